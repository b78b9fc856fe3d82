"""Run an algorithm in the whole-tensor form: hand it parameters, gradients and state as the model has them."""

from __future__ import annotations

import inspect
from collections.abc import Generator, Mapping
from typing import Any

import torch
from torch import Tensor
from torch.distributed.tensor import DTensor, Replicate, Shard
from torch.distributed.tensor.placement_types import Placement, _StridedShard

from dmuown.algorithms import DeclaredState
from dmuown.algorithms.whole import full_tensor, is_permuted, log_once, lr_ratio, using_options
from dmuown.engine.layout import MatrixLayout, local_tensor
from dmuown.engine.planning import Chunk, RoundingOf, State, load_weight
from dmuown.errors import OptionError

#: The names that whole-tensor updates know options by, beside their own.
_OPTION_NAMES = {
    "lr": "lr",
    "weight_decay": "weight_decay",
    "cautious_wd": "cautious_wd",
    "momentum": "mu",
    "nesterov": "nesterov",
    "ns_steps": "ns_steps",
    "orthogonalization_strategy": "scheme",
    "split_sizes": "split_sizes",
}

_NOT_PASSED = frozenset({"params", "param_names", "mu", "scheme", "maximize", *_OPTION_NAMES})


def update_whole(
    chunk: Chunk, state: State, gradients: Mapping[Tensor, Tensor], rounding: RoundingOf
) -> Generator[None, None, None]:
    """Update the parameters of a chunk by their algorithm's `update` or `foreach_update`.

    Args:
        chunk: What steps.
        state: The optimizer's state.
        gradients: Local gradients of the parameters that step, on every rank the same parameters.
        rounding: How weights are rounded, of those that are so stochastically.
    """
    algorithm, layout, working = chunk.algorithm, chunk.bucket.layout, chunk.working_set()
    gathered = _Gathered() if _misleads_dtensor(chunk.params[0]) else None
    present = _presented if gathered is None else gathered.present
    params, grads = [], []
    values: dict[str, list[Tensor]] = {key: [] for key in algorithm.state_spec}
    for param in chunk.params:
        params.append(present(load_weight(param, state[param], chunk.group, working, rounding), param, layout))
        grads.append(present(working.read(gradients[param].detach()).clone(), param, layout))
        for key, spec in algorithm.state_spec.items():
            stored = state[param][key]
            loaded = working.load(local_tensor(stored))
            values[key].append(loaded if spec.like == "scalar" else present(loaded, stored, layout))
    if working.in_flight:
        yield  # the same on every rank: it follows from the group's options
    working.wait()
    options = _options_for(algorithm.foreach_update if _batched(chunk) else algorithm.update, chunk.group)
    ratio = torch.full((), lr_ratio(layout.m, layout.n), dtype=torch.float32, device=working.device)
    with using_options(chunk.group):
        if _batched(chunk):
            result = algorithm.foreach_update(
                params, grads, DeclaredState(algorithm.name, values), [ratio] * len(params), **options
            )
            _check_result(algorithm.name, result)
        else:
            for index, param in enumerate(params):
                own = DeclaredState(algorithm.name, {key: buffers[index] for key, buffers in values.items()})
                _check_result(algorithm.name, algorithm.update(param, grads[index], own, ratio, **options))
                _check_state(algorithm.name, own, {key: buffers[index] for key, buffers in values.items()})
    if gathered is not None:
        gathered.scatter()
    working.store()


def _misleads_dtensor(param: Tensor) -> bool:
    """Whether DTensor's own operations fail on a layout.

    It takes a sharded axis of length 1 for replicated and refuses in-place updates, and its gathers and
    reduce-scatters mix up shards where a mesh's ranks do not ascend.
    """
    if not isinstance(param, DTensor):
        return False
    cuts = [placement for placement in param.placements if isinstance(placement, (Shard, _StridedShard))]
    return bool(cuts) and (is_permuted(param) or any(param.shape[placement.dim] == 1 for placement in cuts))


class _Gathered:
    """Tensors gathered whole for an update, and written back shard by shard."""

    def __init__(self) -> None:
        self._pairs: list[tuple[DTensor, Tensor]] = []

    def present(self, local: Tensor, like: Tensor, layout: MatrixLayout) -> Tensor:
        shard = _presented(local, like, layout)
        if not isinstance(shard, DTensor):
            return shard
        log_once(
            f"parameters of shape {layout.shape} and placements {layout.placements} are gathered whole for a "
            "whole-tensor update: DTensor's own operations fail on sharded axes of length 1 and on permuted meshes"
        )
        whole = full_tensor(shard)
        if whole.data_ptr() == shard.to_local().data_ptr():
            whole = whole.clone()
        self._pairs.append((shard, whole))
        return whole

    def scatter(self) -> None:
        for shard, whole in self._pairs:
            # Every rank has the whole: each takes its part, nothing is sent.
            mesh = shard.device_mesh
            replicated = DTensor.from_local(whole, mesh, [Replicate()] * mesh.ndim, run_check=False)
            shard.to_local().copy_(replicated.redistribute(placements=shard.placements).to_local())


def _batched(chunk: Chunk) -> bool:
    foreach = chunk.group["foreach"]
    if foreach is None:
        return all(param.device.type == "cuda" for param in chunk.params)
    return bool(foreach)


def _check_result(name: str, result: object) -> None:
    if result is not None:
        raise OptionError(
            f"{name}.update",
            f"must update param and state in place and return None, got {type(result).__name__}",
            "Write the result with param.copy_()",
        )


def _check_state(name: str, after: Mapping[str, Tensor], before: Mapping[str, Tensor]) -> None:
    for key, value in after.items():
        if value is not before[key]:
            raise OptionError(
                f"{name}.update", f"replaced state[{key!r}], which is updated in place", "Write it with copy_()"
            )


def _options_for(function: Any, group: Mapping[str, Any]) -> dict[str, Any]:
    """The group's options under the names of this form; only those that the function takes."""
    options = {name: group.get(key) for name, key in _OPTION_NAMES.items()}
    options["cautious_wd"] = bool(options["cautious_wd"])
    options["maximize"] = False
    options.update({key: value for key, value in group.items() if key not in _NOT_PASSED})
    taken = inspect.signature(function).parameters.values()
    if any(parameter.kind is inspect.Parameter.VAR_KEYWORD for parameter in taken):
        return options
    return {parameter.name: options[parameter.name] for parameter in taken if parameter.name in options}


def _presented(local: Tensor, like: Tensor, layout: MatrixLayout) -> Tensor:
    """A local tensor as `[..., m, n]`, wrapped as a DTensor where `like`, a parameter or its state, is one."""
    shape = tuple(like.shape)
    if layout.flatten:
        local, shape = local.reshape(local.shape[0], -1), (shape[0], like.numel() // max(1, shape[0]))
    elif layout.transposed:
        local, shape = local.mT, (*shape[:-2], shape[-1], shape[-2])
    if not isinstance(like, DTensor):
        return local
    placements = [
        _turned(placement, len(like.shape)) if layout.transposed else placement for placement in like.placements
    ]
    stride = torch.empty(shape, device="meta").stride()
    return DTensor.from_local(
        local, like.device_mesh, placements, run_check=False, shape=torch.Size(shape), stride=stride
    )


def _turned(placement: Placement, ndim: int) -> Placement:
    """The placement of a tensor whose last two axes were exchanged."""
    if not isinstance(placement, (Shard, _StridedShard)) or placement.dim % ndim < ndim - 2:
        return placement
    axis = 2 * ndim - 3 - placement.dim % ndim
    if isinstance(placement, _StridedShard):
        return _StridedShard(axis, split_factor=placement.split_factor)
    return Shard(axis)
