"""The authors' Muown and NorMuown (arXiv 2605.10797).

State of a matrix: `m_v`, `g`, `v_norm`, `m_g`, `v_g`, `step`, in NorMuown also `v_normuon`.
Their groups do not name the algorithm; the buffers do.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from dmuown.checkpoint.importers.common import Buffers, Importer, Options, rename_buffers, rename_options, split_betas
from dmuown.checkpoint.importers.targets import Target
from dmuown.errors import CheckpointError

_BUFFERS = {
    "m_v": "momentum",
    "g": "magnitude",
    "m_g": "magnitude_momentum",
    "v_g": "magnitude_variance",
    "v_norm": "direction_norm",
    "step": "step",
}


def _convert_group(where: str, group: Mapping[str, Any], targets: Sequence[Target]) -> Options:
    asked = {target.options.get("algorithm", "muown") for target in targets}
    algorithm = asked.pop() if len(asked) == 1 else ""
    if algorithm not in ("muown", "normuown"):
        raise CheckpointError(where, f"is for Muown or NorMuown, here it runs {algorithm or 'several algorithms'}")
    unused = ("betas", "momentum", "eps")
    options = rename_options(where, group, {}, unused=unused)
    options["mu"] = group["momentum"]
    if "eps" in group:
        options["epsilon"] = group["eps"]
    if "betas" in group:
        split_betas(options, group["betas"])
    return {**options, "algorithm": algorithm}


def _convert_buffers(target: Target, buffers: Buffers, group: Mapping[str, Any], options: Options) -> Buffers:
    normuown = {"v_normuon": "variance_neuron"} if options["algorithm"] == "normuown" else {}
    return rename_buffers(target, buffers, {**_BUFFERS, **normuown})


IMPORTER = Importer("muown", _convert_group, _convert_buffers)
