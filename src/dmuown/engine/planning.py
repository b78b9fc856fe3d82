"""From records to the plan of a step, and from the plan to the chunks that run."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor
from torch.distributed.tensor import DTensor

from dmuown.algorithms import Algorithm, DeclaredState, ElementwiseAlgorithm, MatrixBatch, MuonAlgorithm
from dmuown.engine.agreement import GradientReport, agree, first_difference
from dmuown.engine.bounds import agree_on_bounds, is_bounded, params_at_once
from dmuown.engine.capturable import is_recording
from dmuown.engine.ending import end_gently
from dmuown.engine.groups import audience_of, audiences, control_group, mesh_group
from dmuown.engine.joint import Joint, join
from dmuown.engine.layout import local_tensor
from dmuown.engine.owners import Owners, assign_owners
from dmuown.engine.plan import Bucket, join_team, make_bucket
from dmuown.engine.records import ParamRecord
from dmuown.engine.rounding import follows_placements, rounds_stochastically
from dmuown.errors import PlanMismatchError
from dmuown.orthogonalize import resolve_orthogonalizer
from dmuown.state.lowbit import is_low_bit
from dmuown.state.rounding import Rounding
from dmuown.state.spec import MASTER_WEIGHT, OPTIM_DTYPES
from dmuown.state.working import WorkingSet, compute_device

#: Tasks in flight at once, as in Dion: one computes while others communicate.
MAX_CONCURRENT_TASKS = 3

State = Mapping[Tensor, Mapping[str, Any]]
RoundingOf = Mapping[Tensor, Rounding]


@dataclass
class Chunk:
    """Part of a bucket that is updated as one task.

    Attributes:
        bucket: The bucket.
        algorithm: Its algorithm.
        selected: Indices of the bucket's parameters that step.
        group: Their param group.
        first: How many of the bucket's parameters step in chunks before this one.
    """

    bucket: Bucket
    algorithm: MuonAlgorithm
    selected: list[int]
    group: dict[str, Any]
    first: int = 0

    @property
    def matrices(self) -> int:
        """Matrices in it that are orthogonalized on their own, a fused weight's blocks counted singly."""
        return len(self.selected) * self.bucket.units_per_param * self.bucket.matrices_per_unit

    @property
    def params(self) -> list[Tensor]:
        """The parameters that step."""
        return [self.bucket.params[index] for index in self.selected]

    def working_set(self) -> WorkingSet:
        """An empty working set on the device that computes."""
        return WorkingSet(compute_device(local_tensor(self.bucket.params[0]), self.group))

    def batch(
        self, state: State, gradients: Mapping[Tensor, Tensor], working: WorkingSet, rounding: RoundingOf
    ) -> MatrixBatch:
        """Load the chunk's parameters, gradients and state as logical matrices.

        Args:
            state: The optimizer's state.
            gradients: Local gradients of the parameters that step.
            working: Holds copies of what is not worked on in place; the caller stores it afterwards.
            rounding: How weights are rounded, of those that are so stochastically.
        """
        bucket, layout = self.bucket, self.bucket.layout
        params = self.params
        views: dict[str, list[Tensor]] = {}
        for key, spec in self.algorithm.state_spec.items():
            tensors = [local_tensor(state[param][key]) for param in params]
            if spec.like != "scalar":
                tensors = [working.load(tensor) for tensor in tensors]
            if spec.like == "grad":
                tensors = [layout.logical(tensor) for tensor in tensors]
            elif spec.like == "grad_rows":
                tensors = [layout.logical_rows(tensor) for tensor in tensors]
            views[key] = tensors
        return MatrixBatch(
            names=[bucket.names[index] for index in self.selected],
            weights=[
                layout.logical(load_weight(param, state[param], self.group, working, rounding)) for param in params
            ],
            gradients=[layout.logical(working.read(gradients[param].detach().contiguous())) for param in params],
            state=DeclaredState(self.algorithm.name, views),
            options=self.group,
            m=layout.m,
            n=layout.n,
            block_rows=bucket.block_row_counts,
            block_of_row=None if bucket.block_of_row is None else working.read(bucket.block_of_row),
            input_group=bucket.input_group,
            output_group=bucket.output_group,
        )


def load_weight(
    param: Tensor, state: Mapping[str, Any], group: Mapping[str, Any], working: WorkingSet, rounding: RoundingOf
) -> Tensor:
    """The local weight to work on: the parameter itself, its fp32 master, or a copy.

    A copy where the parameter is not on the compute device, or where the group's `optim_dtype` is wider: updates
    compute in the wider of the two, and the result is rounded to the parameter.
    """
    local = local_tensor(param).detach()
    if MASTER_WEIGHT in state:
        master = working.load(local_tensor(state[MASTER_WEIGHT]))
        working.mirror(local, master)
        return master
    if rounds_stochastically(param, group):
        return working.load(local, dtype=torch.float32, rounding=rounding[param])
    wide = torch.promote_types(local.dtype, OPTIM_DTYPES[group["optim_dtype"]]) if group["optim_dtype"] else None
    return working.load(local, dtype=wide)


def load_elementwise(
    algorithm: ElementwiseAlgorithm,
    params: Sequence[Tensor],
    state: State,
    group: Mapping[str, Any],
    working: WorkingSet,
    rounding: RoundingOf,
) -> tuple[list[Tensor], DeclaredState[list[Tensor]]]:
    """Local weights and state of one device and dtype, which is what fused kernels take.

    Where storage dtypes differ (16-bit weights with fp32 state), the step works in the wider one.
    """
    weights = [load_weight(param, state[param], group, working, rounding) for param in params]
    buffers = [key for key, spec in algorithm.state_spec.items() if spec.like == "grad"]
    dtype = weights[0].dtype
    for stored in (local_tensor(state[param][key]) for param in params for key in buffers):
        if not is_low_bit(stored):
            dtype = torch.promote_types(dtype, stored.dtype)
    weights = [working.load(weight, dtype=dtype) for weight in weights]
    values = {
        key: [
            working.load(local_tensor(state[param][key]), dtype=dtype if key in buffers else None) for param in params
        ]
        for key in algorithm.state_spec
    }
    return weights, DeclaredState(algorithm.name, values)


@dataclass
class Plan:
    """What a step does, as far as it does not depend on which gradients exist.

    Attributes:
        buckets: Matrix buckets, by falling cost.
        records: All parameters.
        audiences: Indices of records by the ranks that hold parts of them (`groups.audiences`).
        parts: Buckets by audience, small ones joined, to be updated part after part: ranks agree within an
            audience on which parameters step, so only there do tasks interleave alike on all ranks, as the
            order of their collectives needs. At least one part, which may be empty.
        told_back: Audiences that are told in the end what others had to tell, in the order of doing so.
    """

    buckets: list[Bucket]
    records: list[ParamRecord]
    audiences: dict[tuple[int, ...], list[int]]
    parts: list[list[Joint]]
    told_back: list[tuple[int, ...]] = field(default_factory=list)
    _algorithms: dict[Tensor, Algorithm] = field(init=False, repr=False)

    def __post_init__(self) -> None:
        self._algorithms = {record.param: record.algorithm for record in self.records}

    def chunks(self, gradients: Mapping[Tensor, Tensor], groups: Sequence[dict[str, Any]], joint: Joint) -> list[Chunk]:
        """The stepping parameters of each of its buckets, split by what the group allows at once (`bounds`)."""
        chunks = []
        for bucket in joint.buckets:
            stepping = [index for index, param in enumerate(bucket.params) if param in gradients]
            group, algorithm, first = groups[bucket.group_index], self.algorithm_of(bucket), 0
            for selected in self.splits(bucket, group, stepping):
                chunks.append(Chunk(bucket, algorithm, selected, group, first))
                first += len(selected)
        return chunks

    def tasks(
        self, gradients: Mapping[Tensor, Tensor], groups: Sequence[dict[str, Any]], part: Sequence[Joint]
    ) -> Iterator[tuple[Joint, list[Chunk]]]:
        """What is updated in one task each: a joint's chunks together, or one by one where a group bounds them."""
        for joint in part:
            chunks = self.chunks(gradients, groups, joint)
            bounded = any(is_bounded(bucket, groups[bucket.group_index]) for bucket in joint.buckets)
            for together in [[chunk] for chunk in chunks] if bounded else [chunks] if chunks else []:
                yield joint, together

    def splits(
        self, bucket: Bucket, group: Mapping[str, Any], stepping: Sequence[int], owners: Owners | None = None
    ) -> list[list[int]]:
        """Split the stepping parameters of a bucket by what its group allows.

        As many parts on all ranks of its mesh; equal ones on those of a team, this rank's unless `owners` says another.
        """
        if bucket.is_empty:
            return []
        size = params_at_once(bucket, owners or bucket.owners, group, len(stepping))
        return [list(stepping[start : start + size]) for start in range(0, len(stepping), size)]

    @property
    def agreements(self) -> int:
        """Host-side messages a step, on which gradients exist."""
        return sum(bool(audience) for audience in self.audiences) + len(self.told_back)

    @property
    def communicators(self) -> int:
        """Process groups that a step's collectives go through."""
        used = (
            group
            for bucket in self.buckets
            for group in (bucket.shard_group, bucket.replica_group, bucket.input_group, bucket.output_group)
        )
        return len({id(group) for group in used if group is not None})

    @property
    def tasks_in_flight(self) -> int:
        """Tasks at once: one while a graph records, if collectives of unlike groups would be its branches."""
        return 1 if is_recording() and self.communicators > 1 else MAX_CONCURRENT_TASKS

    def elementwise(self, groups: Sequence[dict[str, Any]]) -> Iterator[tuple[list[ParamRecord], dict[str, Any]]]:
        """Elementwise parameters by group, device and dtype, which is what fused kernels take at once."""
        parts: dict[tuple[object, ...], list[ParamRecord]] = defaultdict(list)
        for record in self.records:
            if record.layout is None:
                parts[record.group_index, record.param.device, record.param.dtype].append(record)
        for records in parts.values():
            yield records, groups[records[0].group_index]

    def algorithm_of(self, bucket: Bucket) -> MuonAlgorithm:
        """The algorithm of a bucket's parameters."""
        algorithm = self._algorithms[bucket.params[0]]
        assert isinstance(algorithm, MuonAlgorithm)
        return algorithm


def make_plan(
    records: Sequence[ParamRecord],
    groups: Sequence[Mapping[str, Any]],
    newton_schulz_func: Callable[..., Tensor] | None,
) -> Plan:
    """Bucket the matrix parameters, compare the plan across ranks, and assign owners.

    Collective over every mesh that the parameters lie on. Where there are ranks, the program will pause when it ends.

    Raises:
        PlanMismatchError: A parameter differs between ranks; the error names it.
    """
    end_gently()
    _compare(records, groups)
    for record in records:
        if isinstance(record.param, DTensor):
            # Made now, so that a step that has to mend a replica's gradient makes no group.
            replicated = [dim for dim, placement in enumerate(record.param.placements) if placement.is_replicate()]
            mesh_group(record.param.device_mesh, tuple(replicated))
    alike: dict[tuple[object, ...], list[ParamRecord]] = defaultdict(list)
    for record in records:
        if record.layout is not None:
            key = (record.group_index, record.layout.key, record.blocks, record.param.dtype, record.param.device)
            alike[_hashable(key)].append(record)
    buckets = []
    for same in alike.values():
        first = same[0]
        assert first.layout is not None
        options: dict[str, Any] = {**groups[first.group_index], "newton_schulz_func": newton_schulz_func}
        buckets.append(
            make_bucket(
                first.group_index,
                [record.param for record in same],
                [record.name for record in same],
                first.layout,
                first.blocks,
                resolve_orthogonalizer(options, device := compute_device(local_tensor(first.param), options)),
                device,
            )
        )
    buckets.sort(key=lambda bucket: -bucket.flops_per_unit * len(bucket.params))
    for bucket, owners in zip(buckets, assign_owners(buckets), strict=True):
        join_team(bucket, owners)
    by_audience = audiences(record.param for record in records)
    parts_of: dict[tuple[int, ...], list[Bucket]] = {audience: [] for audience in by_audience}
    for bucket in buckets:
        parts_of[audience_of(bucket.params[0])].append(bucket)
    algorithm_of = {record.param: record.algorithm for record in records}
    for audience, part in parts_of.items():
        agree_on_bounds(part, groups, control_group(audience) if audience else None)
    parts = [
        join(part, [_kind(algorithm_of[bucket.params[0]], bucket, groups[bucket.group_index]) for bucket in part])
        for part in parts_of.values()
        if part
    ]
    return Plan(buckets, list(records), by_audience, parts or [[]], _told_back(list(by_audience)))


def _told_back(audiences: Sequence[tuple[int, ...]]) -> list[tuple[int, ...]]:
    """Audiences to which a fault is brought that others of its ranks' tell later. Collective over each.

    Each message carries what was known of earlier ones, so that the ranks of the last audience know it all; most often
    those are all ranks. Members of an audience may have unlike others, so they agree on whether it is told.
    """
    shared = [audience for audience in audiences if audience]
    needed = []
    for audience in shared:
        here = not set(audience) <= set(shared[-1])
        report = agree(GradientReport([here], [False], [0]), control_group(audience))
        if report.present[0]:
            needed.append(audience)
    return needed[::-1]


def _kind(algorithm: Algorithm, bucket: Bucket, group: Mapping[str, Any]) -> str | None:
    """What a bucket's task may be joined with: others of its algorithm; None where bounded, or whole tensors."""
    if not isinstance(algorithm, MuonAlgorithm) or algorithm.updates_whole_tensors():
        return None
    return None if is_bounded(bucket, group) else algorithm.name


def _hashable(key: tuple[object, ...]) -> tuple[object, ...]:
    group, layout, blocks, dtype, device = key
    # Slices have no hash before Python 3.12.
    spans = tuple(repr(block) for block in blocks)  # type: ignore[attr-defined]
    return (group, layout, spans, dtype, device)


def _compare(records: Sequence[ParamRecord], groups: Sequence[Mapping[str, Any]]) -> None:
    """Compare what ranks were given, audience by audience, before the first tensor collective."""
    for audience, indices in audiences(record.param for record in records).items():
        members = [records[index] for index in indices]
        lines = [_describe(record, groups[record.group_index]) for record in members]
        try:
            difference = first_difference(lines, control_group(audience))
        except RuntimeError as error:  # the process group's timeout: some rank is not here
            raise PlanMismatchError(
                members[0].name,
                f"not all of its ranks {list(audience)} came to compare it: {error}",
                "Build the same model, policy and options on every rank; a parameter has one mesh on all its ranks",
            ) from error
        if difference is not None:
            name = members[difference.index].name if difference.index < len(members) else "a parameter"
            raise PlanMismatchError(
                name,
                f"ranks {difference.ranks[0]} and {difference.ranks[1]} disagree on it: "
                f"{_first_words(*difference.texts)}",
                "Build the same model, policy and options on every rank",
            )


def _first_words(here: str, there: str) -> str:
    """What two descriptions differ in, field by field; whole descriptions where they have not the same fields."""
    ours, theirs = here.split("; "), there.split("; ")
    if len(ours) != len(theirs):
        return f"{here!r} and {there!r}"
    pairs = [f"{one} and {other}" for one, other in zip(ours, theirs, strict=True) if one != other]
    return "; ".join(pairs)


#: Group keys that may differ between ranks without harm: the step too, but where random numbers follow from it.
_RANK_LOCAL = frozenset({"params", "param_names", "step"})


def _describe(record: ParamRecord, group: Mapping[str, Any]) -> str:
    param = record.param
    fields = {"name": record.name, "shape": tuple(param.shape), "dtype": param.dtype}
    if isinstance(param, DTensor):
        # The mesh as a whole: ranks at different places of different meshes would wait for each other.
        fields |= {"placements": param.placements, "mesh": param.device_mesh.mesh.tolist()}
    compared = group.keys() - _RANK_LOCAL
    if rounds_stochastically(param, group):
        compared |= {"step"}
        fields["shard follows placements"] = follows_placements(param)  # else ranks that hold one that does would go on
    fields |= {key: group[key] for key in sorted(compared)}
    return "; ".join(f"{key} {value}" for key, value in fields.items())
