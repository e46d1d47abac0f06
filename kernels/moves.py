"""Kernels that move whatever rows an order in shared memory says, without ever being compiled again.

The order lies among int64 words in host memory that the GPU maps:

| where | what |
|---|---|
| `entry_word` | the order: nothing is done unless it equals `run_value` |
| two words on | the number of a lane, and how many of its words are in use |
| four words on | here goes the sum of what was moved, where the order asks for one |
| `lanes_word + lane * lane_words` | the lane: number of spans; from word 2 on what is summed; from word 8 on spans |
| after `MAX_SPANS` spans | row offsets |

A span is `SPAN_WORDS` words: row bytes, number of rows, word bytes, then memory, first byte and table of the source,
and the same of the destination. Row `i` of a side lies at `first byte + offsets[table + i]` of its memory, or, where
the table is -1, at `first byte + i * row bytes`.

Reads of host memory by many programs are served one after another, some 75 ns each however little they read. So one
program reads the order, once, and copies what it says into scratch memory of the device, in lines as long as the bus
takes; the programs that move rows follow in the same stream and read only that.

What is summed, as `kvxfer.row_sums` does it, six words say. `SUM_NONE`: nothing. `SUM_MOVED`, and where a segment
begins in the destination: the rows that are moved. `SUM_CHECKED`, then where a segment begins, its length, the sum that
it must have, its memory and another: the segment is copied to the beginning of the other, read once and summed on the
way, and the spans, which take their rows from there, are moved only if the sum is right. The entry gets the sum.

What lies outside its memory or off the grid of its words is not moved: orders come from another process, and no order
may bring down the process that owns the GPU's context.
"""
# mypy: no-check-untyped-defs, disable-error-code="no-untyped-def, untyped-decorator"

import functools
from dataclasses import dataclass

import torch

from kvxfer.errors import KernelContractError
from kvxfer.kernels import reference
from kvxfer.kernels._compiled import CompiledKernel, compile_kernel
from kvxfer.kernels._contract import check_contiguous, check_tensor
from kvxfer.kernels._launch import jit, runs_triton, tl
from kvxfer.kernels._row_sums import (
    CHECK_NUMBERS,
    SUM_CONSTANTS,
    SUM_KIND_WORD,
    SUM_MOVED,
    SUM_WORD,
    SUM_WORDS,
    add_to_sums,
    check_constants,
    check_segment_kernel,
    memory_of,
    tile_sums,
    total_of_sums,
)

MAX_MEMORIES = 256
MAX_SPANS = 64
SPAN_WORDS = 16
SPANS_WORD = 8
OFFSETS_WORD = SPANS_WORD + MAX_SPANS * SPAN_WORDS

# A tile is what a program moves at a time, 8 words a thread: as many on their way as registers allow, so that few
# programs fill the bus.
_TILE_WORDS = 2048
_NUM_WARPS = 8
DEFAULT_MAX_CTAS = 32
# Words that the program which stages an order has on their way at once: all of most orders.
_STAGE_WORDS = 4096
# Bounds that keep arithmetic inside a tile in 32 bits, and a nonsensical order from running for ever.
_MAX_ROW_BYTES = 1 << 30
_MAX_TILES_PER_SPAN = 1 << 24

_STAGE_CONSTANTS = {
    "MAX_MEMORIES": MAX_MEMORIES,
    "NUM_THREADS": 32 * _NUM_WARPS,
    "BLOCK": _STAGE_WORDS,
    "KIND": SUM_KIND_WORD,
}
_STAGE_NUMBERS = ["entry_word", "run_value", "lanes_word", "lane_words", "num_lanes", "num_memories"]
_MOVE_CONSTANTS = {
    **SUM_CONSTANTS,
    "ENTRY_SUM": SUM_WORD,
    "MOVED": SUM_MOVED,
    "MAX_SPANS": MAX_SPANS,
    "SPAN_WORDS": SPAN_WORDS,
    "SPANS_WORD": SPANS_WORD,
    "OFFSETS_WORD": OFFSETS_WORD,
    "TILE": _TILE_WORDS,
    "MAX_ROW_BYTES": _MAX_ROW_BYTES,
    "MAX_TILES": _MAX_TILES_PER_SPAN,
}
_MOVE_NUMBERS = ["entry_word", "lane_words", "num_memories"]


@jit(do_not_specialize=_STAGE_NUMBERS)
def _stage_order_kernel(
    words, memories, scratch, entry_word, run_value, lanes_word, lane_words, num_lanes, num_memories,
    MAX_MEMORIES: tl.constexpr, NUM_THREADS: tl.constexpr, BLOCK: tl.constexpr, KIND: tl.constexpr,
):  # fmt: skip
    """Copies the lane of an order and the table of memories into `scratch`, and clears the sums behind them; no spans
    unless the order is to run."""
    pair_idx = tl.arange(0, 2 * MAX_MEMORIES)
    pairs = tl.load(memories + pair_idx, mask=pair_idx < 2 * num_memories)
    # One access of one warp for the whole entry. Scalars would be asked for by every warp, one by one.
    entry_idx = tl.arange(0, NUM_THREADS)
    entry = tl.load(words + (entry_word + entry_idx), mask=entry_idx < 4, other=0, volatile=True)
    order = tl.sum(tl.where(entry_idx == 0, entry, 0), 0)
    lane = tl.sum(tl.where(entry_idx == 2, entry, 0), 0)
    num_used = tl.sum(tl.where(entry_idx == 3, entry, 0), 0)
    is_lane = (lane >= 0) & (lane < num_lanes) & (num_used > 0) & (num_used <= lane_words)
    if (order == run_value) & is_lane:
        # Words go in pairs, accesses of 16 bytes: lanes have an even number of them.
        src = words + (lanes_word + lane * lane_words)
        num_staged = (num_used + 1) // 2 * 2
        idx = tl.arange(0, BLOCK)
        for first in range(0, num_staged, BLOCK):
            inside = first + idx < num_staged
            staged = tl.load(tl.multiple_of(src + (first + idx), 16), mask=inside)
            tl.store(tl.multiple_of(scratch + (first + idx), 16), staged, mask=inside)
    else:
        tl.store(scratch, 0)
        tl.store(scratch + KIND, 0)
    tl.store(scratch + lane_words + pair_idx, pairs, mask=pair_idx < 2 * num_memories)
    sums = scratch + lane_words + 2 * num_memories
    tl.store(sums + entry_idx, tl.zeros([NUM_THREADS], tl.int64))
    tl.store(sums + NUM_THREADS, 0)


@jit
def _places(offsets, num_offsets, side, num_bytes, rows, inside, row_bytes, WORD: tl.constexpr):
    """Where in its memory each row begins on one side of a span, and whether it may be touched there."""
    first_byte, table = tl.load(side + 1), tl.load(side + 2)
    tables = tl.zeros_like(rows) + table
    linear = tables == -1
    listed = tables + rows
    listed_inside = (listed >= 0) & (listed < num_offsets) & (tables != -1)
    from_table = tl.load(offsets + listed, mask=inside & listed_inside, other=0)
    begins = first_byte + tl.where(linear, rows * row_bytes, from_table)
    inside = inside & (linear | listed_inside)
    fits = (begins >= 0) & (begins <= num_bytes - row_bytes) & ((begins & (WORD - 1)) == 0)
    return begins, inside & fits


@jit
def _move_tile(
    offsets, num_offsets, span, tile, row_bytes, num_rows, src_address, src_bytes, dst_address, dst_bytes,
    is_summed, segment_begin, sums, TILE: tl.constexpr, SHIFT: tl.constexpr, SUM_LANES: tl.constexpr,
):  # fmt: skip
    """Moves words `[tile * TILE, (tile + 1) * TILE)` of a span's rows, `1 << SHIFT` bytes each."""
    WORD: tl.constexpr = 1 << SHIFT
    # A word of 16 bytes is two lanes of 8 that lie side by side: the compiler joins them into one access.
    LANES: tl.constexpr = 2 if WORD == 16 else 1
    if WORD >= 8:
        lane_type = tl.int64
    elif WORD == 4:
        lane_type = tl.int32
    elif WORD == 2:
        lane_type = tl.int16
    else:
        lane_type = tl.int8
    src = tl.multiple_of(src_address.to(tl.pointer_type(lane_type)), 16)
    dst = tl.multiple_of(dst_address.to(tl.pointer_type(lane_type)), 16)
    lanes = tl.arange(0, LANES)[None, :]
    row_words = (row_bytes >> SHIFT).to(tl.int32)
    first_word = tile * TILE
    first_row = first_word // row_words
    in_row = (first_word - first_row * row_words).to(tl.int32)
    # 32-bit arithmetic inside a tile, 64-bit for its place.
    words = in_row + tl.arange(0, TILE)
    rows_on = words // row_words
    cols = words - rows_on * row_words
    rows = first_row + rows_on
    inside = rows < num_rows
    src_begins, src_fits = _places(offsets, num_offsets, span + 3, src_bytes, rows, inside, row_bytes, WORD)
    dst_begins, dst_fits = _places(offsets, num_offsets, span + 6, dst_bytes, rows, inside, row_bytes, WORD)
    fits = src_fits & dst_fits
    src_words = (src_begins >> SHIFT) + cols
    dst_words = (dst_begins >> SHIFT) + cols
    values = tl.load(src + (src_words[:, None] * LANES + lanes), mask=fits[:, None])
    tl.store(dst + (dst_words[:, None] * LANES + lanes), values, mask=fits[:, None])
    if is_summed:
        shares = tile_sums(values, lanes, (dst_words << SHIFT) - segment_begin, fits, SHIFT)
        add_to_sums(sums, shares, TILE, SUM_LANES)


@jit(do_not_specialize=_MOVE_NUMBERS)
def _move_rows_kernel(
    scratch, words, entry_word, lane_words, num_memories,
    KIND: tl.constexpr, CHECKED: tl.constexpr, SUM_LANES: tl.constexpr, ENTRY_SUM: tl.constexpr, MOVED: tl.constexpr,
    MAX_SPANS: tl.constexpr, SPAN_WORDS: tl.constexpr, SPANS_WORD: tl.constexpr, OFFSETS_WORD: tl.constexpr,
    TILE: tl.constexpr, MAX_ROW_BYTES: tl.constexpr, MAX_TILES: tl.constexpr,
):  # fmt: skip
    """Moves what `_stage_order_kernel` has put into `scratch`, and writes the sum into the entry."""
    sums = scratch + lane_words + 2 * num_memories
    num_spans, kind, segment_begin = tl.load(scratch), tl.load(scratch + KIND), tl.load(scratch + KIND + 1)
    if kind == CHECKED:
        is_right = total_of_sums(sums, SUM_LANES) == tl.load(scratch + KIND + 3)
        num_spans = tl.where(is_right, num_spans, 0)
    if num_spans > 0:
        spans = scratch + SPANS_WORD
        offsets = scratch + OFFSETS_WORD
        num_offsets = lane_words - OFFSETS_WORD
        memories = scratch + lane_words
        # Tiles of all spans at once: programs find theirs without walking the spans one by one.
        idx = tl.arange(0, MAX_SPANS)
        heads = spans + idx * SPAN_WORDS
        bytes_of, rows_of, word_of = tl.load(heads), tl.load(heads + 1), tl.load(heads + 2)
        usable = (idx < num_spans) & (bytes_of > 0) & (bytes_of <= MAX_ROW_BYTES) & (word_of > 0)
        usable = usable & (rows_of > 0) & (rows_of <= MAX_TILES * TILE) & ((bytes_of & (word_of - 1)) == 0)
        tiles_of = (rows_of * (bytes_of // tl.where(usable, word_of, 1)) + TILE - 1) // TILE
        tiles_of = tl.where(usable & (tiles_of <= MAX_TILES), tiles_of, 0).to(tl.int32)
        ends = tl.cumsum(tiles_of, 0)
        for item in range(tl.program_id(0), tl.sum(tiles_of, 0), tl.num_programs(0)):
            at = tl.sum((ends <= item).to(tl.int32), 0)
            tile = (item - tl.sum(tl.where(idx < at, tiles_of, 0), 0)).to(tl.int64)
            span = spans + at * SPAN_WORDS
            row_bytes, num_rows, word_bytes = tl.load(span), tl.load(span + 1), tl.load(span + 2)
            src_address, src_bytes = memory_of(memories, num_memories, tl.load(span + 3))
            dst_address, dst_bytes = memory_of(memories, num_memories, tl.load(span + 6))
            for shift in tl.static_range(5):
                if word_bytes == (1 << shift):
                    _move_tile(
                        offsets, num_offsets, span, tile, row_bytes, num_rows, src_address, src_bytes, dst_address,
                        dst_bytes, kind == MOVED, segment_begin, sums, TILE, shift, SUM_LANES,
                    )  # fmt: skip
    if kind != 0:
        # The program that is done last knows the sum. Each releases what it has added, and that one acquires it.
        num_done = tl.atomic_add(sums + SUM_LANES, 1, sem="acq_rel")
        if num_done == tl.num_programs(0) - 1:
            tl.store(words + (entry_word + ENTRY_SUM), total_of_sums(sums, SUM_LANES))


def move_rows(
    words: torch.Tensor,
    memories: torch.Tensor,
    entry_word: int,
    run_value: int,
    lanes_word: int,
    lane_words: int,
    *,
    max_ctas: int = DEFAULT_MAX_CTAS,
) -> None:
    """Carries out the order at `entry_word`, if it says so: see the head of this module.

    `words`: `[num_words]` int64, at a multiple of 16 in host memory (pinned where `memories` is on a GPU); lanes fill
    it from `lanes_word` on; `lanes_word` and `lane_words` are even. `memories`: `[num_memories, 2]` int64, at most
    `MAX_MEMORIES`, the address, a multiple of 16, and the bytes of each memory; its device is where the rows are
    moved. Rows of 1 byte to 1 GiB. `max_ctas` bounds the programs that move rows.

    Raises:
        KernelContractError: shape, dtype, device or sizes outside this contract. The order itself is not judged.
    """
    check_tensor("words", words, shape=[None], dtypes=[torch.int64])
    check_tensor("memories", memories, shape=[None, 2], dtypes=[torch.int64])
    check_contiguous("words", words)
    check_contiguous("memories", memories)
    if len(memories) > MAX_MEMORIES:
        raise KernelContractError(f"memories: got {len(memories)}, expected at most {MAX_MEMORIES}")
    if words.data_ptr() % 16:
        raise KernelContractError(f"words: got address {words.data_ptr():#x}, expected a multiple of 16")
    if lane_words <= OFFSETS_WORD or lane_words % 2:
        raise KernelContractError(f"lane_words: got {lane_words}, expected an even number above {OFFSETS_WORD}")
    if not 0 <= entry_word < len(words) - SUM_WORD:
        raise KernelContractError(f"entry_word: got {entry_word}, expected 0 to {len(words) - SUM_WORD - 1}")
    if not 0 <= lanes_word <= len(words) or lanes_word % 2:
        raise KernelContractError(f"lanes_word: got {lanes_word}, expected an even number from 0 to {len(words)}")
    if max_ctas < 1:
        raise KernelContractError(f"max_ctas: got {max_ctas}, expected at least 1")
    if not runs_triton(memories):
        reference.move_rows(words, memories, entry_word, run_value, lanes_word, lane_words)
        return
    num_scratch_words = scratch_words(lane_words, len(memories))
    scratch = torch.empty(num_scratch_words, dtype=torch.int64, device=memories.device)
    stage_order(words, memories, scratch, entry_word, run_value, lanes_word, lane_words)
    options = {"num_warps": _NUM_WARPS, "num_stages": 1}
    check_segment_kernel[(max_ctas,)](scratch, lane_words, len(memories), **check_constants(_TILE_WORDS), **options)
    _move_rows_kernel[(max_ctas,)](scratch, words, entry_word, lane_words, len(memories), **_MOVE_CONSTANTS, **options)


def stage_order(
    words: torch.Tensor,
    memories: torch.Tensor,
    scratch: torch.Tensor,
    entry_word: int,
    run_value: int,
    lanes_word: int,
    lane_words: int,
) -> None:
    """The first part of `move_rows`, whose arguments are checked: from `words` and `memories` into `scratch`,
    `[scratch_words()]` int64 where the rows are moved."""
    num_lanes = (len(words) - lanes_word) // lane_words
    _stage_order_kernel[(1,)](
        words, memories, scratch, entry_word, run_value, lanes_word, lane_words, num_lanes, len(memories),
        **_STAGE_CONSTANTS, num_warps=_NUM_WARPS, num_stages=1,
    )  # fmt: skip


@dataclass(frozen=True, slots=True)
class CompiledMove:
    """The kernels of `move_rows`, to be launched one after the other in one stream; all parameters are of 8 bytes.

    `stage`, one program: the addresses of words, memories and scratch; `entry_word`, `run_value`, `lanes_word`,
    `lane_words`, the number of lanes and of memories. `check`, any number of programs, which may be left out where no
    order wants its segment checked: the address of scratch, `lane_words`, the number of memories. `move`, any number:
    the addresses of scratch and words, `entry_word`, `lane_words`, the number of memories. Scratch is device memory of
    `scratch_words()` words, at a multiple of 16, that no other three use at the time.
    """

    stage: CompiledKernel
    check: CompiledKernel
    move: CompiledKernel


def scratch_words(lane_words: int, num_memories: int) -> int:
    """Words of scratch memory that an order takes."""
    return lane_words + 2 * num_memories + SUM_WORDS


def compile_move_rows(capability: int) -> CompiledMove:
    """Compile for GPUs of a compute capability (90 for 9.0). Needs no GPU; takes seconds unless Triton has it cached.

    Raises `KernelContractError` where Triton is not installed or interprets.
    """
    if not hasattr(_move_rows_kernel, "cache_key"):
        raise KernelContractError(
            "move_rows: got no Triton compiler here, expected one: install triton and unset TRITON_INTERPRET"
        )
    build = functools.partial(compile_kernel, capability=capability, num_warps=_NUM_WARPS)
    pointers = ["words", "memories", "scratch"]
    return CompiledMove(
        build(_stage_order_kernel, pointers, _STAGE_NUMBERS, _STAGE_CONSTANTS),
        build(check_segment_kernel, pointers[2:], CHECK_NUMBERS, check_constants(_TILE_WORDS)),
        build(_move_rows_kernel, ["scratch", "words"], _MOVE_NUMBERS, _MOVE_CONSTANTS),
    )
