"""The plan of a job from its YAML."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from dmuown.automodel.checks.document import SIZES, Document, read_document
from dmuown.automodel.checks.problems import Report
from dmuown.automodel.checks.relations import check_batches
from dmuown.automodel.dmuon_options import DMuonOptions, own_options
from dmuown.automodel.optimizer_options import MatrixOptions
from dmuown.automodel.planned.cluster import Cluster, stages
from dmuown.automodel.planned.exchange import BucketPlan
from dmuown.automodel.planned.memory import RankBytes
from dmuown.automodel.planned.model import KnownModel, plan_model
from dmuown.automodel.planned.ownership import OwnershipRanks, mixed_precision
from dmuown.automodel.planned.routes import RouteRow, with_layers
from dmuown.automodel.planned.stage import plan_stage
from dmuown.errors import OptionError


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
            "ownership": [found.plan.to_dict() for found in self.ownership],
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
    known: KnownModel | None = None,
) -> JobPlan:
    """Work out the plan of a job.

    Args:
        path: The YAML.
        overrides: `--dotted.key value` arguments.
        world_size: Processes.
        sizes: `tp`, `ep`, `pp`, `cp`, `replicas` that stand in for the YAML's; None leaves the YAML's.
        model_config: The model's `config.json`, where it is not found from the YAML.
        known: The model's parameters, where they are known from elsewhere.

    Raises:
        OptionError: A bad section of the optimizer or of mixed precision, sizes that do not divide, an unknown family,
            no `config.json`, adapters that are not known here.
        ParameterError: The policy leaves a vector on `muon`.
    """
    document = read_document(path, overrides, sizes)
    options = _options(document)
    chosen = _sizes(document)
    if isinstance(options, DMuonOptions):
        from dmuown.automodel.ownership import check_sizes

        # Before whether they divide: what is refused stays refused.
        check_sizes({f"{name}_size": chosen[name] for name in ("pp", "ep", "cp")})
        options.mixed_precision = mixed_precision(document)
    cluster = Cluster(world_size, **chosen)
    _check_data_parallel(document, cluster)
    plan = JobPlan(str(path), type(options).title(), cluster)
    batches = Report(str(path))
    check_batches(document, batches, cluster.data_parallel // cluster.cp)
    plan.notes += [f"{problem.key}: {problem.rule}: the job would not start" for problem in batches.errors]
    model = plan_model(document, model_config, known)
    plan.elements, plan.trainable = model.elements, model.trained
    plan.notes += model.notes
    rows: list[RouteRow] = []
    for entries in stages(model.entries, cluster.pp):
        stage = plan_stage(entries, options, cluster, model)
        rows += stage.routes
        plan.buckets += stage.buckets
        plan.ownership += [stage.ownership] if stage.ownership is not None else []
        plan.ranks.extend(stage.ranks)
    plan.routes = with_layers(rows)
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


def _sizes(document: Document) -> dict[str, int]:
    """The sizes of the layout, by the names of their options."""
    chosen: dict[str, int] = {}
    for name, key in SIZES.items():
        value = document.get(f"distributed.{key}")
        if value is None:
            value = 1
        if isinstance(value, bool) or not isinstance(value, int) or value < 1:
            raise OptionError(f"distributed.{key}", f"must be a whole number >= 1, got {value!r}")
        chosen[name] = value
    return chosen


def _check_data_parallel(document: Document, cluster: Cluster) -> None:
    """Refuse a fixed number of data-parallel ranks that the other sizes do not leave."""
    fixed, left = document.get("distributed.dp_size"), cluster.data_parallel // cluster.cp
    if fixed is not None and fixed != left:
        rule = f"must be {left} for {cluster.world_size} processes, got {fixed!r}"
        raise OptionError("distributed.dp_size", rule, "Write none, or give another --world-size")
