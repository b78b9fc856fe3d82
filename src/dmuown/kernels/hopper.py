"""Products of batched 16-bit matrices on Hopper: a persistent, warp-specialised Gluon kernel.

    out[b] = alpha * A[b] @ B[b] + beta * C[b] + shift * I

One producer warp keeps a ring of shared-memory stages full through the bulk copy engine (TMA); one or two
warpgroups multiply with `wgmma` and hand the finished tile back to the copy engine, while the producer already
loads the next tile. A symmetric result computes the tiles that reach the lower triangle and stores what lies
below the diagonal twice: as it is, and transposed on the other side.

`A` [M, K] and `B` [K, N] may each be stored with either axis contiguous. The copy engine needs 16-byte aligned
bases and strides, reads zeros beyond the edges and writes nothing there, so any size works. Batches are a
third axis of its descriptors: no load of one matrix ever touches another.
"""

# Compiled from its own text by Gluon, which has no enumerate, unpacking or unused names.
# ruff: noqa: B007, RUF005, SIM113

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
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

# Whether the next kernel may start before this one has finished (its producer waits before it reads).
PDL = gl.constexpr(True)

# Renamed after Triton 3.6.
thread_barrier = gl.thread_barrier if hasattr(gl, "thread_barrier") else gl.barrier


# fmt: off
@gluon.jit
def tile_of(
    tile, batches, tiles_m, tiles_n, tiles_per_matrix, SYMMETRIC: gl.constexpr, RATIO: gl.constexpr, GROUP: gl.constexpr
):
    """(matrix, row tile, column tile) of a linear tile number.

    Symmetric, RATIO = 1: row by row of the lower triangle. RATIO = 2 (column tiles two row tiles wide): first the
    tiles below the diagonal of all matrices, then those on it that count half, which evens out the last round.
    """
    if SYMMETRIC:
        if RATIO == 1:
            batch = tile // tiles_per_matrix
            t = tile % tiles_per_matrix
            row = ((gl.sqrt((8 * t + 1).to(gl.float32)) - 1.0) * 0.5).to(gl.int32)
            row = gl.where(row * (row + 1) // 2 > t, row - 1, row)
            row = gl.where((row + 1) * (row + 2) // 2 <= t, row + 1, row)
            column = t - row * (row + 1) // 2
        else:
            halves = (tiles_m + 1) // 2
            wholes = tiles_per_matrix - halves
            if tile < batches * wholes:
                # Rows 2p and 2p + 1 have p and p + 1 whole tiles: p * p before row 2p.
                batch = tile // wholes
                t = tile % wholes
                p = gl.sqrt(t.to(gl.float32)).to(gl.int32)
                p = gl.where(p * p > t, p - 1, p)
                p = gl.where((p + 1) * (p + 1) <= t, p + 1, p)
                rest = t - p * p
                row = gl.where(rest < p, 2 * p, 2 * p + 1)
                column = gl.where(rest < p, rest, rest - p)
            else:
                t = tile - batches * wholes
                batch = t // halves
                column = t % halves
                row = 2 * column
    else:
        batch = tile // tiles_per_matrix
        t = tile % tiles_per_matrix
        per_group = GROUP * tiles_n
        first = t // per_group * GROUP
        rows = gl.minimum(tiles_m - first, GROUP)
        row = first + (t % per_group) % rows
        column = (t % per_group) // rows
    return batch, row, column


@gluon.jit
def _produce(
    a_desc, b_desc, c_desc, a_bufs, b_bufs, out_bufs, mirror_bufs, full, empty, c_full, c_free,
    batches, tiles, tiles_m, tiles_n, tiles_per_matrix, k_tiles,
    A_K_MAJOR: gl.constexpr, B_K_MAJOR: gl.constexpr, HAS_C: gl.constexpr, SYMMETRIC: gl.constexpr,
    RATIO: gl.constexpr, GROUP: gl.constexpr, BLOCK_M: gl.constexpr, BLOCK_N: gl.constexpr, BLOCK_K: gl.constexpr,
    STAGES: gl.constexpr, CONSUMERS: gl.constexpr, SWIZZLED: gl.constexpr,
):
    """Producer warp: fill the ring tile after tile, and the epilogue buffers with C once they are free."""
    HALF: gl.constexpr = BLOCK_N // 2
    if PDL:
        gdc_wait()
    slot = 0
    count = 0
    for tile in range(gl.program_id(0), tiles, gl.num_programs(0)):
        batch, row, column = tile_of(tile, batches, tiles_m, tiles_n, tiles_per_matrix, SYMMETRIC, RATIO, GROUP)
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
            # Free by now: their consumer frees them early in this tile's loop.
            who = count % CONSUMERS
            bar = c_full.index(who)
            c_first = out_bufs.index(who)
            c_second = mirror_bufs.index(who)._reinterpret(c_desc.dtype, [1, BLOCK_M, HALF], SWIZZLED)
            mbarrier.wait(c_free.index(who), (count // CONSUMERS & 1) ^ 1)
            if SYMMETRIC and n0 + HALF >= m0 + BLOCK_M:
                mbarrier.expect(bar, 2 * BLOCK_M * HALF)
                tma.async_copy_global_to_shared(c_desc, [batch, m0, n0], bar, c_first)
            else:
                mbarrier.expect(bar, 4 * BLOCK_M * HALF)
                tma.async_copy_global_to_shared(c_desc, [batch, m0, n0], bar, c_first)
                tma.async_copy_global_to_shared(c_desc, [batch, m0, n0 + HALF], bar, c_second)
        count += 1


@gluon.jit
def _issue(
    acc, a_bufs, b_bufs, full, slot, use_acc, A_K_MAJOR: gl.constexpr, B_K_MAJOR: gl.constexpr,
    BLOCK_M: gl.constexpr, BLOCK_N: gl.constexpr, BLOCK_K: gl.constexpr, WIDTH: gl.constexpr, STAGES: gl.constexpr,
):
    """Wait for a stage and start its product; return once the product before it is done."""
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
    acc = warpgroup_mma(a, b, acc, is_async=True, use_acc=use_acc)
    return warpgroup_mma_wait(1, (acc,))


@gluon.jit
def multiply_tile(
    a_bufs, b_bufs, full, empty, c_free, turn, slot, k_tiles, count, WHO: gl.constexpr,
    A_K_MAJOR: gl.constexpr, B_K_MAJOR: gl.constexpr, HAS_C: gl.constexpr, BLOCK_M: gl.constexpr,
    BLOCK_N: gl.constexpr, BLOCK_K: gl.constexpr, WIDTH: gl.constexpr, STAGES: gl.constexpr,
    CONSUMERS: gl.constexpr, WARPS: gl.constexpr,
):
    """The first WIDTH columns of one tile of A @ B in fp32, releasing each stage once its product has left it.

    Two consumers take turns: a stage's barrier tells only whether the fill before the awaited one is over, so that
    nobody may wait for a stage whose earlier fills the other one has not seen yet.
    """
    if CONSUMERS > 1:
        mbarrier.wait(turn.index(WHO), (count & 1) ^ (1 - WHO))
    LAYOUT: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [WARPS, 1], [16, WIDTH, 16])
    acc = gl.zeros((BLOCK_M, WIDTH), dtype=gl.float32, layout=LAYOUT)
    if HAS_C:
        # The stores of the tile before have had two products' time to leave the epilogue buffers.
        lead = gl.minimum(k_tiles, 2)
        for k in range(lead):
            acc = _issue(
                acc, a_bufs, b_bufs, full, slot, k > 0, A_K_MAJOR, B_K_MAJOR, BLOCK_M, BLOCK_N, BLOCK_K, WIDTH, STAGES
            )
            mbarrier.arrive(empty.index((slot + STAGES - 1) % STAGES), count=1, pred=k > 0)
            slot += 1
        tma.store_wait(0)
        thread_barrier()
        mbarrier.arrive(c_free, count=1, pred=count > 0)
        for k in range(lead, k_tiles):
            acc = _issue(
                acc, a_bufs, b_bufs, full, slot, True, A_K_MAJOR, B_K_MAJOR, BLOCK_M, BLOCK_N, BLOCK_K, WIDTH, STAGES
            )
            mbarrier.arrive(empty.index((slot + STAGES - 1) % STAGES), count=1)
            slot += 1
    else:
        for k in range(k_tiles):
            acc = _issue(
                acc, a_bufs, b_bufs, full, slot, k > 0, A_K_MAJOR, B_K_MAJOR, BLOCK_M, BLOCK_N, BLOCK_K, WIDTH, STAGES
            )
            mbarrier.arrive(empty.index((slot + STAGES - 1) % STAGES), count=1, pred=k > 0)
            slot += 1
    if CONSUMERS > 1:
        mbarrier.arrive(turn.index(1 - WHO), count=1)
    acc = warpgroup_mma_wait(0, (acc,))
    mbarrier.arrive(empty.index((slot + STAGES - 1) % STAGES), count=1)
    return acc


@gluon.jit
def add_identity(value, shift, m0, n0):
    """Add `shift` to what lies on the diagonal of a part of a tile whose first row and column are m0 and n0."""
    if n0 < m0 + value.shape[0] and m0 < n0 + value.shape[1]:
        rows = gl.arange(0, value.shape[0], layout=gl.SliceLayout(1, value.type.layout))
        columns = gl.arange(0, value.shape[1], layout=gl.SliceLayout(0, value.type.layout))
        value = gl.where(m0 + rows[:, None] == n0 + columns[None, :], value + shift, value)
    return value


@gluon.jit
def _store_half(value, out_desc, mirror_desc, out_buf, mirror_buf, batch, m0, n0, n, SYMMETRIC: gl.constexpr):
    """Write one half tile: as it is and, where it lies below the diagonal, transposed on the other side."""
    SHAPE_M: gl.constexpr = value.shape[0]
    SHAPE_N: gl.constexpr = value.shape[1]
    if n0 < n:
        # Of two buffers in turn, the older store is done once one is in flight.
        tma.store_wait(1)
        thread_barrier()
        out_buf.reshape([SHAPE_M, SHAPE_N]).store(value)
        fence_async_shared()
        tma.async_copy_shared_to_global(out_desc, [batch, m0, n0], out_buf)
        if SYMMETRIC:
            if n0 + SHAPE_N <= m0:
                tma.store_wait(1)
                thread_barrier()
                mirror_buf.reshape([SHAPE_N, SHAPE_M]).store(value.permute((1, 0)))
                fence_async_shared()
                tma.async_copy_shared_to_global(mirror_desc, [batch, n0, m0], mirror_buf)
            else:
                tma.store_wait(0)
    else:
        tma.store_wait(0)


@gluon.jit
def _consume(
    out_desc, mirror_desc, a_bufs, b_bufs, out_bufs, mirror_bufs, full, empty, c_full, c_free, turn,
    alpha, beta, shift, batches, tiles, tiles_m, tiles_n, tiles_per_matrix, k_tiles, n, WHO: gl.constexpr,
    A_K_MAJOR: gl.constexpr, B_K_MAJOR: gl.constexpr, HAS_C: gl.constexpr, SYMMETRIC: gl.constexpr,
    RATIO: gl.constexpr, GROUP: gl.constexpr, BLOCK_M: gl.constexpr, BLOCK_N: gl.constexpr, BLOCK_K: gl.constexpr,
    STAGES: gl.constexpr, CONSUMERS: gl.constexpr, SWIZZLED: gl.constexpr, WARPS: gl.constexpr,
):
    """Consumer warps: multiply and finish every CONSUMERS-th tile that the producer feeds, from tile WHO on."""
    HALF: gl.constexpr = BLOCK_N // 2
    dtype: gl.constexpr = out_desc.dtype
    out_buf = out_bufs.index(WHO)
    mirror_buf = mirror_bufs.index(WHO)
    # C arrives where the result will leave.
    c_first = out_buf
    c_second = mirror_buf._reinterpret(dtype, [1, BLOCK_M, HALF], SWIZZLED)
    slot = WHO * k_tiles
    count = 0
    step = gl.num_programs(0)
    for tile in range(gl.program_id(0) + WHO * step, tiles, CONSUMERS * step):
        batch, row, column = tile_of(tile, batches, tiles_m, tiles_n, tiles_per_matrix, SYMMETRIC, RATIO, GROUP)
        m0 = row * BLOCK_M
        n0 = column * BLOCK_N
        if SYMMETRIC and RATIO > 1 and n0 + HALF >= m0 + BLOCK_M:
            # The right half lies above the diagonal: somebody else mirrors it.
            left = multiply_tile(
                a_bufs, b_bufs, full, empty, c_free.index(WHO), turn, slot, k_tiles, count, WHO, A_K_MAJOR, B_K_MAJOR,
                HAS_C, BLOCK_M, BLOCK_N, BLOCK_K, HALF, STAGES, CONSUMERS, WARPS,
            )
            left = left * alpha
            if HAS_C:
                mbarrier.wait(c_full.index(WHO), count & 1)
                left += beta * c_first.reshape([BLOCK_M, HALF]).load(left.type.layout).to(gl.float32)
                left = add_identity(left, shift, m0, n0)
            _store_half(left.to(dtype), out_desc, mirror_desc, out_buf, mirror_buf, batch, m0, n0, n, SYMMETRIC)
        else:
            acc = multiply_tile(
                a_bufs, b_bufs, full, empty, c_free.index(WHO), turn, slot, k_tiles, count, WHO, A_K_MAJOR, B_K_MAJOR,
                HAS_C, BLOCK_M, BLOCK_N, BLOCK_K, BLOCK_N, STAGES, CONSUMERS, WARPS,
            )
            acc = acc * alpha
            first, second = acc.reshape([BLOCK_M, 2, HALF]).permute((0, 2, 1)).split()
            if HAS_C:
                # Both halves of C leave the buffers before either is written.
                mbarrier.wait(c_full.index(WHO), count & 1)
                first += beta * c_first.reshape([BLOCK_M, HALF]).load(first.type.layout).to(gl.float32)
                second += beta * c_second.reshape([BLOCK_M, HALF]).load(second.type.layout).to(gl.float32)
                if SYMMETRIC:
                    first = add_identity(first, shift, m0, n0)
                    second = add_identity(second, shift, m0, n0 + HALF)
            # Without a mirror the two buffers take the halves in turn.
            second_buf = out_buf if SYMMETRIC else mirror_buf
            _store_half(first.to(dtype), out_desc, mirror_desc, out_buf, mirror_buf, batch, m0, n0, n, SYMMETRIC)
            value = second.to(dtype)
            _store_half(value, out_desc, mirror_desc, second_buf, mirror_buf, batch, m0, n0 + HALF, n, SYMMETRIC)
        slot += CONSUMERS * k_tiles
        count += 1
    tma.store_wait(0)


# Not specialised: a fresh shape must not mean a fresh compilation.
@gluon.jit(do_not_specialize=["batches", "tiles", "tiles_m", "tiles_n", "tiles_per_matrix", "k_tiles", "n"])
def product_kernel(
    a_desc, b_desc, c_desc, out_desc, mirror_desc, alpha, beta, shift,
    batches, tiles, tiles_m, tiles_n, tiles_per_matrix, k_tiles, n,
    A_K_MAJOR: gl.constexpr, B_K_MAJOR: gl.constexpr, HAS_C: gl.constexpr, SYMMETRIC: gl.constexpr,
    GROUP: gl.constexpr, BLOCK_M: gl.constexpr, BLOCK_N: gl.constexpr, BLOCK_K: gl.constexpr,
    STAGES: gl.constexpr, CONSUMERS: gl.constexpr, WARPS: gl.constexpr,
):
    """out = alpha * A @ B + beta * C + shift * I per matrix; grid: as many programs as fit on the card at once.

    Descriptors of [batch, rows, columns] tensors with boxes [1, BLOCK_M, BLOCK_K] or transposed for A,
    [1, BLOCK_N, BLOCK_K] or transposed for B, [1, BLOCK_M, BLOCK_N / 2] for C and out,
    [1, BLOCK_N / 2, BLOCK_M] for the mirrored stores (symmetric only).

    One consumer of two warpgroups takes a wide tile as a whole. Two consumers of one warpgroup each take tiles in
    turn, so that one multiplies while the other finishes.
    """
    RATIO: gl.constexpr = BLOCK_N // BLOCK_M
    HALF: gl.constexpr = BLOCK_N // 2
    dtype: gl.constexpr = out_desc.dtype
    SWIZZLED: gl.constexpr = gl.NVMMASharedLayout(128, 16, rank=3)
    a_bufs = gl.allocate_shared_memory(dtype, [STAGES] + a_desc.block_type.shape, a_desc.layout)
    b_bufs = gl.allocate_shared_memory(dtype, [STAGES] + b_desc.block_type.shape, b_desc.layout)
    out_bufs = gl.allocate_shared_memory(dtype, [CONSUMERS, 1, BLOCK_M, HALF], SWIZZLED)
    MIRROR_SHAPE: gl.constexpr = [CONSUMERS, 1, HALF, BLOCK_M] if SYMMETRIC else [CONSUMERS, 1, BLOCK_M, HALF]
    mirror_bufs = gl.allocate_shared_memory(dtype, MIRROR_SHAPE, SWIZZLED)
    full = gl.allocate_shared_memory(gl.int64, [STAGES, 1], mbarrier.MBarrierLayout())
    empty = gl.allocate_shared_memory(gl.int64, [STAGES, 1], mbarrier.MBarrierLayout())
    c_full = gl.allocate_shared_memory(gl.int64, [CONSUMERS, 1], mbarrier.MBarrierLayout())
    c_free = gl.allocate_shared_memory(gl.int64, [CONSUMERS, 1], mbarrier.MBarrierLayout())
    turn = gl.allocate_shared_memory(gl.int64, [CONSUMERS, 1], mbarrier.MBarrierLayout())
    for i in gl.static_range(STAGES):
        mbarrier.init(full.index(i), count=1)
        mbarrier.init(empty.index(i), count=1)
    for i in gl.static_range(CONSUMERS):
        mbarrier.init(c_full.index(i), count=1)
        mbarrier.init(c_free.index(i), count=1)
        mbarrier.init(turn.index(i), count=1)
    if PDL:
        gdc_launch_dependents()
    if CONSUMERS == 1:
        gl.warp_specialize(
            [
                (_consume, (
                    out_desc, mirror_desc, a_bufs, b_bufs, out_bufs, mirror_bufs, full, empty, c_full, c_free, turn,
                    alpha, beta, shift, batches, tiles, tiles_m, tiles_n, tiles_per_matrix, k_tiles, n, 0,
                    A_K_MAJOR, B_K_MAJOR, HAS_C, SYMMETRIC, RATIO, GROUP, BLOCK_M, BLOCK_N, BLOCK_K,
                    STAGES, CONSUMERS, SWIZZLED, WARPS,
                )),
                (_produce, (
                    a_desc, b_desc, c_desc, a_bufs, b_bufs, out_bufs, mirror_bufs, full, empty, c_full, c_free,
                    batches, tiles, tiles_m, tiles_n, tiles_per_matrix, k_tiles,
                    A_K_MAJOR, B_K_MAJOR, HAS_C, SYMMETRIC, RATIO, GROUP, BLOCK_M, BLOCK_N, BLOCK_K,
                    STAGES, CONSUMERS, SWIZZLED,
                )),
            ],
            [1],
            [24],
        )
    else:
        gl.warp_specialize(
            [
                (_consume, (
                    out_desc, mirror_desc, a_bufs, b_bufs, out_bufs, mirror_bufs, full, empty, c_full, c_free, turn,
                    alpha, beta, shift, batches, tiles, tiles_m, tiles_n, tiles_per_matrix, k_tiles, n, 0,
                    A_K_MAJOR, B_K_MAJOR, HAS_C, SYMMETRIC, RATIO, GROUP, BLOCK_M, BLOCK_N, BLOCK_K,
                    STAGES, CONSUMERS, SWIZZLED, WARPS,
                )),
                (_consume, (
                    out_desc, mirror_desc, a_bufs, b_bufs, out_bufs, mirror_bufs, full, empty, c_full, c_free, turn,
                    alpha, beta, shift, batches, tiles, tiles_m, tiles_n, tiles_per_matrix, k_tiles, n, 1,
                    A_K_MAJOR, B_K_MAJOR, HAS_C, SYMMETRIC, RATIO, GROUP, BLOCK_M, BLOCK_N, BLOCK_K,
                    STAGES, CONSUMERS, SWIZZLED, WARPS,
                )),
                (_produce, (
                    a_desc, b_desc, c_desc, a_bufs, b_bufs, out_bufs, mirror_bufs, full, empty, c_full, c_free,
                    batches, tiles, tiles_m, tiles_n, tiles_per_matrix, k_tiles,
                    A_K_MAJOR, B_K_MAJOR, HAS_C, SYMMETRIC, RATIO, GROUP, BLOCK_M, BLOCK_N, BLOCK_K,
                    STAGES, CONSUMERS, SWIZZLED,
                )),
            ],
            [WARPS, 1],
            [240, 24],
        )
