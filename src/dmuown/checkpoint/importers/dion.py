"""Dion's Muon and NorMuon, with their AdamW and Lion groups, of both generations.

State: `momentum`; NorMuon adds `variance_neuron`, AdamW `variance` and its step: `step_dev` a parameter
(main) or the group's `step` (revision 7452a58). The orthogonalizer is no part of their checkpoints:
main's default is `dmuown.Muon`'s, the older revision's is `use_polar_express=False`.
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

_BUFFERS = {
    "muon": ("momentum",),
    "normuon": ("momentum", "variance_neuron"),
    "lion": ("momentum",),
    "adamw": ("momentum", "variance"),
}


def _convert_group(where: str, group: Mapping[str, Any], targets: Sequence[Target]) -> Options:
    algorithm = group.get("algorithm")
    if algorithm not in _BUFFERS:
        raise unknown_algorithm(where, algorithm, list(_BUFFERS))
    options = rename_options(where, group, {})
    if algorithm in ("muon", "normuon"):
        # One epsilon serves their orthogonalization and AdamW.
        options["ns_epsilon"] = options["epsilon"]
        options["adjust_lr"] = "none" if options["adjust_lr"] is None else options["adjust_lr"]
        options["momentum_form"] = "sum"
    return options


def _convert_buffers(target: Target, buffers: Buffers, group: Mapping[str, Any], options: Options) -> Buffers:
    algorithm = options["algorithm"]
    steps = {"step": counter(target.name, buffers, "step_dev", group)} if algorithm == "adamw" else {}
    return {**rename_buffers(target, buffers, {key: key for key in _BUFFERS[algorithm]}), **steps}


IMPORTER = Importer("dion", _convert_group, _convert_buffers)
