"""The ownership runtime, by rank: owners, transfers and bytes, from the runtime's own pure plan."""

from __future__ import annotations

import math
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import torch

from dmuown.automodel.checks.document import Document
from dmuown.errors import OptionError
from dmuown.ownership.assignment import Item, assign_owners
from dmuown.ownership.boundaries import Boundary
from dmuown.ownership.plan import Entry, OwnershipPlan, build_plan, shard_rows
from dmuown.policy.resolve import ResolvedRoute
from dmuown.policy.roles import ParameterRole
from dmuown.policy.schema import parse_dtype

_BLOCK = re.compile(r"^(.*?\blayers\.\d+)\.")


@dataclass(frozen=True)
class OwnershipRanks:
    """What each rank of the data-parallel mesh owns and moves under the ownership runtime.

    Attributes:
        plan: Owners and transfers.
        parameters: Bytes of master copies and shards, by rank.
        moved: Bytes of one step and micro-batch that a rank receives of other ranks' parameters and gives of gradients
            to other ranks, by rank; padding included. Over all ranks: the buffers' bytes times ranks less one.
        owned: Names of the parameters that each rank steps whole.
    """

    plan: OwnershipPlan
    parameters: list[float]
    moved: list[float]
    owned: list[list[str]]


#: What the host computes and reduces in under fsdp2 where the YAML has no `distributed.mp_policy`.
_HOST_PRECISION = (torch.bfloat16, torch.float32)


def mixed_precision(document: Document) -> tuple[torch.dtype | None, torch.dtype | None]:
    """Return the dtypes of computation and of gradients' reduction that the host's fsdp2 would take from a YAML.

    None is the parameters' own dtype, as in `torch.distributed.fsdp.MixedPrecisionPolicy`.

    Raises:
        OptionError: The section `distributed.mp_policy` is none, or names no dtype.
    """
    key = "distributed.mp_policy"
    section = document.get(key)
    if section is None:
        return _HOST_PRECISION
    if not isinstance(section, Mapping):
        raise OptionError(key, f"must be a section of keys, got {section!r}", "Indent its keys below it")
    compute, reduce = (parse_dtype(section.get(name), f"{key}.{name}") for name in ("param_dtype", "reduce_dtype"))
    return compute, reduce


def plan_ownership(
    entries: Sequence[ParameterRole],
    routes: Mapping[str, ResolvedRoute],
    ranks: int,
    *,
    shapes: Mapping[str, Sequence[int]],
    dtypes: Mapping[str, torch.dtype],
    trainable: Mapping[str, bool],
    reshard_after_forward: bool = True,
    replicas: int = 1,
) -> OwnershipRanks:
    """Work out who owns what and what is transferred, as `dedicate_params` does with boundaries at layers.

    Args:
        entries: The model's parameters in order.
        routes: Their resolved routes.
        ranks: Ranks of the (replicate x) shard mesh.
        shapes: What a tensor-parallel rank has of each.
        dtypes: Dtype of each, for what the policy leaves open.
        trainable: Whether each takes gradients.
        reshard_after_forward: As `dedicate_params`.
        replicas: Replicas among the ranks, between which a transfer goes once.
    """
    homes = [_boundary(entry.name) for entry in entries]
    names = list(dict.fromkeys(homes))
    boundaries = [
        Boundary(index, name, len(names) - 1 - index, len(names) - 1 - index) for index, name in enumerate(names)
    ]
    index = {name: position for position, name in enumerate(names)}
    items = [
        Item(entry.name, tuple(entry.parameter.shape), index[home], routes[entry.name].route == "muon")
        for entry, home in zip(entries, homes, strict=True)
        if routes[entry.name].route != "sharded_adamw"
    ]
    owners = assign_owners(items, ranks)
    planned = []
    for entry, home in zip(entries, homes, strict=True):
        route = routes[entry.name]
        compute = route.param_dtype or dtypes[entry.name]
        used = {index[home], *(index.get(_boundary(alias), index[home]) for alias in entry.aliases)}
        planned.append(
            Entry(
                name=entry.name,
                shape=tuple(shapes[entry.name]),
                route=route.route,
                owner=owners.get(entry.name),
                boundaries=tuple(sorted(used)),
                param_dtype=compute,
                grad_dtype=route.grad_dtype or compute,
                trainable=trainable[entry.name],
            )
        )
    plan = build_plan(
        planned,
        boundaries,
        world_size=ranks,
        reshard_after_forward=reshard_after_forward,
        shard_size=ranks // replicas if 1 < replicas < ranks else None,
    )
    held = [0.0] * ranks
    owned: list[list[str]] = [[] for _ in range(ranks)]
    for part in planned:
        master = (routes[part.name].master_dtype or dtypes[part.name]).itemsize
        if part.owner is not None:
            held[part.owner] += math.prod(part.shape) * master
            owned[part.owner].append(part.name)
            continue
        rows, rest = shard_rows(part.shape[0], ranks), math.prod(part.shape[1:])
        for rank in range(ranks):
            held[rank] += max(0, min(rows, part.shape[0] - rows * rank)) * rest * master
    return OwnershipRanks(plan, held, _moved(plan), owned)


def _moved(plan: OwnershipPlan) -> list[float]:
    """Bytes by rank: of each buffer what others have to give when it is fetched, and to get when it is reduced."""
    everywhere = 0.0
    own = [0.0] * plan.world_size
    fetches = 2 if plan.reshard_after_forward else 1
    for transfer in plan.transfers:
        size = fetches * transfer.fetch_bytes + (transfer.reduce_bytes if transfer.trainable else 0)
        if transfer.kind == "owner":
            everywhere += size
            own[transfer.owner] += size
        else:
            everywhere += size * (plan.world_size - 1) / plan.world_size
    return [everywhere - part for part in own]


def _boundary(name: str) -> str:
    """The nearest element of a list of layers, else the parameter's own module."""
    match = _BLOCK.match(name)
    return match.group(1) if match else name.rpartition(".")[0]
