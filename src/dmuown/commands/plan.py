"""`dmuown plan`."""

from __future__ import annotations

import re
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from dmuown.commands.layout import ExpertParallel, PipelineParallel, Replicas, TensorParallel

if TYPE_CHECKING:
    import torch

    from dmuown.automodel.planned import JobPlan
    from dmuown.ownership.plan import OwnershipPlan


def plan(
    context: typer.Context,
    config: Annotated[Path, typer.Argument(help="YAML configuration of an AutoModel recipe.", metavar="CONFIG.yaml")],
    world_size: Annotated[int, typer.Option("--world-size", min=1, help="Processes of the job.")] = 1,
    tp: TensorParallel = None,
    ep: ExpertParallel = None,
    pp: PipelineParallel = None,
    replicas: Replicas = None,
    model_config: Annotated[
        Path | None, typer.Option("--model-config", help="The model's config.json, if its checkpoint is elsewhere.")
    ] = None,
    deep: Annotated[
        bool, typer.Option("--deep", help="Build the model with transformers on the meta device: any architecture.")
    ] = False,
    ranks: Annotated[bool, typer.Option("--ranks", help="Show every rank, not only the spread.")] = False,
    as_json: Annotated[bool, typer.Option("--json", help="Print the plan as JSON.")] = False,
) -> None:
    """Show what a job would do before it has GPUs: routes, splits, exchange, memory and bytes by rank.

    Needs the YAML and the model's config.json only; weights are neither read nor downloaded. Overrides count:

        dmuown plan run.yaml --world-size 512 --replicas 8 --optimizer.lr 1e-3

    Exit code 0: planned. 2: the configuration is wrong; see dmuown check.
    """
    from dmuown.automodel.planned import plan_job
    from dmuown.commands.output import print_json

    known = None
    if deep:
        from dmuown.automodel.planned.deep import deep_model
        from dmuown.commands.quiet import quieten_host

        quieten_host()

        known = deep_model(config, context.args, model_config)
    found = plan_job(
        config,
        context.args,
        world_size=world_size,
        sizes={"tp": tp, "ep": ep, "pp": pp, "replicas": replicas},
        model_config=model_config,
        known=known,
    )
    if as_json:
        print_json(found.to_dict(every_rank=ranks))
        return
    for line in _lines(found, ranks):
        typer.echo(line)


def _lines(found: JobPlan, every_rank: bool) -> list[str]:
    from dmuown.commands.output import size, table

    percent = 100 * found.trainable / max(1, found.elements)
    lines = [
        f"{found.config}: {found.optimizer} on {found.cluster.world_size} ranks, {found.cluster.describe()}",
        f"{found.elements:,} parameters, {percent:.1f} % trained, {found.matrices:,} matrices orthogonalized a step",
        "",
        "Routes",
    ]
    header = ("parameters", "count", "shape", "role", "route", "algorithm", "lr", "decay", "blocks", "split")
    lines += table(
        header,
        [
            (
                row.pattern,
                row.count,
                " x ".join(map(str, row.shape)),
                row.role,
                row.route or "-",
                row.algorithm,
                "-" if row.lr is None else f"{row.lr:.3g}",
                "-" if row.weight_decay is None else f"{row.weight_decay:.3g}",
                row.blocks or "-",
                row.split,
            )
            for row in found.routes
        ],
        right=(1,),
    )
    if found.buckets:
        lines += ["", "Exchange of one step"]
        lines += table(
            ("shape", "parameters", "matrices", "collectives", "bytes, all ranks", "largest rank", "ranks at work"),
            [
                (
                    " x ".join(map(str, bucket.bucket.layout.shape)),
                    len(bucket.bucket.params),
                    sum(bucket.matrices),
                    ", ".join(f"{count} {kind}" for kind, count in bucket.collectives.items()) or "none",
                    size(sum(bucket.bytes_sent)),
                    size(max(bucket.bytes_sent)),
                    sum(count > 0 for count in bucket.matrices),
                )
                for bucket in found.buckets
            ],
            right=(1, 2, 4, 5, 6),
        )
    for owned in found.ownership:
        lines += _transfer_lines(owned.plan, found.cluster.tp)
    lines += ["", "By rank", *_rank_lines(found, every_rank)]
    return [*lines, "", *(f"note: {note}" for note in dict.fromkeys(found.notes))]


def _transfer_lines(plan: OwnershipPlan, tp: int) -> list[str]:
    from dmuown.automodel.planned.transfers import transfer_rows
    from dmuown.commands.output import size, table

    rows = transfer_rows(plan)
    if not rows:
        return []
    each = f", of each of {tp} tensor-parallel ranks" if tp > 1 else ""
    times = "twice" if plan.reshard_after_forward else "once"
    lines = ["", f"Transfers: bytes of one buffer{each}; a micro-batch fetches each {times} and reduces it once"]
    lines += table(
        ("at", "parameters", "from", "transfers", "fetch", "dtype", "reduce", "dtype"),
        [
            (
                _LAYERS.sub(r"\1...", row.boundary),
                _few([name.removesuffix(".weight") for name in row.parameters]),
                _from(row.owners),
                row.count,
                size(row.fetch_bytes),
                _short(row.param_dtype),
                size(row.reduce_bytes) if row.reduce_bytes else "frozen",
                _short(row.grad_dtype) if row.reduce_bytes else "-",
            )
            for row in rows
        ],
        right=(3, 4, 6),
    )
    lines += ["", f"Transfers of one step, one micro-batch{each}"]
    return lines + table(
        ("kind", "collectives", "bytes in buffers"),
        [(kind, total["collectives"], size(total["bytes"])) for kind, total in plan.per_step().items()],
        right=(1, 2),
    )


#: Numbers of layers, all but the first three runs of which a cell leaves to --json.
_LAYERS = re.compile(r"((?:\d+(?:-\d+)?,){3})[\d,-]+")


def _few(names: list[str]) -> str:
    """Names in a cell: all, or the first three and how many more."""
    return ", ".join(names) if len(names) <= 4 else f"{', '.join(names[:3])} and {len(names) - 3} more"


def _from(owners: Sequence[int]) -> str:
    if not owners:
        return "shards"
    return f"owner {owners[0]}" if len(owners) == 1 else f"{len(owners)} owners"


def _short(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")


_RANK_TITLES = {
    "parameters": "parameters",
    "gradients": "gradients",
    "state": "optimizer state",
    "buffers": "temporary, one task",
    "total": "memory together",
    "sent": "sent a step",
    "work": "orthogonalization, Gflop",
    "matrices": "matrices",
}


def _rank_lines(found: JobPlan, every_rank: bool) -> list[str]:
    from dmuown.automodel.planned.memory import spread
    from dmuown.commands.output import size, table

    def text(name: str, value: float) -> str:
        if name == "work":
            return f"{value / 1e9:,.1f}"
        return f"{value:,.0f}" if name == "matrices" else size(value)

    columns = found.ranks.columns()
    titles = _RANK_TITLES | ({"sent": "moved a step"} if found.ownership else {})
    if every_rank:
        rows = [
            (rank, *(text(name, columns[name][rank]) for name in titles)) for rank in range(found.cluster.world_size)
        ]
        return table(("rank", *titles.values()), rows, right=range(len(titles) + 1))
    rows = []
    for name, title in titles.items():
        low = spread(columns[name])
        rows.append((title, *(text(name, low[key]) for key in ("min", "mean", "max")), int(low["max_rank"])))
    return table(("", "least", "mean", "most", "on rank"), rows, right=(1, 2, 3, 4))
