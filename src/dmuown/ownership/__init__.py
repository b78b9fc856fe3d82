"""The ownership runtime: every dedicated parameter has an owner, and the model's own passes move it.

    plan = dmuown.dedicate_params(model, mesh, predicate=..., param_policy=...)
    fully_shard(model, mesh=mesh, ignored_params=dmuown.dedicated_parameters(model))   # the rest, if any
    optimizer = dmuown.Muown(model, lr=...)

Between boundaries a rank that does not own a parameter on `muon` or `adamw` holds zero bytes of it, of
its gradient and of its optimizer state.

    assignment   who owns what (pure)
    boundaries   where transfers hang (pure)
    plan         which transfers there are, their bytes (pure; compared across ranks)
    record       one dedicated parameter: its home, its compute parameter, legal transitions
    away         a parameter that is elsewhere
    link         process group, streams, collectives in flight, counts
    transport    the buffers of transfers
    runtime      when transfers happen
    hooks        how a model's passes, `state_dict`, `load_state_dict` and `to` reach the runtime
    group        the (replicate x) shard mesh as one process group
    shards       parameters on `sharded_adamw`
    dedicate     `dedicate_params`
    registry     from a model to its runtime and records
    groups       param groups of what this rank steps
    clip, sync   `clip_grad_norm_`; `no_sync` and `gathered`

**What an optimizer needs to know.** `record_of(param)` is None, or the `Record` of a dedicated parameter.
Between passes `model.named_parameters()` gives the *homes*:

- `muon` and `adamw` on the owner: a plain `nn.Parameter`, whole, in `master_dtype`, with the averaged
  gradient in `.grad` after a backward pass. The matrix is whole: no exchange. (Under tensor parallelism
  it is a DTensor over the tensor-parallel mesh only, whose ranks all own it.)
- `muon` and `adamw` elsewhere: an `AwayParameter` with shape and dtype, no data, and `.grad` None.
- `sharded_adamw`: a DTensor, `Shard(0)` over the group (under tensor parallelism over both meshes), with its
  gradient likewise.

So an optimizer steps what is no `AwayParameter`, with state for these alone. `dedicated_param_groups(model,
groups, algorithm=...)` gives the groups, equal on all ranks; torch's own optimizers take them too, since
they leave parameters without gradients alone.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from dmuown.ownership.clip import clip_grad_norm_
    from dmuown.ownership.dedicate import dedicate_params
    from dmuown.ownership.groups import dedicated_param_groups
    from dmuown.ownership.plan import OwnershipPlan
    from dmuown.ownership.record import Record, record_of
    from dmuown.ownership.registry import dedicated_parameters, dedicated_records, find_runtime, runtime_of
    from dmuown.ownership.sync import gathered, no_sync

__all__ = [
    "OwnershipPlan",
    "Record",
    "clip_grad_norm_",
    "dedicate_params",
    "dedicated_param_groups",
    "dedicated_parameters",
    "dedicated_records",
    "find_runtime",
    "gathered",
    "no_sync",
    "record_of",
    "runtime_of",
]

_HOMES = {
    "OwnershipPlan": "plan",
    "Record": "record",
    "clip_grad_norm_": "clip",
    "dedicate_params": "dedicate",
    "dedicated_parameters": "registry",
    "dedicated_records": "registry",
    "find_runtime": "registry",
    "gathered": "sync",
    "no_sync": "sync",
    "dedicated_param_groups": "groups",
    "record_of": "record",
    "runtime_of": "registry",
}


def __getattr__(name: str) -> Any:
    if name not in _HOMES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    from importlib import import_module

    return getattr(import_module(f"{__name__}.{_HOMES[name]}"), name)
