"""Host side of the chain kernel (`hopper_chain`): who may use it, and how stages are told to it."""

from __future__ import annotations

from collections.abc import Sequence
from functools import lru_cache
from typing import TYPE_CHECKING

import torch
import triton
from torch import Tensor

from dmuown.kernels import products, table
from dmuown.kernels.launch import INT32_LIMIT, INTERPRETED, launch

if TYPE_CHECKING:
    from dmuown.orthogonalize.coefficients import Triple
    from dmuown.orthogonalize.stages import Stage

_PLACES = 4
_MAX_POLYNOMIALS = 3  # two bits a stage tell them apart from a product
_MAX_STAGES = 15  # of two bits each, in a signed 32-bit number


def run(x: Tensor, places: Tensor, stages: Sequence[Stage]) -> bool:
    """Put x x^T into places[0] and make every stage, in one launch or two.

    False, with nothing done, where a launch each is better, or the operands cannot be addressed.

    Args:
        x: [B, m, n], 16-bit, m <= n.
        places: [P, B, m, m], P at most 4, contiguous, as `x`. Changed in place.
        stages: In order; each reads what earlier ones made, or x x^T.
    """
    if INTERPRETED or not products.is_hopper(x.device):
        return False
    batch, m, n = x.shape
    shape = table.chain_shape(batch, m, len(stages))
    if shape is None or len(places) > _PLACES or places.dtype.itemsize != 2 or m % 8 or places.data_ptr() % 16:
        return False
    # Gluon is imported where it runs.
    from dmuown.kernels import hopper, hopper_chain
    from dmuown.kernels.hopper_launch import describe, multiprocessors, row_major, triangle

    within = shape.with_gram and row_major(x.stride(), n) and x.data_ptr() % 16 == 0
    codes = _codes(tuple(stages), within)
    if codes is None:
        return False
    block, block_k = hopper_chain.BLOCK.value, hopper_chain.BLOCK_K.value
    rows = triton.cdiv(m, block)
    tiles = triangle(rows, shape.ratio)
    items = (len(stages) + within) * batch * tiles
    if items + 2 * multiprocessors(x.device) > INT32_LIMIT:
        return False
    counters = torch.zeros(batch + 1, dtype=torch.int32, device=x.device)
    if not within:
        products.multiply(x, x.mT, symmetric=True, out=places[0])
    layout = ((len(places) * batch, m, m), (m * m, m, 1))
    desc = describe(places.data_ptr(), places.dtype, layout, (1, block, block_k))
    launch(
        hopper_chain.chain_kernel,
        (min(multiprocessors(x.device), items), 1, 1),
        (
            describe(x.data_ptr(), x.dtype, (tuple(x.shape), x.stride()), (1, block, block_k)) if within else desc,
            desc,
            describe(places.data_ptr(), places.dtype, layout, (1, block, block)),
            counters[:1],
            counters[1:],
            *codes,
            batch,
            items,
            rows,
            tiles,
            triton.cdiv(m, block_k),
            triton.cdiv(n, block_k),
        ),
        (within, shape.ratio, shape.stages),
        x.device,
        key=x.dtype,
        num_warps=4 * shape.ratio,
        launch_pdl=hopper.PDL.value,
    )
    return True


@lru_cache(maxsize=256)
def _codes(stages: tuple[Stage, ...], within: bool) -> tuple[int | float, ...] | None:
    """Places of a, b and out and the kinds of stages, two bits a stage, then nine coefficients; None if too many.

    within: Whether the Gram matrix is the first stage, with zeros for its bits.
    """
    triples: list[Triple] = [stage.triple for stage in stages if stage.triple is not None]
    if len(stages) + within > _MAX_STAGES or len(triples) > _MAX_POLYNOMIALS:
        return None
    a = b = out = kinds = polynomials = 0
    for index, stage in enumerate(stages, start=int(within)):
        polynomials += stage.triple is not None
        a |= stage.a << 2 * index
        b |= stage.b << 2 * index
        out |= stage.out << 2 * index
        kinds |= (polynomials if stage.triple is not None else 0) << 2 * index
    triples += [(0.0, 0.0, 0.0)] * (_MAX_POLYNOMIALS - len(triples))
    return a, b, out, kinds, *(float(number) for triple in triples for number in triple)
