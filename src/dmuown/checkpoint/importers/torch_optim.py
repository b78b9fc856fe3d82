"""torch.optim.Muon, AdamW and Adam.

Muon keeps `momentum_buffer`, the exponential average B <- B + (1 - mu)(G - B): (1 - mu) times the sum
form M <- mu M + G. AdamW and Adam keep `exp_avg`, `exp_avg_sq`, `step`.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from dmuown.checkpoint.importers.common import (
    Buffers,
    Importer,
    Options,
    refuse,
    refuse_other_direction,
    rename_buffers,
    rename_options,
    split_betas,
)
from dmuown.checkpoint.importers.targets import Target
from dmuown.errors import CheckpointError

#: torch's names of learning-rate scales.
_SCALES = {None: "keller", "original": "keller", "match_rms_adamw": "rms_norm"}

#: torch.optim.Muon's default coefficients, Keller Jordan's.
_KELLER = (3.4445, -4.775, 2.0315)


def _convert_group(where: str, group: Mapping[str, Any], targets: Sequence[Target]) -> Options:
    if "ns_coefficients" in group:
        return _muon_options(where, group, targets)
    if "betas" not in group or "eps" not in group:
        raise CheckpointError(where, "is of neither torch.optim.Muon, AdamW nor Adam", "Check `source`")
    return adam_options(where, group, targets)


def _muon_options(where: str, group: Mapping[str, Any], targets: Sequence[Target]) -> Options:
    if group["adjust_lr_fn"] not in _SCALES:
        raise CheckpointError(f"{where}: adjust_lr_fn", f"{group['adjust_lr_fn']!r} has no counterpart here")
    unused = ("adjust_lr_fn", "ns_coefficients")
    options = rename_options(where, group, {"momentum": "mu", "eps": "ns_epsilon"}, unused=unused)
    coefficients = tuple(float(value) for value in group["ns_coefficients"])
    forms = {target.options.get("momentum_form", "sum") for target in targets}
    return {
        **options,
        "algorithm": "muon",
        "adjust_lr": _SCALES[group["adjust_lr_fn"]],
        "scheme": "newton_schulz",
        "coefficients": "keller" if coefficients == _KELLER else (coefficients,) * int(group["ns_steps"]),
        "ns_norm": "clamp",
        "momentum_form": "ema" if forms == {"ema"} else "sum",
    }


def adam_options(where: str, group: Mapping[str, Any], targets: Sequence[Target]) -> Options:
    """Options of one of torch's AdamW or Adam groups, which other libraries have adopted."""
    refuse(where, group, "amsgrad")
    refuse_other_direction(where, group, targets)
    unused = (
        "betas",
        "amsgrad",
        "foreach",
        "maximize",
        "capturable",
        "differentiable",
        "fused",
        "decoupled_weight_decay",
    )
    options = rename_options(where, group, {"eps": "epsilon", "wd": "weight_decay"}, unused=unused)
    split_betas(options, group["betas"])
    asked = {target.options.get("algorithm") for target in targets}
    decoupled = group.get("decoupled_weight_decay", asked != {"adam"})
    return {**options, "algorithm": "adamw" if decoupled else "adam"}


def adam_buffers(target: Target, buffers: Buffers) -> Buffers:
    """Buffers that torch's AdamW and Adam keep."""
    names = {"exp_avg": "momentum", "exp_avg_sq": "variance", "step": "step"}
    return rename_buffers(target, buffers, names)


def _convert_buffers(target: Target, buffers: Buffers, group: Mapping[str, Any], options: Options) -> Buffers:
    if options["algorithm"] != "muon":
        return adam_buffers(target, buffers)
    converted = rename_buffers(target, buffers, {"momentum_buffer": "momentum"})
    if options["momentum_form"] == "sum":
        converted["momentum"] = converted["momentum"] / (1 - options["mu"])
    return converted


IMPORTER = Importer("torch", _convert_group, _convert_buffers)
