"""The operation table of `dmuown.orthogonalize` on quack-kernels, which AutoModel brings on Linux.

`gemm_symmetric` computes half of a symmetric product and mirrors it, `gemm` is general. All need
16-bit operands on compute capability 9.0 or newer with 16-byte rows; what they cannot take goes to torch.
"""

from __future__ import annotations

import importlib.util
from collections.abc import Sequence
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from dmuown.errors import MissingDependencyError

if TYPE_CHECKING:
    from dmuown.orthogonalize.coefficients import Triple
    from dmuown.orthogonalize.stages import Stage

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

    def polynomial(self, r: Tensor, triple: Triple, *, out: Tensor | None = None) -> Tensor:
        """a I + b r + c r r for r: [B, m, m], symmetric."""
        a, b, c = triple
        if _fits(r):
            from quack.gemm_interface import gemm_symmetric

            result: Tensor = gemm_symmetric(r, r.mT, C=r, out=out, alpha=float(c), beta=float(b))
        else:
            result = torch.baddbmm(r, r, r, beta=b, alpha=c, out=out)
        diagonal = result.diagonal(dim1=-2, dim2=-1)
        diagonal.copy_(diagonal.float() + a)
        return result

    def commuting_product(self, a: Tensor, b: Tensor, *, out: Tensor | None = None) -> Tensor:
        """a b^T: [B, m, m], symmetric because a and b are and commute."""
        if not _fits(a, b):
            return torch.bmm(a, b, out=out)
        from quack.gemm_interface import gemm_symmetric

        result: Tensor = gemm_symmetric(a, b.mT, out=out)
        return result

    def product(self, a: Tensor, x: Tensor, *, out: Tensor | None = None) -> Tensor:
        """a x: [B, m, m], [B, m, n] -> [B, m, n]."""
        if not _fits(a, x, *(() if out is None else (out,))):
            return torch.bmm(a, x, out=out)
        from quack.gemm_interface import gemm

        result: Tensor = gemm(a, x, out=out, tuned=False)
        return result

    def product_in_place(self, a: Tensor, x: Tensor, free: Tensor, turn: int) -> bool:
        """False: panel by panel."""
        return False

    def run_stages(self, x: Tensor, places: Tensor, stages: Sequence[Stage]) -> bool:
        """False: products one by one."""
        return False


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
