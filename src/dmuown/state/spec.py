"""How an algorithm declares its state, once: the engine allocates, shards, saves and loads it."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

import torch

Like = Literal["grad", "grad_rows", "scalar"]
Fate = Literal["accumulated", "weight_rows", "weights", "counter"]


@dataclass(frozen=True)
class BufferSpec:
    """One state buffer of one parameter.

    Attributes:
        like: `"grad"`: the parameter's shape and placements. `"grad_rows"`: one number per output
            row, shape `[..., output, 1]` (`[..., 1, output]` in transposed storage), sharded as the
            output axis is and replicated over mesh dimensions that shard the input axis.
            `"scalar"`: a 0-d fp32 tensor.
        signed: Whether values may be negative; quantized storage needs to know.
        dtype: Storage dtype; None follows the group's `state_precision` for `"grad"` buffers, and
            is fp32 for the others, which are small.
        fate: `"accumulated"`: starts at zero and is carried through checkpoints. `"weight_rows"`:
            starts as the row norms of the weight, and can be made anew from it. `"weights"`: starts as
            the weight itself. `"counter"`: counts steps.
    """

    like: Like = "grad"
    signed: bool = True
    dtype: torch.dtype | None = None
    fate: Fate = "accumulated"

    def __post_init__(self) -> None:
        from dmuown.errors import OptionError

        for field, allowed in (("like", Like), ("fate", Fate)):
            value = getattr(self, field)
            if value not in allowed.__args__:  # type: ignore[attr-defined]
                choices = ", ".join(allowed.__args__)  # type: ignore[attr-defined]
                raise OptionError(f"BufferSpec.{field}", f"must be one of {choices}, got {value!r}")


#: What a low-bit or bf16 `state_precision` may be called, and the dtype of those that have one.
PRECISIONS: dict[str, torch.dtype | None] = {
    "fp32": torch.float32,
    "bf16": torch.bfloat16,
    "int8": None,
    "int4": None,
    "fp8": None,
}

#: What a group's `optim_dtype` may be: its state is stored in it, and its update computes in the wider of it and the
#: parameter's own. By name, so that checkpoints hold text alone.
OPTIM_DTYPES: dict[str, torch.dtype] = {
    "float64": torch.float64,
    "float32": torch.float32,
    "bfloat16": torch.bfloat16,
    "float16": torch.float16,
}

#: Name of the fp32 copy of a 16-bit parameter that a group with `master_weights=True` steps.
MASTER_WEIGHT = "master_weight"

#: Its declaration.
MASTER = BufferSpec(like="grad", dtype=torch.float32, fate="weights")

#: State of Adam's moments on the magnitudes and of any per-parameter counter.
STEP = BufferSpec(like="scalar", dtype=torch.float32, fate="counter")
