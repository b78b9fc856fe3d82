"""Where transfers hang: the hook boundary of every parameter, and the order in which boundaries run.

A boundary is a module before whose forward its parameters are made whole and after whose backward
their gradients are reduced. Finding it needs the module tree only.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

from torch import nn

from dmuown.errors import OwnershipError
from dmuown.policy.names import canonical_name

# Containers are never called, so a hook on them would never run.
_CONTAINERS = (nn.ModuleList, nn.ModuleDict, nn.ParameterList, nn.ParameterDict)


@dataclass(frozen=True)
class Boundary:
    """A module where transfers hang.

    Attributes:
        index: Position in the order of forward passes: a module before the modules inside it.
        name: Canonical name; empty for the model itself.
        backward: Position in the order in which backward passes enter boundaries: later modules first,
            a module before the modules inside it.
        backward_end: The largest such position of the boundary itself and of those inside it: its backward is
            over after theirs.
    """

    index: int
    name: str
    backward: int
    backward_end: int

    @property
    def label(self) -> str:
        """The name for messages."""
        return self.name or "(the model itself)"


@dataclass(frozen=True)
class Boundaries:
    """All boundaries of a model.

    Attributes:
        entries: In forward order.
        modules: Their modules, likewise.
        of: Boundary indices by parameter name, ascending; several where tied uses lie in different ones.
    """

    entries: tuple[Boundary, ...]
    modules: tuple[nn.Module, ...]
    of: Mapping[str, tuple[int, ...]]


def find_boundaries(
    model: nn.Module,
    uses: Mapping[str, Sequence[str]],
    predicate: Callable[[nn.Module], bool] | None = None,
) -> Boundaries:
    """Find the boundary of every use of every parameter.

    Args:
        model: The model.
        uses: By canonical name of a parameter, the raw names under which `model` reaches it.
        predicate: Selects boundaries: the lowest matching ancestor counts. None takes the nearest
            enclosing element of a `ModuleList`, else the parameter's own module.

    Raises:
        OwnershipError: A parameter has no boundary, or one that is never called.
    """
    found: dict[str, list[nn.Module]] = {}
    for name, raw_names in uses.items():
        found[name] = [_boundary_of(model, raw, name, predicate) for raw in raw_names]
    chosen = {id(module) for modules in found.values() for module in modules}
    forward: list[tuple[str, nn.Module]] = []
    leaving: list[nn.Module] = []
    inside: dict[int, list[int]] = {}
    _walk(model, "", set(), chosen, forward, leaving, inside)
    backward = {id(module): position for position, module in enumerate(reversed(leaving))}
    index = {id(module): position for position, (_, module) in enumerate(forward)}
    ends = {identity: max(backward[other] for other in others) for identity, others in inside.items()}
    entries = tuple(
        Boundary(position, canonical_name(path), backward[id(module)], ends[id(module)])
        for position, (path, module) in enumerate(forward)
    )
    of = {name: tuple(sorted({index[id(module)] for module in modules})) for name, modules in found.items()}
    return Boundaries(entries, tuple(module for _, module in forward), of)


def _boundary_of(model: nn.Module, raw: str, name: str, predicate: Callable[[nn.Module], bool] | None) -> nn.Module:
    path = raw.split(".")[:-1]
    chain = [(path[:depth], model.get_submodule(".".join(path[:depth]))) for depth in range(len(path), -1, -1)]
    if predicate is not None:
        for position, (module_path, module) in enumerate(chain):
            if predicate(module):
                parent = chain[position + 1][1] if position + 1 < len(chain) else None
                _check_called(name, canonical_name(".".join(module_path)), module, parent)
                return module
        raise OwnershipError(
            name,
            "no module that contains it matches hook_boundary_predicate",
            "Let the predicate match one, for embeddings and heads the module itself, or leave the parameter "
            "out by `predicate`",
        )
    for (_, module), (_, parent) in itertools.pairwise(chain):
        if isinstance(parent, nn.ModuleList) and not isinstance(module, _CONTAINERS):
            return module
    # nn.MultiheadAttention reads the weight of its out_proj without calling it.
    called = [
        module
        for position, (_, module) in enumerate(chain)
        if not isinstance(module, _CONTAINERS)
        and not (position + 1 < len(chain) and isinstance(chain[position + 1][1], nn.MultiheadAttention))
    ]
    return called[0] if called else model


def _check_called(name: str, path: str, module: nn.Module, parent: nn.Module | None) -> None:
    """Refuse a boundary whose forward never runs: its hooks would not run, and other ranks would wait."""
    no_forward = type(module).forward is nn.Module.forward and "forward" not in vars(module)
    if (isinstance(module, _CONTAINERS) and no_forward) or isinstance(parent, nn.MultiheadAttention):
        raise OwnershipError(
            name,
            f"has its boundary, by hook_boundary_predicate, at {path or 'the model'}, a {type(module).__name__} that "
            "is never called",
            "Let the predicate match a module that the model calls: an element of a list, not the list",
        )


def _walk(
    module: nn.Module,
    path: str,
    seen: set[int],
    chosen: set[int],
    entering: list[tuple[str, nn.Module]],
    leaving: list[nn.Module],
    inside: dict[int, list[int]],
) -> list[int]:
    """List boundaries in pre-order and post-order; returns those in `module`, and notes them for boundaries."""
    if id(module) in seen:
        return []
    seen.add(id(module))
    here: list[int] = []
    if id(module) in chosen:
        entering.append((path, module))
        here.append(id(module))
    for name, child in module.named_children():
        child_path = f"{path}.{name}" if path else name
        here += _walk(child, child_path, seen, chosen, entering, leaving, inside)
    if id(module) in chosen:
        leaving.append(module)
        inside[id(module)] = here
    return here
