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
            `ns_epsilon`, `ns_dtype` ("auto", a torch dtype or its name; auto is fp16 on CUDA, bf16 for a plain
            form or own function), `ns_norm`, `ns_form`, `backend`, `newton_schulz_func`. Other keys are
            ignored.
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
    elif device.type == "cuda" and options.get("ns_form") != "plain" and fields.get("function") is None:
        # As fast as bf16 there, with one restart of the Gram form less (a fifth of the work) and a sixth of the
        # error (see `Orthogonalizer.restarts`). Inputs are normalized in fp32 first, so fp16's range suffices.
        fields["dtype"] = torch.float16
    else:
        fields["dtype"] = resolve_compute_dtype(device)
    return Orthogonalizer(**fields)


def _scheme(options: Mapping[str, object]) -> object:
    scheme, alias = options.get("scheme"), options.get("orthogonalization_strategy")
    if scheme is not None and alias is not None and scheme != alias:
        rule = f"disagrees with orthogonalization_strategy, its alias: {scheme!r} and {alias!r}"
        raise OptionError("scheme", rule, "Give one of them")
    return alias if scheme is None else scheme
