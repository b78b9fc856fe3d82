"""The operation table of `dmuown.orthogonalize` on Triton."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

import torch
import triton
from torch import Tensor

from dmuown.errors import MissingDependencyError
from dmuown.kernels import chain, normalize, panels, table
from dmuown.kernels.products import multiply

if TYPE_CHECKING:
    from dmuown.orthogonalize.coefficients import Triple
    from dmuown.orthogonalize.stages import Stage


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

    def polynomial(self, r: Tensor, triple: Triple, *, out: Tensor | None = None) -> Tensor:
        """a I + b r + c r r for r: [B, m, m], symmetric."""
        a, b, c = triple
        return multiply(r, r.mT, c=r, alpha=c, beta=b, shift=a, symmetric=True, out=out)

    def commuting_product(self, a: Tensor, b: Tensor, *, out: Tensor | None = None) -> Tensor:
        """a b^T: [B, m, m], symmetric because a and b are and commute."""
        return multiply(a, b.mT, symmetric=True, out=out)

    def product(self, a: Tensor, x: Tensor, *, out: Tensor | None = None) -> Tensor:
        """a x: [B, m, m], [B, m, n] -> [B, m, n]."""
        return multiply(a, x, out=torch.empty_like(x) if out is None else out)

    def product_in_place(self, a: Tensor, x: Tensor, free: Tensor, turn: int) -> bool:
        """In one kernel where there is one: see `panels.multiply`."""
        return panels.multiply(a, x, free, turn)

    def run_stages(self, x: Tensor, places: Tensor, stages: Sequence[Stage]) -> bool:
        """In one kernel, or two, where that is faster: see `chain.run`."""
        return chain.run(x, places, stages)


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
