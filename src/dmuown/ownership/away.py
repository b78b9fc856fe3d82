"""A parameter on a rank that does not own it: its shape, dtype and device, and zero bytes of data.

Reading the memory of a tensor whose storage was freed crashes the process. `AwayParameter` answers
what a parameter is, follows `model.to(...)`, and refuses everything else with an error that names the
parameter and its owner.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from dmuown.errors import OwnershipError

_METADATA = frozenset(
    {
        "__repr__", "__format__", "__len__", "size", "stride", "dim", "ndimension", "numel", "nelement", "element_size",
        "is_floating_point", "is_complex", "is_signed", "is_contiguous", "is_same_size", "get_device",
        "untyped_storage", "storage_offset", "requires_grad_", "register_hook", "retain_grad",
        "register_post_accumulate_grad_hook",
        "_has_compatible_shallow_copy_type", "_is_view", "is_inference", "is_pinned", "type_as", "is_shared",
    }
)  # fmt: skip
_CONVERSIONS = frozenset(
    {"to", "cpu", "cuda", "xpu", "type", "float", "double", "half", "bfloat16", "empty_like", "pin_memory"}
)
# Views of the data, unlike the other properties, which describe it.
_DATA_PROPERTIES = frozenset({"T", "mT", "H", "mH", "real", "imag"})


class AwayParameter(nn.Parameter):
    """A parameter without data on this rank.

    A parameter becomes one by assigning `__class__`, so that it stays the object that modules and
    optimizers hold. `.data` and `.detach()` give a tensor on the meta device, as does `state_dict()`.

    Attributes:
        away_name: Canonical name.
        away_owner: Who has the data, in words.
    """

    away_name: str
    away_owner: str

    def __repr__(self, *, tensor_contents: Any = None) -> Any:  # type: ignore[override]
        return f"AwayParameter({self.away_name}, shape={tuple(self.shape)}, dtype={self.dtype}, on {self.away_owner})"

    def __reduce_ex__(self, protocol: Any) -> Any:
        raise _no_data(self, "pickling")

    @classmethod
    def __torch_function__(
        cls, func: Callable[..., Any], types: Any, args: Sequence[Any] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        name = getattr(func, "__name__", "")
        away = next((arg for arg in args if isinstance(arg, AwayParameter)), None)
        if away is None:
            away = _find(args, kwargs)
        with torch._C.DisableTorchFunctionSubclass():
            if name in ("__set__", "__delete__"):
                return func(*args, **(kwargs or {}))
            if name == "__get__":
                attribute = getattr(getattr(func, "__self__", None), "__name__", "")
                if attribute == "data":
                    return _on_meta(away)
                if attribute not in _DATA_PROPERTIES:
                    return func(*args, **(kwargs or {}))
                name = attribute
            elif name == "detach":
                return _on_meta(away)
            elif name in _CONVERSIONS:
                probe = torch.empty(0, dtype=away.dtype, device=away.device)
                target = func(probe, *args[1:], **(kwargs or {}))
                return (
                    released_tensor(away.shape, target.dtype, target.device) if isinstance(target, Tensor) else target
                )
            elif name in _METADATA:
                return func(*args, **(kwargs or {}))
        raise _no_data(away, name or str(func))


def make_away(param: nn.Parameter, name: str, owner: str) -> None:
    """Free the data of `param` on this rank; the object stays the same."""
    param.data = released_tensor(param.shape, param.dtype, param.device)
    param.__class__ = AwayParameter
    assert isinstance(param, AwayParameter)
    param.away_name = name
    param.away_owner = owner


def released_tensor(shape: Sequence[int], dtype: torch.dtype, device: torch.device) -> Tensor:
    """Return a tensor of this shape whose storage holds zero bytes."""
    tensor = torch.empty(0, dtype=dtype, device=device)
    strides: list[int] = []
    step = 1
    for size in reversed(shape):
        strides.append(step)
        step *= max(size, 1)
    with torch.no_grad():
        tensor.set_(tensor.untyped_storage(), 0, tuple(shape), tuple(reversed(strides)))
    tensor.untyped_storage().resize_(0)  # set_ grew it; the memory was never written
    return tensor


def _no_data(away: AwayParameter, use: str) -> OwnershipError:
    return OwnershipError(
        away.away_name,
        f"holds no data on this rank, for {use}: it is on {away.away_owner}",
        "Parameters are whole inside the forward and backward of their hook boundary, and under "
        "`with dmuown.gathered(model)`; a module that reads a parameter outside its boundary needs a "
        "hook_boundary_predicate that matches a module around both, and fully_shard needs "
        "ignored_params=dmuown.dedicated_parameters(model)",
    )


def _on_meta(away: AwayParameter) -> Tensor:
    return torch.empty(away.shape, dtype=away.dtype, device="meta")


def _find(args: Sequence[Any], kwargs: dict[str, Any] | None) -> AwayParameter:
    from torch.utils._pytree import tree_leaves

    return next(leaf for leaf in tree_leaves((args, kwargs)) if isinstance(leaf, AwayParameter))
