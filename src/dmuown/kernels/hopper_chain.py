"""A chain of products of square symmetric matrices on Hopper, in one kernel.

Each stage of the chain makes one m x m matrix per matrix of the batch from matrices that earlier stages made:

    out = A B^T        or        out = c A A^T + b A + a I

The first stage may be R = X X^T for the wide X: [B, m, n] that the chain belongs to.
A kernel for each stage would leave multiprocessors idle while its last tiles finish, and would start with all of them
waiting for their first operands. Here programs take tiles of all stages from one queue (a counter in memory), and a
tile waits until every tile of its own matrix's stage before is stored (a counter a matrix). Nobody waits
for a tile that no running program has: whoever takes a number works through its numbers in order, so that the lowest
unfinished tile waits for nothing, however few of the programs fit on the card.

All matrices lie in one workspace of at most four places, [P B, m, m]; `chain` tells the stages in two bits each.
One warp loads, one or two consumers multiply (as in `hopper`), and one warp a consumer stores: it waits for
memory, so that its consumer need not.
"""

from __future__ import annotations

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import fence_async_shared, mbarrier, tma
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

from dmuown.kernels.hopper import PDL, add_identity, multiply_tile, tile_of

BLOCK = gl.constexpr(128)
BLOCK_K = gl.constexpr(64)


# fmt: off
@gluon.jit
def order_copies(value):
    """Order the copy engine's accesses to memory after this thread's, and the other way round."""
    return gl.inline_asm_elementwise(
        "fence.proxy.async; mov.u32 $0, $1;", "=r,r", [value], dtype=gl.int32, is_pure=False, pack=1
    )


@gluon.jit
def _stores_arrived(value):
    """Wait until what this thread gave the copy engine to store is in memory, not merely read from the buffers."""
    return gl.inline_asm_elementwise(
        "cp.async.bulk.wait_group 0; fence.proxy.async; mov.u32 $0, $1;", "=r,r", [value],
        dtype=gl.int32, is_pure=False, pack=1,
    )


@gluon.jit
def _pair(codes, stage):
    """The two bits of a stage."""
    return (codes >> (2 * stage)) & 3


@gluon.jit
def _place(ticket, batches, tiles_m, tiles_per_matrix, RATIO: gl.constexpr):
    """(stage, matrix, first row, first column) of a tile.

    Matrix by matrix within a stage, so that a matrix's next stage comes as long after its last tile as it can.
    """
    per_stage = batches * tiles_per_matrix
    stage = ticket // per_stage
    rest = ticket % per_stage
    batch = rest // tiles_per_matrix
    _, row, column = tile_of(rest % tiles_per_matrix, 1, tiles_m, tiles_m, tiles_per_matrix, True, RATIO, 1)
    return stage, batch, row * BLOCK, column * RATIO * BLOCK


@gluon.jit
def publish_work(work, work_full, work_free, item, ticket, slot, CONSUMERS: gl.constexpr):
    """Tell the next consumer and its storing warp which tile comes next, and where in the ring it starts."""
    LAYOUT: gl.constexpr = gl.BlockedLayout([1], [32], [gl.num_warps()], [0])
    visit = item // CONSUMERS
    entry = (visit % 2) * CONSUMERS + item % CONSUMERS
    mbarrier.wait(work_free.index(entry), (visit // 2 & 1) ^ 1)
    work.index(2 * entry).store(gl.full([1], ticket, gl.int32, LAYOUT))
    work.index(2 * entry + 1).store(gl.full([1], slot, gl.int32, LAYOUT))
    mbarrier.arrive(work_full.index(entry), count=1)


@gluon.jit
def next_work(work, work_full, count, WHO: gl.constexpr, CONSUMERS: gl.constexpr):
    """The number of this consumer's next tile, and where it starts in the ring."""
    LAYOUT: gl.constexpr = gl.BlockedLayout([1], [32], [gl.num_warps()], [0])
    entry = (count % 2) * CONSUMERS + WHO
    mbarrier.wait(work_full.index(entry), count // 2 & 1)
    ticket = gl.max(work.index(2 * entry).load(LAYOUT), axis=0)
    slot = gl.max(work.index(2 * entry + 1).load(LAYOUT), axis=0)
    return ticket, slot


@gluon.jit
def _fetch(desc, a_bufs, b_bufs, bar, index, k, a_at, b_at, m0, n0, RATIO: gl.constexpr):
    """Ask for one step of a tile's operands; of a wide tile on the diagonal, for its left half's alone."""
    tma.async_copy_global_to_shared(desc, [a_at, m0, k * BLOCK_K], bar, a_bufs.index(index))
    tma.async_copy_global_to_shared(desc, [b_at, n0, k * BLOCK_K], bar, b_bufs.index(RATIO * index))
    if RATIO > 1:  # noqa: SIM102 -- decided while compiling
        if n0 != m0:
            second = b_bufs.index(RATIO * index + 1)
            tma.async_copy_global_to_shared(desc, [b_at, n0 + BLOCK, k * BLOCK_K], bar, second)


@gluon.jit
def _load(
    x_desc, desc, a_bufs, b_bufs, full, empty, slot, start, stop, stage, batch, a_at, b_at, m0, n0,
    HAS_X: gl.constexpr, RATIO: gl.constexpr, STAGES: gl.constexpr,
):
    """Fetch steps `start` to `stop` of a tile's operands into the ring."""
    whole = RATIO > 1 and n0 != m0
    for k in range(start, stop):
        index = slot % STAGES
        mbarrier.wait(empty.index(index), (slot // STAGES & 1) ^ 1)
        bar = full.index(index)
        if whole:
            mbarrier.expect(bar, 6 * BLOCK * BLOCK_K)
        else:
            mbarrier.expect(bar, 4 * BLOCK * BLOCK_K)
        if HAS_X:
            if stage == 0:
                _fetch(x_desc, a_bufs, b_bufs, bar, index, k, batch, batch, m0, n0, RATIO)
            else:
                _fetch(desc, a_bufs, b_bufs, bar, index, k, a_at, b_at, m0, n0, RATIO)
        else:
            _fetch(desc, a_bufs, b_bufs, bar, index, k, a_at, b_at, m0, n0, RATIO)
        slot += 1
    return slot


@gluon.jit
def _produce(
    x_desc, desc, tile_desc, a_bufs, b_bufs, tile_bufs, full, empty, c_full, free, work, work_full, work_free,
    queue_ptr, done_ptr, a_places, b_places, steps, batches, items, tiles_m, tiles_per_matrix, m_steps, n_steps,
    HAS_X: gl.constexpr, RATIO: gl.constexpr, STAGES: gl.constexpr, CONSUMERS: gl.constexpr,
):
    """Producer warp: take tiles from the queue, wait for what they read, keep the ring full.

    Memory answers a question in about the time that three products take. The next tile's number, and whether its
    operands are there, are therefore asked for while the ring is full.
    """
    if PDL:
        gdc_wait()
    slot = 0
    item = 0
    ticket = gl.atomic_add(queue_ptr, 1, sem="relaxed", scope="gpu")
    ready = 0
    while ticket < items:
        publish_work(work, work_full, work_free, item, ticket, slot, CONSUMERS)
        stage, batch, m0, n0 = _place(ticket, batches, tiles_m, tiles_per_matrix, RATIO)
        needed = stage * tiles_per_matrix
        while ready < needed:
            ready = gl.atomic_add(done_ptr + batch, 0, sem="acquire", scope="gpu")
        order_copies(needed)
        a_at = _pair(a_places, stage) * batches + batch
        b_at = _pair(b_places, stage) * batches + batch
        k_tiles = m_steps
        if HAS_X:
            k_tiles = gl.where(stage == 0, n_steps, m_steps)
        first_part = k_tiles // 3
        second_part = 2 * k_tiles // 3
        slot = _load(
            x_desc, desc, a_bufs, b_bufs, full, empty, slot, 0, first_part, stage, batch, a_at, b_at, m0, n0,
            HAS_X, RATIO, STAGES,
        )
        upcoming = gl.atomic_add(queue_ptr, 1, sem="relaxed", scope="gpu")
        slot = _load(
            x_desc, desc, a_bufs, b_bufs, full, empty, slot, first_part, second_part, stage, batch, a_at, b_at, m0, n0,
            HAS_X, RATIO, STAGES,
        )
        ready = 0
        if upcoming < items:
            next_batch = upcoming % (batches * tiles_per_matrix) // tiles_per_matrix
            ready = gl.atomic_add(done_ptr + next_batch, 0, sem="acquire", scope="gpu")
        slot = _load(
            x_desc, desc, a_bufs, b_bufs, full, empty, slot, second_part, k_tiles, stage, batch, a_at, b_at, m0, n0,
            HAS_X, RATIO, STAGES,
        )
        if _pair(steps, stage) > 0:
            # Where its result will leave, once the tile before has left.
            who = item % CONSUMERS
            mbarrier.wait(free.index(who), (item // CONSUMERS & 1) ^ 1)
            bar = c_full.index(who)
            if RATIO == 1:
                mbarrier.expect(bar, 2 * BLOCK * BLOCK)
                tma.async_copy_global_to_shared(tile_desc, [a_at, m0, n0], bar, tile_bufs.index(who))
            elif n0 == m0:
                mbarrier.expect(bar, 2 * BLOCK * BLOCK)
                tma.async_copy_global_to_shared(tile_desc, [a_at, m0, n0], bar, tile_bufs.index(0))
            else:
                mbarrier.expect(bar, 4 * BLOCK * BLOCK)
                tma.async_copy_global_to_shared(tile_desc, [a_at, m0, n0], bar, tile_bufs.index(0))
                tma.async_copy_global_to_shared(tile_desc, [a_at, m0, n0 + BLOCK], bar, tile_bufs.index(1))
        item += 1
        ticket = upcoming
    for _ in gl.static_range(CONSUMERS):
        publish_work(work, work_full, work_free, item, items, slot, CONSUMERS)
        item += 1


@gluon.jit
def _finish(acc, block, step, a, b, c, m0, n0):
    """c acc + b A + a I for a part of a tile whose A stands in `block`; `acc` itself for a product."""
    if step > 0:
        acc = add_identity(acc * c + b * block.load(acc.type.layout).to(gl.float32), a, m0, n0)
    return acc


@gluon.jit
def _await_tile(c_full, free, step, polynomials, count):
    """Wait until the tile's buffer holds A for a polynomial, or nothing that anybody needs."""
    if step > 0:
        mbarrier.wait(c_full, polynomials & 1)
    else:
        mbarrier.wait(free, (count & 1) ^ 1)


@gluon.jit
def _consume(
    dtype: gl.constexpr, a_bufs, b_bufs, tile_bufs, full, empty, c_full, free, stored, filled, turn,
    work, work_full, work_free, steps, a0, b0, c0, a1, b1, c1, a2, b2, c2,
    batches, items, tiles_m, tiles_per_matrix, m_steps, n_steps,
    WHO: gl.constexpr, HAS_X: gl.constexpr, RATIO: gl.constexpr, STAGES: gl.constexpr,
    CONSUMERS: gl.constexpr, WARPS: gl.constexpr,
):
    """Consumer warps: multiply and finish every CONSUMERS-th tile that the producer took."""
    count = 0
    polynomials = 0
    mirrored = 0
    left_buf = tile_bufs.index(WHO)
    right_buf = tile_bufs.index(RATIO - 1 if RATIO > 1 else WHO)
    left_flat = left_buf.reshape([BLOCK, BLOCK])
    right_flat = right_buf.reshape([BLOCK, BLOCK])
    ticket, slot = next_work(work, work_full, count, WHO, CONSUMERS)
    while ticket < items:
        stage, _, m0, n0 = _place(ticket, batches, tiles_m, tiles_per_matrix, RATIO)
        step = _pair(steps, stage)
        k_tiles = m_steps
        if HAS_X:
            k_tiles = gl.where(stage == 0, n_steps, m_steps)
        a = gl.where(step == 1, a0, gl.where(step == 2, a1, a2))
        b = gl.where(step == 1, b0, gl.where(step == 2, b1, b2))
        c = gl.where(step == 1, c0, gl.where(step == 2, c1, c2))
        if RATIO == 1 or n0 == m0:
            left = multiply_tile(
                a_bufs, b_bufs, full, empty, free.index(WHO), turn, slot, k_tiles, count, WHO, True, True,
                False, BLOCK, RATIO * BLOCK, BLOCK_K, BLOCK, STAGES, CONSUMERS, WARPS,
            )
            _await_tile(c_full.index(WHO), free.index(WHO), step, polynomials, count)
            left = _finish(left, left_flat, step, a, b, c, m0, n0)
            value = left.to(dtype)
            left_flat.store(value)
            fence_async_shared()
            mbarrier.arrive(filled.index(WHO), count=1)
            if n0 < m0:
                mbarrier.wait(stored.index(WHO), mirrored & 1)
                left_flat.store(value.permute((1, 0)))
                fence_async_shared()
                mbarrier.arrive(filled.index(WHO), count=1)
                mirrored += 1
        else:
            acc = multiply_tile(
                a_bufs, b_bufs, full, empty, free.index(WHO), turn, slot, k_tiles, count, WHO, True, True,
                False, BLOCK, RATIO * BLOCK, BLOCK_K, RATIO * BLOCK, STAGES, CONSUMERS, WARPS,
            )
            first, second = acc.reshape([BLOCK, 2, BLOCK]).permute((0, 2, 1)).split()
            _await_tile(c_full.index(WHO), free.index(WHO), step, polynomials, count)
            first = _finish(first, left_flat, step, a, b, c, m0, n0)
            second = _finish(second, right_flat, step, a, b, c, m0, n0 + BLOCK)
            first_value = first.to(dtype)
            second_value = second.to(dtype)
            left_flat.store(first_value)
            right_flat.store(second_value)
            fence_async_shared()
            mbarrier.arrive(filled.index(WHO), count=1)
            mbarrier.wait(stored.index(WHO), mirrored & 1)
            left_flat.store(first_value.permute((1, 0)))
            if n0 + BLOCK < m0:
                right_flat.store(second_value.permute((1, 0)))
            fence_async_shared()
            mbarrier.arrive(filled.index(WHO), count=1)
            mirrored += 1
        if step > 0:
            polynomials += 1
        mbarrier.arrive(work_free.index((count % 2) * CONSUMERS + WHO), count=1)
        count += 1
        ticket, slot = next_work(work, work_full, count, WHO, CONSUMERS)


@gluon.jit
def _store(
    tile_desc, tile_bufs, free, stored, filled, work, work_full, work_free, done_ptr, out_places,
    batches, items, tiles_m, tiles_per_matrix,
    WHO: gl.constexpr, RATIO: gl.constexpr, CONSUMERS: gl.constexpr,
):
    """Storing warp: send what its consumer has filled, as it is and mirrored; count the tile once it is in memory."""
    left_buf = tile_bufs.index(WHO)
    right_buf = tile_bufs.index(RATIO - 1 if RATIO > 1 else WHO)
    count = 0
    fills = 0
    ticket, _ = next_work(work, work_full, count, WHO, CONSUMERS)
    while ticket < items:
        stage, batch, m0, n0 = _place(ticket, batches, tiles_m, tiles_per_matrix, RATIO)
        out_at = _pair(out_places, stage) * batches + batch
        mbarrier.wait(filled.index(WHO), fills & 1)
        fills += 1
        tma.async_copy_shared_to_global(tile_desc, [out_at, m0, n0], left_buf)
        if RATIO > 1 and n0 < m0:
            tma.async_copy_shared_to_global(tile_desc, [out_at, m0, n0 + BLOCK], right_buf)
        if n0 < m0:
            tma.store_wait(0)
            mbarrier.arrive(stored.index(WHO), count=1)
            mbarrier.wait(filled.index(WHO), fills & 1)
            fills += 1
            tma.async_copy_shared_to_global(tile_desc, [out_at, n0, m0], left_buf)
            if RATIO > 1 and n0 + BLOCK < m0:
                tma.async_copy_shared_to_global(tile_desc, [out_at, n0 + BLOCK, m0], right_buf)
        _stores_arrived(count)
        mbarrier.arrive(free.index(WHO), count=1)
        # Only now: the parity of `free` tells whether tile c - 1 is stored where c - 2 is known to be, and tile c is
        # told of in the entry that c - 2 gives back.
        mbarrier.arrive(work_free.index((count % 2) * CONSUMERS + WHO), count=1)
        gl.atomic_add(done_ptr + batch, 1, sem="release", scope="gpu")
        count += 1
        ticket, _ = next_work(work, work_full, count, WHO, CONSUMERS)


# Not specialised: a fresh shape must not mean a fresh compilation.
@gluon.jit(do_not_specialize=[
    "a_places", "b_places", "out_places", "steps", "batches", "items", "tiles_m", "tiles_per_matrix",
    "m_steps", "n_steps",
])
def chain_kernel(
    x_desc, desc, tile_desc, queue_ptr, done_ptr, a_places, b_places, out_places, steps,
    a0, b0, c0, a1, b1, c1, a2, b2, c2,
    batches, items, tiles_m, tiles_per_matrix, m_steps, n_steps,
    HAS_X: gl.constexpr, RATIO: gl.constexpr, STAGES: gl.constexpr,
):
    """The stages of one chain; grid: at most as many programs as the card has multiprocessors.

    `desc` and `tile_desc` describe the workspace [P B, m, m] with boxes [1, 128, 64] and [1, 128, 128];
    `queue_ptr` (int32) and `done_ptr` (int32, [B]) hold zeros at the start. `a_places`, `b_places`, `out_places` and
    `steps` have two bits a stage, the first stage's lowest: places in the workspace, and 0 for a product, 1 + i for
    c_i A A^T + b_i A + a_i I. RATIO 1: two consumers take tiles of 128 x 128 in turn; 2: one takes 128 x 256.
    """
    CONSUMERS: gl.constexpr = 3 - RATIO
    WARPS: gl.constexpr = 4 * RATIO
    dtype: gl.constexpr = desc.dtype
    SWIZZLED: gl.constexpr = gl.NVMMASharedLayout(128, 16, rank=3)
    BARRIER: gl.constexpr = mbarrier.MBarrierLayout()
    a_bufs = gl.allocate_shared_memory(dtype, [STAGES, 1, BLOCK, BLOCK_K], SWIZZLED)
    b_bufs = gl.allocate_shared_memory(dtype, [STAGES, 1, RATIO * BLOCK, BLOCK_K], SWIZZLED)
    b_parts = b_bufs._reinterpret(dtype, [RATIO * STAGES, 1, BLOCK, BLOCK_K], SWIZZLED)
    tile_bufs = gl.allocate_shared_memory(dtype, [2, 1, BLOCK, BLOCK], SWIZZLED)
    full = gl.allocate_shared_memory(gl.int64, [STAGES, 1], BARRIER)
    empty = gl.allocate_shared_memory(gl.int64, [STAGES, 1], BARRIER)
    c_full = gl.allocate_shared_memory(gl.int64, [CONSUMERS, 1], BARRIER)
    free = gl.allocate_shared_memory(gl.int64, [CONSUMERS, 1], BARRIER)
    stored = gl.allocate_shared_memory(gl.int64, [CONSUMERS, 1], BARRIER)
    filled = gl.allocate_shared_memory(gl.int64, [CONSUMERS, 1], BARRIER)
    turn = gl.allocate_shared_memory(gl.int64, [CONSUMERS, 1], BARRIER)
    work = gl.allocate_shared_memory(gl.int32, [4 * CONSUMERS, 1], gl.SwizzledSharedLayout(1, 1, 1, [0]))
    work_full = gl.allocate_shared_memory(gl.int64, [2 * CONSUMERS, 1], BARRIER)
    work_free = gl.allocate_shared_memory(gl.int64, [2 * CONSUMERS, 1], BARRIER)
    for i in gl.static_range(STAGES):
        mbarrier.init(full.index(i), count=1)
        mbarrier.init(empty.index(i), count=1)
    for i in gl.static_range(CONSUMERS):
        mbarrier.init(c_full.index(i), count=1)
        mbarrier.init(free.index(i), count=1)
        mbarrier.init(stored.index(i), count=1)
        mbarrier.init(filled.index(i), count=1)
        mbarrier.init(turn.index(i), count=1)
    for i in gl.static_range(2 * CONSUMERS):
        mbarrier.init(work_full.index(i), count=1)
        mbarrier.init(work_free.index(i), count=2)  # the consumer's and its storing warp's
    if PDL:
        gdc_launch_dependents()
    if CONSUMERS == 1:
        gl.warp_specialize(
            [
                (_consume, (
                    dtype, a_bufs, b_bufs, tile_bufs, full, empty, c_full, free, stored, filled, turn,
                    work, work_full, work_free, steps, a0, b0, c0, a1, b1, c1, a2, b2, c2,
                    batches, items, tiles_m, tiles_per_matrix, m_steps, n_steps,
                    0, HAS_X, RATIO, STAGES, CONSUMERS, WARPS,
                )),
                (_produce, (
                    x_desc, desc, tile_desc, a_bufs, b_parts, tile_bufs, full, empty, c_full, free,
                    work, work_full, work_free, queue_ptr, done_ptr, a_places, b_places, steps,
                    batches, items, tiles_m, tiles_per_matrix, m_steps, n_steps, HAS_X, RATIO, STAGES, CONSUMERS,
                )),
                (_store, (
                    tile_desc, tile_bufs, free, stored, filled, work, work_full, work_free, done_ptr, out_places,
                    batches, items, tiles_m, tiles_per_matrix, 0, RATIO, CONSUMERS,
                )),
            ],
            [1, 1],
            [40, 40],
        )
    else:
        gl.warp_specialize(
            [
                (_consume, (
                    dtype, a_bufs, b_bufs, tile_bufs, full, empty, c_full, free, stored, filled, turn,
                    work, work_full, work_free, steps, a0, b0, c0, a1, b1, c1, a2, b2, c2,
                    batches, items, tiles_m, tiles_per_matrix, m_steps, n_steps,
                    0, HAS_X, RATIO, STAGES, CONSUMERS, WARPS,
                )),
                (_consume, (
                    dtype, a_bufs, b_bufs, tile_bufs, full, empty, c_full, free, stored, filled, turn,
                    work, work_full, work_free, steps, a0, b0, c0, a1, b1, c1, a2, b2, c2,
                    batches, items, tiles_m, tiles_per_matrix, m_steps, n_steps,
                    1, HAS_X, RATIO, STAGES, CONSUMERS, WARPS,
                )),
                (_produce, (
                    x_desc, desc, tile_desc, a_bufs, b_parts, tile_bufs, full, empty, c_full, free,
                    work, work_full, work_free, queue_ptr, done_ptr, a_places, b_places, steps,
                    batches, items, tiles_m, tiles_per_matrix, m_steps, n_steps, HAS_X, RATIO, STAGES, CONSUMERS,
                )),
                (_store, (
                    tile_desc, tile_bufs, free, stored, filled, work, work_full, work_free, done_ptr, out_places,
                    batches, items, tiles_m, tiles_per_matrix, 0, RATIO, CONSUMERS,
                )),
                (_store, (
                    tile_desc, tile_bufs, free, stored, filled, work, work_full, work_free, done_ptr, out_places,
                    batches, items, tiles_m, tiles_per_matrix, 1, RATIO, CONSUMERS,
                )),
            ],
            [WARPS, 1, 1, 1],
            [232, 40, 40, 40],
        )
