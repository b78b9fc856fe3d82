"""From a matrix to the nearest semi-orthogonal one: schemes, coefficients, fused blocks, backends.

Needs torch alone; Triton and quack are imported only when a backend asks for them.
"""

from __future__ import annotations

from dmuown.orthogonalize.backends import TORCH, Operations, available_backends, select_backend
from dmuown.orthogonalize.blocks import (
    Blocks,
    GroupedRows,
    blocks_from_heads,
    blocks_from_split_sizes,
    grouped_blocks,
    interleaved_blocks,
    orthogonalize_blocks,
)
from dmuown.orthogonalize.coefficients import (
    KELLER,
    POLAR_EXPRESS,
    POLAR_EXPRESS_1_02,
    POLAR_EXPRESS_1_05,
    YOU,
    CoefficientTable,
)
from dmuown.orthogonalize.orthogonalizer import Orthogonalizer, resolve_compute_dtype
from dmuown.orthogonalize.resolve import auto_dtype, resolve_orthogonalizer

__all__ = [
    "KELLER",
    "POLAR_EXPRESS",
    "POLAR_EXPRESS_1_02",
    "POLAR_EXPRESS_1_05",
    "TORCH",
    "YOU",
    "Blocks",
    "CoefficientTable",
    "GroupedRows",
    "Operations",
    "Orthogonalizer",
    "auto_dtype",
    "available_backends",
    "blocks_from_heads",
    "blocks_from_split_sizes",
    "grouped_blocks",
    "interleaved_blocks",
    "orthogonalize_blocks",
    "resolve_compute_dtype",
    "resolve_orthogonalizer",
    "select_backend",
]
