"""The operation table of `dmuown.orthogonalize` on Triton."""

from __future__ import annotations

import torch
import triton
from torch import Tensor

from dmuown.errors import MissingDependencyError
from dmuown.kernels import normalize, table
from dmuown.kernels.products import multiply


class TritonOperations:
    """Products of batched matrices, half computed where symmetric; CUDA (or Triton's interpreter on CPU)."""

    name = "triton"
    # Not 0.5: tiles on the diagonal are computed whole, and every symmetric tile is stored twice.
    symmetric_cost = 0.55

    def preferred(self, device: torch.device, dtype: torch.dtype, shape: tuple[int, int, int]) -> bool:
        """Whether these kernels beat torch there by the checked-in measurements (`table.triton_preferred`)."""
        return table.triton_preferred(torch.cuda.get_device_capability(device), dtype, shape)

    def normalize(
        self, x: Tensor, dtype: torch.dtype, *, factor: float, epsilon: float, clamp: bool, overwrite: bool = False
    ) -> Tensor | None:
        """Each matrix by its Frobenius norm, cast to `dtype`: see `normalize.normalize`."""
        return normalize.normalize(x, dtype, factor=factor, epsilon=epsilon, clamp=clamp, overwrite=overwrite)

    def symmetric_product(self, x: Tensor, *, out: Tensor | None = None) -> Tensor:
        """x x^T: [B, m, n] -> [B, m, m]."""
        return multiply(x, x.mT, symmetric=True, out=out)

    def symmetric_product_add(
        self, a: Tensor, b: Tensor, c: Tensor, *, alpha: float, beta: float, out: Tensor | None = None
    ) -> Tensor:
        """beta c + alpha a b, all [B, m, m]; a b and c are symmetric."""
        return multiply(a, b, c=c, alpha=alpha, beta=beta, symmetric=True, out=out)

    def product(self, a: Tensor, x: Tensor, *, out: Tensor | None = None) -> Tensor:
        """a x: [B, m, m], [B, m, n] -> [B, m, n]."""
        return multiply(a, x, out=torch.empty_like(x) if out is None else out)

    def product_add(self, a: Tensor, x: Tensor, c: Tensor, *, beta: float, out: Tensor | None = None) -> Tensor:
        """beta c + a x: [B, m, m], [B, m, n], [B, m, n] -> [B, m, n]."""
        return multiply(a, x, c=c, beta=beta, out=torch.empty_like(x) if out is None else out)


def operations() -> TritonOperations:
    """The table.

    Raises:
        MissingDependencyError: No CUDA device (and not under TRITON_INTERPRET=1), or one older than Triton supports.
    """
    if triton.knobs.runtime.interpret:
        return TritonOperations()
    if not torch.cuda.is_available():
        raise MissingDependencyError(
            "backend='triton'", "needs a CUDA device, and torch sees none", "Use backend='torch'"
        )
    capability = torch.cuda.get_device_capability()
    if capability < (8, 0):
        raise MissingDependencyError(
            "backend='triton'",
            f"needs compute capability 8.0 or newer, got {capability[0]}.{capability[1]}",
            "Use backend='torch'",
        )
    return TritonOperations()
