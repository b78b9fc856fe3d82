"""Orthogonalization alone: every backend against the Gram floor and float64, on the shapes of `shapes.py`.

The floor counts every symmetric product at half cost (`shapes.gram_floor_flops`) over the card's matrix rate, taken
right before and after each row, since a card's clock follows its load. Quack and Dion are measured where importable.
"""

from __future__ import annotations

import argparse
from collections.abc import Callable
from functools import partial

import torch
from harness import Report, ceilings, default_device, measure, measure_graph, peak_memory
from shapes import ORTHOGONALIZATION, SMALL, Batch, gram_floor_flops
from torch import Tensor

from dmuown.orthogonalize import Orthogonalizer, available_backends


def exact(x: Tensor, orthogonalizer: Orthogonalizer) -> Tensor:
    """The same polynomials in float64, plain form."""
    x = x.double()
    tall = x.size(-2) > x.size(-1)
    x = x.mT if tall else x
    x = x / (x.norm(dim=(-2, -1), keepdim=True) * orthogonalizer.table.safety_factor)
    for a, b, c in orthogonalizer.table.for_steps(orthogonalizer.steps):
        gram = x @ x.mT
        x = a * x + (b * gram + c * gram @ gram) @ x
    return x.mT if tall else x


def candidates(device: torch.device) -> dict[str, tuple[Orthogonalizer | None, Callable[[Tensor], Tensor]]]:
    """By name: the orthogonalizer whose polynomials it has to match, and what to call."""
    found: dict[str, tuple[Orthogonalizer | None, Callable[[Tensor], Tensor]]] = {}
    dtypes = (torch.float16, torch.bfloat16) if device.type == "cuda" else (torch.float32,)
    for backend in available_backends():
        for dtype in dtypes:
            ours = Orthogonalizer(scheme="newton_schulz", coefficients="keller", dtype=dtype, backend=backend)
            found[f"dmuown {backend} {str(dtype).removeprefix('torch.')}"] = (ours, ours)
    try:
        from dion.newton_schulz_triton import newton_schulz_triton

        found["dion newton_schulz_triton"] = (None, lambda x: newton_schulz_triton(x, epsilon=1e-7))
    except ImportError:
        pass
    return found


def main() -> None:
    """Run and report."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--output", help="JSON file")
    parser.add_argument("--only", default="", help="comma-separated substrings of the names to run")
    parser.add_argument("--shapes", default="", help="comma-separated shapes, such as 8x4096x4096")
    arguments = parser.parse_args()
    device = default_device()
    shapes: tuple[Batch, ...] = ORTHOGONALIZATION if device.type == "cuda" else SMALL
    report = Report("orthogonalize", device, path=arguments.output)
    wanted = [part for part in arguments.only.split(",") if part]
    chosen = [part for part in arguments.shapes.split(",") if part]
    for shape in shapes:
        if chosen and str(shape) not in chosen:
            continue
        x = torch.randn(*shape, device=device)
        for name, (orthogonalizer, function) in candidates(device).items():
            if wanted and not any(part in name for part in wanted):
                continue
            before = ceilings(device).matmul_tflops
            eager = measure(partial(function, x), device, repeats=6, seconds=1.0)
            graph = measure_graph(partial(function, x), device, repeats=6)
            peak = (before + ceilings(device).matmul_tflops) / 2
            floor = shape.matrices * gram_floor_flops(shape.rows, shape.columns) / peak / 1e9
            error = float("nan")
            if orthogonalizer is not None:
                reference = exact(x[:1], orthogonalizer)
                error = float((function(x[:1]).double() - reference).norm() / reference.norm())
            report.add(
                shape=str(shape),
                name=name,
                eager=eager,
                graph=graph,
                floor_ms=floor,
                peak_tflops=peak,
                ratio_eager=eager.median / floor,
                ratio_graph=graph.median / floor,
                error=error,
                temporary_gib=peak_memory(partial(function, x), device),
            )
    report.write()


if __name__ == "__main__":
    main()
