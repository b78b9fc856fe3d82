"""What the engine knows of each parameter: its name, group, algorithm and layout; all checked before any work."""

from __future__ import annotations

import logging
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor
from torch.distributed import ProcessGroup
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor

from dmuown.algorithms import Algorithm, MuonAlgorithm, get_algorithm
from dmuown.engine.layout import MatrixLayout
from dmuown.errors import LayoutError, OptionError, OptionTypeError, OwnershipError, ParameterError
from dmuown.orthogonalize import Blocks, blocks_from_heads, grouped_blocks, interleaved_blocks, select_backend
from dmuown.ownership.away import AwayParameter
from dmuown.ownership.record import Record, record_of, replaced_name
from dmuown.policy.splits import block_sizes
from dmuown.state import BufferSpec
from dmuown.state.spec import MASTER, MASTER_WEIGHT

logger = logging.getLogger(__name__)

_FLOATING = (torch.float32, torch.bfloat16, torch.float16, torch.float64)


@dataclass(eq=False)
class ParamRecord:
    """One parameter.

    Attributes:
        param: The tensor or DTensor itself.
        name: Its name, given or made up.
        group_index: Its param group.
        algorithm: Its algorithm.
        layout: Where its matrices lie; None for elementwise algorithms.
        blocks: Row blocks of a fused weight; () for one block.
        state_spec: The state it has: its algorithm's, and a master weight where the group asks for one.
        early: Whether it was not dedicated when the optimizer was given it.
    """

    param: Tensor
    name: str
    group_index: int
    algorithm: Algorithm
    layout: MatrixLayout | None = None
    blocks: Blocks = ()
    state_spec: Mapping[str, BufferSpec] = field(default_factory=dict)
    early: bool = field(init=False)

    def __post_init__(self) -> None:
        self.early = record_of(self.param) is None


def as_groups(params: Any) -> list[dict[str, Any]]:
    """Return a list of groups, new dicts, from whatever torch accepts as `params`.

    Raises:
        OptionTypeError: One tensor, or one group, outside a list.
        ParameterError: Nothing in it.
    """
    if isinstance(params, Tensor):
        raise OptionTypeError("params", "must be an iterable of tensors or groups, got one tensor", "Wrap it in a list")
    if isinstance(params, dict):
        raise OptionTypeError("params", "must be a list of groups, got one dict", "Wrap it in a list")
    items = params if isinstance(params, (set, frozenset)) else list(params)
    if not items:
        raise ParameterError("params", "is empty", "Check what selected the parameters")
    if isinstance(items, list) and isinstance(items[0], dict):
        return [_listed(group) if isinstance(group, dict) else group for group in items]
    return [{"params": items}]


def _listed(group: Mapping[str, Any]) -> dict[str, Any]:
    """A new group, with a list in place of a generator: several look at it before torch does."""
    params = group.get("params")
    if params is None or isinstance(params, (Tensor, set, frozenset, str)) or not isinstance(params, Iterable):
        return dict(group)
    return {**group, "params": list(params)}


def named_tensors(params: Any, where: str) -> tuple[list[Tensor], list[str] | None]:
    """Split what a group calls `params` into tensors and names, as torch accepts them.

    Args:
        params: A tensor, or an iterable of tensors or of `(name, tensor)` pairs.
        where: How errors call the group.

    Raises:
        OptionTypeError: A set (no order), or something that is no tensor.
        ParameterError: Nothing in it.
    """
    if isinstance(params, Tensor):
        params = [params]
    if isinstance(params, (set, frozenset)):
        raise OptionTypeError(f"{where}: params", "must be ordered, got a set", "Pass a list")
    items = list(params)
    if not items:
        raise ParameterError(
            f"{where}: params", "is empty", "Leave the group out, or check what selected its parameters"
        )
    names = [item[0] for item in items if isinstance(item, tuple)]
    tensors = [item[1] if isinstance(item, tuple) else item for item in items]
    if names and len(names) != len(items):
        raise OptionError(f"{where}: params", "must be named throughout or not at all")
    for item in tensors:
        if not isinstance(item, Tensor):
            raise OptionTypeError(f"{where}: params", f"must hold tensors, got {type(item).__name__}")
    return tensors, names or None


def make_records(
    tensors: Iterable[Tensor], names: list[str] | None, group: Mapping[str, Any], group_index: int
) -> list[ParamRecord]:
    """Check the parameters of one complete group and describe them.

    Raises:
        ParameterError: A parameter that cannot be optimized so; the error names it.
        LayoutError: A layout that cannot be supported.
        MissingDependencyError: A backend asked for by name that cannot run here.
    """
    algorithm = get_algorithm(group["algorithm"])
    if isinstance(algorithm, MuonAlgorithm) and group["backend"] != "auto":
        select_backend(group["backend"], torch.device("cpu"), torch.float32, (1, 1, 1))
    records = []
    for position, tensor in enumerate(tensors):
        if isinstance(tensor, AwayParameter):
            continue  # another rank owns it: that one holds its state and steps it
        name = names[position] if names else f"param group {group_index}, parameter {position}"
        _check_tensor(tensor, name)
        _check_dedicated(tensor, group)
        if group["stochastic_rounding"] and tensor.dtype == torch.float16:
            raise ParameterError(
                name, "is float16, which stochastic rounding is not for", "Use bfloat16, or master_weights=True"
            )
        record = ParamRecord(tensor, name, group_index, algorithm, state_spec=_state_spec(algorithm, tensor, group))
        if isinstance(algorithm, MuonAlgorithm):
            record.layout = MatrixLayout(tensor, name, transposed=group["matrix_transposed"], flatten=group["flatten"])
            record.blocks = row_blocks(record.layout, group, name)
            if algorithm.updates_whole_tensors() and (
                (group["num_heads"] or 1) > 1
                or any(group[key] for key in ("interleaved", "split_groups", "qkv_heuristic"))
            ):
                raise OptionError(
                    name,
                    f"{algorithm.name} is in the whole-tensor form, which knows contiguous split_sizes only",
                    "Leave out num_heads, interleaved, split_groups and qkv_heuristic",
                )
            if algorithm.updates_whole_tensors() and record.layout.flatten and record.layout.col_dims:
                raise LayoutError(
                    name,
                    f"flatten with placements {record.layout.placements} suits no algorithm in the whole-tensor form",
                    "Shard the first axis, or write the algorithm as the two halves around orthogonalization",
                )
        elif isinstance(tensor, DTensor) and any(placement.is_partial() for placement in tensor.placements):
            raise LayoutError(
                name,
                f"placements {tensor.placements} hold unreduced partial sums",
                "Redistribute the parameter to Shard or Replicate before building the optimizer",
            )
        records.append(record)
    return records


def _state_spec(algorithm: Algorithm, tensor: Tensor, group: Mapping[str, Any]) -> Mapping[str, BufferSpec]:
    if group["master_weights"] and tensor.dtype in (torch.bfloat16, torch.float16):
        return {**algorithm.state_spec, MASTER_WEIGHT: MASTER}
    return algorithm.state_spec


def _check_tensor(tensor: Tensor, name: str) -> None:
    if tensor.is_meta or (isinstance(tensor, DTensor) and tensor.to_local().is_meta):
        raise ParameterError(name, "is on the meta device and holds no values", "Materialize and load the model first")
    if tensor.dtype not in _FLOATING:
        raise ParameterError(
            name, f"must be a real floating-point tensor, got {tensor.dtype}", "Leave it out of the optimizer"
        )
    if tensor.layout != torch.strided:
        raise ParameterError(name, f"must be dense, got layout {tensor.layout}", "Convert it with to_dense()")
    if isinstance(tensor, DTensor) and tensor.device_mesh.get_coordinate() is None:
        raise LayoutError(name, "this rank is not in the parameter's mesh", "Build the optimizer on its ranks")
    if not (tensor.is_leaf or tensor.retains_grad):
        raise ParameterError(name, "is not a leaf tensor", "Pass the parameter itself, not a result computed from it")


def split_by_optim_dtype(groups: Iterable[Any]) -> list[Any]:
    """Split groups of dedicated parameters whose policies ask for an `optim_dtype` unlike their own dtype.

    Groups that name one, and groups of which no parameter needs one, stay as they are.
    """
    result: list[Any] = []
    for group in groups:
        items = group["params"] if isinstance(group, dict) and isinstance(group.get("params"), list) else []
        pieces: dict[torch.dtype | None, list[int]] = {}
        for index, item in enumerate(items):
            record = record_of(item[1] if isinstance(item, tuple) else item)
            pieces.setdefault(record.optim_dtype if record is not None else None, []).append(index)
        if not pieces.keys() - {None} or group.get("optim_dtype") is not None:
            result.append(group)
            continue
        names = group.get("param_names")
        for dtype, indices in pieces.items():
            piece = {**group, "params": [items[index] for index in indices]}
            if dtype is not None:  # else the optimizer's own, which a None would stand in the way of
                piece["optim_dtype"] = dtype
            if names is not None:
                piece["param_names"] = [names[index] for index in indices]
            result.append(piece)
    return result


def check_complete(groups: Iterable[Any]) -> None:
    """Refuse groups that hold some of a dedicated model's trainable parameters and not the others.

    Raises:
        OwnershipError: Naming those that no group holds: nothing would ever step them.
    """
    held: set[int] = set()
    models: dict[int, Mapping[str, Record]] = {}
    for group in groups:
        params = group.get("params", ()) if isinstance(group, dict) else ()
        for item in (params,) if isinstance(params, Tensor) else params:
            param = item[1] if isinstance(item, tuple) and len(item) == 2 else item
            held.add(id(param))
            record = record_of(param) if isinstance(param, Tensor) else None
            if record is not None:
                models[id(record.model)] = record.model
    for records in models.values():
        absent = [n for n, record in records.items() if record.home.requires_grad and id(record.home) not in held]
        if absent:
            raise OwnershipError(
                absent[0],
                f"is dedicated and takes gradients, but is in no param group ({len(absent)} such parameters"
                f"{': ' if len(absent) > 1 else ''}{', '.join(absent[1:4])}{', ...' if len(absent) > 4 else ''}): this "
                "optimizer would never step it",
                "Pass the model itself, or groups that hold all its parameters (those of other ranks too), or "
                "partial=True if another optimizer steps the rest",
            )


def check_distinct(records: Sequence[ParamRecord]) -> None:
    """Refuse a parameter, or a name, that an optimizer would hold twice.

    Raises:
        ParameterError: Naming the later one.
    """
    seen: dict[Tensor, ParamRecord] = {}
    for record in records:
        other = seen.setdefault(record.param, record)
        if other is not record:
            raise ParameterError(
                record.name,
                f"appears twice: also as {other.name!r} in param group {other.group_index}",
                "Pass every parameter once (tied weights share one parameter)",
            )
    names: set[str] = set()
    for record in records:
        if record.name in names:
            raise ParameterError(
                record.name, "names two parameters", "Give each its own name: checkpoints and random numbers go by them"
            )
        names.add(record.name)


def check_not_dedicated_since(records: Iterable[ParamRecord]) -> None:
    """Refuse to step parameters that were dedicated after the optimizer had been built for them.

    Raises:
        OwnershipError: Naming one; its state is of the whole parameter on every rank.
    """
    for entry in records:
        dedicated = record_of(entry.param)
        name = replaced_name(entry.param) or (dedicated.name if dedicated is not None and entry.early else None)
        if name is not None:
            raise OwnershipError(
                name,
                "was dedicated after this optimizer was built",
                "Call dedicate_params first, then build the optimizer from the model",
            )


def _check_dedicated(tensor: Tensor, group: Mapping[str, Any]) -> None:
    """Refuse what is no dedicated model's any more, and to step one in another precision than its policy says."""
    replaced = replaced_name(tensor)
    if replaced is not None:
        raise OwnershipError(
            replaced,
            "was replaced in its model by dedicate_params; what is given here would never get a gradient",
            "Take the model's parameters, or the model itself, after dedicate_params",
        )
    record = record_of(tensor)
    if record is not None and record.optim_dtype is not None and group["optim_dtype"] is None:
        raise OwnershipError(
            record.name,
            f"has optim_dtype {record.optim_dtype} by its policy and is stored in {record.home_dtype}, but its group "
            "sets no optim_dtype",
            "Set it in the group, or build the optimizer from the model, which does",
        )


def row_blocks(layout: MatrixLayout, group: Mapping[str, Any], name: str) -> Blocks:
    """Return the blocks of rows that a group, complete or not, cuts a parameter's matrices into; () for one.

    Raises:
        ParameterError: `num_heads` for a stack of matrices.
        OptionError: Blocks that do not fit the rows.
    """
    split_sizes, num_heads = group.get("split_sizes"), group.get("num_heads") or 1
    if split_sizes is None:
        split_sizes = block_sizes(group, layout.shape) or None
    if split_sizes is None and num_heads == 1:
        return ()
    if split_sizes is None and len(layout.shape) != 2:
        raise ParameterError(name, f"num_heads takes weights of 2 axes, got shape {layout.shape}", "Use split_sizes")
    try:
        if split_sizes is None:
            return blocks_from_heads(num_heads, layout.m)
        blocks = grouped_blocks(split_sizes, group.get("split_groups") or 1, layout.m)
        if group.get("interleaved"):
            if len(set(split_sizes)) != 1:
                raise OptionError("interleaved", f"needs blocks of equal size, got {tuple(split_sizes)}")
            return interleaved_blocks(len(split_sizes), layout.m)
        return blocks
    except OptionError as error:
        raise OptionError(f"{name}: {error.subject}", error.rule, error.remedy) from None


def warn_of_narrow_storage(records: Iterable[ParamRecord], groups: Sequence[Mapping[str, Any]]) -> None:
    """Magnitudes learn in steps that 16-bit weights round away, where nothing is done about it; say so once."""
    narrow = [
        record
        for record in records
        if "magnitude" in record.algorithm.state_spec
        and record.param.dtype in (torch.bfloat16, torch.float16)
        and MASTER_WEIGHT not in record.state_spec
        and not groups[record.group_index]["stochastic_rounding"]
    ]
    if narrow:
        logger.warning(
            "%s%s: stored in %s, which rounds magnitudes away; %s recommends fp32 parameters, master_weights=True or "
            "stochastic_rounding=True",
            narrow[0].name,
            f" and {len(narrow) - 1} others" if len(narrow) > 1 else "",
            narrow[0].param.dtype,
            narrow[0].algorithm.name,
        )


def check_mesh_type(mesh: object) -> None:
    """Check what is accepted for compatibility with Dion, and not used.

    Raises:
        OptionTypeError: Neither a mesh nor a group.
    """
    if mesh is not None and not isinstance(mesh, (DeviceMesh, ProcessGroup)):
        raise OptionTypeError("distributed_mesh", f"must be a DeviceMesh or ProcessGroup, got {type(mesh).__name__}")
