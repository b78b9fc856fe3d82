"""The operation table that the iterations are written over, and the choice of who provides it.

The iterations (`iterations.py`) know two operations: `run` makes the m x m matrices of planned stages
(`stages.py`) from the wide one, `product` multiplies the wide one by the last of them. The others are what `run`
consists of where each stage is a product by itself. `torch` provides all of them here; `triton` and `quack` come from
`dmuown.kernels` by the same protocol, and are imported only when asked for, or when a CUDA tensor meets
`backend="auto"`.
"""

from __future__ import annotations

import importlib
import logging
from collections.abc import Sequence
from functools import cache
from typing import Protocol

import torch
from torch import Tensor

from dmuown.errors import MissingDependencyError
from dmuown.orthogonalize.coefficients import Triple
from dmuown.orthogonalize.options import choice_error
from dmuown.orthogonalize.stages import Stage

logger = logging.getLogger(__name__)

BACKENDS = ("auto", "torch", "triton", "quack")


class Operations(Protocol):
    """Products of batched matrices, all 3-d, one dtype, one device.

    `out`, where given, has the result's shape and dtype, may be uninitialised, overlaps no operand,
    and is returned. "Symmetric" promises that the exact result is symmetric, so that half of it
    may be computed and mirrored.
    """

    @property
    def name(self) -> str:
        """What the option `backend` calls it."""

    @property
    def symmetric_cost(self) -> float:
        """Time of a symmetric product relative to a general one of its shape: 1.0, or 0.5 where half is mirrored."""

    def preferred(self, device: torch.device, dtype: torch.dtype, shape: tuple[int, int, int]) -> bool:
        """Whether `auto` should take this backend for [batch, rows, columns], rows <= columns (measured crossover)."""

    def normalize(
        self, x: Tensor, dtype: torch.dtype, *, factor: float, epsilon: float, clamp: bool, overwrite: bool = False
    ) -> Tensor | None:
        """x / (factor ||x||_F + epsilon), or / max(factor ||x||_F, epsilon), per matrix, in `dtype`.

        A new tensor, or with `overwrite` x's own memory where `dtype` is as wide as x's. None, with nothing done,
        where torch should: a dtype, device or layout this backend has no kernel for.
        """

    def symmetric_product(self, x: Tensor, *, out: Tensor | None = None) -> Tensor:
        """x x^T: [B, m, n] -> [B, m, m], symmetric."""

    def polynomial(self, r: Tensor, triple: Triple, *, out: Tensor | None = None) -> Tensor:
        """a I + b r + c r r for r: [B, m, m], symmetric."""

    def commuting_product(self, a: Tensor, b: Tensor, *, out: Tensor | None = None) -> Tensor:
        """a b^T or a b: [B, m, m], symmetric because a and b are and commute."""

    def product(self, a: Tensor, x: Tensor, *, out: Tensor | None = None) -> Tensor:
        """a x: [B, m, m], [B, m, n] -> [B, m, n]."""

    def product_in_place(self, a: Tensor, x: Tensor, free: Tensor, turn: int) -> bool:
        """x <- a x, its columns turned towards the start (-1) or the end (1) by a width of these operations' choice.

        a: [B, m, m]; x: [B, m, n]; free: [B, m, m], overwritten. The same width for every call on one x. False, with
        nothing done, where `panels.multiply_by_panels` is as good.
        """

    def run_stages(self, x: Tensor, places: Tensor, stages: Sequence[Stage]) -> bool:
        """Put x x^T into places[0], then make places[stage.out] for one stage after another, in fewer launches.

        x: [B, m, n]; places: [P, B, m, m]. False, with nothing done, where a product a stage is as good.
        """


def run_one_by_one(ops: Operations, x: Tensor, places: Tensor, stages: Sequence[Stage]) -> None:
    """What `Operations.run_stages` does, by one product a stage."""
    ops.symmetric_product(x, out=places[0])
    for stage in stages:
        if stage.triple is None:
            ops.commuting_product(places[stage.a], places[stage.b], out=places[stage.out])
        else:
            ops.polynomial(places[stage.a], stage.triple, out=places[stage.out])


class TorchOperations:
    """torch's own batched products; any device, any floating dtype, any strides."""

    name = "torch"
    symmetric_cost = 1.0

    def preferred(self, device: torch.device, dtype: torch.dtype, shape: tuple[int, int, int]) -> bool:
        return True

    def normalize(
        self, x: Tensor, dtype: torch.dtype, *, factor: float, epsilon: float, clamp: bool, overwrite: bool = False
    ) -> Tensor | None:
        return None

    def symmetric_product(self, x: Tensor, *, out: Tensor | None = None) -> Tensor:
        return torch.bmm(x, x.mT, out=out)

    def polynomial(self, r: Tensor, triple: Triple, *, out: Tensor | None = None) -> Tensor:
        a, b, c = triple
        result = torch.baddbmm(r, r, r, beta=b, alpha=c, out=out)
        diagonal = result.diagonal(dim1=-2, dim2=-1)
        # In fp32: torch on CPU would round the number itself to bf16, alike on the whole diagonal.
        diagonal.copy_(diagonal.to(torch.promote_types(r.dtype, torch.float32)) + a)
        return result

    def commuting_product(self, a: Tensor, b: Tensor, *, out: Tensor | None = None) -> Tensor:
        # Not a b^T: on CPU, products of 16-bit matrices with a transposed operand fall back to naive loops, which also
        # round more.
        return torch.bmm(a, b, out=out)

    def product(self, a: Tensor, x: Tensor, *, out: Tensor | None = None) -> Tensor:
        return torch.bmm(a, x, out=out)

    def product_in_place(self, a: Tensor, x: Tensor, free: Tensor, turn: int) -> bool:
        return False

    def run_stages(self, x: Tensor, places: Tensor, stages: Sequence[Stage]) -> bool:
        return False


TORCH = TorchOperations()

# Modules of the layer below; each has `operations()`, which raises MissingDependencyError where it cannot run.
_MODULES = {"triton": "dmuown.kernels.triton_operations", "quack": "dmuown.kernels.quack_operations"}


@cache
def _load(name: str) -> Operations:
    module_name = _MODULES[name]
    try:
        module = importlib.import_module(module_name)
        operations: Operations = module.operations()
    except MissingDependencyError:
        raise
    except ImportError as error:
        raise MissingDependencyError(
            f"backend={name!r}",
            f"needs the package {error.name or name!r}, which cannot be imported here ({error})",
            f"Install {name}, or use backend='auto' or 'torch'",
        ) from error
    return operations


@cache
def _available(name: str) -> Operations | None:
    try:
        return _load(name)
    except MissingDependencyError as error:
        logger.info("orthogonalization backend %s is not available: %s", name, error)
        return None


@cache
def _log_choice(chosen: str, device_type: str, dtype: torch.dtype) -> None:
    logger.info("orthogonalization backend auto: %s on %s in %s", chosen, device_type, dtype)


def select_backend(name: str, device: torch.device, dtype: torch.dtype, shape: tuple[int, int, int]) -> Operations:
    """Who computes the products of one batch.

    Args:
        name: `torch`, `triton`, `quack`, or `auto`: on CUDA the first of triton and quack that prefers
            this shape by its measured crossover, else torch; elsewhere torch.
        device: Where the batch is.
        dtype: The compute dtype.
        shape: [batch, rows, columns] with rows <= columns.

    Raises:
        OptionError: An unknown name.
        MissingDependencyError: A backend asked for by name that cannot run here.
    """
    if name == "torch":
        return TORCH
    if name in _MODULES:
        return _load(name)
    if name != "auto":
        raise choice_error("backend", name, BACKENDS)
    chosen: Operations = TORCH
    if device.type == "cuda":
        candidates = (_available(candidate) for candidate in _MODULES)
        chosen = next((ops for ops in candidates if ops is not None and ops.preferred(device, dtype, shape)), TORCH)
    if not torch.compiler.is_compiling():
        _log_choice(chosen.name, device.type, dtype)
    return chosen


def available_backends() -> list[str]:
    """Names of the backends that can be imported here, `torch` first; imports the optional ones to find out."""
    return ["torch", *(name for name in _MODULES if _available(name) is not None)]


__all__ = ["BACKENDS", "TORCH", "Operations", "TorchOperations", "available_backends", "select_backend"]
