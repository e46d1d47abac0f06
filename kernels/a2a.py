"""Packing partial attention for one all-to-all, and merging what the other ranks sent into the merged output."""
# mypy: no-check-untyped-defs, disable-error-code="no-untyped-def, untyped-decorator"

from typing import Literal, overload

import torch

from kvxfer.kernels import reference
from kvxfer.kernels._contract import (
    FP8_DTYPES,
    INT_DTYPES,
    LseBase,
    check_apart,
    check_lse_base,
    check_tensor,
    check_written,
)
from kvxfer.kernels._launch import (
    ceil_div,
    jit,
    next_power_of_2,
    runs_triton,
    tl,
    widest_word_bytes,
)
from kvxfer.kernels.a2a_layout import A2ALayout
from kvxfer.kernels.combine import check_lse_out, launch_combine

# Rows of a batch, times heads, from which on the programs of a launch are many, and from which on the data exceeds
# the L2. Between the two, whole rows to a warp were measured to be fastest; elsewhere one load to a thread.
_SEVERAL_ROWS = 8192
_MANY_ROWS = 32768
_LSES_PER_PROGRAM = 512


@jit
def _places(rows, HEADS: tl.constexpr, HEADS_PER_RANK: tl.constexpr):
    """Batch row, head, peer and row in the peer's slot of `rows`, counted as they lie in `out`; all but head int64."""
    b = (rows // HEADS).to(tl.int64)
    head = rows % HEADS
    return b, head.to(tl.int64), (head // HEADS_PER_RANK).to(tl.int64), b * HEADS_PER_RANK + head % HEADS_PER_RANK


@jit
def _move_lses(
    first_row, lse, send, row_lens, num_rows, slot_bytes, lse_offset_bytes, lse_stride_b, lse_stride_h, lens_stride,
    HEADS: tl.constexpr, HEADS_PER_RANK: tl.constexpr, ROWS: tl.constexpr, HAS_LENS: tl.constexpr,
):  # fmt: skip
    rows = first_row + tl.arange(0, ROWS)
    live = rows < num_rows
    b, head, peer, slot_row = _places(rows, HEADS, HEADS_PER_RANK)
    values = tl.load(lse + b * lse_stride_b + head * lse_stride_h, mask=live)
    if HAS_LENS:
        row_len = tl.load(row_lens + b * lens_stride, mask=live, other=0)
        values = tl.where(row_len > 0, values, float("-inf"))
    slots = (send + peer * slot_bytes + lse_offset_bytes).to(tl.pointer_type(tl.float32), bitcast=True)
    tl.store(slots + slot_row, values, mask=live)


@jit
def _move_rows(
    first_row, out, send, row_lens, num_rows, slot_bytes, out_stride_b, out_stride_h, out_stride_d, lens_stride,
    HEADS: tl.constexpr, HEADS_PER_RANK: tl.constexpr, ROW_WORDS: tl.constexpr, WORD: tl.constexpr, ROWS: tl.constexpr,
    BLOCK: tl.constexpr, EVEN: tl.constexpr, HAS_LENS: tl.constexpr,
):  # fmt: skip
    # A word of 16 bytes is two lanes of 8 that lie side by side: the compiler joins them into one access.
    LANE: tl.constexpr = 8 if WORD == 16 else WORD
    LANES: tl.constexpr = WORD // LANE
    if LANE == 8:
        lane_type = tl.int64
    elif LANE == 4:
        lane_type = tl.int32
    elif LANE == 2:
        lane_type = tl.int16
    else:
        lane_type = tl.int8
    rows = first_row + tl.arange(0, ROWS)
    live = rows < num_rows
    b, head, peer, slot_row = _places(rows, HEADS, HEADS_PER_RANK)
    # Evenly spaced rows are found without a division, so that the load goes out before the rest is worked out.
    from_words = (rows.to(tl.int64) * out_stride_h if EVEN else b * out_stride_b + head * out_stride_h) * LANES
    # In whole words, then in lanes: the product shows the compiler that every row begins on a word.
    to_words = (peer * (slot_bytes // WORD) + slot_row * ROW_WORDS) * LANES
    src = tl.multiple_of(out.to(tl.pointer_type(lane_type), bitcast=True), WORD)
    dst = tl.multiple_of(send.to(tl.pointer_type(lane_type), bitcast=True), WORD)
    for first in tl.static_range(0, ROW_WORDS * LANES, BLOCK):
        lanes = first + tl.arange(0, BLOCK)
        inside = live[:, None] & (lanes < ROW_WORDS * LANES)[None, :]
        values = tl.load(
            src + (from_words[:, None] + (lanes.to(tl.int64) * out_stride_d)[None, :]), mask=inside, other=0
        )
        if HAS_LENS:
            # Selected after the load, not masked before it: two loads in a chain cost more than rows read in vain.
            row_len = tl.load(row_lens + b * lens_stride, mask=live, other=0)
            values = tl.where((row_len > 0)[:, None], values, 0)
        tl.store(dst + (to_words[:, None] + lanes[None, :]), values, mask=inside)


@jit(do_not_specialize=["num_rows", "num_lse_programs", "slot_bytes", "lse_offset_bytes"])
def _pack_kernel(
    out, lse, send, row_lens, num_rows, num_lse_programs, slot_bytes, lse_offset_bytes, out_stride_b, out_stride_h,
    out_stride_d, lse_stride_b, lse_stride_h, lens_stride,
    HEADS: tl.constexpr, HEADS_PER_RANK: tl.constexpr, ROW_WORDS: tl.constexpr, WORD: tl.constexpr, ROWS: tl.constexpr,
    BLOCK: tl.constexpr, EVEN: tl.constexpr, LSES: tl.constexpr, HAS_LENS: tl.constexpr,
):  # fmt: skip
    """The first programs move `LSES` LSEs each, the others `ROWS` rows of payload; strides of `out` are in words."""
    program = tl.program_id(0)
    if program < num_lse_programs:
        _move_lses(
            program * LSES, lse, send, row_lens, num_rows, slot_bytes, lse_offset_bytes, lse_stride_b, lse_stride_h,
            lens_stride, HEADS, HEADS_PER_RANK, LSES, HAS_LENS,
        )  # fmt: skip
    else:
        _move_rows(
            (program - num_lse_programs) * ROWS, out, send, row_lens, num_rows, slot_bytes, out_stride_b, out_stride_h,
            out_stride_d, lens_stride, HEADS, HEADS_PER_RANK, ROW_WORDS, WORD, ROWS, BLOCK, EVEN, HAS_LENS,
        )  # fmt: skip


def pack_a2a(
    out: torch.Tensor,
    lse: torch.Tensor,
    send: torch.Tensor,
    layout: A2ALayout,
    *,
    row_lens: torch.Tensor | None = None,
) -> None:
    """Packs this rank's partial attention into `send`, each peer's heads and their LSEs into the peer's slot.

    `out`: `[batch, heads, head_dim]` of `layout.dtype`, any strides; moved bit by bit. `lse`: `[batch, heads]`
    float32, any strides (a 16-bit LSE is refused: at 8 bits of mantissa it is off by percents). `send`: flat uint8,
    contiguous, `layout.total_bytes` or more. With `row_lens`, `[batch]` int32 or int64 local lengths, rows of length
    0 or less are sent as zeros with LSE -inf, whatever `out` and `lse` hold there.

    Raises:
        KernelContractError: shape, dtype, device or memory outside this contract.
    """
    shape = (layout.batch, layout.heads, layout.head_dim)
    check_tensor("out", out, shape=shape, dtypes=[layout.dtype])
    check_tensor("lse", lse, shape=shape[:2], dtypes=[torch.float32], device=out.device)
    layout.check_buffer("send", send, out.device)
    check_apart("send", send, "out", out)
    check_apart("send", send, "lse", lse)
    if row_lens is not None:
        check_tensor("row_lens", row_lens, shape=shape[:1], dtypes=INT_DTYPES, device=out.device)
    if layout.batch == 0:
        return
    if not runs_triton(out):
        reference.pack_a2a(out, lse, send, layout, row_lens=row_lens)
        return
    _launch_pack(out, lse, send, layout, row_lens)


def _launch_pack(
    out: torch.Tensor, lse: torch.Tensor, send: torch.Tensor, layout: A2ALayout, row_lens: torch.Tensor | None
) -> None:
    itemsize = layout.dtype.itemsize
    stride_b, stride_h, stride_d = out.stride()
    if stride_d == 1 or layout.head_dim == 1:
        word_bytes = widest_word_bytes(out.data_ptr(), layout.row_bytes, stride_b * itemsize, stride_h * itemsize)
        stride_d = 1
    else:
        word_bytes = itemsize  # elements that lie apart move one by one
    words_per_stride = word_bytes // itemsize
    if words_per_stride > 0:
        stride_b, stride_h = stride_b // words_per_stride, stride_h // words_per_stride
    num_rows = layout.batch * layout.heads
    row_lanes = layout.row_bytes // min(word_bytes, 8)
    rows, num_warps = (4, 1) if _SEVERAL_ROWS <= num_rows < _MANY_ROWS else (2, 4)
    num_lse_programs = ceil_div(num_rows, _LSES_PER_PROGRAM)
    _pack_kernel[(num_lse_programs + ceil_div(num_rows, rows),)](
        out if layout.dtype not in FP8_DTYPES else out.view(torch.uint8),
        lse,
        send,
        lse if row_lens is None else row_lens,
        num_rows,
        num_lse_programs,
        layout.slot_bytes,
        layout.lse_offset_bytes,
        stride_b,
        stride_h,
        stride_d,
        *lse.stride(),
        0 if row_lens is None else row_lens.stride(0),
        HEADS=layout.heads,
        HEADS_PER_RANK=layout.heads_per_rank,
        ROW_WORDS=layout.row_bytes // word_bytes,
        WORD=word_bytes,
        ROWS=rows,
        BLOCK=min(next_power_of_2(row_lanes), 512),
        EVEN=layout.batch == 1 or stride_b == layout.heads * stride_h,
        LSES=_LSES_PER_PROGRAM,
        HAS_LENS=row_lens is not None,
        num_warps=num_warps,
    )


@overload
def unpack_combine(
    recv: torch.Tensor,
    layout: A2ALayout,
    *,
    lse_base: LseBase,
    return_lse: Literal[False] = False,
    out: torch.Tensor | None = None,
    lse_out: torch.Tensor | None = None,
    scale: float | None = None,
) -> torch.Tensor: ...


@overload
def unpack_combine(
    recv: torch.Tensor,
    layout: A2ALayout,
    *,
    lse_base: LseBase,
    return_lse: Literal[True],
    out: torch.Tensor | None = None,
    lse_out: torch.Tensor | None = None,
    scale: float | None = None,
) -> tuple[torch.Tensor, torch.Tensor]: ...


def unpack_combine(
    recv: torch.Tensor,
    layout: A2ALayout,
    *,
    lse_base: LseBase,
    return_lse: bool = False,
    out: torch.Tensor | None = None,
    lse_out: torch.Tensor | None = None,
    scale: float | None = None,
) -> torch.Tensor | tuple[torch.Tensor, torch.Tensor]:
    """Merges what the ranks sent for this rank's heads, straight out of the receive buffer.

    `recv`: flat uint8, contiguous, `layout.total_bytes` or more. Returns `[batch, heads_per_rank, head_dim]` of
    `layout.result_dtype`, in `out` if given (any strides), and with `return_lse` the merged LSE `[batch,
    heads_per_rank]` float32 in the same base, in `lse_out` if given (contiguous). `scale` multiplies the output:
    what an fp8 payload was divided by when it was quantised. A row that is empty everywhere gives 0 and -inf.

    Raises:
        KernelContractError: shape, dtype, device or memory outside this contract, or an unknown base.
    """
    check_lse_base(lse_base)
    layout.check_buffer("recv", recv)
    shape = (layout.batch, layout.heads_per_rank, layout.head_dim)
    if out is not None:
        check_tensor("out", out, shape=shape, dtypes=[layout.result_dtype], device=recv.device)
        check_written("out", out)
        check_apart("out", out, "recv", recv)
    if lse_out is not None:
        check_lse_out(lse_out, *shape[:2], recv.device)
        check_apart("lse_out", lse_out, "recv", recv)
    if not runs_triton(recv):
        return reference.unpack_combine(
            recv, layout, lse_base=lse_base, return_lse=return_lse, out=out, lse_out=lse_out, scale=scale
        )
    if out is None:
        out = torch.empty(shape, dtype=layout.result_dtype, device=recv.device)
    if return_lse and lse_out is None:
        lse_out = torch.empty(shape[:2], dtype=torch.float32, device=recv.device)
    wanted_lse = lse_out if return_lse else None
    if layout.batch > 0:
        launch_combine(layout.payload(recv), layout.lse(recv), out, wanted_lse, lse_base, scale)
    return out if wanted_lse is None else (out, wanted_lse)
