"""Products of batched 16-bit matrices on Hopper: a persistent, warp-specialised Gluon kernel.

One producer warp keeps a ring of shared-memory stages full through the bulk copy engine (TMA); two
warpgroups multiply with `wgmma` and write the finished tile back through the copy engine while the
producer already loads the next tile. A symmetric result computes the tiles on and below the
diagonal and stores each twice: as it is, and transposed on the other side.

    out[b] = alpha * A[b] @ B[b] + beta * C[b]

`A` [M, K] and `B` [K, N] may each be stored with either axis contiguous; the copy engine needs
16-byte aligned bases and strides, and zero-fills what lies beyond the edges.
"""

from __future__ import annotations

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import (
    fence_async_shared,
    mbarrier,
    tma,
    warpgroup_mma,
    warpgroup_mma_wait,
)

# Renamed after Triton 3.6.
thread_barrier = gl.thread_barrier if hasattr(gl, "thread_barrier") else gl.barrier


@gluon.jit
def _tile_of(tile, tiles_m, tiles_n, tiles_per_matrix, SYMMETRIC: gl.constexpr, RATIO: gl.constexpr, GROUP: gl.constexpr):
    """(matrix, row tile, column tile) of a linear tile number; symmetric: only tiles that reach the lower triangle.

    With RATIO = BLOCK_N / BLOCK_M row tiles to a column tile, rows come in groups of RATIO that all have the
    same number p + 1 of column tiles, so group p starts at RATIO * p * (p + 1) / 2.
    """
    batch = tile // tiles_per_matrix
    t = tile % tiles_per_matrix
    if SYMMETRIC:
        p = ((gl.sqrt((8 * t).to(gl.float32) / RATIO + 1.0) - 1.0) * 0.5).to(gl.int32)
        p = gl.where(RATIO * p * (p + 1) // 2 > t, p - 1, p)
        p = gl.where(RATIO * (p + 1) * (p + 2) // 2 <= t, p + 1, p)
        rest = t - RATIO * p * (p + 1) // 2
        # The last group may have fewer rows than RATIO: rows vary fastest within what it has.
        rows = gl.minimum(RATIO, tiles_m - RATIO * p)
        row = RATIO * p + rest % rows
        column = rest // rows
    else:
        per_group = GROUP * tiles_n
        group = t // per_group
        first = group * GROUP
        rows = gl.minimum(tiles_m - first, GROUP)
        row = first + (t % per_group) % rows
        column = (t % per_group) // rows
    return batch, row, column


@gluon.jit
def _produce(
    a_desc, b_desc, c_desc, a_bufs, b_bufs, full, empty, tiles, tiles_m, tiles_n, tiles_per_matrix, k_tiles,
    A_K_MAJOR: gl.constexpr, B_K_MAJOR: gl.constexpr, HAS_C: gl.constexpr, SYMMETRIC: gl.constexpr,
    RATIO: gl.constexpr, GROUP: gl.constexpr, BLOCK_M: gl.constexpr, BLOCK_N: gl.constexpr, BLOCK_K: gl.constexpr,
    STAGES: gl.constexpr, C_LAYOUT: gl.constexpr,
):
    """Producer warp: fill the ring, tile after tile, never waiting for an epilogue."""
    HALF: gl.constexpr = BLOCK_N // 2
    slot = 0
    for tile in range(gl.program_id(0), tiles, gl.num_programs(0)):
        batch, row, column = _tile_of(tile, tiles_m, tiles_n, tiles_per_matrix, SYMMETRIC, RATIO, GROUP)
        m0 = row * BLOCK_M
        n0 = column * BLOCK_N
        for k in range(k_tiles):
            index = slot % STAGES
            mbarrier.wait(empty.index(index), (slot // STAGES & 1) ^ 1)
            bar = full.index(index)
            mbarrier.expect(bar, 2 * (BLOCK_M + BLOCK_N) * BLOCK_K)
            if A_K_MAJOR:
                tma.async_copy_global_to_shared(a_desc, [batch, m0, k * BLOCK_K], bar, a_bufs.index(index))
            else:
                tma.async_copy_global_to_shared(a_desc, [batch, k * BLOCK_K, m0], bar, a_bufs.index(index))
            if B_K_MAJOR:
                tma.async_copy_global_to_shared(b_desc, [batch, n0, k * BLOCK_K], bar, b_bufs.index(index))
            else:
                tma.async_copy_global_to_shared(b_desc, [batch, k * BLOCK_K, n0], bar, b_bufs.index(index))
            slot += 1
        if HAS_C:
            # The halves of the C tile travel through the ring as further stages, in the B buffers.
            for half in gl.static_range(2):
                if not SYMMETRIC or n0 + half * HALF < m0 + BLOCK_M:
                    index = slot % STAGES
                    mbarrier.wait(empty.index(index), (slot // STAGES & 1) ^ 1)
                    bar = full.index(index)
                    mbarrier.expect(bar, 2 * BLOCK_M * HALF)
                    c_buf = b_bufs.index(index)._reinterpret(c_desc.dtype, [1, BLOCK_M, HALF], C_LAYOUT)
                    tma.async_copy_global_to_shared(c_desc, [batch, m0, n0 + half * HALF], bar, c_buf)
                    slot += 1


@gluon.jit
def _multiply(
    a_bufs, b_bufs, full, empty, slot, k_tiles, A_K_MAJOR: gl.constexpr, B_K_MAJOR: gl.constexpr,
    BLOCK_M: gl.constexpr, BLOCK_N: gl.constexpr, BLOCK_K: gl.constexpr, WIDTH: gl.constexpr, STAGES: gl.constexpr,
    num_warps: gl.constexpr,
):
    """The first WIDTH columns of one tile of A @ B in fp32, releasing each stage once its product has left it."""
    layout: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [num_warps, 1], [16, WIDTH, 16])
    acc = gl.zeros((BLOCK_M, WIDTH), dtype=gl.float32, layout=layout)
    for k in range(k_tiles):
        index = slot % STAGES
        mbarrier.wait(full.index(index), slot // STAGES & 1)
        if A_K_MAJOR:
            a = a_bufs.index(index).reshape([BLOCK_M, BLOCK_K])
        else:
            a = a_bufs.index(index).reshape([BLOCK_K, BLOCK_M]).permute((1, 0))
        if B_K_MAJOR:
            b = b_bufs.index(index).reshape([BLOCK_N, BLOCK_K]).slice(0, WIDTH, 0).permute((1, 0))
        else:
            b = b_bufs.index(index).reshape([BLOCK_K, BLOCK_N]).slice(0, WIDTH, 1)
        acc = warpgroup_mma(a, b, acc, is_async=True, use_acc=k > 0)
        acc = warpgroup_mma_wait(1, (acc,))
        mbarrier.arrive(empty.index((slot + STAGES - 1) % STAGES), count=1, pred=k > 0)
        slot += 1
    acc = warpgroup_mma_wait(0, (acc,))
    mbarrier.arrive(empty.index((slot + STAGES - 1) % STAGES), count=1)
    return acc


@gluon.jit
def _finish(
    value, out_desc, mirror_desc, b_bufs, out_buf, mirror_buf, full, empty, slot, alpha, beta, batch, m0, n0, n,
    HAS_C: gl.constexpr, SYMMETRIC: gl.constexpr, STAGES: gl.constexpr, DOUBLE: gl.constexpr, C_LAYOUT: gl.constexpr,
):
    """Scale, add C, and write one half tile: as it is and, below the diagonal, transposed on the other side."""
    SHAPE_M: gl.constexpr = value.shape[0]
    SHAPE_N: gl.constexpr = value.shape[1]
    dtype: gl.constexpr = out_desc.dtype
    value = value * alpha
    if HAS_C:
        index = slot % STAGES
        mbarrier.wait(full.index(index), slot // STAGES & 1)
        c_buf = b_bufs.index(index)._reinterpret(dtype, [1, SHAPE_M, SHAPE_N], C_LAYOUT)
        c = c_buf.reshape([SHAPE_M, SHAPE_N]).load(value.type.layout)
        fence_async_shared()
        mbarrier.arrive(empty.index(index), count=1)
        value += beta * c.to(gl.float32)
    result = value.to(dtype)
    if n0 < n:
        # With two buffers the older of two stores is done once one is in flight.
        tma.store_wait(1 if DOUBLE else 0)
        thread_barrier()
        out_buf.reshape([SHAPE_M, SHAPE_N]).store(result)
        fence_async_shared()
        tma.async_copy_shared_to_global(out_desc, [batch, m0, n0], out_buf)
        if SYMMETRIC:
            if n0 + SHAPE_N <= m0:
                tma.store_wait(1 if DOUBLE else 0)
                thread_barrier()
                mirror_buf.reshape([SHAPE_N, SHAPE_M]).store(result.permute((1, 0)))
                fence_async_shared()
                tma.async_copy_shared_to_global(mirror_desc, [batch, n0, m0], mirror_buf)
            elif DOUBLE:
                tma.store_wait(0)
    elif DOUBLE:
        tma.store_wait(0)


@gluon.jit
def _consume(
    out_desc, mirror_desc, a_bufs, b_bufs, out_buf, mirror_buf, full, empty, alpha, beta,
    tiles, tiles_m, tiles_n, tiles_per_matrix, k_tiles, n,
    A_K_MAJOR: gl.constexpr, B_K_MAJOR: gl.constexpr, HAS_C: gl.constexpr, SYMMETRIC: gl.constexpr,
    RATIO: gl.constexpr, GROUP: gl.constexpr, BLOCK_M: gl.constexpr, BLOCK_N: gl.constexpr, BLOCK_K: gl.constexpr,
    STAGES: gl.constexpr, DOUBLE: gl.constexpr, C_LAYOUT: gl.constexpr, num_warps: gl.constexpr,
):
    """Consumer warps: multiply and finish the tiles the producer feeds, in the same order."""
    HALF: gl.constexpr = BLOCK_N // 2
    slot = 0
    for tile in range(gl.program_id(0), tiles, gl.num_programs(0)):
        batch, row, column = _tile_of(tile, tiles_m, tiles_n, tiles_per_matrix, SYMMETRIC, RATIO, GROUP)
        m0 = row * BLOCK_M
        n0 = column * BLOCK_N
        if SYMMETRIC and RATIO > 1 and n0 + HALF >= m0 + BLOCK_M:
            # The right half lies above the diagonal: somebody mirrors it.
            left = _multiply(
                a_bufs, b_bufs, full, empty, slot, k_tiles, A_K_MAJOR, B_K_MAJOR,
                BLOCK_M, BLOCK_N, BLOCK_K, HALF, STAGES, num_warps,
            )
            slot += k_tiles
            _finish(
                left, out_desc, mirror_desc, b_bufs, out_buf, mirror_buf, full, empty, slot, alpha, beta,
                batch, m0, n0, n, HAS_C, SYMMETRIC, STAGES, DOUBLE, C_LAYOUT,
            )
            if HAS_C:
                slot += 1
        else:
            acc = _multiply(
                a_bufs, b_bufs, full, empty, slot, k_tiles, A_K_MAJOR, B_K_MAJOR,
                BLOCK_M, BLOCK_N, BLOCK_K, BLOCK_N, STAGES, num_warps,
            )
            slot += k_tiles
            first, second = acc.reshape([BLOCK_M, 2, HALF]).permute((0, 2, 1)).split()
            _finish(
                first, out_desc, mirror_desc, b_bufs, out_buf, mirror_buf, full, empty, slot, alpha, beta,
                batch, m0, n0, n, HAS_C, SYMMETRIC, STAGES, DOUBLE, C_LAYOUT,
            )
            if HAS_C:
                slot += 1
            # Without a mirror the two buffers take the halves in turn.
            second_buf = out_buf if SYMMETRIC else mirror_buf
            _finish(
                second, out_desc, mirror_desc, b_bufs, second_buf, mirror_buf, full, empty, slot, alpha, beta,
                batch, m0, n0 + HALF, n, HAS_C, SYMMETRIC, STAGES, DOUBLE, C_LAYOUT,
            )
            if HAS_C:
                slot += 1
    tma.store_wait(0)


# Not specialised: a fresh shape must not mean a fresh compilation.
@gluon.jit(do_not_specialize=["tiles", "tiles_m", "tiles_n", "tiles_per_matrix", "k_tiles", "n"])
def product_kernel(
    a_desc, b_desc, c_desc, out_desc, mirror_desc, alpha, beta, tiles, tiles_m, tiles_n, tiles_per_matrix, k_tiles, n,
    A_K_MAJOR: gl.constexpr, B_K_MAJOR: gl.constexpr, HAS_C: gl.constexpr, SYMMETRIC: gl.constexpr,
    GROUP: gl.constexpr, BLOCK_M: gl.constexpr, BLOCK_N: gl.constexpr, BLOCK_K: gl.constexpr,
    STAGES: gl.constexpr, DOUBLE: gl.constexpr, num_warps: gl.constexpr,
):
    """out = alpha * A @ B + beta * C per matrix; grid: as many programs as fit on the card at once.

    Descriptors of [batch, rows, columns] tensors with boxes [1, BLOCK_M, BLOCK_K] or transposed for A,
    [1, BLOCK_N, BLOCK_K] or transposed for B, [1, BLOCK_M, BLOCK_N / 2] for C and out,
    [1, BLOCK_N / 2, BLOCK_M] for the mirrored stores.
    """
    RATIO: gl.constexpr = BLOCK_N // BLOCK_M
    HALF: gl.constexpr = BLOCK_N // 2
    dtype: gl.constexpr = out_desc.dtype
    C_LAYOUT: gl.constexpr = gl.NVMMASharedLayout(128, 16, rank=3)
    a_bufs = gl.allocate_shared_memory(dtype, [STAGES] + a_desc.block_type.shape, a_desc.layout)
    b_bufs = gl.allocate_shared_memory(dtype, [STAGES] + b_desc.block_type.shape, b_desc.layout)
    out_buf = gl.allocate_shared_memory(dtype, [1, BLOCK_M, HALF], C_LAYOUT)
    MIRROR_SHAPE: gl.constexpr = [1, HALF, BLOCK_M] if SYMMETRIC else [1, BLOCK_M, HALF]
    if DOUBLE:
        mirror_buf = gl.allocate_shared_memory(dtype, MIRROR_SHAPE, C_LAYOUT)
    else:
        mirror_buf = out_buf._reinterpret(dtype, MIRROR_SHAPE, C_LAYOUT)
    full = gl.allocate_shared_memory(gl.int64, [STAGES, 1], mbarrier.MBarrierLayout())
    empty = gl.allocate_shared_memory(gl.int64, [STAGES, 1], mbarrier.MBarrierLayout())
    for i in gl.static_range(STAGES):
        mbarrier.init(full.index(i), count=1)
        mbarrier.init(empty.index(i), count=1)
    gl.warp_specialize(
        [
            (_consume, (
                out_desc, mirror_desc, a_bufs, b_bufs, out_buf, mirror_buf, full, empty, alpha, beta,
                tiles, tiles_m, tiles_n, tiles_per_matrix, k_tiles, n,
                A_K_MAJOR, B_K_MAJOR, HAS_C, SYMMETRIC, RATIO, GROUP, BLOCK_M, BLOCK_N, BLOCK_K,
                STAGES, DOUBLE, C_LAYOUT, num_warps,
            )),
            (_produce, (
                a_desc, b_desc, c_desc, a_bufs, b_bufs, full, empty, tiles, tiles_m, tiles_n, tiles_per_matrix, k_tiles,
                A_K_MAJOR, B_K_MAJOR, HAS_C, SYMMETRIC, RATIO, GROUP, BLOCK_M, BLOCK_N, BLOCK_K, STAGES, C_LAYOUT,
            )),
        ],
        [1],
        [24],
    )
