"""Allocation of a parameter's declared state, where the engine knows its layout."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import Tensor

from dmuown.algorithms import MuonAlgorithm
from dmuown.engine.layout import local_tensor
from dmuown.engine.records import ParamRecord
from dmuown.errors import OptionError
from dmuown.state.allocate import allocate, allocate_rows


def add_missing_buffers(state: dict[str, Any], record: ParamRecord, options: Mapping[str, Any]) -> None:
    """Allocate the declared buffers that a parameter's state does not have yet; the others stay as they are.

    Args:
        state: The parameter's state by buffer name.
        record: The parameter.
        options: Its group.

    Raises:
        OptionError: An algorithm without matrices declares `"grad_rows"` state.
        MissingDependencyError: Low-bit storage without torchao.
    """
    for key, spec in record.state_spec.items():
        if key in state:
            continue
        # AdamW's fused kernel reads the step on the parameter's device; elsewhere the host does.
        on_host = spec.like == "scalar" and isinstance(record.algorithm, MuonAlgorithm) and not options["capturable"]
        device = torch.device("cpu") if on_host else local_tensor(record.param).device
        state[key] = allocate(
            spec, record.param, _row_allocator(record), device, name=f"{record.name}.{key}", options=options
        )


def _row_allocator(record: ParamRecord) -> Callable[[torch.dtype], Tensor]:
    def rows_of(dtype: torch.dtype) -> Tensor:
        layout = record.layout
        if layout is None:
            raise OptionError(record.name, f"{record.algorithm.name} declares row state, which only matrices have")
        return allocate_rows(
            record.param,
            global_shape=layout.rows_shape,
            local_shape=layout.local_rows_shape,
            input_dims=layout.col_dims,
            dtype=dtype,
        )

    return rows_of
