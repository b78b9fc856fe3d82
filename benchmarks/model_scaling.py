"""What the plan says of a step on 1 to 4096 cards, priced with measured and nominal rates. Runs anywhere.

    python benchmarks/model_scaling.py

Bytes, owners and matrices are the engine's own plan (`dmuown plan`; tests compare it with what ranks do). Times are a
model: products and rows at rates measured on one H200, transfers at nominal bandwidths; nothing overlapped, no host
time.
"""

from __future__ import annotations

import argparse
import json
import tempfile
from dataclasses import dataclass
from pathlib import Path

from rich.console import Console
from rich.table import Table
from shapes import gram_floor_flops

from dmuown.automodel.planned import JobPlan, plan_job

LLAMA_1B = {
    "model_type": "llama",
    "hidden_size": 2048,
    "intermediate_size": 8192,
    "num_attention_heads": 32,
    "num_key_value_heads": 8,
    "head_dim": 64,
    "num_hidden_layers": 16,
    "vocab_size": 32000,
    "tie_word_embeddings": False,
}
LLAMA_8B = {
    **LLAMA_1B,
    "hidden_size": 4096,
    "intermediate_size": 14336,
    "head_dim": 128,
    "num_hidden_layers": 32,
    "vocab_size": 128256,
}
#: The widths and depth of bench_step.py and bench_sharded.py, matrices only.
BENCHMARK = {**LLAMA_1B, "num_hidden_layers": 6, "vocab_size": 8}


@dataclass(frozen=True)
class Rates:
    """What a card and its links do.

    Attributes:
        products: FLOP/s of the products, symmetric ones counted half, when the card is warm (step_h200_2026-11-29.md).
        overhead: Orthogonalization over that floor, for matrices of 1024 rows and more and for smaller ones, captured
            (orthogonalize_h200_2026-11-29.md).
        rows: Bytes/s of the row kernels (lab log), of 28 bytes a parameter under Muown.
        inside: Bytes/s that a card sends within its machine: nominal, NVLink 4, one direction.
        between: Bytes/s that a card sends to other machines: nominal, 400 Gb/s.
        latency: Seconds of one collective.
    """

    products: float = 690e12
    overhead: tuple[float, float] = (1.2, 2.44)
    rows: float = 4.0e12
    inside: float = 450e9
    between: float = 50e9
    latency: float = 50e-6


def plan_of(config: dict[str, object], ranks: int, replicas: int) -> JobPlan:
    """Muown under FSDP2, or HSDP with `replicas`."""
    with tempfile.TemporaryDirectory() as folder:
        model, recipe = Path(folder, "config.json"), Path(folder, "recipe.yaml")
        model.write_text(json.dumps(config))
        optimizer = {"_target_": "dmuown.automodel.MuownConfig", "lr": 1e-3, "ns_dtype": "bfloat16"}
        recipe.write_text(json.dumps({"model": {"torch_dtype": "float32", "force_hf": True}, "optimizer": optimizer}))
        return plan_job(recipe, world_size=ranks, sizes={"replicas": replicas}, model_config=model)


def price(plan: JobPlan, rates: Rates, within: float) -> dict[str, float]:
    """Milliseconds of each part of a step, on the rank that it takes longest.

    Args:
        plan: The plan.
        rates: The rates.
        within: Bytes of what a rank sends that stay in its machine.
    """
    ranks, shards = plan.cluster.world_size, plan.cluster.world_size // plan.cluster.replicas
    products, elements = [0.0] * ranks, 0
    for found in plan.buckets:
        layout = found.bucket.layout
        small = min(layout.m, layout.n) < 1024
        each = gram_floor_flops(layout.m, layout.n) / rates.products * rates.overhead[small]
        products = [seconds + count * each for seconds, count in zip(products, found.matrices, strict=True)]
        elements += sum(param.numel() for param in found.bucket.params)
    calls = sum(sum(found.collectives.values()) for found in plan.buckets)
    transfer = within / rates.inside + (max(plan.ranks.sent) - within) / rates.between + calls * rates.latency
    rows = 28 * elements / shards / rates.rows
    return {"products": max(products) * 1e3, "rows": rows * 1e3, "transfer": transfer * 1e3}


def main() -> None:
    """Print a table for each model."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--machine", type=int, default=8, help="cards of a machine")
    machine = parser.parse_args().machine
    console = Console(width=120)
    for name, config in {"benchmark": BENCHMARK, "Llama 1B": LLAMA_1B, "Llama 8B": LLAMA_8B}.items():
        table = Table(title=f"{name}: a step of Muown, modelled", title_justify="left")
        for column in ("ranks", "layout", "at work", "sent MB", "products ms", "rows ms", "transfer ms", "step ms"):
            table.add_column(column, justify="right")
        for ranks in (1, 2, 4, 8, 64, 512, 4096):
            for replicas in sorted({1, max(1, ranks // machine)}):
                plan = plan_of(config, ranks, replicas)
                sent = max(plan.ranks.sent)
                # Shard groups of one machine exchange inside it, and share with replicas outside.
                away = max(0, ranks - machine) / max(1, ranks - 1)
                inside = sent * (1 - away)
                if replicas > 1:
                    inside = max(plan_of(config, ranks // replicas, 1).ranks.sent) / replicas
                cost = price(plan, Rates(), inside)
                at_work = sum(count > 0 for count in plan.ranks.matrices)
                layout = "FSDP" if replicas == 1 else f"HSDP {replicas} x {ranks // replicas}"
                times = [f"{value:.2f}" for value in (*cost.values(), sum(cost.values()))]
                table.add_row(str(ranks), layout, str(at_work), f"{sent / 1e6:.0f}", *times)
        console.print(table)


if __name__ == "__main__":
    main()
