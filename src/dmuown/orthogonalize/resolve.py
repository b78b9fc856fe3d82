"""From the options of a parameter group to an `Orthogonalizer`."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch

from dmuown.errors import OptionError
from dmuown.orthogonalize.options import check_dtype
from dmuown.orthogonalize.orthogonalizer import Orthogonalizer, resolve_compute_dtype

# Group key -> field of `Orthogonalizer`; an absent key or None takes the field's default.
_FIELDS = {
    "coefficients": "coefficients",
    "ns_steps": "steps",
    "ns_epsilon": "epsilon",
    "ns_norm": "norm",
    "ns_form": "form",
    "backend": "backend",
    "newton_schulz_func": "function",
}


def resolve_orthogonalizer(options: Mapping[str, object], device: torch.device) -> Orthogonalizer:
    """The orthogonalizer of a group on a device.

    Args:
        options: Group keys. Read here: `scheme` (alias `orthogonalization_strategy`), `coefficients`, `ns_steps`,
            `ns_epsilon`, `ns_dtype` ("auto", see `auto_dtype`, a torch dtype or its name), `ns_norm`, `ns_form`,
            `backend`, `newton_schulz_func`, `batch_bytes` (in place where that spares memory, and no more of a batch
            at a time). Other keys are ignored.
        device: Where the matrices are; decides `ns_dtype="auto"`.

    Raises:
        OptionError: A bad value, or `scheme` and its alias disagree.
    """
    fields: dict[str, Any] = {}
    scheme = _scheme(options)
    if scheme is not None:
        fields["scheme"] = scheme
    for key, name in _FIELDS.items():
        if options.get(key) is not None:
            fields[name] = options[key]
    dtype = options.get("ns_dtype")
    if dtype is not None and dtype != "auto":
        fields["dtype"] = check_dtype("ns_dtype", dtype)
    else:
        may_be_gram = options.get("ns_form") != "plain" and fields.get("function") is None
        fields["dtype"] = auto_dtype(device, may_be_gram=may_be_gram)
    budget: Any = options.get("batch_bytes")
    return Orthogonalizer(**fields, in_place=budget is not None, most_bytes=budget)


def auto_dtype(device: torch.device, *, may_be_gram: bool) -> torch.dtype:
    """What `ns_dtype="auto"` means.

    | device | form `auto` or `gram` | form `plain`, or an own function |
    |---|---|---|
    | CUDA | float16 | bfloat16 (float32 without bf16 units) |
    | CPU with AMX tiles or AVX512-BF16 | bfloat16 | bfloat16 |
    | other CPU, other devices | float32 | float32 |

    float16 has the range for it, since inputs are normalized in fp32 first, and is nearer than bfloat16, at the same
    speed: its relative error against float64 is 0.006 where bfloat16's is 0.043, on 256 x 1024 matrices with singular
    values from 1e-4 to 1 (see `Orthogonalizer.restarts`), and the Gram form restarts once less (a fifth of the work).
    Momentum travels, and updates leave, in bfloat16 for either.
    """
    if device.type == "cuda" and may_be_gram:
        return torch.float16
    return resolve_compute_dtype(device)


def _scheme(options: Mapping[str, object]) -> object:
    scheme, alias = options.get("scheme"), options.get("orthogonalization_strategy")
    if scheme is not None and alias is not None and scheme != alias:
        rule = f"disagrees with orthogonalization_strategy, its alias: {scheme!r} and {alias!r}"
        raise OptionError("scheme", rule, "Give one of them")
    return alias if scheme is None else scheme
