"""One optimizer step: ours against torch, and against Dion where importable, on Llama-1B widths x 6 layers.

Floor: the Gram floor of all matrices (`shapes.gram_floor_flops` over the card's matrix rate) plus fp32 Muon's memory
traffic, 20 bytes a parameter, over its copy rate; both rates are taken right before and after each row.
The error is that of a weight's change after two steps against the same optimizer in float64.
"""

from __future__ import annotations

import argparse
from collections.abc import Callable, Iterator
from typing import Any

import torch
import torch.distributed as dist
from harness import Ceilings, Report, Timing, ceilings, chosen, default_device, measure, overlap, peak_memory
from shapes import LAYERS, LLAMA_1B_LAYER, LLAMA_1B_LAYERS, NORM_VECTORS_PER_LAYER, gram_floor_flops
from torch import Tensor
from torch.nn import Parameter

import dmuown
from dmuown.engine.capture import WARMUP_STEPS

Optimizer = torch.optim.Optimizer
Builder = Callable[[list[Parameter], list[Parameter]], list[Optimizer]]

MUON_BYTES = 20  # G read, M and W read and written, fp32


def small_layer() -> dict[str, tuple[int, int]]:
    """A sixteenth of the widths, for processors."""
    return {name: (rows // 16, columns // 16) for name, (rows, columns) in LLAMA_1B_LAYER.items()}


def parameters(
    device: torch.device, layers: int, dtype: torch.dtype, widths: str = "1b"
) -> tuple[list[Parameter], list[Parameter]]:
    """(matrices, vectors) with gradients."""
    layer = LAYERS[widths] if device.type == "cuda" else small_layer()
    generator = torch.Generator(device=device).manual_seed(0)

    def one(*shape: int) -> Parameter:
        parameter = Parameter(torch.randn(*shape, device=device, generator=generator).mul_(0.02).to(dtype))
        parameter.grad = torch.randn(*shape, device=device, generator=generator).to(dtype)
        return parameter

    matrices = [one(*shape) for _ in range(layers) for shape in layer.values()]
    width = next(iter(layer.values()))[1]
    return matrices, [one(width) for _ in range(layers * NORM_VECTORS_PER_LAYER)]


def ours(kind: str, **options: Any) -> Builder:
    """One of our optimizers, vectors by AdamW."""

    def build(matrices: list[Parameter], vectors: list[Parameter]) -> list[Optimizer]:
        groups = [{"params": matrices}, {"params": vectors, "algorithm": "adamw"}]
        return [getattr(dmuown, kind)(groups, lr=1e-3, **options)]

    return build


def torch_adamw(matrices: list[Parameter], vectors: list[Parameter]) -> list[Optimizer]:
    """The yardstick of every training run."""
    return [torch.optim.AdamW([*matrices, *vectors], lr=1e-3, fused=matrices[0].device.type == "cuda")]


def torch_muon(matrices: list[Parameter], vectors: list[Parameter]) -> list[Optimizer]:
    """torch's own Muon, vectors by AdamW."""
    fused = matrices[0].device.type == "cuda"
    return [torch.optim.Muon(matrices, lr=1e-3), torch.optim.AdamW(vectors, lr=1e-3, fused=fused)]


def dion(kind: str, **options: Any) -> Builder:
    """One of Dion's optimizers."""

    def build(matrices: list[Parameter], vectors: list[Parameter]) -> list[Optimizer]:
        import dion as package

        groups = [{"params": matrices}, {"params": vectors, "algorithm": "adamw"}]
        return [getattr(package, kind)(groups, lr=1e-3, **options)]

    return build


def builders() -> dict[str, Builder]:
    """By name, everything that can be measured here."""
    found: dict[str, Builder] = {
        "torch AdamW fused": torch_adamw,
        "torch Muon + AdamW": torch_muon,
        "dmuown Muown": ours("Muown"),
        "dmuown Muon keller": ours("Muon", scheme="newton_schulz", coefficients="keller"),
        "dmuown Muon": ours("Muon"),
        "dmuown NorMuon": ours("NorMuon"),
        "dmuown NorMuown": ours("NorMuown"),
        "dmuown AngularMuown": ours("AngularMuown", decay_degree=0),
        **{f"dmuown Muown batch_size={size}": ours("Muown", batch_size=size) for size in (1, 2, 3, 4, 6)},
        **{
            f"dmuown Muown batch_bytes={size} MiB": ours("Muown", batch_bytes=size << 20)
            for size in (128, 192, 256, 384)
        },
    }
    try:
        import dion as _  # noqa: F401

        found["dion Muon triton"] = dion("Muon", use_triton=True)
        found["dion Muon gram"] = dion("Muon", use_gram_newton_schulz=True)
        found["dion NorMuon triton"] = dion("NorMuon", use_triton=True)
    except ImportError:
        pass
    return found


def floor_ms(matrices: list[Parameter], rates: Ceilings) -> float:
    """Gram floor plus fp32 Muon traffic."""
    flops = sum(gram_floor_flops(*matrix.shape) for matrix in matrices)
    moved = MUON_BYTES * sum(matrix.numel() for matrix in matrices)
    return flops / rates.matmul_tflops / 1e9 + moved / rates.copy_tbps / 1e9


def state_gib(optimizers: list[Optimizer]) -> float:
    """Optimizer state."""

    def tensors() -> Iterator[Tensor]:
        for optimizer in optimizers:
            for state in optimizer.state.values():
                yield from (value for value in state.values() if isinstance(value, Tensor))

    return float(sum(tensor.numel() * tensor.element_size() for tensor in tensors())) / 2**30


def error_against_float64(build: Builder, device: torch.device) -> float:
    """Relative error of the change of one layer's weights after two steps, against float64 through torch."""
    changes = []
    for dtype in (torch.float32, torch.float64):
        matrices, vectors = parameters(device, 1, dtype)
        start = [matrix.detach().double().clone() for matrix in matrices]
        optimizers = build(matrices, vectors)
        if dtype == torch.float64:
            for group in optimizers[0].param_groups:
                group.update(backend="torch", ns_dtype=torch.float64) if "backend" in group else None
            remake = getattr(optimizers[0], "_make_plan", None)
            if remake is None:
                return float("nan")
            remake()
        for _ in range(2):
            for optimizer in optimizers:
                optimizer.step()
        changes.append(torch.cat([(m.detach().double() - s).flatten() for m, s in zip(matrices, start, strict=True)]))
    return float((changes[0] - changes[1]).norm() / changes[1].norm())


def captured(optimizer: Optimizer, device: torch.device, streams: int) -> tuple[Timing, float, dict[str, Any]]:
    """(the step replayed from a CUDA graph, GiB that its pool holds, what overlaps what).

    Host time includes what a replay checks.
    """
    step = dmuown.capture(optimizer, streams=streams)
    for _ in range(WARMUP_STEPS):
        step.step()
    torch.cuda.synchronize(device)
    torch.cuda.empty_cache()
    before = torch.cuda.memory_reserved(device)
    step.step()
    torch.cuda.synchronize(device)
    torch.cuda.empty_cache()
    memory = (torch.cuda.memory_reserved(device) - before) / 2**30  # the graph's pool keeps what it has taken
    for _ in range(2):
        step.step()
    timing = measure(step.step, device, repeats=10, seconds=60.0)  # sharded steps: equally often on every rank
    overlapped = overlap(step.step, device) if dist.is_initialized() and dist.get_world_size() > 1 else {}
    step.release()
    return timing, memory, overlapped


def measure_captured(optimizer: Optimizer, device: torch.device, streams: str, floor: float) -> dict[str, Any]:
    """One row's columns for each number of streams."""
    columns: dict[str, Any] = {}
    for count in (int(part) for part in streams.split(",") if part):
        timing, memory, overlapped = captured(optimizer, device, count)
        columns[f"graph_{count}"] = timing
        columns[f"ratio_graph_{count}"] = timing.median / floor
        columns[f"graph_{count}_gib"] = memory
        columns |= {f"graph_{count}_{key}": value for key, value in overlapped.items()}
    return columns


def main() -> None:
    """Run and report."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--output", help="JSON file")
    parser.add_argument("--only", default="", help="comma-separated parts of the names to run; =name is exact")
    parser.add_argument("--layers", type=int, default=LLAMA_1B_LAYERS)
    parser.add_argument("--graph", default="", help="also replay the step from a CUDA graph, on so many streams: 1,2,3")
    arguments = parser.parse_args()
    device = default_device()
    layers = arguments.layers if device.type == "cuda" else 1
    report = Report("step", device, path=arguments.output, layers=layers)
    wanted = [part for part in arguments.only.split(",") if part]
    for name, build in builders().items():
        if wanted and not chosen(name, wanted):
            continue
        matrices, vectors = parameters(device, layers, torch.float32)
        try:
            optimizers = build(matrices, vectors)

            def step(optimizers: list[Optimizer] = optimizers) -> None:
                for optimizer in optimizers:
                    optimizer.step()

            for _ in range(3):
                step()
            before = ceilings(device)
            timing = measure(step, device, repeats=10)
            after = ceilings(device)
            memory = peak_memory(step, device)
            error = error_against_float64(build, device) if name.startswith("dmuown") else float("nan")
        except Exception as reason:  # a peer that does not run here is a row of its own, not the end of the run
            report.add(name=name, failed=f"{type(reason).__name__}: {reason}"[:200])
            continue
        rates = Ceilings((before.matmul_tflops + after.matmul_tflops) / 2, (before.copy_tbps + after.copy_tbps) / 2)
        floor = floor_ms(matrices, rates)
        extra: dict[str, Any] = {}
        if name.startswith("dmuown") and device.type == "cuda":
            extra = measure_captured(optimizers[0], device, arguments.graph, floor)
        report.add(
            name=name,
            step=timing,
            floor_ms=floor,
            ratio=timing.median / floor,
            temporary_gib=memory,
            state_gib=state_gib(optimizers),
            error=error,
            peak_tflops=rates.matmul_tflops,
            copy_tbps=rates.copy_tbps,
            **extra,
        )
        del optimizers, matrices, vectors
    report.write()


if __name__ == "__main__":
    main()
