"""The row kernels themselves; `rows` is their host side and says what they compute and what they move.

Every operand is a list of equally shaped, equally strided [batch, m, n] tensors given by a table of addresses,
`table[operand, tensor]`. A program takes ROWS rows of one tensor. Where a row fits into registers (COLS >= n) it is
read once; else the kernel walks it in chunks of COLS, once to reduce and once to write.

Divisions and roots are rounded as IEEE says: a row of one element has W / g = 1 exactly, and what its gradient leaves
across the row is then 0 and not a rounding error, which orthogonalization would blow up to an update.
"""

# Compiled from its own text by Triton.
# ruff: noqa: SIM108

from __future__ import annotations

import triton
import triton.language as tl


# fmt: off
@triton.jit
def _address(table, operand, tensors, tensor, DTYPE: tl.constexpr, ALIGNED: tl.constexpr):
    """Address of one tensor of an operand."""
    pointer = tl.load(table + operand * tensors + tensor).to(tl.pointer_type(DTYPE))
    if ALIGNED:
        pointer = tl.multiple_of(pointer, 16)
    return pointer


@triton.jit
def _read(pointer, rows, cols, col_stride, mask):
    return tl.load(pointer + rows[:, None] + cols[None, :] * col_stride, mask=mask, other=0.0).to(tl.float32)


@triton.jit
def _write(pointer, rows, cols, col_stride, value, mask):
    tl.store(pointer + rows[:, None] + cols[None, :] * col_stride, value.to(pointer.dtype.element_ty), mask=mask)


@triton.jit
def _guard(magnitude, floor):
    """|g| >= floor with its sign; both zeros count as positive. NaN stays NaN."""
    kept = tl.where(magnitude < 0, tl.where(magnitude > -floor, -floor, magnitude), magnitude)
    return tl.where((kept >= 0) & (kept < floor), floor, kept)


@triton.jit
def _at_least(value, floor):
    """max(value, floor) that keeps NaN, as torch's clamp does."""
    return tl.where(value < floor, floor, value)


@triton.jit
def _accumulate(momentum, grad, mu, EMA: tl.constexpr, NESTEROV: tl.constexpr):
    """(new momentum, what is to be orthogonalized)."""
    if EMA:
        momentum = momentum + (1.0 - mu) * (grad - momentum)
        direction = grad + mu * (momentum - grad)
    else:
        momentum = mu * momentum + grad
        direction = grad + mu * momentum
    return momentum, direction if NESTEROV else momentum


# Operands of the table of `before_kernel`, in order.
_B_WEIGHT, _B_GRAD, _B_MOMENTUM, _B_MAGNITUDE, _B_NORM = (tl.constexpr(i) for i in range(5))
_KIND_MUON, _KIND_MUOWN, _KIND_ANGULAR = (tl.constexpr(i) for i in range(3))


@triton.jit(do_not_specialize=["tensors", "programs"])
def before_kernel(
    table, dg_ptr, direction_ptr, tensors, programs, m, n, total_rows, mu, floor,
    w_batch, w_row, w_col, g_batch, g_row, g_col, p_batch, p_row, p_col, s_batch, s_row, d_batch, d_row, d_col,
    KIND: tl.constexpr, EMA: tl.constexpr, NESTEROV: tl.constexpr, WEIGHT: tl.constexpr, GRAD: tl.constexpr,
    MOMENTUM: tl.constexpr, ALIGNED: tl.constexpr, ROWS: tl.constexpr, COLS: tl.constexpr, WHOLE: tl.constexpr,
):
    """Gradient -> momentum and direction. Strides: weight, gradient, momentum, row state, direction."""
    pid = tl.program_id(0)
    tensor = pid // programs
    row = (pid % programs) * ROWS + tl.arange(0, ROWS)
    row_mask = row < total_rows
    batch = (row // m).to(tl.int64)
    inner = (row % m).to(tl.int64)
    w_rows = batch * w_batch + inner * w_row
    g_rows = batch * g_batch + inner * g_row
    p_rows = batch * p_batch + inner * p_row
    d_rows = (tensor.to(tl.int64) * (total_rows // m) + batch) * d_batch + inner * d_row
    grad_ptr = _address(table, _B_GRAD, tensors, tensor, GRAD, ALIGNED)
    momentum_ptr = _address(table, _B_MOMENTUM, tensors, tensor, MOMENTUM, ALIGNED)
    if KIND != _KIND_MUON:
        weight_ptr = _address(table, _B_WEIGHT, tensors, tensor, WEIGHT, ALIGNED)
        s_rows = batch * s_batch + inner * s_row
        magnitude_ptr = _address(table, _B_MAGNITUDE, tensors, tensor, tl.float32, False)
        # Warps share rows; guarding twice gives the same, so that no order among them matters.
        magnitude = _guard(tl.load(magnitude_ptr + s_rows, mask=row_mask, other=1.0), floor)
        tl.store(magnitude_ptr + s_rows, magnitude, mask=row_mask)
        factor = magnitude
        if KIND == _KIND_MUOWN:
            norm_ptr = _address(table, _B_NORM, tensors, tensor, tl.float32, False)
            norm = _at_least(tl.load(norm_ptr + s_rows, mask=row_mask, other=1.0), floor)
            tl.store(norm_ptr + s_rows, norm, mask=row_mask)
            factor = tl.div_rn(magnitude, norm)
    if WHOLE:
        cols = tl.arange(0, COLS)
        mask = row_mask[:, None] & (cols < n)[None, :]
        grad = _read(grad_ptr, g_rows, cols, g_col, mask)
        momentum = _read(momentum_ptr, p_rows, cols, p_col, mask)
        if KIND != _KIND_MUON:
            unit = tl.div_rn(_read(weight_ptr, w_rows, cols, w_col, mask), magnitude[:, None])
            dg = tl.sum(grad * unit, axis=1)
            grad = (grad - unit * dg[:, None]) * factor[:, None]
        momentum, direction = _accumulate(momentum, grad, mu, EMA, NESTEROV)
        _write(momentum_ptr, p_rows, cols, p_col, momentum, mask)
        _write(direction_ptr, d_rows, cols, d_col, direction, mask)
    else:
        if KIND != _KIND_MUON:
            partial = tl.zeros((ROWS, COLS), dtype=tl.float32)
            for start in range(0, n, COLS):
                cols = start + tl.arange(0, COLS)
                mask = row_mask[:, None] & (cols < n)[None, :]
                unit = tl.div_rn(_read(weight_ptr, w_rows, cols.to(tl.int64), w_col, mask), magnitude[:, None])
                partial += _read(grad_ptr, g_rows, cols.to(tl.int64), g_col, mask) * unit
            dg = tl.sum(partial, axis=1)
        for start in range(0, n, COLS):
            cols = start + tl.arange(0, COLS)
            mask = row_mask[:, None] & (cols < n)[None, :]
            cols = cols.to(tl.int64)
            grad = _read(grad_ptr, g_rows, cols, g_col, mask)
            momentum = _read(momentum_ptr, p_rows, cols, p_col, mask)
            if KIND != _KIND_MUON:
                unit = tl.div_rn(_read(weight_ptr, w_rows, cols, w_col, mask), magnitude[:, None])
                grad = (grad - unit * dg[:, None]) * factor[:, None]
            momentum, direction = _accumulate(momentum, grad, mu, EMA, NESTEROV)
            _write(momentum_ptr, p_rows, cols, p_col, momentum, mask)
            _write(direction_ptr, d_rows, cols, d_col, direction, mask)
    if KIND != _KIND_MUON:
        tl.store(dg_ptr + tensor.to(tl.int64) * total_rows + row, dg, mask=row_mask)


# Operands of the table of `after_kernel`, in order.
_A_WEIGHT, _A_MAGNITUDE, _A_NORM, _A_FIRST, _A_SECOND, _A_STEP = (tl.constexpr(i) for i in range(6))


@triton.jit
def _moved(weight, update, scale, length, KIND: tl.constexpr, CAUTIOUS: tl.constexpr, rate):
    """Muon: the new weight. Else the direction after its step; `scale` brings the weight to the direction's size."""
    if KIND == _KIND_MUON:
        if CAUTIOUS:
            return weight - tl.where(update * weight > 0, weight, 0.0) * rate - update * length
        return weight * (1.0 - rate) - update * length
    return weight * scale - update * length


@triton.jit(do_not_specialize=["tensors", "programs"])
def after_kernel(
    table, update_ptr, dg_ptr, multiplier_ptr, tensors, programs, m, n, total_rows, lr, weight_decay, scale, floor,
    epsilon, beta1, beta2, corrected1, corrected2,
    w_batch, w_row, w_col, s_batch, s_row, u_batch, u_row, u_col,
    KIND: tl.constexpr, DECAY: tl.constexpr, CAUTIOUS: tl.constexpr, MULTIPLIED: tl.constexpr,
    LIVE_LR: tl.constexpr, LIVE_DECAY: tl.constexpr, LIVE_STEP: tl.constexpr,
    WEIGHT: tl.constexpr, ALIGNED: tl.constexpr,
    ROWS: tl.constexpr, COLS: tl.constexpr, WHOLE: tl.constexpr,
):
    """Update -> weights and row state. Strides: weight, row state, update."""
    pid = tl.program_id(0)
    tensor = pid // programs
    row = (pid % programs) * ROWS + tl.arange(0, ROWS)
    row_mask = row < total_rows
    batch = (row // m).to(tl.int64)
    inner = (row % m).to(tl.int64)
    w_rows = batch * w_batch + inner * w_row
    u_rows = (tensor.to(tl.int64) * (total_rows // m) + batch) * u_batch + inner * u_row
    s_rows = batch * s_batch + inner * s_row
    flat = tensor.to(tl.int64) * total_rows + row
    # A hyper-parameter is a number, or (live) the address of one on the device.
    if LIVE_LR:
        rate_lr = tl.load(lr).to(tl.float32)
    else:
        rate_lr = lr
    rate = 0.0
    if DECAY:
        if LIVE_DECAY:
            rate = rate_lr * tl.load(weight_decay).to(tl.float32)
        else:
            rate = rate_lr * weight_decay
    length = tl.zeros((ROWS,), dtype=tl.float32) + rate_lr * scale
    if MULTIPLIED:
        length *= tl.load(multiplier_ptr + flat, mask=row_mask, other=0.0)
    weight_ptr = _address(table, _A_WEIGHT, tensors, tensor, WEIGHT, ALIGNED)
    to_direction = tl.zeros((ROWS,), dtype=tl.float32)
    if KIND != _KIND_MUON:
        magnitude_ptr = _address(table, _A_MAGNITUDE, tensors, tensor, tl.float32, False)
        magnitude = tl.load(magnitude_ptr + s_rows, mask=row_mask, other=1.0)
        norm = tl.zeros((ROWS,), dtype=tl.float32) + 1.0
        if KIND == _KIND_MUOWN:
            norm_ptr = _address(table, _A_NORM, tensors, tensor, tl.float32, False)
            norm = tl.load(norm_ptr + s_rows, mask=row_mask, other=1.0)
        to_direction = tl.div_rn(norm, magnitude)
        # Adam on the magnitude.
        first_ptr = _address(table, _A_FIRST, tensors, tensor, tl.float32, False)
        second_ptr = _address(table, _A_SECOND, tensors, tensor, tl.float32, False)
        dg = tl.load(dg_ptr + flat, mask=row_mask, other=0.0)
        first = tl.load(first_ptr + s_rows, mask=row_mask, other=0.0)
        second = tl.load(second_ptr + s_rows, mask=row_mask, other=0.0)
        first = first + (1.0 - beta1) * (dg - first)
        second = beta2 * second + (1.0 - beta2) * dg * dg
        if LIVE_STEP:
            step = tl.load(_address(table, _A_STEP, tensors, tensor, tl.float32, False))
            corrected1 = 1.0 - tl.exp2(step * tl.log2(beta1))
            corrected2 = 1.0 - tl.exp2(step * tl.log2(beta2))
        adam = (first / corrected1) / (tl.sqrt_rn(second / corrected2) + epsilon)
        stepped = _guard(magnitude - rate_lr * adam, floor)
    if WHOLE:
        cols = tl.arange(0, COLS)
        mask = row_mask[:, None] & (cols < n)[None, :]
        weight = _read(weight_ptr, w_rows, cols, w_col, mask)
        update = _read(update_ptr, u_rows, cols, u_col, mask)
        moved = _moved(weight, update, to_direction[:, None], length[:, None], KIND, CAUTIOUS, rate)
        if KIND != _KIND_MUON:
            squares = tl.sum(moved * moved, axis=1)
    elif KIND != _KIND_MUON:
        partial = tl.zeros((ROWS, COLS), dtype=tl.float32)
        for start in range(0, n, COLS):
            cols = start + tl.arange(0, COLS)
            mask = row_mask[:, None] & (cols < n)[None, :]
            cols = cols.to(tl.int64)
            weight = _read(weight_ptr, w_rows, cols, w_col, mask)
            update = _read(update_ptr, u_rows, cols, u_col, mask)
            moved = _moved(weight, update, to_direction[:, None], length[:, None], KIND, CAUTIOUS, rate)
            partial += moved * moved
        squares = tl.sum(partial, axis=1)
    to_weight = tl.zeros((ROWS,), dtype=tl.float32) + 1.0
    if KIND == _KIND_MUOWN:
        new_norm = tl.sqrt_rn(squares)
        newborn = (tl.abs(magnitude) <= floor) & (norm <= floor) & (new_norm > floor)
        stepped = tl.where(newborn, _at_least(rate_lr, floor), stepped)
        new_norm = _at_least(new_norm, floor)
        to_weight = tl.div_rn(stepped, new_norm)
    elif KIND == _KIND_ANGULAR:
        to_weight = tl.div_rn(stepped, _at_least(tl.sqrt_rn(squares), floor))
    if WHOLE:
        if KIND != _KIND_MUON:
            moved = moved * to_weight[:, None]
            if DECAY:
                moved -= weight * rate
                stepped = _at_least(tl.sqrt_rn(tl.sum(moved * moved, axis=1)), floor)
        _write(weight_ptr, w_rows, cols, w_col, moved, mask)
    else:
        partial = tl.zeros((ROWS, COLS), dtype=tl.float32)
        for start in range(0, n, COLS):
            cols = start + tl.arange(0, COLS)
            mask = row_mask[:, None] & (cols < n)[None, :]
            cols = cols.to(tl.int64)
            weight = _read(weight_ptr, w_rows, cols, w_col, mask)
            update = _read(update_ptr, u_rows, cols, u_col, mask)
            moved = _moved(weight, update, to_direction[:, None], length[:, None], KIND, CAUTIOUS, rate)
            if KIND != _KIND_MUON:
                moved = moved * to_weight[:, None]
                if DECAY:
                    moved -= weight * rate
                    partial += moved * moved
            _write(weight_ptr, w_rows, cols, w_col, moved, mask)
        if KIND != _KIND_MUON and DECAY:
            stepped = _at_least(tl.sqrt_rn(tl.sum(partial, axis=1)), floor)
    if KIND != _KIND_MUON:
        # Warps share rows: nobody may write row state before everybody has read it.
        tl.debug_barrier()
        tl.store(magnitude_ptr + s_rows, stepped, mask=row_mask)
        tl.store(first_ptr + s_rows, first, mask=row_mask)
        tl.store(second_ptr + s_rows, second, mask=row_mask)
        if KIND == _KIND_MUOWN:
            tl.store(norm_ptr + s_rows, new_norm, mask=row_mask)


@triton.jit(do_not_specialize=["tensors"])
def neuron_kernel(
    table, squares_ptr, multiplier_ptr, tensors, m, n, batches, beta2, epsilon, s_batch, s_row, BLOCK: tl.constexpr,
):
    """NorMuon's per-row multiplier for one whole matrix per program; updates the rows' second moments.

    s <- b2 s + (1 - b2) mean_row(O^2);  f = 1 / (sqrt(s) + eps);  multiplier = f ||O||_F / ||f O||_F, 0 for O = 0.
    """
    pid = tl.program_id(0)
    tensor = pid // batches
    batch = (pid % batches).to(tl.int64)
    variance_ptr = _address(table, 0, tensors, tensor, tl.float32, False) + batch * s_batch
    base = pid.to(tl.int64) * m
    before = tl.zeros((BLOCK,), dtype=tl.float32)
    after = tl.zeros((BLOCK,), dtype=tl.float32)
    for start in range(0, m, BLOCK):
        row = start + tl.arange(0, BLOCK)
        mask = row < m
        squares = tl.load(squares_ptr + base + row, mask=mask, other=0.0)
        variance = tl.load(variance_ptr + row.to(tl.int64) * s_row, mask=mask, other=0.0)
        variance = variance + (1.0 - beta2) * (squares / n - variance)
        tl.store(variance_ptr + row.to(tl.int64) * s_row, variance, mask=mask)
        factor = 1.0 / (tl.sqrt(variance) + epsilon)
        tl.store(multiplier_ptr + base + row, factor, mask=mask)
        before += squares
        after += tl.where(mask, squares * factor * factor, 0.0)
    total_before = tl.sum(before, axis=0)
    total_after = tl.sum(after, axis=0)
    # NaN compares false: a non-finite matrix keeps its NaN through the division.
    ratio = tl.where(total_after <= 0.0, 0.0, tl.sqrt(total_before / total_after))
    tl.debug_barrier()
    for start in range(0, m, BLOCK):
        row = start + tl.arange(0, BLOCK)
        mask = row < m
        factor = tl.load(multiplier_ptr + base + row, mask=mask, other=0.0)
        tl.store(multiplier_ptr + base + row, factor * ratio, mask=mask)


@triton.jit(do_not_specialize=["programs"])
def row_squares_kernel(
    source, result, programs, m, n, total_rows, batch_stride, row_stride, col_stride,
    ROWS: tl.constexpr, COLS: tl.constexpr, WHOLE: tl.constexpr,
):
    """fp32 sum of squares of every row of one [batch, m, n] tensor, into a flat [batch * m]."""
    row = tl.program_id(0) * ROWS + tl.arange(0, ROWS)
    row_mask = row < total_rows
    rows = (row // m).to(tl.int64) * batch_stride + (row % m).to(tl.int64) * row_stride
    if WHOLE:
        cols = tl.arange(0, COLS)
        value = _read(source, rows, cols, col_stride, row_mask[:, None] & (cols < n)[None, :])
        squares = tl.sum(value * value, axis=1)
    else:
        partial = tl.zeros((ROWS, COLS), dtype=tl.float32)
        for start in range(0, n, COLS):
            cols = start + tl.arange(0, COLS)
            value = _read(source, rows, cols.to(tl.int64), col_stride, row_mask[:, None] & (cols < n)[None, :])
            partial += value * value
        squares = tl.sum(partial, axis=1)
    tl.store(result + row, squares, mask=row_mask)
