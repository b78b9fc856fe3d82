"""AutoModel's Muown, which is built on Dion's Muon: its groups called `"muon"` are Muown's matrices.

State of a matrix: `momentum`, `g`, `v_norm`, `m_g`, `v_g`, `muown_step`; of AdamW: `momentum`,
`variance`, `step`; of Lion: `momentum`.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from dmuown.checkpoint.importers.common import (
    Buffers,
    Importer,
    Options,
    counter,
    rename_buffers,
    rename_options,
    unknown_algorithm,
)
from dmuown.checkpoint.importers.targets import Target

_ALGORITHMS = {"muon": "muown", "adamw": "adamw", "lion": "lion"}
_ROWS = {"g": "magnitude", "m_g": "magnitude_momentum", "v_g": "magnitude_variance", "v_norm": "direction_norm"}
_BUFFERS = {
    "muown": {"momentum": "momentum", **_ROWS},
    "adamw": {"momentum": "momentum", "variance": "variance"},
    "lion": {"momentum": "momentum"},
}

#: Options of Dion's Muon that its groups inherit and Muown does not read.
_UNUSED = ("algorithm", "adjust_lr", "flatten", "cautious_wd")


def _convert_group(where: str, group: Mapping[str, Any], targets: Sequence[Target]) -> Options:
    algorithm = group.get("algorithm")
    if algorithm not in _ALGORITHMS:
        raise unknown_algorithm(where, algorithm, list(_ALGORITHMS))
    if algorithm == "muon":
        options = rename_options(where, group, {}, unused=_UNUSED)
    else:
        options = rename_options(where, group, {}, unused=("algorithm",))
    return {**options, "algorithm": _ALGORITHMS[algorithm]}


def _convert_buffers(target: Target, buffers: Buffers, group: Mapping[str, Any], options: Options) -> Buffers:
    algorithm = options["algorithm"]
    steps = {}
    if algorithm != "lion":
        key = "muown_step" if algorithm == "muown" else "step_dev" if "step_dev" in buffers else "step"
        steps["step"] = counter(target.name, buffers, key, group)
    return {**rename_buffers(target, buffers, _BUFFERS[algorithm]), **steps}


IMPORTER = Importer("automodel", _convert_group, _convert_buffers)
