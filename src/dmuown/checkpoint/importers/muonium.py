"""muonium's Muon and NorMuon, with their Adam and AdamW groups.

State of a matrix: `momentum_buffer` (sum form), `step`, `lr_ratio` (made from the shape), in NorMuon
also `variance_neuron`; of Adam: torch's. Low-bit momentum is dequantized.

Its weight decay is multiplied by the shape's lr ratio, sqrt(max(1, m/n)); here decay takes the
unscaled lr. Where the ratio is not 1 the continued run decays less, which is logged.
"""

from __future__ import annotations

import logging
from collections.abc import Mapping, Sequence
from typing import Any

from dmuown.checkpoint.importers.common import (
    Buffers,
    Importer,
    Options,
    refuse_other_direction,
    rename_buffers,
    rename_options,
    unknown_algorithm,
)
from dmuown.checkpoint.importers.targets import Target
from dmuown.checkpoint.importers.torch_optim import adam_buffers, adam_options

logger = logging.getLogger(__name__)

_BUFFERS = {
    "muon": {"momentum_buffer": "momentum"},
    "normuon": {"momentum_buffer": "momentum", "variance_neuron": "variance_neuron"},
}
_NAMES = {
    "wd": "weight_decay",
    "use_cautious_wd": "cautious_wd",
    "momentum": "mu",
    "orthogonalization_strategy": "scheme",
}


def _convert_group(where: str, group: Mapping[str, Any], targets: Sequence[Target]) -> Options:
    algorithm = group.get("algorithm")
    if algorithm in ("adam", "adamw"):
        theirs = {key: value for key, value in group.items() if key not in ("use_muon", "has_complex", "algorithm")}
        return adam_options(where, theirs, targets)
    if algorithm not in _BUFFERS:
        raise unknown_algorithm(where, algorithm, [*_BUFFERS, "adam", "adamw"])
    refuse_other_direction(where, group, targets)
    options = rename_options(where, group, _NAMES, unused=("use_muon", "maximize", "foreach"))
    tall = [target.name for target in targets if _is_tall(target, options)]
    if options["weight_decay"] and tall:
        logger.warning("%s: muonium decays %s by more, its lr ratio being above 1; here it does not", where, tall[0])
    return {**options, "adjust_lr": "keller", "momentum_form": "sum"}


def _is_tall(target: Target, options: Options) -> bool:
    shape = tuple(target.param.shape)
    rows, columns = (shape[0], target.param.numel() // max(1, shape[0])) if options.get("flatten") else shape[-2:]
    return rows > columns


def _convert_buffers(target: Target, buffers: Buffers, group: Mapping[str, Any], options: Options) -> Buffers:
    if options["algorithm"] not in _BUFFERS:
        return adam_buffers(target, buffers)
    converted = rename_buffers(target, buffers, _BUFFERS[options["algorithm"]], unused=("step", "lr_ratio"))
    rows = converted.get("variance_neuron")
    if rows is not None and target.record is not None and target.record.layout is not None:
        shape = target.record.layout.rows_shape
        if tuple(rows.shape) != shape and rows.numel() == target.record.layout.m:
            converted["variance_neuron"] = rows.reshape(shape)
    return converted


IMPORTER = Importer("muonium", _convert_group, _convert_buffers)
