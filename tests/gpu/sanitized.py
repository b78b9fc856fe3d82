"""Small runs of every kernel, for CUDA's checkers:

    PYTORCH_NO_CUDA_MEMORY_CACHING=1 compute-sanitizer --tool memcheck python -m tests.gpu.sanitized
    PYTORCH_NO_CUDA_MEMORY_CACHING=1 compute-sanitizer --tool racecheck python -m tests.gpu.sanitized

Without torch's cache every tensor is an allocation of its own, so that a read past its end is seen.
"""

from __future__ import annotations

import sys

import torch

import dmuown
from dmuown.kernels.normalize import normalize
from dmuown.kernels.products import multiply

SIZES = ((2, 136, 200), (3, 72, 40), (1, 256, 512), (2, 33, 17))


def products() -> None:
    """Symmetric and general, with and without a third operand, by copy engine and by pointers."""
    for batch, m, n in SIZES:
        x = torch.randn(batch, m, n, device="cuda", dtype=torch.float16)
        gram = multiply(x, x.mT, symmetric=True)
        polynomial = multiply(gram, gram, c=gram, alpha=0.5, beta=2.0, symmetric=True)
        multiply(polynomial, x, c=x, beta=1.5)
        multiply(polynomial, x.mT.contiguous().mT)
        normalize(x, torch.float16, factor=1.0, epsilon=1e-7, clamp=False)
        normalize(x.mT, torch.bfloat16, factor=1.0, epsilon=1e-7, clamp=True, overwrite=True)


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
    for name in sys.argv[1:] or ["products", "Muown", "Muon", "NorMuon", "NorMuown", "AngularMuown"]:
        products() if name == "products" else steps(name)
        torch.cuda.synchronize()
        print(name, "done", flush=True)


if __name__ == "__main__":
    main()
