"""Small runs of every kernel, for CUDA's checkers:

    PYTORCH_NO_CUDA_MEMORY_CACHING=1 compute-sanitizer --tool memcheck python -m tests.gpu.sanitized
    PYTORCH_NO_CUDA_MEMORY_CACHING=1 compute-sanitizer --tool racecheck python -m tests.gpu.sanitized

Without torch's cache every tensor is an allocation of its own, so that a read past its end is seen.
"""

from __future__ import annotations

import sys
from functools import partial

import torch

import dmuown
from dmuown.kernels import chain, panels, table
from dmuown.kernels.normalize import normalize
from dmuown.kernels.products import multiply
from dmuown.orthogonalize.stages import count_places, plan_stages

SIZES = ((2, 136, 200), (3, 72, 40), (1, 256, 512), (2, 33, 17))


def products() -> None:
    """Symmetric and general, with and without a third operand, by copy engine and by pointers."""
    for batch, m, n in SIZES:
        x = torch.randn(batch, m, n, device="cuda", dtype=torch.float16)
        gram = multiply(x, x.mT, symmetric=True)
        polynomial = multiply(gram, gram, c=gram, alpha=0.5, beta=2.0, symmetric=True)
        multiply(polynomial, x, c=x, beta=1.5)
        multiply(polynomial, x.mT.contiguous().mT)
        multiply(gram, gram.mT, c=gram, alpha=0.5, beta=2.0, shift=3.0, symmetric=True)
        normalize(x, torch.float16, factor=1.0, epsilon=1e-7, clamp=False)
        normalize(x.mT, torch.bfloat16, factor=1.0, epsilon=1e-7, clamp=True, overwrite=True)


def _always(shape: table.ChainShape, batch: int, m: int, stages: int) -> table.ChainShape:
    return shape


def chains() -> None:
    """Runs of one to three steps, on both tiles."""
    triples = [(3.4445, -4.775, 2.0315)] * 3
    usual = table.chain_shape
    for shape in (table._CHAIN_TURNS, table._CHAIN_WIDE, table._CHAIN_TURNS._replace(with_gram=False)):
        table.chain_shape = partial(_always, shape)
        for batch, m, n in ((2, 136, 200), (3, 72, 80), (1, 384, 512)):
            x = torch.randn(batch, m, n, device="cuda", dtype=torch.float16) / (m * n) ** 0.5
            for steps_in_run in (1, 2, 3):
                stages = plan_stages(triples[:steps_in_run])
                places = torch.empty(count_places(stages), batch, m, m, device="cuda", dtype=torch.float16)
                if not chain.run(x, places, stages):
                    raise RuntimeError("the chain kernel did not run")
    table.chain_shape = usual


def in_place() -> None:
    """Products in their operand's memory, both ways of storage, whole and partial panels."""
    for batch, m, n in ((2, 256, 1000), (1, 264, 712), (3, 256, 512)):
        q = torch.randn(batch, m, m, device="cuda", dtype=torch.float16) / m**0.5
        for x in (torch.randn(batch, m, n, device="cuda"), torch.randn(batch, n, m, device="cuda").mT):
            value, free = x.half(), torch.empty_like(q)
            for turn in (-1, 1):
                if not panels.multiply(q, value, free, turn):
                    raise RuntimeError("the panel kernel did not run")


def steps(kind: str) -> None:
    """The row kernels, both ways of storage."""
    for transposed in (False, True):
        params = [
            torch.nn.Parameter(torch.randn(size, device="cuda"))
            for size in ((136, 200), (136, 200), (33, 17), (2, 64, 96))
        ]
        optimizer = getattr(dmuown, kind)([{"params": params, "matrix_transposed": transposed}], lr=0.01)
        for _ in range(2):
            for param in params:
                param.grad = torch.randn_like(param)
            optimizer.step()


def main() -> None:
    """Run what is named, or all."""
    parts = {"products": products, "chains": chains, "in_place": in_place}
    for name in sys.argv[1:] or [*parts, "Muown", "Muon", "NorMuon", "NorMuown", "AngularMuown"]:
        parts.get(name, partial(steps, name))()
        torch.cuda.synchronize()
        print(name, "done", flush=True)


if __name__ == "__main__":
    main()
