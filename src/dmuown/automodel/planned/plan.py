"""The plan of a job from its YAML."""

from __future__ import annotations

import fnmatch
import re
from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from dmuown.automodel.checks.document import Document, read_document
from dmuown.automodel.dmuon_options import DMuonOptions, own_options
from dmuown.automodel.grouping import ELEMENTWISE, group_parameters
from dmuown.automodel.optimizer_options import MatrixOptions
from dmuown.automodel.planned.cluster import Cluster, place, stages
from dmuown.automodel.planned.exchange import BucketPlan, local_numel, plan_exchange, state_bytes
from dmuown.automodel.planned.memory import RankBytes
from dmuown.automodel.planned.ownership import OwnershipRanks, plan_ownership
from dmuown.automodel.shapes import find_model_config, model_parameters, read_model_config
from dmuown.engine.layout import MatrixLayout
from dmuown.engine.plan import Bucket
from dmuown.errors import OptionError
from dmuown.orthogonalize import resolve_orthogonalizer
from dmuown.policy.resolve import resolve_routes
from dmuown.policy.roles import ParameterRole
from dmuown.policy.schema import parse_dtype

_LAYER_NUMBER = re.compile(r"(?<=\.)\d+(?=\.)")


@dataclass(frozen=True)
class RouteRow:
    """Parameters that differ in their layer's number only.

    Attributes:
        pattern: Their name, numbers as `*`.
        count: How many.
        shape: Their shape.
        role: Their role.
        route: Route of the policy; empty without one.
        algorithm: What steps them; `frozen` for none.
        lr: Learning rate; None if frozen.
        weight_decay: Decay; None if frozen.
        split: How one lies on the ranks.
    """

    pattern: str
    count: int
    shape: tuple[int, ...]
    role: str
    route: str
    algorithm: str
    lr: float | None
    weight_decay: float | None
    split: str

    def to_dict(self) -> dict[str, Any]:
        """The row as data that JSON can hold."""
        return {**vars(self), "shape": list(self.shape)}


@dataclass
class JobPlan:
    """What a job would do.

    Attributes:
        config: The YAML.
        optimizer: Name of the optimizer's configuration.
        cluster: The ranks.
        elements: Parameters of the model.
        trainable: Those that are trained.
        routes: Route table.
        buckets: Exchange of each stage, one entry a bucket; empty under the ownership runtime.
        ownership: Plan of each stage under the ownership runtime; else empty.
        ranks: Bytes and work by rank.
        notes: What the plan leaves out or assumes.
    """

    config: str
    optimizer: str
    cluster: Cluster
    elements: int = 0
    trainable: int = 0
    routes: list[RouteRow] = field(default_factory=list)
    buckets: list[BucketPlan] = field(default_factory=list)
    ownership: list[OwnershipRanks] = field(default_factory=list)
    ranks: RankBytes = field(default_factory=RankBytes)
    notes: list[str] = field(default_factory=list)

    @property
    def matrices(self) -> int:
        """Matrices orthogonalized at each step, over all ranks."""
        return int(sum(self.ranks.matrices))

    def to_dict(self, *, every_rank: bool = False) -> dict[str, Any]:
        """The plan as data that JSON can hold; `every_rank` adds all quantities of each rank."""
        data: dict[str, Any] = {
            "config": self.config,
            "optimizer": self.optimizer,
            "world_size": self.cluster.world_size,
            "mesh": vars(self.cluster) | {},
            "parameters": self.elements,
            "trainable": self.trainable,
            "matrices": self.matrices,
            "routes": [row.to_dict() for row in self.routes],
            "exchange": [bucket.to_dict() for bucket in self.buckets],
            "transfers": [found.plan.per_step() for found in self.ownership],
            "by_rank": self.ranks.to_dict(),
            "notes": list(self.notes),
        }
        data["mesh"] = {key: getattr(self.cluster, key) for key in ("world_size", "replicas", "tp", "ep", "pp", "cp")}
        if every_rank:
            data["ranks"] = self.ranks.columns()
        return data


def plan_job(
    path: str | Path,
    overrides: Sequence[str] = (),
    *,
    world_size: int,
    sizes: Mapping[str, int | None] | None = None,
    model_config: Path | None = None,
    parameters: Sequence[ParameterRole] | None = None,
) -> JobPlan:
    """Work out the plan of a job.

    Args:
        path: The YAML.
        overrides: `--dotted.key value` arguments.
        world_size: Processes.
        sizes: `tp`, `ep`, `pp`, `cp`, `replicas` that stand in for the YAML's; None leaves the YAML's.
        model_config: The model's `config.json`, where it is not found from the YAML.
        parameters: The model's parameters, where they are known from elsewhere.

    Raises:
        OptionError: A bad optimizer section, sizes that do not divide, an unknown family, no `config.json`.
    """
    document = read_document(path, overrides)
    options = _options(document)
    cluster = _cluster(document, world_size, sizes or {})
    plan = JobPlan(str(path), type(options).title(), cluster)
    if document.get("peft") is not None:
        raise OptionError("peft", "adapters are not planned here", "Plan without it: --peft none")
    dtype = _dtype(document, model_config, plan)
    entries = list(parameters) if parameters is not None else _parameters(document, model_config)
    trainable = {entry.name: flag for entry, flag in zip(entries, trainable_flags(document, entries), strict=True)}
    plan.elements = sum(entry.parameter.numel() for entry in entries)
    plan.trainable = sum(entry.parameter.numel() for entry in entries if trainable[entry.name])
    for stage in stages(entries, cluster.pp):
        _plan_stage(stage, options, cluster, dtype, trainable, plan)
    plan.notes.append("not counted: activations, and layers while FSDP holds them whole")
    return plan


def _options(document: Document) -> MatrixOptions:
    section = document.get("optimizer")
    target = section.get("_target_") if isinstance(section, Mapping) else None
    found = own_options(target)
    if found is None or not isinstance(section, Mapping):
        raise OptionError(
            "optimizer._target_", f"must name a configuration of dmuown.automodel, got {target!r}", "See dmuown check"
        )
    try:
        return found(**{key: value for key, value in section.items() if key != "_target_"})
    except OptionError as error:
        raise OptionError(f"optimizer.{error.subject}", error.rule, error.remedy) from None


def _cluster(document: Document, world_size: int, sizes: Mapping[str, int | None]) -> Cluster:
    keys = {"tp": "tp_size", "ep": "ep_size", "pp": "pp_size", "cp": "cp_size", "replicas": "dp_replicate_size"}
    chosen: dict[str, int] = {}
    for name, key in keys.items():
        given = sizes.get(name)
        value = given if given is not None else document.get(f"distributed.{key}")
        if value is None:
            value = 1
        if isinstance(value, bool) or not isinstance(value, int) or value < 1:
            raise OptionError(f"distributed.{key}", f"must be a whole number >= 1, got {value!r}")
        chosen[name] = value
    return Cluster(world_size, **chosen)


def _model_file(document: Document, model_config: Path | None) -> Path:
    if model_config is not None:
        if not model_config.is_file():
            raise OptionError("--model-config", f"{str(model_config)!r} is no file", "Give a config.json")
        return model_config
    named = document.get("model.pretrained_model_name_or_path") or document.get("model.config")
    if isinstance(named, Mapping):
        named = named.get("pretrained_model_name_or_path")
    found = find_model_config(named) if isinstance(named, str) else None
    if found is None:
        raise OptionError(
            "model.pretrained_model_name_or_path",
            f"the config.json of {named!r} is not on this machine",
            "Download it (hf download NAME config.json), or give the file with --model-config",
        )
    return found


def _parameters(document: Document, model_config: Path | None) -> list[ParameterRole]:
    file = _model_file(document, model_config)
    changed = {
        key: value for key, value in (document.get("model") or {}).items() if key in SHAPE_KEYS and value is not None
    }
    content = {**read_model_config(file), **changed}
    host_layout = not document.get("model.force_hf", False)
    return model_parameters(content, where=str(file), host_layout=host_layout)


#: Keys of a model's section that change the shapes of its checkpoint's configuration.
SHAPE_KEYS = frozenset({"num_hidden_layers", "vocab_size", "tie_word_embeddings"})


def _dtype(document: Document, model_config: Path | None, plan: JobPlan) -> torch.dtype:
    named = document.get("model.torch_dtype", document.get("model.dtype", "auto"))
    if named in ("auto", None):
        content = read_model_config(_model_file(document, model_config))
        named = content.get("dtype") or content.get("torch_dtype") or "float32"
        plan.notes.append(f"dtype of parameters: {named}, the checkpoint's (model.torch_dtype is not set)")
    return parse_dtype(named, "model.torch_dtype") or torch.float32


def trainable_flags(document: Document, entries: Sequence[ParameterRole]) -> list[bool]:
    """Whether each parameter is trained: what `freeze_modules` selects is not, unless `unfreeze_modules` does."""
    flags = [True] * len(entries)
    for field_name, value in (("freeze_modules", False), ("unfreeze_modules", True)):
        for selector in document.get(f"freeze_config.{field_name}") or ():
            for position, entry in enumerate(entries):
                if isinstance(selector, Mapping) and _selected(entry.name, selector):
                    flags[position] = value
    return flags


def _selected(name: str, selector: Mapping[str, Any]) -> bool:
    parts = name.split(".")
    paths = [".".join(parts[:depth]) for depth in range(1, len(parts))]
    if "path" in selector:
        return selector["path"] in paths
    return any(fnmatch.fnmatch(path, str(selector.get("glob"))) for path in paths)


def _plan_stage(
    entries: Sequence[ParameterRole],
    options: MatrixOptions,
    cluster: Cluster,
    dtype: torch.dtype,
    trainable: Mapping[str, bool],
    plan: JobPlan,
) -> None:
    active = [entry for entry in entries if trainable[entry.name]]
    groups = group_parameters(active, options.grouping_rules(), owner="the model's stage") if active else []
    group_of = {name: group for group in groups for name, _ in group["params"]}
    routes = {}
    if options.param_policy is not None:
        routes = resolve_routes(
            {entry.name: entry.parameter for entry in entries},
            policy=options.param_policy,
            roles={entry.name: entry.role.value for entry in entries},
        ).routes
    owned = options if isinstance(options, DMuonOptions) else None
    if owned is not None and cluster.tp > 1:
        plan.notes.append("the ownership runtime is planned over data-parallel ranks, each tensor-parallel part alike")
    placed = {entry.name: place(entry, cluster, dtype) for entry in entries}
    _add_routes(
        entries, placed, group_of, {name: route.route for name, route in routes.items()}, owned is not None, plan
    )
    found = RankBytes.zeros(cluster.stage_size)
    if owned is not None:
        _ownership(entries, owned, routes, cluster, dtype, trainable, group_of, found, plan)
    else:
        _sharded(entries, options, groups, placed, cluster, group_of, found, plan)
    plan.ranks.extend(found)


def _sharded(
    entries: Sequence[ParameterRole],
    options: MatrixOptions,
    groups: Sequence[Mapping[str, Any]],
    placed: Mapping[str, Tensor],
    cluster: Cluster,
    group_of: Mapping[str, Mapping[str, Any]],
    found: RankBytes,
    plan: JobPlan,
) -> None:
    ranks = cluster.stage_size
    settings = options.optimizer_options()
    buckets = _buckets(groups, placed, settings)
    for bucket in plan_exchange(buckets, ranks, batch_size=settings.get("batch_size")):
        plan.buckets.append(bucket)
        for rank in range(ranks):
            found.sent[rank] += bucket.bytes_sent[rank]
            found.work[rank] += bucket.work[rank]
            found.matrices[rank] += bucket.matrices[rank]
            found.buffers[rank] = max(found.buffers[rank], bucket.buffers[rank])
    layouts = {name: bucket.layout for bucket in buckets for name in bucket.names}
    # Parameters of equal shape and layout weigh the same: count one of each kind.
    kinds: dict[tuple[Any, ...], list[ParameterRole]] = defaultdict(list)
    for entry in entries:
        tensor, group = placed[entry.name], group_of.get(entry.name)
        algorithm = group["algorithm"] if group else ""
        kinds[tuple(tensor.shape), getattr(tensor, "placements", ()), algorithm, entry.transposed].append(entry)
    for (_, _, algorithm, _), members in kinds.items():
        tensor, layout = placed[members[0].name], layouts.get(members[0].name)
        for rank in range(ranks):
            numel = local_numel(tensor, rank) * tensor.dtype.itemsize * len(members)
            found.parameters[rank] += numel
            if algorithm:
                found.gradients[rank] += numel
                found.state[rank] += len(members) * state_bytes(tensor, layout, algorithm, rank, settings)


def _buckets(
    groups: Sequence[Mapping[str, Any]], placed: Mapping[str, Tensor], settings: Mapping[str, Any]
) -> list[Bucket]:
    orthogonalizer = resolve_orthogonalizer(settings, torch.device("cuda"))
    made: dict[tuple[object, ...], Bucket] = {}
    for index, group in enumerate(groups):
        if group["algorithm"] in ELEMENTWISE:
            continue
        for name, _ in group["params"]:
            tensor = placed[name]
            key = (index, tuple(tensor.shape), getattr(tensor, "placements", ()))
            if key not in made:
                layout = MatrixLayout(tensor, name, transposed=group["matrix_transposed"], flatten=group["flatten"])
                made[key] = Bucket(index, [], [], layout, (), orthogonalizer, None, None, None, None, [layout.own])
            made[key].params.append(tensor)
            made[key].names.append(name)
    return sorted(made.values(), key=lambda bucket: -bucket.flops_per_unit * len(bucket.params))


def _ownership(
    entries: Sequence[ParameterRole],
    options: DMuonOptions,
    routes: Mapping[str, Any],
    cluster: Cluster,
    dtype: torch.dtype,
    trainable: Mapping[str, bool],
    group_of: Mapping[str, Mapping[str, Any]],
    found: RankBytes,
    plan: JobPlan,
) -> None:
    count = cluster.data_parallel
    planned = plan_ownership(
        entries, routes, count, dtype=dtype, trainable=trainable, reshard_after_forward=options.reshard_after_forward
    )
    plan.ownership.append(planned)
    settings = options.optimizer_options()
    by_name = {entry.name: entry for entry in entries}
    received = sum(total["bytes"] for total in planned.plan.per_step().values())
    for rank in range(cluster.stage_size):
        owner = rank // cluster.tp
        found.parameters[rank] = planned.parameters[owner] / cluster.tp
        found.work[rank] = planned.work[owner] / cluster.tp
        found.sent[rank] = received / cluster.tp
    for owner, names in enumerate(planned.stepped):
        for name in names:
            group = group_of.get(name)
            if group is None:
                continue
            entry, route = by_name[name], routes[name]
            whole = torch.empty(entry.parameter.shape, dtype=route.master_dtype or dtype, device="meta")
            matrix = group["algorithm"] not in ELEMENTWISE
            layout = MatrixLayout(whole, name, transposed=entry.transposed) if matrix else None
            held = state_bytes(whole, layout, group["algorithm"], 0, settings)
            for rank in range(owner * cluster.tp, (owner + 1) * cluster.tp):
                found.state[rank] += held / cluster.tp
                found.gradients[rank] += whole.numel() * whole.dtype.itemsize / cluster.tp
                found.matrices[rank] += (whole[..., 0, 0].numel() if matrix else 0) / cluster.tp
    sharded = [entry for entry in entries if routes[entry.name].route == "sharded_adamw" and trainable[entry.name]]
    for entry in sharded:
        master = (routes[entry.name].master_dtype or dtype).itemsize
        share = entry.parameter.numel() / count / cluster.tp
        for rank in range(cluster.stage_size):
            found.gradients[rank] += share * master
            found.state[rank] += 2 * share * master + 4


def _add_routes(
    entries: Sequence[ParameterRole],
    placed: Mapping[str, Tensor],
    group_of: Mapping[str, Mapping[str, Any]],
    routes: Mapping[str, str],
    owned: bool,
    plan: JobPlan,
) -> None:
    rows: dict[tuple[Any, ...], int] = {}
    for entry in entries:
        group, tensor = group_of.get(entry.name), placed[entry.name]
        route = routes.get(entry.name, "")
        split = ("shards" if route == "sharded_adamw" else "one owner") if owned else split_text(tensor)
        key = (
            _LAYER_NUMBER.sub("*", entry.name),
            tuple(entry.parameter.shape),
            entry.role.value,
            route,
            group["algorithm"] if group else "frozen",
            group["lr"] if group else None,
            group["weight_decay"] if group else None,
            split,
        )
        rows[key] = rows.get(key, 0) + 1
    for (pattern, shape, role, route, algorithm, lr, decay, split), count in rows.items():
        plan.routes.append(RouteRow(pattern, count, shape, role, route, algorithm, lr, decay, split))


def split_text(tensor: Tensor) -> str:
    """How a parameter is cut: `axis 0 by shard x8, axis 0 by tp x2`."""
    mesh = getattr(tensor, "device_mesh", None)
    if mesh is None:
        return "whole"
    names = mesh.mesh_dim_names or ()
    parts = []
    for dim, placement in enumerate(tensor.placements):  # type: ignore[attr-defined]
        if mesh.size(dim) == 1:
            continue
        axis = getattr(placement, "dim", None)
        parts.append(f"{names[dim]} x{mesh.size(dim)}" + ("" if axis is None else f" cuts axis {axis}"))
    return ", ".join(parts) or "whole"
