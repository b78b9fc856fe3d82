"""Options for another layout of the ranks than the YAML's, which `check` and `plan` take in the same words.

Each stands for a key of the section `distributed`; `dmuown.automodel.checks.document.SIZES` says which.
"""

from __future__ import annotations

from typing import Annotated

import typer

TensorParallel = Annotated[
    int | None, typer.Option("--tp", min=1, help="Tensor-parallel ranks, instead of the YAML's tp_size.")
]
ExpertParallel = Annotated[int | None, typer.Option("--ep", min=1, help="Expert-parallel ranks, instead of ep_size.")]
PipelineParallel = Annotated[int | None, typer.Option("--pp", min=1, help="Pipeline stages, instead of pp_size.")]
Replicas = Annotated[
    int | None,
    typer.Option("--replicas", min=1, help="Copies of every shard (HSDP), instead of dp_replicate_size."),
]
