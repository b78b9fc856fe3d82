"""The table of algorithms: what a row declares, and how rows are registered and found.

A step of any matrix algorithm reads

    prepare gradient -> update momentum -> orthogonalize -> shape update -> apply

The engine owns the sentence, and orthogonalization with its exchange; an algorithm is a row of
the table: a name, options, declared state, and the phases it does differently.
"""

from __future__ import annotations

import difflib
import importlib.metadata
from collections.abc import Mapping, Sequence
from typing import Any, ClassVar, TypeVar

from torch import Tensor

from dmuown.algorithms.batch import DeclaredState, MatrixBatch, Work
from dmuown.errors import MissingDependencyError, OptionError, OptionTypeError
from dmuown.state import BufferSpec

#: Entry-point group in which installed packages name their algorithm classes.
ENTRY_POINT_GROUP = "dmuown.algorithms"


class Algorithm:
    """What every algorithm declares.

    Attributes:
        name: What a group writes under `algorithm`.
        options: Options a group may set, with their defaults; inherited rows add up.
        state_spec: State buffers by name; the engine allocates, shards, saves and loads them.
    """

    name: ClassVar[str] = ""
    options: ClassVar[Mapping[str, Any]] = {}
    state_spec: ClassVar[Mapping[str, BufferSpec]] = {}

    @classmethod
    def all_options(cls) -> dict[str, Any]:
        """Options of this row and of the rows it builds on, nearest first."""
        merged: dict[str, Any] = {}
        for owner in reversed(cls.__mro__):
            merged.update(vars(owner).get("options", {}))
        return merged

    def check_options(self, options: Mapping[str, Any]) -> None:
        """Validate a group's options, aliases resolved and defaults filled in.

        Raises:
            OptionError: A value breaks this algorithm's rules.
        """


class MuonAlgorithm(Algorithm):
    """A matrix algorithm: the two halves around orthogonalization. The base row is Muon itself.

    Each phase works on this rank's shards of a whole bucket; sums over a sharded axis are
    `yield from batch.sum_rows(...)` and `batch.sum_blocks(...)`. A phase must enter the same
    collectives on every rank, also with an empty shard.
    """

    options: ClassVar[Mapping[str, Any]] = {"mu": 0.95, "nesterov": False, "momentum_form": "sum"}
    state_spec: ClassVar[Mapping[str, BufferSpec]] = {"momentum": BufferSpec(like="grad", signed=True)}

    def prepare_gradient(self, batch: MatrixBatch) -> Work[list[Tensor]]:
        """Return what momentum accumulates, `[batch, m_local, n_local]` each; the gradients as they are."""
        return batch.gradients
        yield

    def update_momentum(self, batch: MatrixBatch, gradient: Sequence[Tensor]) -> list[Tensor]:
        """Accumulate momentum in place and return what is to be orthogonalized.

        `sum`: M <- mu M + G, and G + mu M with Nesterov (kellerjordan.github.io/posts/muon).
        `ema`: M <- M + (1 - mu)(G - M), and G + mu (M - G) with Nesterov (torch.optim.Muon).
        """
        mu, nesterov = batch.options["mu"], batch.options["nesterov"]
        directions = []
        for momentum, grad in zip(batch.state["momentum"], gradient, strict=True):
            grad = grad.to(momentum.dtype)
            if batch.options["momentum_form"] == "ema":
                momentum.lerp_(grad, 1 - mu)
                directions.append(grad.lerp(momentum, mu) if nesterov else momentum)
            else:
                momentum.mul_(mu).add_(grad)
                directions.append(grad.add(momentum, alpha=mu) if nesterov else momentum)
        return directions

    def shape_update(self, batch: MatrixBatch, update: Sequence[Tensor]) -> Work[list[Tensor]]:
        """Return the orthogonalized updates, reshaped where the algorithm normalizes them."""
        return list(update)
        yield

    def apply(self, batch: MatrixBatch, update: Sequence[Tensor]) -> Work[None]:
        """Apply the update to the weights in place."""
        raise NotImplementedError(f"{type(self).__name__} declares no apply phase")
        yield

    def update(self, *args: Any, **kwargs: Any) -> Any:
        """The whole-tensor form, instead of the phases above: `update(param, grad, state, lr_ratio, *, ...)`.

        An algorithm that defines it is called once per parameter and step, under `torch.no_grad`:

        Args:
            param: `[..., m, n]`, output rows first, updated in place; a DTensor where the parameter is one.
                Fused convolutions arrive as `[m, n]` with `flatten`, transposed storage as a view.
            grad: Of param's shape, dtype and placements; the algorithm's to overwrite.
            state: Declared buffers by name, updated in place: `"grad"` ones like param, `"grad_rows"` ones
                `[..., m, 1]`.
            lr_ratio: 0-d fp32 tensor, sqrt(max(1, m / n)).
            lr, weight_decay, cautious_wd, momentum, nesterov, ns_steps, orthogonalization_strategy, split_sizes:
                The group's options, by keyword; `maximize` is False always, since the gradient's sign is turned
                before. The algorithm's own options and all others of the group follow for `**kwargs`.

        Returns None. Orthogonalize with `dmuown.algorithms.orthogonalize_single`.
        """
        raise NotImplementedError(f"{type(self).__name__} declares no whole-tensor update")

    def foreach_update(self, *args: Any, **options: Any) -> Any:
        """Batched whole-tensor form, `foreach_update(params, grads, state, lr_ratios, *, ...)`; loops `update`.

        Called instead of `update` with `foreach=True`, and with `foreach=None` where all parameters at hand
        are on CUDA. `params`, `grads` and `lr_ratios` are lists over parameters of one shape, dtype, placement and
        device; `state` maps buffer names to such lists. Options as for `update`.
        """
        params, grads, state, lr_ratios = args
        for index, (param, grad, ratio) in enumerate(zip(params, grads, lr_ratios, strict=True)):
            values = {key: buffers[index] for key, buffers in state.items()}
            self.update(param, grad, DeclaredState(self.name, values), ratio, **options)

    @classmethod
    def updates_whole_tensors(cls) -> bool:
        """Whether it is written in the whole-tensor form."""
        return cls.update is not MuonAlgorithm.update

    def check_options(self, options: Mapping[str, Any]) -> None:
        """Check the momentum's form; see `Algorithm.check_options`."""
        if options["momentum_form"] not in ("sum", "ema"):
            raise OptionError("momentum_form", f"must be 'sum' or 'ema', got {options['momentum_form']!r}")


class ElementwiseAlgorithm(Algorithm):
    """An algorithm that treats every element alone, so that shards need no communication."""

    def update(
        self,
        params: list[Tensor],
        gradients: list[Tensor],
        state: Mapping[str, list[Tensor]],
        options: Mapping[str, Any],
    ) -> None:
        """Update parameters and state in place.

        Args:
            params: Local shards of one device and dtype, any shape.
            gradients: Gradients of the same shapes; never written.
            state: Per declared buffer, one tensor a parameter.
            options: The group's options.
        """
        raise NotImplementedError(f"{type(self).__name__} declares no update")


_registry: dict[str, Algorithm] = {}
A = TypeVar("A", bound=type[Algorithm])

#: Group keys whose meaning an algorithm's options may give another default, and no other meaning.
_NEVER_OPTIONS = frozenset({"params", "param_names", "algorithm", "algorithm_source", "lr", "step", "split_sizes"})


def register_muon_algorithm(algorithm: A) -> A:
    """Register an algorithm class under its `name`; usable as a decorator.

    Raises:
        OptionError: The name is empty or taken by another class; `state_spec` holds something else than
            `BufferSpec`; an option bears a reserved name; no update is defined.
        OptionTypeError: Not a class derived from `MuonAlgorithm` or `ElementwiseAlgorithm`.
    """
    if not isinstance(algorithm, type) or not issubclass(algorithm, (MuonAlgorithm, ElementwiseAlgorithm)):
        raise OptionTypeError("register_muon_algorithm", f"takes a subclass of MuonAlgorithm, got {algorithm!r}")
    name = algorithm.name
    if not isinstance(name, str) or not name:
        raise OptionError(f"{algorithm.__qualname__}.name", "an algorithm needs a non-empty name")
    known = _registry.get(name)
    if known is not None and not _is_same_class(type(known), algorithm):
        raise OptionError(
            name,
            f"is already registered by {type(known).__module__}.{type(known).__qualname__}",
            f"Give {algorithm.__qualname__} another name",
        )
    _check_declarations(algorithm)
    _registry[name] = algorithm()
    return algorithm


def _check_declarations(algorithm: type[Algorithm]) -> None:
    name = algorithm.name
    if not isinstance(algorithm.state_spec, Mapping):
        raise OptionError(f"{name}.state_spec", f"must map names to BufferSpec, got {algorithm.state_spec!r}")
    for buffer, spec in algorithm.state_spec.items():
        if not isinstance(spec, BufferSpec):
            raise OptionError(f"{name}.state_spec[{buffer!r}]", f"must be a BufferSpec, got {type(spec).__name__}")
    for owner in algorithm.__mro__:
        options = vars(owner).get("options", {})
        if not isinstance(options, Mapping):
            raise OptionError(f"{name}.options", f"must map names to defaults, got {options!r}")
        reserved = sorted(_NEVER_OPTIONS & options.keys())
        if reserved:
            raise OptionError(f"{name}.options", f"declares {reserved[0]!r}, which every group has", "Rename it")
    if issubclass(algorithm, MuonAlgorithm):
        if not algorithm.updates_whole_tensors() and algorithm.apply is MuonAlgorithm.apply:
            raise OptionError(name, "defines neither `apply` nor a whole-tensor `update`", "Define one of them")
    elif issubclass(algorithm, ElementwiseAlgorithm) and algorithm.update is ElementwiseAlgorithm.update:
        raise OptionError(name, "defines no `update`")


def get_algorithm(name: str) -> Algorithm:
    """Return the algorithm registered under `name`, importing installed packages that offer it.

    Raises:
        OptionError: No such algorithm; the nearest name is suggested.
    """
    if name not in _registry:
        for entry_point in importlib.metadata.entry_points(group=ENTRY_POINT_GROUP):
            if entry_point.name == name:
                _register_offered(entry_point)
    if name not in _registry:
        near = difflib.get_close_matches(str(name), registered_algorithms(), n=1)
        hint = f"Did you mean {near[0]!r}" if near else "Import the package that registers it before this"
        raise OptionError("algorithm", f"{name!r} is not one of {', '.join(registered_algorithms())}", hint)
    return _registry[name]


def _register_offered(entry_point: importlib.metadata.EntryPoint) -> None:
    where = f"entry point {entry_point.name!r} of {ENTRY_POINT_GROUP}"
    try:
        algorithm = entry_point.load()
    except Exception as error:
        raise MissingDependencyError(
            where, f"{entry_point.value} cannot be imported: {error}", "Fix or uninstall the package that offers it"
        ) from error
    register_muon_algorithm(algorithm)
    if algorithm.name != entry_point.name:
        raise OptionError(where, f"leads to an algorithm named {algorithm.name!r}", "Name both alike")


def source_of(algorithm: Algorithm) -> str | None:
    """Module to import for an algorithm of another package; None for this package's own."""
    module = type(algorithm).__module__
    return None if module.startswith("dmuown.") else module


def is_registered(name: str) -> bool:
    """Whether an algorithm is registered, or offered by an installed package."""
    return name in registered_algorithms()


def loaded_algorithms() -> list[Algorithm]:
    """The algorithms registered so far, without importing more."""
    return list(_registry.values())


def registered_algorithms() -> list[str]:
    """Names of all registered algorithms, and of those that installed packages offer."""
    offered = {entry_point.name for entry_point in importlib.metadata.entry_points(group=ENTRY_POINT_GROUP)}
    return sorted(offered | set(_registry))


def _is_same_class(known: type, other: type) -> bool:
    # A reloaded module defines the same class anew.
    return (known.__module__, known.__qualname__) == (other.__module__, other.__qualname__)
