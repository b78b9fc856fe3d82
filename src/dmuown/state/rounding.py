"""Stochastic rounding whose random numbers follow from what is rounded: no generator is read or advanced.

An element's number is a function of a seed, the count of steps, the parameter's name and the element's
position in the whole parameter. So ranks that hold the same element round it alike, whatever they have drawn
before; shards round as the whole does; and a resumed run repeats one that went on.

Every index of every axis has a word of 32 bits, hashed with the name once and with seed and step in each step.
An element's number is hashed from the exclusive or of its indices' words. Without that last hash the numbers of
a matrix would have low rank, and rounding would add few large singular values instead of many small ones.
"""

from __future__ import annotations

import hashlib
import math
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cache

import torch
from torch import Tensor

from dmuown import kernels

#: Elements that torch rounds at once: what a core's cache holds; on a card without the kernel, enough to fill it.
_AT_ONCE = {"cpu": 1 << 18, "cuda": 1 << 24}


def hashed(words: Tensor) -> Tensor:
    """Hash int32 words in place, one to one, and return them.

    Two rounds of xorshift and multiply, with constants from https://github.com/skeeto/hash-prospector
    (bias 0.165, where lowbias32 has 0.174). Products wrap; shifts are made logical by a mask.
    """
    for shift, factor in ((16, 0x604BAA5D), (15, 0x43D6CE97)):
        words ^= (words >> shift).bitwise_and_((1 << 32 - shift) - 1)
        words *= factor
    words ^= (words >> 15).bitwise_and_((1 << 17) - 1)
    return words


def word_of(text: str) -> int:
    """A signed 32-bit word of a text, the same in every process and on every machine."""
    return int.from_bytes(hashlib.sha256(text.encode()).digest()[:4], "little", signed=True)


def words_of_positions(name: str, positions: Sequence[Tensor]) -> Tensor:
    """The words of a parameter's indices, int32, axis after axis.

    Args:
        name: The parameter's name.
        positions: Per axis, the indices in the whole parameter that are held here, integers; none for a 0-d parameter.
    """
    held = positions or [torch.zeros(1, dtype=torch.int32)]
    return torch.cat([hashed(index.to(torch.int32) ^ word_of(f"{axis} {name}")) for axis, index in enumerate(held)])


@dataclass(frozen=True)
class Rounding:
    """How one parameter's weights are rounded.

    Attributes:
        positions: Words of the indices held here: `words_of_positions`.
        key: 0-d int32 on the same device, of seed and step; another in each step, in place.
    """

    positions: Tensor
    key: Tensor

    def __call__(self, value: Tensor) -> Tensor:
        """Round fp32 to bf16, up or down with probabilities that make the result exact on average.

        The 16 bits that bf16 drops get a uniform 16-bit number added before they are cut off. Infinities and NaN stay.

        Args:
            value: fp32, of the shape whose positions are held here.
        """
        rounded = _in_one_launch(value, self.positions, self.key) if value.is_cuda else None
        return self.by_torch(value) if rounded is None else rounded

    def by_torch(self, value: Tensor) -> Tensor:
        """The same, in torch's operations: what a kernel has to repeat bit for bit."""
        shape = value.shape or torch.Size((1,))
        rounded = torch.empty_like(value, dtype=torch.bfloat16)
        first, *others = hashed(self.positions ^ self.key).split(list(shape))
        rows = max(1, _AT_ONCE.get(value.device.type, value.numel()) // max(1, math.prod(shape[1:])))
        parts = zip(value.view(shape).split(rows), rounded.view(shape).split(rows), first.split(rows), strict=True)
        for part, target, words in parts:
            for axis in others:
                words = words.unsqueeze(-1) ^ axis
            bits = hashed(words).bitwise_and_(0xFFFF)
            bits += part.view(torch.int32)
            bits &= -0x10000
            target.copy_(torch.where(part.isnan(), part, bits.view(torch.float32)))  # a carry would leave NaN's range
        return rounded


def _in_one_launch(value: Tensor, positions: Tensor, key: Tensor) -> Tensor | None:
    if not _has_kernel(value.device):
        return None
    from dmuown.kernels.rounding import round_stochastically

    return round_stochastically(value, positions, key)


@cache
def _has_kernel(device: torch.device) -> bool:
    return kernels.available() and torch.cuda.get_device_capability(device) >= (8, 0)
