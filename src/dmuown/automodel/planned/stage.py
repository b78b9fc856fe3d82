"""One pipeline stage of a job: its routes, its exchange or transfers, and what each of its ranks holds."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from torch import Tensor

from dmuown.automodel.dmuon_options import DMuonOptions
from dmuown.automodel.grouping import group_parameters
from dmuown.automodel.optimizer_options import MatrixOptions
from dmuown.automodel.planned.buckets import make_buckets
from dmuown.automodel.planned.cluster import Cluster, place, place_tensor_parallel
from dmuown.automodel.planned.exchange import BucketPlan, local_numel, plan_exchange, state_bytes
from dmuown.automodel.planned.memory import RankBytes
from dmuown.automodel.planned.model import PlannedModel
from dmuown.automodel.planned.ownership import OwnershipRanks, plan_ownership
from dmuown.automodel.planned.routes import RouteRow, route_rows
from dmuown.ownership.plan import shard_rows
from dmuown.policy.fused import cut_groups
from dmuown.policy.resolve import ResolvedRoute, resolve_routes
from dmuown.policy.roles import ParameterRole


@dataclass
class StagePlan:
    """What the ranks of one stage do.

    Attributes:
        ranks: Bytes and work by rank of the stage.
        routes: Its part of the route table.
        buckets: Its exchange; empty under the ownership runtime.
        ownership: Its owners and transfers under the ownership runtime; else None.
    """

    ranks: RankBytes
    routes: list[RouteRow] = field(default_factory=list)
    buckets: list[BucketPlan] = field(default_factory=list)
    ownership: OwnershipRanks | None = None


@dataclass(frozen=True)
class _Stage:
    entries: Sequence[ParameterRole]
    options: MatrixOptions
    cluster: Cluster
    model: PlannedModel
    groups: Sequence[Mapping[str, Any]]
    group_of: Mapping[str, Mapping[str, Any]]
    routes: Mapping[str, ResolvedRoute]

    @property
    def settings(self) -> dict[str, Any]:
        return self.options.optimizer_options()


def plan_stage(
    entries: Sequence[ParameterRole], options: MatrixOptions, cluster: Cluster, model: PlannedModel
) -> StagePlan:
    """Plan one stage.

    Args:
        entries: The stage's parameters.
        options: The optimizer's configuration.
        cluster: The ranks.
        model: The whole model.

    Raises:
        ParameterError: The policy leaves a vector on `muon`.
    """
    active = [entry for entry in entries if model.trainable[entry.name]]
    rules = options.grouping_rules()
    groups = group_parameters(active, rules, owner="the model's stage") if active else []
    if rules.auto_split:
        found = [(entry.parameter, model.splits[entry.name]) for entry in active if entry.name in model.splits]
        cuts = {id(parameter): split.group_options(per_head=rules.per_head) for parameter, split in found}
        groups = cut_groups(groups, cuts)
    policy = options.param_policy
    owned = isinstance(options, DMuonOptions)
    if isinstance(options, DMuonOptions):
        from dmuown.automodel.ownership import policy_with_precision

        policy = policy_with_precision(options)
    routes: Mapping[str, ResolvedRoute] = {}
    if policy is not None:
        routes = resolve_routes(
            {entry.name: entry.parameter for entry in entries},
            policy=policy,
            roles={entry.name: entry.role.value for entry in entries},
        ).routes
    stage = _Stage(
        entries,
        options,
        cluster,
        model,
        groups,
        {name: group for group in groups for name, _ in group["params"]},
        routes,
    )
    placed = {entry.name: place(entry, cluster, model.dtype_of(entry.name)) for entry in entries}
    plan = StagePlan(RankBytes.zeros(cluster.stage_size))
    names = {name: route.route for name, route in routes.items()}
    plan.routes = route_rows(entries, placed, stage.group_of, names, model.splits, owned=owned)
    if isinstance(options, DMuonOptions):
        _owned(stage, options, plan)
    else:
        _sharded(stage, placed, plan)
    return plan


def _sharded(stage: _Stage, placed: Mapping[str, Tensor], plan: StagePlan) -> None:
    """Shards of FSDP2, which the engine exchanges."""
    found, settings, ranks = plan.ranks, stage.settings, stage.cluster.stage_size
    buckets = make_buckets(stage.groups, placed, settings)
    plan.buckets = plan_exchange(buckets, ranks, settings)
    _add_exchange(found, plan.buckets, range(ranks))
    layouts = {name: bucket.layout for bucket in buckets for name in bucket.names}
    # Parameters of equal shape and layout weigh the same: count one of each kind.
    kinds: dict[tuple[Any, ...], list[ParameterRole]] = defaultdict(list)
    for entry in stage.entries:
        tensor, group = placed[entry.name], stage.group_of.get(entry.name)
        algorithm = group["algorithm"] if group else ""
        key = (tuple(tensor.shape), tensor.dtype, getattr(tensor, "placements", ()), algorithm, entry.transposed)
        kinds[key].append(entry)
    for (*_, algorithm, _), members in kinds.items():
        tensor, layout = placed[members[0].name], layouts.get(members[0].name)
        for rank in range(ranks):
            size = local_numel(tensor, rank) * tensor.dtype.itemsize * len(members)
            found.parameters[rank] += size
            if algorithm:
                found.gradients[rank] += size
                found.state[rank] += len(members) * state_bytes(tensor, layout, algorithm, rank, settings)


def _owned(stage: _Stage, options: DMuonOptions, plan: StagePlan) -> None:
    """Owners, each of which is the tensor-parallel ranks of one data-parallel place."""
    cluster, model, found, settings = stage.cluster, stage.model, plan.ranks, stage.settings
    held = {
        entry.name: place_tensor_parallel(
            entry, cluster, stage.routes[entry.name].master_dtype or model.dtype_of(entry.name)
        )
        for entry in stage.entries
    }
    owners = plan_ownership(
        stage.entries,
        stage.routes,
        cluster.data_parallel,
        shapes={name: getattr(tensor, "_local_tensor", tensor).shape for name, tensor in held.items()},
        dtypes={entry.name: model.dtype_of(entry.name) for entry in stage.entries},
        trainable=model.trainable,
        reshard_after_forward=options.reshard_after_forward,
        replicas=cluster.replicas,
    )
    plan.ownership = owners
    for owner, names in enumerate(owners.owned):
        ranks = range(owner * cluster.tp, (owner + 1) * cluster.tp)
        trained = {name for name in names if name in stage.group_of}
        buckets = make_buckets(stage.groups, held, settings, trained)
        exchange = plan_exchange(buckets, cluster.tp, settings)
        _add_exchange(found, exchange, ranks)
        layouts = {name: bucket.layout for bucket in buckets for name in bucket.names}
        for place_, rank in enumerate(ranks):
            found.parameters[rank] = owners.parameters[owner]
            found.sent[rank] += owners.moved[owner]
            for name in trained:
                tensor, algorithm = held[name], stage.group_of[name]["algorithm"]
                kept = stage.routes[name].optim_dtype
                found.gradients[rank] += local_numel(tensor, place_) * tensor.dtype.itemsize
                found.state[rank] += state_bytes(tensor, layouts.get(name), algorithm, place_, settings, dtype=kept)
    for name, group in stage.group_of.items():
        if stage.routes[name].route != "sharded_adamw":
            continue
        kept, tensor = stage.routes[name].optim_dtype, held[name]
        tensor = getattr(tensor, "_local_tensor", tensor)
        part = shard_rows(tensor.shape[0], cluster.data_parallel)
        for rank in range(cluster.stage_size):
            rows = max(0, min(part, tensor.shape[0] - part * (rank // cluster.tp)))
            shard = tensor.new_empty((rows, *tensor.shape[1:]))
            found.gradients[rank] += shard.numel() * shard.dtype.itemsize
            found.state[rank] += state_bytes(shard, None, group["algorithm"], 0, settings, dtype=kept)


def _add_exchange(found: RankBytes, buckets: Sequence[BucketPlan], ranks: range) -> None:
    for bucket in buckets:
        for index, rank in enumerate(ranks):
            found.sent[rank] += bucket.bytes_sent[index]
            found.work[rank] += bucket.work[index]
            found.matrices[rank] += bucket.matrices[index]
            found.buffers[rank] = max(found.buffers[rank], bucket.buffers[index])
