"""`kvxfer.row_sums` in kernels: the share of the words that a tile moves, and a segment staged and summed at once.

Every thread adds to a partial sum of its own in scratch memory, so that nothing in a program waits for the others.
"""
# mypy: no-check-untyped-defs, disable-error-code="no-untyped-def, untyped-decorator"

from kvxfer import row_sums
from kvxfer.kernels._launch import jit, tl

SUM_LANES = 256
"""Partial sums, each added to by one thread of a program: as many as a program has threads."""
SUM_WORDS = SUM_LANES + 2
"""Of scratch memory: the partial sums, the number of programs that are done, one word to keep the number even."""
SUM_WORD = 4
"""Of an entry."""
SUM_KIND_WORD = 2
"""Of a lane."""
SUM_NONE, SUM_MOVED, SUM_CHECKED = range(3)
SUM_CONSTANTS = {"KIND": SUM_KIND_WORD, "CHECKED": SUM_CHECKED, "SUM_LANES": SUM_LANES}
CHECK_NUMBERS = ["lane_words", "num_memories"]

_STEP = tl.constexpr(row_sums.KEY_STEP)
_FIRST = tl.constexpr(row_sums.KEY_FIRST)
_FACTOR = tl.constexpr(row_sums.KEY_FACTOR)
_WORD_0, _WORD_1, _WORD_2, _WORD_3 = (tl.constexpr(key) for key in row_sums.WORD_KEYS)


@jit
def _block_key(block):
    keys = block.to(tl.uint64) * _STEP + _FIRST
    keys = (keys ^ (keys >> 32)) * _FACTOR
    return (keys ^ (keys >> 32)) | 1


@jit
def tile_sums(values, lanes, begins, fits, SHIFT: tl.constexpr):
    """`[TILE]` int64: the share of each word of `1 << SHIFT` bytes that begins at byte `begins` of the segment.

    `values`: `[TILE, LANES]`, words of 16 bytes as `LANES` = 2 of 8. Words that do not fit count nothing.
    """
    if SHIFT >= 3:
        bits = values.to(tl.uint64, bitcast=True)
        # Which half of its block a word of 8 bytes is.
        is_first = (lanes == 0) if SHIFT == 4 else ((begins & 8) == 0)[:, None]
        low = (bits & 0xFFFFFFFF) * tl.where(is_first, _WORD_0, _WORD_2).to(tl.uint64)
        shares = low + (bits >> 32) * tl.where(is_first, _WORD_1, _WORD_3).to(tl.uint64)
    else:
        if SHIFT == 2:
            bits = values.to(tl.uint32, bitcast=True)
        elif SHIFT == 1:
            bits = values.to(tl.uint16, bitcast=True)
        else:
            bits = values.to(tl.uint8, bitcast=True)
        low_keys = tl.where((begins & 4) == 0, _WORD_0, _WORD_1)
        high_keys = tl.where((begins & 4) == 0, _WORD_2, _WORD_3)
        keys = tl.where((begins & 8) == 0, low_keys, high_keys).to(tl.uint64)
        shares = (bits.to(tl.uint64) << ((begins & 3) * 8).to(tl.uint64)[:, None]) * keys[:, None]
    shares = tl.where(fits[:, None], shares.to(tl.int64, bitcast=True), 0)
    keys = _block_key(begins >> 4).to(tl.int64, bitcast=True)
    return tl.sum(shares, 1) * keys


@jit
def add_to_sums(sums, shares, TILE: tl.constexpr, LANES: tl.constexpr):
    """Add `[TILE]` shares to the `LANES` partial sums. Thread by thread: no program waits here."""
    by_thread = tl.sum(tl.reshape(shares, [TILE // LANES, LANES]), 0)
    tl.atomic_add(sums + tl.arange(0, LANES), by_thread, sem="relaxed")


@jit
def total_of_sums(sums, LANES: tl.constexpr):
    """The sum, once all that add to it have done so. Past the first-level cache, which knows nothing of that."""
    return tl.sum(tl.load(sums + tl.arange(0, LANES), cache_modifier=".cg"), 0)


@jit
def copy_and_sum(src_address, dst_address, num_bytes, sums, TILE: tl.constexpr, LANES: tl.constexpr):
    """Copy `num_bytes` from one multiple of 16 to another by all programs, and add what was read to `sums`."""
    src = tl.multiple_of(src_address.to(tl.pointer_type(tl.int64)), 16)
    dst = tl.multiple_of(dst_address.to(tl.pointer_type(tl.int64)), 16)
    halves = tl.arange(0, 2)[None, :]
    num_words = num_bytes >> 4
    shares = tl.zeros([TILE], tl.int64)
    for first_word in range(tl.program_id(0) * TILE, num_words, tl.num_programs(0) * TILE):
        words = first_word + tl.arange(0, TILE).to(tl.int64)
        inside = words < num_words
        at = words[:, None] * 2 + halves
        values = tl.load(src + at, mask=inside[:, None])
        tl.store(dst + at, values, mask=inside[:, None])
        shares += tile_sums(values, halves, words << 4, inside, 4)
    add_to_sums(sums, shares, TILE, LANES)
    tail_bytes = num_bytes & 15
    if (tl.program_id(0) == 0) & (tail_bytes > 0):
        begins = (num_words << 4) + tl.arange(0, LANES)
        inside = tl.arange(0, LANES) < tail_bytes
        values = tl.load(src_address.to(tl.pointer_type(tl.int8)) + begins, mask=inside)
        tl.store(dst_address.to(tl.pointer_type(tl.int8)) + begins, values, mask=inside)
        add_to_sums(sums, tile_sums(values[:, None], halves, begins, inside, 0), LANES, LANES)


@jit
def memory_of(memories, num_memories, index):
    """Address and bytes of a memory; 0 bytes where there is none."""
    known = (index >= 0) & (index < num_memories)
    address = tl.load(memories + index * 2, mask=known, other=0)
    return address, tl.load(memories + index * 2 + 1, mask=known, other=0)


@jit(do_not_specialize=CHECK_NUMBERS)
def check_segment_kernel(
    scratch, lane_words, num_memories,
    KIND: tl.constexpr, CHECKED: tl.constexpr, SUM_LANES: tl.constexpr, TILE: tl.constexpr,
):  # fmt: skip
    """Copies the segment that an order wants checked into memory of the device, and sums it."""
    order = scratch + KIND
    if tl.load(order) == CHECKED:
        memories = scratch + lane_words
        sums = memories + 2 * num_memories
        src_address, src_bytes = memory_of(memories, num_memories, tl.load(order + 4))
        dst_address, dst_bytes = memory_of(memories, num_memories, tl.load(order + 5))
        first_byte, num_bytes = tl.load(order + 1), tl.load(order + 2)
        fits = (num_bytes > 0) & (num_bytes <= dst_bytes) & (first_byte >= 0) & ((first_byte & 15) == 0)
        if fits & (first_byte <= src_bytes - num_bytes):
            copy_and_sum(src_address + first_byte, dst_address, num_bytes, sums, TILE, SUM_LANES)
        elif tl.program_id(0) == 0:
            tl.store(sums, ~tl.load(order + 3))  # what was not copied is not right


def check_constants(tile_words: int) -> dict[str, int]:
    """What `check_segment_kernel` is compiled with."""
    return {**SUM_CONSTANTS, "TILE": tile_words}
