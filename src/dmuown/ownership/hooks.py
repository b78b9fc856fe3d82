"""Module hooks: how forward and backward passes reach the runtime."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from dmuown.ownership.record import Record
from dmuown.ownership.runtime import BoundaryState, OwnershipRuntime, compiler_disabled, in_backward
from dmuown.ownership.shards import part_of
from dmuown.ownership.tree import map_tensors, tensors


class Casts:
    """Activation casts of one boundary.

    Attributes:
        inputs: Dtype of floating-point inputs; None leaves them.
        outputs: Dtype of floating-point outputs; None leaves them.
    """

    def __init__(self, inputs: torch.dtype | None = None, outputs: torch.dtype | None = None) -> None:
        self.inputs = inputs
        self.outputs = outputs


def attach_root(model: nn.Module, runtime: OwnershipRuntime) -> None:
    """Let forwards of the model begin and end passes."""

    @compiler_disabled
    def begin(module: nn.Module, args: Any) -> None:
        runtime.begin_forward()

    @compiler_disabled
    def end(module: nn.Module, args: Any, output: Any) -> None:
        runtime.end_forward()
        if torch.is_grad_enabled():
            # The outermost backward pass starts here; a boundary's may be one that checkpointing nests in it.
            for tensor in tensors(output):
                if tensor.requires_grad:
                    tensor.register_hook(lambda grad: _start(runtime))

    model.register_forward_pre_hook(begin, prepend=True)
    model.register_forward_hook(end)


def attach_boundary(state: BoundaryState, runtime: OwnershipRuntime, casts: Casts) -> None:
    """Let forwards and backwards of a boundary fetch, free and reduce."""

    @compiler_disabled
    def enter(module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        runtime.enter(state)
        # A recomputed forward repeats the inputs of one that was differentiable, whose hooks will run.
        if torch.is_grad_enabled() and not (in_backward() and state.calls):
            for tensor in tensors((args, kwargs)):
                # The gradient of a leaf may be complete before the boundary's own operations are through.
                if tensor.requires_grad and not tensor.is_leaf:
                    state.inputs_pending += 1
                    tensor.register_hook(_then(runtime.input_done, state))
        if casts.inputs is None:
            return None
        to = _cast(casts.inputs)
        return map_tensors(to, args), map_tensors(to, kwargs)

    @compiler_disabled
    def leave(module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any], output: Any) -> Any:
        if casts.outputs is not None:
            output = map_tensors(_cast(casts.outputs), output)
        differentiable = False
        if torch.is_grad_enabled():
            for tensor in tensors(output):
                if tensor.requires_grad:
                    differentiable = True
                    tensor.register_hook(_then(runtime.before_backward, state))
        runtime.leave(state, differentiable=differentiable)
        return output

    state.module.register_forward_pre_hook(enter, with_kwargs=True)
    # Always called: after an exception in the forward as well, the parameters are given up.
    state.module.register_forward_hook(leave, with_kwargs=True, always_call=True)


def attach_state(module: nn.Module, attributes: dict[str, Record]) -> None:
    """Let `state_dict`, `load_state_dict` and `to` of a module work with parameters that are elsewhere.

    Args:
        module: A module that holds dedicated parameters.
        attributes: Their records by attribute name.
    """
    missing: set[str] = set()

    def before_load(
        module: nn.Module, state_dict: dict[str, Any], prefix: str, *unused: Any, **also_unused: Any
    ) -> None:
        missing.clear()
        for attribute, record in attributes.items():
            key = prefix + attribute
            value = state_dict.get(key)
            if value is None:
                if not record.owned:
                    missing.add(key)  # an owner's entry need not be on this rank
                continue
            if load_into(record, value):
                del state_dict[key]
                missing.add(key)

    def after_load(module: nn.Module, incompatible: Any) -> None:
        incompatible.missing_keys[:] = [key for key in incompatible.missing_keys if key not in missing]

    module.register_load_state_dict_pre_hook(before_load)
    module.register_load_state_dict_post_hook(after_load)
    apply_to_others: Callable[..., Any] = module._apply

    def apply(function: Callable[[Tensor], Tensor], recurse: bool = True) -> nn.Module:
        held = {attribute: module._parameters[attribute] for attribute in attributes}
        for attribute in attributes:
            module._parameters[attribute] = None
        try:
            apply_to_others(function, recurse)
        finally:
            module._parameters.update(held)
        for attribute, record in attributes.items():
            # A tied weight is converted once, with the first module that holds it.
            if record.places[0] == (module, attribute):
                record.convert(function)
        return module

    # On this module alone: nothing of torch is patched.
    module._apply = apply  # type: ignore[method-assign]


def load_into(record: Record, value: Any) -> bool:
    """Load a checkpoint's tensor as far as this rank holds the parameter.

    Returns:
        Whether that is done; False leaves it to torch's own loading and its messages.
    """
    if not isinstance(value, Tensor) or tuple(value.shape) != record.shape:
        return False
    if not record.owned:
        return True
    home = record.home
    if not isinstance(home, DTensor) or isinstance(value, DTensor) or value.device.type == "meta":
        return False
    # Every rank has the whole tensor: each takes its shard, without communication.
    with torch.no_grad():
        home.to_local().copy_(part_of(record, value))
    return True


def _start(runtime: OwnershipRuntime) -> None:
    runtime.start_backward()


def _then(function: Callable[[BoundaryState], None], state: BoundaryState) -> Callable[[Tensor], None]:
    def hook(grad: Tensor) -> None:
        function(state)

    return hook


def _cast(dtype: torch.dtype) -> Callable[[Tensor], Tensor]:
    def to(tensor: Tensor) -> Tensor:
        return tensor.to(dtype) if tensor.is_floating_point() else tensor

    return to
