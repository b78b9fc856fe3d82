"""Products of batched matrices through pointers: any floating dtype, any strides, any size, any device Triton has.

    out[b] = alpha * A[b] @ B[b] + beta * C[b] + shift * I

The portable kernel. It is the one that runs under Triton's interpreter, on cards other than Hopper,
for fp32, and for what the copy engine cannot address (`hopper`).
"""

# Compiled from its own text by Triton.
# ruff: noqa: SIM102

from __future__ import annotations

import triton
import triton.language as tl


# fmt: off
@triton.jit(do_not_specialize=["tiles_m", "tiles_n", "tiles_per_matrix"])
def product_kernel(
    a_ptr, b_ptr, c_ptr, out_ptr, alpha, beta, shift, m, n, k, tiles_m, tiles_n, tiles_per_matrix,
    a_batch, a_row, a_column, b_batch, b_row, b_column, c_batch, c_row, c_column, out_batch, out_row, out_column,
    HAS_C: tl.constexpr, SHIFTED: tl.constexpr, SYMMETRIC: tl.constexpr, WIDE_OFFSETS: tl.constexpr,
    UPCAST: tl.constexpr, GROUP: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_K: tl.constexpr,
):
    """One tile of one matrix per program; grid (batch * tiles_per_matrix,).

    SYMMETRIC (BLOCK_M == BLOCK_N): tiles on and below the diagonal, the ones below stored twice.
    WIDE_OFFSETS: 64-bit offsets within one matrix; the offset of a matrix in its batch always is.
    UPCAST: multiply in fp32 what is stored in 16 bits (Triton's interpreter multiplies bf16 bit patterns as integers).
    """
    pid = tl.program_id(0)
    batch = (pid // tiles_per_matrix).to(tl.int64)
    t = pid % tiles_per_matrix
    if SYMMETRIC:
        row = ((tl.sqrt((8 * t + 1).to(tl.float32)) - 1.0) * 0.5).to(tl.int32)
        row = tl.where(row * (row + 1) // 2 > t, row - 1, row)
        row = tl.where((row + 1) * (row + 2) // 2 <= t, row + 1, row)
        column = t - row * (row + 1) // 2
    else:
        per_group = GROUP * tiles_n
        first = (t // per_group) * GROUP
        rows = tl.minimum(tiles_m - first, GROUP)
        row = first + (t % per_group) % rows
        column = (t % per_group) // rows
    offs_m = row * BLOCK_M + tl.arange(0, BLOCK_M)
    offs_n = column * BLOCK_N + tl.arange(0, BLOCK_N)
    offs_k = tl.arange(0, BLOCK_K)
    if WIDE_OFFSETS:
        offs_m = offs_m.to(tl.int64)
        offs_n = offs_n.to(tl.int64)
        offs_k = offs_k.to(tl.int64)
    mask_m = offs_m < m
    mask_n = offs_n < n
    a_ptrs = a_ptr + batch * a_batch + offs_m[:, None] * a_row + offs_k[None, :] * a_column
    b_ptrs = b_ptr + batch * b_batch + offs_k[:, None] * b_row + offs_n[None, :] * b_column
    acc = tl.zeros((BLOCK_M, BLOCK_N), dtype=tl.float32)
    for start in range(0, k, BLOCK_K):
        mask_k = offs_k < k - start
        a = tl.load(a_ptrs, mask=mask_m[:, None] & mask_k[None, :], other=0.0)
        b = tl.load(b_ptrs, mask=mask_k[:, None] & mask_n[None, :], other=0.0)
        if UPCAST:
            a = a.to(tl.float32)
            b = b.to(tl.float32)
        # fp32 operands stay fp32: tf32 would round them to eleven bits.
        acc = tl.dot(a, b, acc, input_precision="ieee")
        if WIDE_OFFSETS:
            a_ptrs += tl.cast(BLOCK_K, tl.int64) * a_column
            b_ptrs += tl.cast(BLOCK_K, tl.int64) * b_row
        else:
            a_ptrs += BLOCK_K * a_column
            b_ptrs += BLOCK_K * b_row
    acc = acc * alpha
    mask = mask_m[:, None] & mask_n[None, :]
    if HAS_C:
        c_ptrs = c_ptr + batch * c_batch + offs_m[:, None] * c_row + offs_n[None, :] * c_column
        acc += beta * tl.load(c_ptrs, mask=mask, other=0.0).to(tl.float32)
    if SHIFTED:
        acc = tl.where(offs_m[:, None] == offs_n[None, :], acc + shift, acc)
    result = acc.to(out_ptr.dtype.element_ty)
    out_base = out_ptr + batch * out_batch
    tl.store(out_base + offs_m[:, None] * out_row + offs_n[None, :] * out_column, result, mask=mask)
    if SYMMETRIC:
        if column < row:
            mirror = out_base + offs_n[:, None] * out_row + offs_m[None, :] * out_column
            tl.store(mirror, tl.trans(result), mask=mask_n[:, None] & mask_m[None, :])
