"""Triton kernels: products of symmetric matrices, and row kernels over many tensors at once.

Importing this package imports no Triton; its modules do. Ask `available()` first.

| module | what |
|---|---|
| `products` | batched products over any strides and sizes, half computed where symmetric |
| `hopper`, `hopper_launch` | the same on the bulk copy engine and `wgmma` (16-bit, Hopper), and its host side |
| `hopper_chain`, `chain` | all m x m products between two passes over the wide side in one kernel, and its host side |
| `normalize` | division by the Frobenius norm |
| `table` | tile shapes per problem, measured, checked in |
| `rows` | everything around orthogonalization, one launch for many tensors |
| `rounding` | stochastic rounding of a tensor, one launch |
| `triton_operations`, `quack_operations` | the operation tables of `dmuown.orthogonalize` |
"""

from __future__ import annotations

import importlib.util
from functools import cache


@cache
def available() -> bool:
    """Whether Triton can be imported; says nothing about a device."""
    return importlib.util.find_spec("triton") is not None


__all__ = ["available"]
