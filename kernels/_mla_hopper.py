"""The many-heads form of `mla_decode`'s split stage for Hopper GPUs, in Gluon: warps with roles of their own.

One program handles BLOCK_H query rows of one sequence over one split, as in `_mla_split`. Its warps have three roles:

    one warp                 copies tiles of BLOCK_N rows into shared memory with the bulk copy engine
    two groups of 4 warps    each computes all scores of a tile and the product with its half of the value columns

The output of 64 rows by 512 columns in fp32 fills the registers of two groups. That both compute the same scores costs
half as much again in matrix work, but the groups never wait for each other: while one is in its softmax, the other has
the matrix units. `full` barriers hand a tile to the groups, `empty` barriers hand its memory back to the copying warp.
"""

# Kernel arguments are traced, not typed.
# mypy: disable-error-code="no-untyped-def, untyped-decorator"

import torch
from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import (
    fence_async_shared,
    mbarrier,
    tma,
    warpgroup_mma,
    warpgroup_mma_wait,
)
from triton.experimental.gluon.nvidia.hopper import TensorDescriptor

BLOCK_H = 64
BLOCK_N = 64
V_DIM = 512
R_DIM = 64
_STAGES = 2
# Triton 3.6 has the older name.
_bulk_load = tma.async_load if hasattr(tma, "async_load") else tma.async_copy_global_to_shared


@gluon.jit
def _copy_tiles(
    kv_v, kv_r, tiles_v, tiles_r, full, empty, table_ptr, begin, num_tiles,
    PAGE_TOKENS: gl.constexpr, PAGE_ROWS: gl.constexpr, STAGES: gl.constexpr, BLOCK_N: gl.constexpr,
    V_DIM: gl.constexpr, TILE_BYTES: gl.constexpr,
):  # fmt: skip
    for i in range(num_tiles):
        start = begin + i * BLOCK_N
        page = gl.load(table_ptr + start // PAGE_TOKENS).to(gl.int32)
        pool_row = page * PAGE_ROWS + start % PAGE_TOKENS
        slot = i % STAGES
        mbarrier.wait(empty.index(slot), (i // STAGES & 1) ^ 1)
        ready = full.index(slot)
        mbarrier.expect(ready, TILE_BYTES)
        _bulk_load(kv_v, [pool_row, 0], ready, tiles_v.index(slot))
        _bulk_load(kv_r, [pool_row, V_DIM], ready, tiles_r.index(slot))


@gluon.jit
def _zero_past_end(values, num_rows, BLOCK_N: gl.constexpr, COLS: gl.constexpr):
    """Rows past the end may hold NaN, and 0 * NaN would reach the output."""
    layout: gl.constexpr = gl.BlockedLayout([1, 8], [4, 8], [4, 1], [1, 0])
    row = gl.arange(0, BLOCK_N, gl.SliceLayout(1, layout))
    for col in gl.static_range(0, COLS, 64):
        part = values.slice(col, 64, 1)
        held = part.load(layout)
        part.store(gl.where((row < num_rows)[:, None], held, gl.zeros_like(held)))
    fence_async_shared()


@gluon.jit
def _attend_tile(
    i, start, q_v, q_r, tiles_v, tiles_r, full, empty, peak, total, acc, lens, seq_len, scale_log2,
    MASKED: gl.constexpr, HALF: gl.constexpr, STAGES: gl.constexpr, BLOCK_H: gl.constexpr, BLOCK_N: gl.constexpr,
    HALF_V: gl.constexpr, S_LAYOUT: gl.constexpr, O_LAYOUT: gl.constexpr,
):  # fmt: skip
    slot = i % STAGES
    tile_v, tile_r = tiles_v.index(slot), tiles_r.index(slot)
    values = tile_v.slice(HALF * HALF_V, HALF_V, 1)
    mbarrier.wait(full.index(slot), i // STAGES & 1)
    scores = gl.zeros([BLOCK_H, BLOCK_N], gl.float32, S_LAYOUT)
    scores = warpgroup_mma(q_v, tile_v.permute((1, 0)), scores, use_acc=False, is_async=True)
    scores = warpgroup_mma(q_r, tile_r.permute((1, 0)), scores, is_async=True)
    scores = warpgroup_mma_wait(0, deps=[scores])
    if MASKED:
        kv_row = start + gl.arange(0, BLOCK_N, gl.SliceLayout(0, S_LAYOUT))
        scores = gl.where(kv_row[None, :] < lens[:, None], scores, float("-inf"))
        _zero_past_end(values, seq_len - start, BLOCK_N, HALF_V)
    new_peak = gl.maximum(peak, gl.max(scores, 1))
    # A row that has seen nothing yet has peak -inf; -inf - -inf would be NaN.
    shift = gl.where(new_peak == float("-inf"), 0.0, new_peak * scale_log2)
    probs = gl.exp2(scores * scale_log2 - shift[:, None])
    decay = gl.exp2(peak * scale_log2 - shift)
    total = total * decay + gl.sum(probs, 1)
    acc = acc * gl.convert_layout(decay, gl.SliceLayout(1, O_LAYOUT))[:, None]
    probs = gl.convert_layout(probs.to(tiles_v.dtype), gl.DotOperandLayout(0, O_LAYOUT, 2))
    acc = warpgroup_mma(probs, values, acc, is_async=True)
    acc = warpgroup_mma_wait(0, deps=[acc])
    mbarrier.arrive(empty.index(slot))
    return new_peak, total, acc


@gluon.jit
def _attend_half(
    q_v, q_r, tiles_v, tiles_r, full, empty, lens_ptr, out_ptr, lse_ptr, lens_stride_t,
    row_begin, num_rows, out_begin, begin, num_tiles, seq_len, table_rows, scale_log2,
    HALF: gl.constexpr, NUM_HEADS: gl.constexpr, STAGES: gl.constexpr, BLOCK_H: gl.constexpr, BLOCK_N: gl.constexpr,
    V_DIM: gl.constexpr,
):  # fmt: skip
    HALF_V: gl.constexpr = V_DIM // 2
    S_LAYOUT: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, BLOCK_N, 16])
    O_LAYOUT: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, HALF_V, 16])
    row = row_begin + gl.arange(0, BLOCK_H, gl.SliceLayout(1, S_LAYOUT))
    row_ok = row < num_rows
    lens = gl.load(lens_ptr + row // NUM_HEADS * lens_stride_t, mask=row_ok, other=0)
    too_long = lens > table_rows
    lens = gl.minimum(lens, table_rows).to(gl.int32)
    # Tiles before the shortest length need no mask.
    shortest = gl.min(gl.where(row_ok, lens, table_rows), 0)
    num_whole = gl.minimum(gl.maximum(shortest - begin, 0) // BLOCK_N, num_tiles)
    peak = gl.full([BLOCK_H], float("-inf"), gl.float32, gl.SliceLayout(1, S_LAYOUT))
    total = gl.zeros([BLOCK_H], gl.float32, gl.SliceLayout(1, S_LAYOUT))
    acc = gl.zeros([BLOCK_H, HALF_V], gl.float32, O_LAYOUT)
    for i in range(num_whole):
        peak, total, acc = _attend_tile(
            i, begin + i * BLOCK_N, q_v, q_r, tiles_v, tiles_r, full, empty, peak, total, acc, lens, seq_len,
            scale_log2, False, HALF, STAGES, BLOCK_H, BLOCK_N, HALF_V, S_LAYOUT, O_LAYOUT,
        )  # fmt: skip
    for i in range(num_whole, num_tiles):
        peak, total, acc = _attend_tile(
            i, begin + i * BLOCK_N, q_v, q_r, tiles_v, tiles_r, full, empty, peak, total, acc, lens, seq_len,
            scale_log2, True, HALF, STAGES, BLOCK_H, BLOCK_N, HALF_V, S_LAYOUT, O_LAYOUT,
        )  # fmt: skip
    # A length beyond the page table cannot be served; NaN shows it where a cut result would hide it.
    total = gl.where(too_long, float("nan"), total)
    if HALF == 0:
        lse = (peak * scale_log2 + gl.log2(total)) * 0.6931471805599453
        gl.store(lse_ptr + out_begin + row, lse, mask=row_ok)
    inverse = gl.convert_layout(1.0 / gl.where(total == 0.0, 1.0, total), gl.SliceLayout(1, O_LAYOUT))
    out_row = row_begin + gl.arange(0, BLOCK_H, gl.SliceLayout(1, O_LAYOUT))
    col = HALF * HALF_V + gl.arange(0, HALF_V, gl.SliceLayout(0, O_LAYOUT))
    out_ptrs = out_ptr + (out_begin + out_row)[:, None] * V_DIM + col[None, :]
    gl.store(out_ptrs, (acc * inverse[:, None]).to(out_ptr.dtype.element_ty), mask=(out_row < num_rows)[:, None])


@gluon.jit
def split_kernel(
    kv_v, kv_r, q_ptr, table_ptr, lens_ptr, out_ptr, lse_ptr,
    q_stride_b, q_stride_t, q_stride_h, table_stride, lens_stride_b, lens_stride_t,
    scale_log2, num_rows, num_batch_rows, num_splits, table_rows,
    NUM_HEADS: gl.constexpr, PAGE_TOKENS: gl.constexpr, PAGE_ROWS: gl.constexpr, STAGES: gl.constexpr,
    BLOCK_H: gl.constexpr, BLOCK_N: gl.constexpr, V_DIM: gl.constexpr, R_DIM: gl.constexpr,
):  # fmt: skip
    DTYPE: gl.constexpr = q_ptr.dtype.element_ty
    num_blocks_h = gl.cdiv(num_rows, BLOCK_H)
    pid = gl.program_id(0)
    # Row blocks of one split are neighbours: they read the same KV rows, so all but the first hit the L2.
    row_begin = pid % num_blocks_h * BLOCK_H
    split = pid // num_blocks_h % num_splits
    batch = (pid // num_blocks_h // num_splits).to(gl.int64)
    lens_ptr += batch * lens_stride_b

    q_layout: gl.constexpr = gl.BlockedLayout([1, 8], [4, 8], [4, 1], [1, 0])
    row = row_begin + gl.arange(0, BLOCK_H, gl.SliceLayout(1, q_layout))
    row_ok = row < num_rows
    lens = gl.load(lens_ptr + row // NUM_HEADS * lens_stride_t, mask=row_ok, other=0)
    seq_len = gl.minimum(gl.max(lens, 0), table_rows).to(gl.int32)
    split_rows = gl.cdiv(gl.cdiv(seq_len, num_splits), BLOCK_N) * BLOCK_N
    begin = split * split_rows
    num_tiles = gl.cdiv(gl.maximum(gl.minimum(split_rows, seq_len - begin), 0), BLOCK_N)

    position, head = (row // NUM_HEADS).to(gl.int64), (row % NUM_HEADS).to(gl.int64)
    q_rows = (q_ptr + batch * q_stride_b + position * q_stride_t + head * q_stride_h)[:, None]
    smem: gl.constexpr = gl.NVMMASharedLayout(128, 16, 2)
    q_v = gl.allocate_shared_memory(DTYPE, [BLOCK_H, V_DIM], smem)
    for begin_col in gl.static_range(0, V_DIM, 64):
        col = begin_col + gl.arange(0, 64, gl.SliceLayout(0, q_layout))
        q_v.slice(begin_col, 64, 1).store(gl.load(q_rows + col[None, :], mask=row_ok[:, None], other=0.0))
    col_r = V_DIM + gl.arange(0, R_DIM, gl.SliceLayout(0, q_layout))
    q_r = gl.allocate_shared_memory(
        DTYPE, [BLOCK_H, R_DIM], smem, gl.load(q_rows + col_r[None, :], mask=row_ok[:, None], other=0.0)
    )
    tiles_v = gl.allocate_shared_memory(DTYPE, [STAGES, BLOCK_N, V_DIM], smem)
    tiles_r = gl.allocate_shared_memory(DTYPE, [STAGES, BLOCK_N, R_DIM], smem)
    full = gl.allocate_shared_memory(gl.int64, [STAGES, 1], mbarrier.MBarrierLayout())
    empty = gl.allocate_shared_memory(gl.int64, [STAGES, 1], mbarrier.MBarrierLayout())
    for slot in gl.static_range(STAGES):
        mbarrier.init(full.index(slot), count=1)
        mbarrier.init(empty.index(slot), count=2)
    fence_async_shared()
    out_begin = split.to(gl.int64) * num_batch_rows + batch * num_rows
    TILE_BYTES: gl.constexpr = BLOCK_N * (V_DIM + R_DIM) * 2
    gl.warp_specialize(
        [
            (_attend_half, (
                q_v, q_r, tiles_v, tiles_r, full, empty, lens_ptr, out_ptr, lse_ptr, lens_stride_t,
                row_begin, num_rows, out_begin, begin, num_tiles, seq_len, table_rows, scale_log2,
                0, NUM_HEADS, STAGES, BLOCK_H, BLOCK_N, V_DIM,
            )),
            (_attend_half, (
                q_v, q_r, tiles_v, tiles_r, full, empty, lens_ptr, out_ptr, lse_ptr, lens_stride_t,
                row_begin, num_rows, out_begin, begin, num_tiles, seq_len, table_rows, scale_log2,
                1, NUM_HEADS, STAGES, BLOCK_H, BLOCK_N, V_DIM,
            )),
            (_copy_tiles, (
                kv_v, kv_r, tiles_v, tiles_r, full, empty, table_ptr + batch * table_stride, begin, num_tiles,
                PAGE_TOKENS, PAGE_ROWS, STAGES, BLOCK_N, V_DIM, TILE_BYTES,
            )),
        ],
        [4, 1],
        [240, 24],
    )  # fmt: skip


def fits(q: torch.Tensor, kv_pages: torch.Tensor, v_head_dim: int) -> bool:
    """Whether this form can serve the call: a Hopper GPU, rows of 512 + 64 16-bit values, tiles that end with pages.

    The pool must be a grid of equally spaced rows for the bulk copy engine, fewer than 2^31 of them.
    """
    _, page_tokens, dim = kv_pages.shape
    page_stride, row_stride, _ = kv_pages.stride()
    return (
        q.is_cuda
        and torch.cuda.get_device_capability(q.device)[0] == 9
        and q.dtype in (torch.bfloat16, torch.float16)
        and (v_head_dim, dim) == (V_DIM, V_DIM + R_DIM)
        and page_tokens % BLOCK_N == 0
        and row_stride >= dim
        and row_stride % 8 == 0
        and page_stride % row_stride == 0
        and kv_pages.data_ptr() % 16 == 0
        and _num_pool_rows(kv_pages) < 2**31
    )


def _num_pool_rows(kv_pages: torch.Tensor) -> int:
    num_pages, page_tokens, _ = kv_pages.shape
    return (num_pages - 1) * (kv_pages.stride(0) // kv_pages.stride(1)) + page_tokens


def launch_split(
    q: torch.Tensor,
    kv_pages: torch.Tensor,
    page_table: torch.Tensor,
    row_lens: torch.Tensor,
    scale_log2: float,
    parts: torch.Tensor,
    part_lses: torch.Tensor,
    num_splits: int,
) -> None:
    """Fills `parts [num_splits, B * q_len * H, V_DIM]` and base-e `part_lses [num_splits, B * q_len * H]`."""
    batch, q_len, heads, dim = q.shape
    page_tokens = kv_pages.shape[1]
    num_rows = q_len * heads
    row_stride = kv_pages.stride(1)
    layout = gl.NVMMASharedLayout(128, 16, 2)
    pool = [_num_pool_rows(kv_pages), dim]
    split_kernel[(batch * -(-num_rows // BLOCK_H) * num_splits,)](
        TensorDescriptor(kv_pages, pool, [row_stride, 1], [BLOCK_N, V_DIM], layout),
        TensorDescriptor(kv_pages, pool, [row_stride, 1], [BLOCK_N, R_DIM], layout),
        q, page_table, row_lens, parts, part_lses,
        q.stride(0), q.stride(1), q.stride(2), page_table.stride(0), row_lens.stride(0), row_lens.stride(1),
        scale_log2, num_rows, batch * num_rows, num_splits, page_table.shape[1] * page_tokens,
        NUM_HEADS=heads, PAGE_TOKENS=page_tokens, PAGE_ROWS=kv_pages.stride(0) // row_stride, STAGES=_STAGES,
        BLOCK_H=BLOCK_H, BLOCK_N=BLOCK_N, V_DIM=V_DIM, R_DIM=R_DIM, num_warps=4,
    )  # fmt: skip
