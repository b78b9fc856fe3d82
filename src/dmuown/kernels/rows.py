"""Everything around orthogonalization, one launch for all tensors of a bucket.

`before` turns gradients into momentum and direction, `after` turns updates into weights and row state, `neuron`
is NorMuon's normalization. They compute what `dmuown.algorithms` computes with torch, in fp32, rounded once.

Bytes per parameter (fp32 weights, gradients and momentum, 16-bit direction and update; rows that fit into registers):

| | before: read, written | neuron | after: read, written | sum |
|---|---|---|---|---|
| muon | G 4 M 4, M 4 D 2 | | W 4 O 2, W 4 | 24 |
| normuon | as muon | O 2 | as muon | 26 |
| muown | W 4 G 4 M 4, M 4 D 2 | | W 4 O 2, W 4 | 28 |
| normuown | as muown | O 2 | as muown | 30 |
| angular_muown | as muown | | as muown | 28 |

A row longer than `_LONGEST_ROW` elements, and a matrix whose rows are not contiguous (`matrix_transposed`), is
walked twice: W and G (before), W and O (after) are then read twice.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Sequence
from dataclasses import dataclass

import torch
import triton
import triton.language as tl
from torch import Tensor

from dmuown.kernels import row_kernels
from dmuown.kernels.launch import launch

KINDS = {"muon": 0, "muown": 1, "angular": 2}
_LONGEST_ROW = 16384
_TYPES = {torch.float32: tl.float32, torch.bfloat16: tl.bfloat16, torch.float16: tl.float16}


@dataclass(frozen=True)
class _Tile:
    rows: int
    cols: int
    whole: bool
    warps: int


def before(
    kind: str,
    gradients: Sequence[Tensor],
    momenta: Sequence[Tensor],
    directions: Tensor,
    *,
    weights: Sequence[Tensor] | None = None,
    magnitudes: Sequence[Tensor] | None = None,
    norms: Sequence[Tensor] | None = None,
    mu: float,
    nesterov: bool,
    ema: bool = False,
    floor: float = 0.0,
) -> Tensor | None:
    """Update momenta in place and write directions; for `muown` and `angular` also guard the row state.

    Args:
        kind: `muon`, `muown` or `angular`.
        gradients: [batch, m, n] each; not changed.
        momenta: As `gradients`; updated in place.
        directions: [len(gradients) * batch, m, n], any strides; written whole.
        weights: As `gradients` (not for muon); not changed.
        magnitudes: [batch, m, 1] fp32 each (not for muon); |g| raised to `floor`, keeping its sign.
        norms: [batch, m, 1] fp32 each (muown only); raised to `floor`.
        mu: Momentum coefficient.
        nesterov: Direction is gradient + mu * momentum instead of the momentum.
        ema: M <- M + (1 - mu)(G - M) instead of M <- mu M + G.
        floor: See `magnitudes`.

    Returns:
        dL/dg, fp32 [len(gradients), batch, m, 1]; None for muon.
    """
    first = gradients[0]
    batch, m, n = first.shape
    count = len(gradients)
    split = kind != "muon"
    weights = weights if split and weights is not None else gradients
    magnitudes = magnitudes if split and magnitudes is not None else gradients
    norms = norms if kind == "muown" and norms is not None else magnitudes
    dg = torch.empty((count, batch, m, 1) if split else (1,), dtype=torch.float32, device=first.device)
    table, aligned = _table([weights, gradients, momenta, magnitudes, norms], wide=3)
    tile = _tile(batch * m, n, [weights[0], first, momenta[0], directions])
    programs = triton.cdiv(batch * m, tile.rows)
    state = magnitudes[0].stride()[:2] if split else (0, 0)
    arguments = (
        table,
        dg,
        directions,
        count,
        programs,
        m,
        n,
        batch * m,
        float(mu),
        float(floor),
        *weights[0].stride(),
        *first.stride(),
        *momenta[0].stride(),
        *state,
        *directions.stride(),
    )
    constants = (
        KINDS[kind],
        ema,
        nesterov,
        _TYPES[weights[0].dtype],
        _TYPES[first.dtype],
        _TYPES[momenta[0].dtype],
        aligned,
        tile.rows,
        tile.cols,
        tile.whole,
    )
    launch(
        row_kernels.before_kernel, (count * programs, 1, 1), arguments, constants, first.device, num_warps=tile.warps
    )
    return dg if split else None


def after(
    kind: str,
    weights: Sequence[Tensor],
    updates: Tensor,
    *,
    lr: float | Tensor,
    weight_decay: float | Tensor,
    scale: float,
    multipliers: Tensor | None = None,
    cautious: bool = False,
    magnitudes: Sequence[Tensor] | None = None,
    norms: Sequence[Tensor] | None = None,
    first_moments: Sequence[Tensor] | None = None,
    second_moments: Sequence[Tensor] | None = None,
    dg: Tensor | None = None,
    steps: Sequence[Tensor] | None = None,
    betas: tuple[float, float] = (0.0, 0.0),
    floor: float = 0.0,
    epsilon: float = 0.0,
) -> None:
    """Step weights and row state in place.

    Args:
        kind: `muon`, `muown` or `angular`.
        weights: [batch, m, n] each; updated in place.
        updates: [len(weights) * batch, m, n], any strides; not changed.
        lr: Learning rate, a float or a 0-d fp32 tensor on the device.
        weight_decay: As `lr`; decay uses the unscaled learning rate.
        scale: Multiplies the learning rate of the update.
        multipliers: fp32 [len(weights), batch, m, 1], a further factor per row.
        cautious: Decay only where update * weight > 0 (muon only).
        magnitudes, norms, first_moments, second_moments: [batch, m, 1] fp32 each, equal strides (norms: muown only).
        dg: As `before` returned it.
        steps: 0-d fp32, counting this step already: on the CPU and equal, or on the device.
        betas: Adam's.
        floor: Lower bound of |g| and of norms.
        epsilon: Adam's.
    """
    first = weights[0]
    batch, m, n = first.shape
    count = len(weights)
    split = kind != "muon"
    magnitudes = magnitudes if split and magnitudes is not None else weights
    norms = norms if kind == "muown" and norms is not None else magnitudes
    firsts = first_moments if split and first_moments is not None else weights
    seconds = second_moments if split and second_moments is not None else weights
    live_step = split and steps is not None and steps[0].device.type != "cpu"
    step_operand = steps if live_step and steps is not None else weights
    corrected = (1.0, 1.0)
    if split and steps is not None and not live_step:
        taken = float(steps[0])
        corrected = (1.0 - betas[0] ** taken, 1.0 - betas[1] ** taken)
    table, aligned = _table([weights, magnitudes, norms, firsts, seconds, step_operand], wide=1)
    tile = _tile(batch * m, n, [first, updates])
    programs = triton.cdiv(batch * m, tile.rows)
    state = magnitudes[0].stride()[:2] if split else (0, 0)
    decays = isinstance(weight_decay, Tensor) or weight_decay != 0
    dummy = first if dg is None else dg
    arguments = (
        table,
        updates,
        dummy,
        dummy if multipliers is None else multipliers,
        count,
        programs,
        m,
        n,
        batch * m,
        lr if isinstance(lr, Tensor) else float(lr),
        weight_decay if isinstance(weight_decay, Tensor) else float(weight_decay),
        float(scale),
        float(floor),
        float(epsilon),
        float(betas[0]),
        float(betas[1]),
        *corrected,
        *first.stride(),
        *state,
        *updates.stride(),
    )
    constants = (
        KINDS[kind],
        decays,
        cautious,
        multipliers is not None,
        isinstance(lr, Tensor),
        isinstance(weight_decay, Tensor),
        live_step,
        _TYPES[first.dtype],
        aligned,
        tile.rows,
        tile.cols,
        tile.whole,
    )
    launch(row_kernels.after_kernel, (count * programs, 1, 1), arguments, constants, first.device, num_warps=tile.warps)


def neuron(updates: Tensor, variances: Sequence[Tensor], *, beta2: float, epsilon: float) -> Tensor:
    """NorMuon's multiplier of every row; updates the rows' second moments in place.

    Args:
        updates: [len(variances) * batch, m, n], orthogonalized; not changed.
        variances: [batch, m, 1] fp32 each.
        beta2: Decay of the second moments.
        epsilon: Added to their square roots.

    Returns:
        fp32 [len(variances), batch, m, 1]: multiply rows of the updates by it.
    """
    count = len(variances)
    batch, m, _ = variances[0].shape
    n = updates.shape[2]
    squares = row_squares(updates)
    multipliers = torch.empty((count, batch, m, 1), dtype=torch.float32, device=updates.device)
    table, _ = _table([variances], wide=0)
    arguments = (
        table,
        squares,
        multipliers,
        count,
        m,
        n,
        batch,
        float(beta2),
        float(epsilon),
        *variances[0].stride()[:2],
    )
    launch(row_kernels.neuron_kernel, (count * batch, 1, 1), arguments, (1024,), updates.device, num_warps=4)
    return multipliers


def row_squares(x: Tensor) -> Tensor:
    """fp32 [B, m, 1] sums of squares of the rows of x: [B, m, n], any strides."""
    batch, m, n = x.shape
    result = torch.empty((batch, m, 1), dtype=torch.float32, device=x.device)
    tile = _tile(batch * m, n, [x])
    programs = triton.cdiv(batch * m, tile.rows)
    arguments = (x, result, programs, m, n, batch * m, *x.stride())
    constants = (tile.rows, tile.cols, tile.whole)
    launch(row_kernels.row_squares_kernel, (programs, 1, 1), arguments, constants, x.device, num_warps=tile.warps)
    return result


def _tile(rows: int, n: int, operands: Sequence[Tensor]) -> _Tile:
    """Rows and columns of a program, so that a warp reads along what is contiguous."""
    if all(x.stride(2) == 1 or n == 1 for x in operands):
        if n <= _LONGEST_ROW:
            cols = max(16, triton.next_power_of_2(n))
            per_program = max(1, min(16, 2048 // cols, triton.next_power_of_2(rows)))
            return _Tile(per_program, cols, True, max(1, min(16, per_program * cols // 512)))
        return _Tile(1, 4096, False, 8)
    return _Tile(32, 64, False, 4)


def uniform(tensors: Sequence[Tensor]) -> bool:
    """Whether one table can address these: equal shapes, strides and dtypes, of a dtype the kernels know."""
    first = tensors[0]
    return first.dtype in _TYPES and all(
        x.shape == first.shape and x.stride() == first.stride() and x.dtype == first.dtype for x in tensors
    )


# Addresses -> table. Parameters and state stay where they are, and gradients mostly return to where they were.
_tables: OrderedDict[tuple[int, ...], Tensor] = OrderedDict()
_CACHED_TABLES = 512
# Copies recorded in a CUDA graph read the host side at every replay.
_captured: list[tuple[Tensor, Tensor]] = []


def _table(operands: Sequence[Sequence[Tensor]], *, wide: int | None) -> tuple[Tensor, bool]:
    """(int64 [operands, tensors] of addresses on the device, whether the first `wide` operands are 16-byte aligned)."""
    addresses = tuple(x.data_ptr() for operand in operands for x in operand)
    count = len(operands[0])
    aligned = wide is None or all(address % 16 == 0 for address in addresses[: wide * count])
    device = operands[0][0].device
    key = (-1 if device.index is None else device.index, *addresses)
    table = _tables.get(key)
    if table is not None:
        _tables.move_to_end(key)
        return table, aligned
    host = torch.tensor(addresses, dtype=torch.int64)
    if device.type == "cpu":
        return host, aligned
    host = host.pin_memory()
    table = host.to(device, non_blocking=True)
    if torch.cuda.is_current_stream_capturing():
        _captured.append((host, table))
        return table, aligned
    _tables[key] = table
    if len(_tables) > _CACHED_TABLES:
        _tables.popitem(last=False)
    return table, aligned
