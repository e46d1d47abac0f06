"""The Triton side of `mla_decode`: attention over a part of a sequence's rows, then a merge of the parts.

Query rows are (position, head) pairs, position-major: row r is position r // H, head r % H. One program handles BLOCK_H
rows of one sequence over one split of its KV rows, tile by tile with a running softmax. A KV tile is read once and
serves as keys (all columns) and as values (the first V_DIM columns).
"""

# Kernel arguments are traced, not typed.
# mypy: disable-error-code="no-untyped-def, untyped-decorator"

import functools
from dataclasses import dataclass
from types import ModuleType

import torch
import triton
import triton.language as tl

_LOG2_E = 1.4426950408889634
_MIN_ROWS_PER_SPLIT = 128
_START_ROWS = 128
_MAX_SPLITS = 256


@triton.jit
def _split_kernel(
    q_ptr, kv_ptr, table_ptr, lens_ptr, out_ptr, lse_ptr,
    q_stride_b, q_stride_t, q_stride_h, kv_stride_page, kv_stride_row, table_stride, lens_stride_b, lens_stride_t,
    scale_log2, num_rows, num_batch_rows, num_splits, table_rows,
    NUM_HEADS: tl.constexpr, V_DIM: tl.constexpr, R_DIM: tl.constexpr, PAGE_TOKENS: tl.constexpr,
    BLOCK_H: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_V: tl.constexpr, BLOCK_R: tl.constexpr,
    TILE_IN_PAGE: tl.constexpr, STAGES: tl.constexpr,
):  # fmt: skip
    num_blocks_h = tl.cdiv(num_rows, BLOCK_H)
    pid = tl.program_id(0)
    # Row blocks of one split are neighbours: they read the same KV rows, so all but the first hit the L2.
    split = ((pid // num_blocks_h) % num_splits).to(tl.int64)
    batch = (pid // num_blocks_h // num_splits).to(tl.int64)
    row = (pid % num_blocks_h) * BLOCK_H + tl.arange(0, BLOCK_H)
    row_ok = row < num_rows
    position, head = row // NUM_HEADS, row % NUM_HEADS
    lens = tl.load(lens_ptr + batch * lens_stride_b + position * lens_stride_t, mask=row_ok, other=0)
    too_long = lens > table_rows
    lens = tl.minimum(lens, table_rows).to(tl.int32)
    seq_len = tl.max(lens, 0)
    split_rows = tl.cdiv(tl.cdiv(seq_len, num_splits), BLOCK_N) * BLOCK_N
    begin = split.to(tl.int32) * split_rows
    end = tl.minimum(begin + split_rows, seq_len)

    col_v, col_r = tl.arange(0, BLOCK_V), tl.arange(0, BLOCK_R)
    q_row = q_ptr + batch * q_stride_b + position.to(tl.int64) * q_stride_t + head.to(tl.int64) * q_stride_h
    q_v = tl.load(q_row[:, None] + col_v[None, :], mask=row_ok[:, None] & (col_v < V_DIM)[None, :], other=0.0)
    q_r = tl.load(q_row[:, None] + V_DIM + col_r[None, :], mask=row_ok[:, None] & (col_r < R_DIM)[None, :], other=0.0)
    peak = tl.full([BLOCK_H], float("-inf"), tl.float32)
    total = tl.zeros([BLOCK_H], tl.float32)
    acc = tl.zeros([BLOCK_H, BLOCK_V], tl.float32)
    for start in tl.range(begin, end, BLOCK_N, num_stages=STAGES):
        kv_row = start + tl.arange(0, BLOCK_N)
        kv_ok = kv_row < seq_len
        if TILE_IN_PAGE:
            page = tl.load(table_ptr + batch * table_stride + start // PAGE_TOKENS).to(tl.int64)
        else:
            page = tl.load(table_ptr + batch * table_stride + kv_row // PAGE_TOKENS, mask=kv_ok, other=0).to(tl.int64)
        # Where pages fit into tiles, the row in the page is the same for every tile.
        in_page = (tl.arange(0, BLOCK_N) if BLOCK_N % PAGE_TOKENS == 0 else kv_row) % PAGE_TOKENS
        kv = kv_ptr + page * kv_stride_page + in_page.to(tl.int64) * kv_stride_row
        # Rows past the end are never read: what lies there may be NaN, and 0 * NaN would reach the output.
        k_v = tl.load(kv[:, None] + col_v[None, :], mask=kv_ok[:, None] & (col_v < V_DIM)[None, :], other=0.0)
        k_r = tl.load(kv[:, None] + V_DIM + col_r[None, :], mask=kv_ok[:, None] & (col_r < R_DIM)[None, :], other=0.0)
        scores = tl.dot(q_v, tl.trans(k_v), input_precision="ieee")
        scores = tl.dot(q_r, tl.trans(k_r), scores, input_precision="ieee")
        scores = tl.where(kv_row[None, :] < lens[:, None], scores, float("-inf"))
        new_peak = tl.maximum(peak, tl.max(scores, 1))
        # A row that has seen nothing yet has peak -inf; -inf - -inf would be NaN.
        shift = tl.where(new_peak == float("-inf"), 0.0, new_peak * scale_log2)
        probs = tl.math.exp2(scores * scale_log2 - shift[:, None])
        decay = tl.math.exp2(peak * scale_log2 - shift)
        total = total * decay + tl.sum(probs, 1)
        acc = tl.dot(probs.to(k_v.dtype), k_v, acc * decay[:, None], input_precision="ieee")
        peak = new_peak
    # A length beyond the page table cannot be served; NaN shows it where a cut result would hide it.
    total = tl.where(too_long, float("nan"), total)
    acc = acc / tl.where(total == 0.0, 1.0, total)[:, None]
    lse = (peak * scale_log2 + tl.math.log2(total)) * 0.6931471805599453
    out_row = split * num_batch_rows + batch * num_rows + row
    tl.store(lse_ptr + out_row, lse, mask=row_ok)
    out_ptrs = out_ptr + out_row[:, None] * V_DIM + col_v[None, :]
    tl.store(out_ptrs, acc.to(out_ptr.dtype.element_ty), mask=row_ok[:, None] & (col_v < V_DIM)[None, :])


@triton.jit
def _merge_kernel(
    parts_ptr, part_lses_ptr, out_ptr, lse_ptr, num_batch_rows, num_splits,
    V_DIM: tl.constexpr, BLOCK_V: tl.constexpr, BLOCK_S: tl.constexpr, STEP_S: tl.constexpr,
):  # fmt: skip
    row = tl.program_id(0).to(tl.int64)
    all_splits = tl.arange(0, BLOCK_S)
    lse_ptrs = part_lses_ptr + all_splits.to(tl.int64) * num_batch_rows + row
    lses = tl.load(lse_ptrs, mask=all_splits < num_splits, other=float("-inf"))
    peak = tl.max(lses, 0)
    shift = tl.where(peak == float("-inf"), 0.0, peak)
    total = tl.sum(tl.exp(lses - shift), 0)
    col = tl.program_id(1) * BLOCK_V + tl.arange(0, BLOCK_V)
    acc = tl.zeros([BLOCK_V], tl.float32)
    for start in range(0, num_splits, STEP_S):
        split = start + tl.arange(0, STEP_S)
        part_row = split.to(tl.int64) * num_batch_rows + row
        part_lse = tl.load(part_lses_ptr + part_row, mask=split < num_splits, other=float("-inf"))
        weight = tl.exp(part_lse - shift)
        # Empty parts are left out by selection; NaN (a length beyond the page table) passes through.
        used = (part_lse != float("-inf"))[:, None] & (col < V_DIM)[None, :]
        part = tl.load(parts_ptr + part_row[:, None] * V_DIM + col[None, :], mask=used, other=0.0)
        acc += tl.sum(part * weight[:, None], 0)
    acc = acc / tl.where(total == 0.0, 1.0, total)
    tl.store(out_ptr + row * V_DIM + col, acc.to(out_ptr.dtype.element_ty), mask=col < V_DIM)
    tl.store(lse_ptr + row, shift + tl.log(total), mask=tl.program_id(1) == 0)


@dataclass(frozen=True, slots=True)
class _Tiles:
    block_h: int
    block_n: int
    stages: int
    num_warps: int
    programs_per_processor: int  # that fit at a time, by shared memory and by `max_registers`
    max_registers: int | None = None


# One group of programs copies while the other computes, so two a processor beat deeper pipelines (measured on an H200).
_TILES_FP32 = _Tiles(block_h=16, block_n=16, stages=1, num_warps=8, programs_per_processor=2)
_TILES_16 = _Tiles(block_h=16, block_n=64, stages=2, num_warps=8, programs_per_processor=2, max_registers=128)
_TILES_32 = _Tiles(block_h=32, block_n=64, stages=2, num_warps=4, programs_per_processor=2)
_TILES_64 = _Tiles(block_h=64, block_n=64, stages=2, num_warps=8, programs_per_processor=1)


def _choose_tiles(dtype: torch.dtype, num_rows: int) -> _Tiles:
    if dtype == torch.float32:
        return _TILES_FP32
    return _TILES_16 if num_rows <= 16 else _TILES_32 if num_rows <= 32 else _TILES_64


@functools.lru_cache(maxsize=1024)
def choose_num_splits(num_blocks: int, block_h: int, table_rows: int, num_slots: int) -> int:
    """Splits per sequence for `num_blocks` blocks of `block_h` query rows on a GPU that runs `num_slots` at a time.

    The split that minimises (waves of programs) x (KV rows a program reads + what its start and its part of the
    output cost, in rows). Chosen from shapes that the host knows: lengths stay on the device.
    """
    fixed_rows = _START_ROWS + 3 * block_h

    def cost(num_splits: int) -> float:
        waves = -(-num_blocks * num_splits // num_slots)
        return waves * (table_rows / num_splits + fixed_rows)

    return min(range(1, max(1, min(table_rows // _MIN_ROWS_PER_SPLIT, _MAX_SPLITS)) + 1), key=cost)


def attend(
    q: torch.Tensor,
    kv_pages: torch.Tensor,
    page_table: torch.Tensor,
    row_lens: torch.Tensor,
    scale: float,
    v_head_dim: int,
    num_splits: int | None = None,
) -> tuple[torch.Tensor, torch.Tensor]:
    """`q [B, q_len, H, D]`, `row_lens [B, q_len]` to `out [B, q_len, H, v_head_dim]`, `lse [B, q_len, H]`.

    Arguments are those of `mla_decode`, already checked. `num_splits` overrides the choice (tests, tuning).
    """
    batch, q_len, heads, _ = q.shape
    num_rows, num_batch_rows = q_len * heads, batch * q_len * heads
    page_tokens = kv_pages.shape[1]
    tiles = _choose_tiles(q.dtype, num_rows)
    # More than 16 rows are matrix-bound, and there the form with warps of roles is the faster one.
    hopper = _hopper() if q.is_cuda and num_rows > 16 else None
    if hopper is not None and not hopper.fits(q, kv_pages, v_head_dim):
        hopper = None
    block_h, programs = (hopper.BLOCK_H, 1) if hopper else (tiles.block_h, tiles.programs_per_processor)
    if num_splits is None:
        num_blocks = batch * triton.cdiv(num_rows, block_h)
        table_rows = page_table.shape[1] * page_tokens
        num_splits = choose_num_splits(num_blocks, block_h, table_rows, _num_processors(q.device) * programs)
    out = q.new_empty((batch, q_len, heads, v_head_dim))
    lse = q.new_empty((batch, q_len, heads), dtype=torch.float32)
    parts, part_lses = out, lse
    if num_splits > 1:
        parts = q.new_empty((num_splits, num_batch_rows, v_head_dim), dtype=torch.float32)
        part_lses = q.new_empty((num_splits, num_batch_rows), dtype=torch.float32)
    if hopper:
        hopper.launch_split(q, kv_pages, page_table, row_lens, scale * _LOG2_E, parts, part_lses, num_splits)
    else:
        _launch_split(q, kv_pages, page_table, row_lens, scale * _LOG2_E, parts, part_lses, num_splits, tiles)
    if num_splits > 1:
        block_c = min(triton.next_power_of_2(v_head_dim), 128)
        _merge_kernel[(num_batch_rows, triton.cdiv(v_head_dim, block_c))](
            parts, part_lses, out, lse, num_batch_rows, num_splits,
            V_DIM=v_head_dim, BLOCK_V=block_c, BLOCK_S=triton.next_power_of_2(num_splits),
            STEP_S=min(triton.next_power_of_2(num_splits), 32), num_warps=4,
        )  # fmt: skip
    return out, lse


def _num_processors(device: torch.device) -> int:
    if device.type == "cuda":
        return torch.cuda.get_device_properties(device).multi_processor_count
    return 4  # the interpreter runs programs one after another; a few splits exercise the merge


def _hopper() -> ModuleType:
    # Here, because Gluon is for GPUs only: the interpreter never gets here.
    from kvxfer.kernels import _mla_hopper

    return _mla_hopper


def _launch_split(
    q: torch.Tensor,
    kv_pages: torch.Tensor,
    page_table: torch.Tensor,
    row_lens: torch.Tensor,
    scale_log2: float,
    parts: torch.Tensor,
    part_lses: torch.Tensor,
    num_splits: int,
    tiles: _Tiles,
) -> None:
    batch, q_len, heads, dim = q.shape
    page_tokens, v_head_dim = kv_pages.shape[1], parts.shape[-1]
    num_rows = q_len * heads
    num_blocks = batch * triton.cdiv(num_rows, tiles.block_h)
    _split_kernel[(num_blocks * num_splits,)](
        q, kv_pages, page_table, row_lens, parts, part_lses,
        q.stride(0), q.stride(1), q.stride(2), kv_pages.stride(0), kv_pages.stride(1), page_table.stride(0),
        row_lens.stride(0), row_lens.stride(1),
        scale_log2, num_rows, batch * num_rows, num_splits, page_table.shape[1] * page_tokens,
        NUM_HEADS=heads, V_DIM=v_head_dim, R_DIM=dim - v_head_dim, PAGE_TOKENS=page_tokens,
        BLOCK_H=tiles.block_h, BLOCK_N=tiles.block_n, BLOCK_V=max(16, triton.next_power_of_2(v_head_dim)),
        BLOCK_R=max(16, triton.next_power_of_2(dim - v_head_dim)),
        TILE_IN_PAGE=page_tokens % tiles.block_n == 0, STAGES=tiles.stages,
        num_warps=tiles.num_warps, maxnreg=tiles.max_registers,
    )  # fmt: skip
