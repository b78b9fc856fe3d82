"""X <- Q X on Hopper in X's own memory, in one kernel.

A column of Q X needs that column of X alone. The result of a panel of columns therefore goes where the panel beside it
was, once every tile of that one has read it, and the first panel's goes to a buffer of its own: all columns move by one
panel. Programs take tiles from one queue, panel by panel (a counter in memory); a tile is stored as soon as the panel
before it has been read (a counter a panel). Only tiles with lower numbers are waited for, so that the lowest unfinished
one waits for nothing, however few of the programs fit on the card.

One warp loads, two warpgroups multiply tiles of 128 x 256, and one warp stores: it waits for memory, so that the others
need not.
"""

# Compiled from its own text by Gluon, which has no unpacking.
# ruff: noqa: RUF005

from __future__ import annotations

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import fence_async_shared, mbarrier, tma
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

from dmuown.kernels.hopper import PDL, multiply_tile
from dmuown.kernels.hopper_chain import next_work, order_copies, publish_work

BLOCK_M = gl.constexpr(128)
BLOCK_N = gl.constexpr(256)
BLOCK_K = gl.constexpr(64)
HALF = gl.constexpr(128)
STAGES = gl.constexpr(3)


# fmt: off
@gluon.jit
def _place(ticket, panels, tiles):
    """(matrix, panel, tile within the panel)."""
    return ticket // (panels * tiles), ticket % (panels * tiles) // tiles, ticket % tiles


@gluon.jit
def _corner(start, tile, COLUMNS: gl.constexpr):
    """First row and column of a tile whose panel begins at `start`."""
    if COLUMNS:
        return tile * BLOCK_M, start
    else:  # noqa: RET505 -- decided while compiling
        return start, tile * BLOCK_N


@gluon.jit
def _load(
    a_desc, b_desc, a_bufs, b_bufs, full, empty, slot, first, last, batch, m0, n0, COLUMNS: gl.constexpr,
):
    """Fetch steps `first` to `last` of a tile's operands into the ring."""
    for k in range(first, last):
        index = slot % STAGES
        mbarrier.wait(empty.index(index), (slot // STAGES & 1) ^ 1)
        bar = full.index(index)
        mbarrier.expect(bar, 2 * (BLOCK_M + BLOCK_N) * BLOCK_K)
        tma.async_copy_global_to_shared(a_desc, [batch, m0, k * BLOCK_K], bar, a_bufs.index(index))
        if COLUMNS:
            tma.async_copy_global_to_shared(b_desc, [batch, k * BLOCK_K, n0], bar, b_bufs.index(index))
        else:
            tma.async_copy_global_to_shared(b_desc, [batch, n0, k * BLOCK_K], bar, b_bufs.index(index))
        slot += 1
    return slot


@gluon.jit
def _await(counter, needed):
    """Wait until a counter in memory has reached a number, and for what was written before it was counted."""
    count = 0
    while count < needed:
        count = gl.atomic_add(counter, 0, sem="acquire", scope="gpu")


@gluon.jit
def _produce(
    a_desc, b_desc, a_bufs, b_bufs, full, empty, work, work_full, work_free, queue_ptr,
    items, panels, tiles, k_tiles, start, stride, COLUMNS: gl.constexpr,
):
    """Producer warp: take tiles from the queue, the next one's number while the ring is full; keep the ring full."""
    if PDL:
        gdc_wait()
    slot = 0
    item = 0
    ticket = gl.atomic_add(queue_ptr, 1, sem="relaxed", scope="gpu")
    while ticket < items:
        publish_work(work, work_full, work_free, item, ticket, slot, 1)
        batch, panel, tile = _place(ticket, panels, tiles)
        m0, n0 = _corner(start + panel * stride, tile, COLUMNS)
        half = k_tiles // 2
        slot = _load(a_desc, b_desc, a_bufs, b_bufs, full, empty, slot, 0, half, batch, m0, n0, COLUMNS)
        ticket = gl.atomic_add(queue_ptr, 1, sem="relaxed", scope="gpu")
        slot = _load(a_desc, b_desc, a_bufs, b_bufs, full, empty, slot, half, k_tiles, batch, m0, n0, COLUMNS)
        item += 1
    publish_work(work, work_full, work_free, item, items, slot, 1)


@gluon.jit
def _consume(
    dtype: gl.constexpr, a_bufs, b_bufs, out_bufs, full, empty, free, filled, work, work_full, work_free,
    items, k_tiles, COLUMNS: gl.constexpr,
):
    """Consumer warps: multiply, and leave the result to the storing warp."""
    count = 0
    left_buf = out_bufs.index(0).reshape([BLOCK_M, HALF])
    right_buf = out_bufs.index(1).reshape([BLOCK_M, HALF])
    ticket, slot = next_work(work, work_full, count, 0, 1)
    while ticket < items:
        acc = multiply_tile(
            a_bufs, b_bufs, full, empty, free.index(0), free, slot, k_tiles, count, 0, True, not COLUMNS, False,
            BLOCK_M, BLOCK_N, BLOCK_K, BLOCK_N, STAGES, 1, 8,
        )
        left, right = acc.reshape([BLOCK_M, 2, HALF]).permute((0, 2, 1)).split()
        mbarrier.wait(free.index(0), (count & 1) ^ 1)
        left_buf.store(left.to(dtype))
        right_buf.store(right.to(dtype))
        fence_async_shared()
        mbarrier.arrive(filled.index(0), count=1)
        mbarrier.arrive(work_free.index(count % 2), count=1)
        count += 1
        ticket, slot = next_work(work, work_full, count, 0, 1)


@gluon.jit
def _store(
    out_desc, first_desc, out_bufs, free, filled, work, work_full, work_free, read_ptr,
    items, panels, tiles, start, stride, COLUMNS: gl.constexpr,
):
    """Storing warp: count a tile as read, and send it to where the panel before it has been read."""
    count = 0
    ticket, _ = next_work(work, work_full, count, 0, 1)
    while ticket < items:
        batch, panel, tile = _place(ticket, panels, tiles)
        mbarrier.wait(filled.index(0), count & 1)
        counter = read_ptr + batch * panels + panel
        gl.atomic_add(counter, 1, sem="release", scope="gpu")
        if panel == 0:
            m0, n0 = _corner(0, tile, COLUMNS)
            tma.async_copy_shared_to_global(first_desc, [batch, m0, n0], out_bufs.index(0))
            tma.async_copy_shared_to_global(first_desc, [batch, m0, n0 + HALF], out_bufs.index(1))
        else:
            _await(counter - 1, tiles)
            order_copies(tiles)
            m0, n0 = _corner(start + (panel - 1) * stride, tile, COLUMNS)
            tma.async_copy_shared_to_global(out_desc, [batch, m0, n0], out_bufs.index(0))
            tma.async_copy_shared_to_global(out_desc, [batch, m0, n0 + HALF], out_bufs.index(1))
        tma.store_wait(0)
        mbarrier.arrive(free.index(0), count=1)
        mbarrier.arrive(work_free.index(count % 2), count=1)
        count += 1
        ticket, _ = next_work(work, work_full, count, 0, 1)


# Not specialised: a fresh shape must not mean a fresh compilation.
@gluon.jit(do_not_specialize=["items", "panels", "tiles", "k_tiles", "start", "stride"])
def panel_kernel(
    a_desc, b_desc, out_desc, first_desc, queue_ptr, read_ptr, items, panels, tiles, k_tiles, start, stride,
    COLUMNS: gl.constexpr,
):
    """X <- Q X, moved by one panel; grid: at most as many programs as the card has multiprocessors.

    COLUMNS: A = Q and B = X [K, N], panels of BLOCK_N columns; else A = X^T [M, K] and B = Q^T, panels of BLOCK_M rows.
    `out_desc` describes X and `first_desc` the first panel's buffer, both with boxes [1, BLOCK_M, BLOCK_N / 2].
    `queue_ptr` (int32) and `read_ptr` (int32, [matrices, panels]) hold zeros at the start. `tiles` is how many tiles a
    panel has, `start` where the first panel taken begins, `stride` how far on the next one does, of either sign.
    """
    dtype: gl.constexpr = out_desc.dtype
    SWIZZLED: gl.constexpr = gl.NVMMASharedLayout(128, 16, rank=3)
    BARRIER: gl.constexpr = mbarrier.MBarrierLayout()
    a_bufs = gl.allocate_shared_memory(dtype, [STAGES] + a_desc.block_type.shape, a_desc.layout)
    b_bufs = gl.allocate_shared_memory(dtype, [STAGES] + b_desc.block_type.shape, b_desc.layout)
    out_bufs = gl.allocate_shared_memory(dtype, [2, 1, BLOCK_M, HALF], SWIZZLED)
    full = gl.allocate_shared_memory(gl.int64, [STAGES, 1], BARRIER)
    empty = gl.allocate_shared_memory(gl.int64, [STAGES, 1], BARRIER)
    free = gl.allocate_shared_memory(gl.int64, [1, 1], BARRIER)
    filled = gl.allocate_shared_memory(gl.int64, [1, 1], BARRIER)
    work = gl.allocate_shared_memory(gl.int32, [4, 1], gl.SwizzledSharedLayout(1, 1, 1, [0]))
    work_full = gl.allocate_shared_memory(gl.int64, [2, 1], BARRIER)
    work_free = gl.allocate_shared_memory(gl.int64, [2, 1], BARRIER)
    for i in gl.static_range(STAGES):
        mbarrier.init(full.index(i), count=1)
        mbarrier.init(empty.index(i), count=1)
    mbarrier.init(free.index(0), count=1)
    mbarrier.init(filled.index(0), count=1)
    for i in gl.static_range(2):
        mbarrier.init(work_full.index(i), count=1)
        mbarrier.init(work_free.index(i), count=2)  # the consumer's and the storing warp's
    if PDL:
        gdc_launch_dependents()
    gl.warp_specialize(
        [
            (_consume, (
                dtype, a_bufs, b_bufs, out_bufs, full, empty, free, filled, work, work_full, work_free,
                items, k_tiles, COLUMNS,
            )),
            (_produce, (
                a_desc, b_desc, a_bufs, b_bufs, full, empty, work, work_full, work_free, queue_ptr,
                items, panels, tiles, k_tiles, start, stride, COLUMNS,
            )),
            (_store, (
                out_desc, first_desc, out_bufs, free, filled, work, work_full, work_free, read_ptr,
                items, panels, tiles, start, stride, COLUMNS,
            )),
        ],
        [1, 1],
        [40, 40],
    )
