"""The operation table of `dmuown.orthogonalize` on quack-kernels, which AutoModel brings on Linux.

`gemm_symmetric` computes half of a symmetric product and mirrors it, `gemm` and `gemm_add` are general. All need
16-bit operands on compute capability 9.0 or newer with 16-byte rows; what they cannot take goes to torch.
"""

from __future__ import annotations

import importlib.util

import torch
from torch import Tensor

from dmuown.errors import MissingDependencyError

#: Below this the kernels lose to cuBLAS: their tiles are 128 x 256.
SMALLEST_ROWS = 257


class QuackOperations:
    """Products of batched matrices through quack-kernels."""

    name = "quack"
    symmetric_cost = 0.55

    def preferred(self, device: torch.device, dtype: torch.dtype, shape: tuple[int, int, int]) -> bool:
        """Never by itself where Triton's kernels run: they measured faster on every shape (benchmarks/results)."""
        _, rows, columns = shape
        return dtype.itemsize == 2 and rows >= SMALLEST_ROWS and rows % 8 == 0 and columns % 8 == 0

    def normalize(
        self, x: Tensor, dtype: torch.dtype, *, factor: float, epsilon: float, clamp: bool, overwrite: bool = False
    ) -> Tensor | None:
        """None: torch normalizes."""
        return None

    def symmetric_product(self, x: Tensor, *, out: Tensor | None = None) -> Tensor:
        """x x^T: [B, m, n] -> [B, m, m]."""
        if not _fits(x):
            return torch.bmm(x, x.mT, out=out)
        from quack.gemm_interface import gemm_symmetric

        result: Tensor = gemm_symmetric(x, x.mT, out=out)
        return result

    def symmetric_product_add(
        self, a: Tensor, b: Tensor, c: Tensor, *, alpha: float, beta: float, out: Tensor | None = None
    ) -> Tensor:
        """beta c + alpha a b, all [B, m, m]; a b and c are symmetric."""
        if not _fits(a, b, c):
            return torch.baddbmm(c, a, b, beta=beta, alpha=alpha, out=out)
        from quack.gemm_interface import gemm_symmetric

        result: Tensor = gemm_symmetric(a, b.mT, C=c, out=out, alpha=float(alpha), beta=float(beta))
        return result

    def product(self, a: Tensor, x: Tensor, *, out: Tensor | None = None) -> Tensor:
        """a x: [B, m, m], [B, m, n] -> [B, m, n]."""
        if not _fits(a, x):
            return torch.bmm(a, x, out=out)
        from quack.gemm_interface import gemm

        result: Tensor = gemm(a, x, out=out, tuned=False)
        return result

    def product_add(self, a: Tensor, x: Tensor, c: Tensor, *, beta: float, out: Tensor | None = None) -> Tensor:
        """beta c + a x: [B, m, m], [B, m, n], [B, m, n] -> [B, m, n]."""
        if not _fits(a, x, c):
            return torch.baddbmm(c, a, x, beta=beta, out=out)
        from quack.gemm_interface import gemm_add

        result: Tensor = gemm_add(a, x, c, out=out, beta=float(beta), tuned=False)
        return result


def _fits(*operands: Tensor) -> bool:
    """Whether quack can address them: 16-bit, one contiguous axis, the rest in steps of 16 bytes."""
    for x in operands:
        unit = [stride for stride in x.stride()[1:] if stride != 1]
        if x.dtype.itemsize != 2 or len(unit) > 1 or any(stride % 8 for stride in (*unit, x.stride(0))):
            return False
        if x.data_ptr() % 16 or x.size(1) < SMALLEST_ROWS:
            return False
    return True


def operations() -> QuackOperations:
    """The table.

    Raises:
        MissingDependencyError: quack-kernels is not installed, or the card is older than compute capability 9.0.
    """
    if importlib.util.find_spec("quack") is None:
        raise MissingDependencyError(
            "backend='quack'", "needs quack-kernels, which is not installed", "pip install quack-kernels (Linux)"
        )
    if not torch.cuda.is_available() or torch.cuda.get_device_capability() < (9, 0):
        raise MissingDependencyError(
            "backend='quack'", "needs a CUDA device of compute capability 9.0 or newer", "Use backend='torch'"
        )
    return QuackOperations()
