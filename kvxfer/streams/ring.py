"""The shared words and tables through which an agent gives orders to a stream that moves rows.

One memfd, made by the agent, mapped by both sides and registered with CUDA by the side whose stream reads it:

| part | what it holds |
|---|---|
| header | timeline, raised by the worker's stream; entries enqueued so far; the owner's end; bytes of `STAGING` |
| entries | `NUM_ENTRIES` of `ENTRY_BYTES`: order word, done word, lane, words of the lane that are in use, sum |
| lanes | `num_lanes` of `lane_bytes`: numbers of spans and of words in use, a `SumOrder`, `MAX_SPANS` spans, then row |
| | offsets |

Entry number `n`, counted from 0 without end, lies at `n % NUM_ENTRIES`. Whoever owns the stream enqueues for it, once:
wait until the order word has reached `wait_value(n)`; run the kernel, which reads the word and moves rows only if its
code is RUN; write `done_value(n)` into the done word. The agent fills a lane, then writes `order_value(n, code)`. A
stream never waits for ever: every enqueued entry gets an order, RUN or SKIP, by the end of its transfer.

An order that was given may still be turned into SKIP; whether the kernel had read it by then is not known, so only
the done word says that the entry touches nothing any more.

An order may ask for the sum of a segment (`kvxfer.row_sums`); it is in the entry before the done word is.

An owner that ends says so first and then skips what is unfinished itself. So an entry that is found done has done what
its order says if the owner is found not to have ended *after* that; otherwise it may have been skipped.
"""

from __future__ import annotations

import enum
from typing import Final, NamedTuple

import numpy as np
import numpy.typing as npt

from kvxfer.errors import HandoffError
from kvxfer.memory import HostMemory

NUM_ENTRIES: Final = 1024
ENTRY_BYTES: Final = 64
MAX_SPANS: Final = 64
SPAN_WORDS: Final = 16
_WORDS_OF_A_SPAN: Final = 9
SRC_COLUMN, DST_COLUMN = 3, 6  # of a span's words: memory, first byte and table of a side
LINEAR: Final = -1
"""In place of a table: rows lie one behind the other."""

_HEADER_BYTES: Final = 4096
_TIMELINE_WORD: Final = 0
_ENQUEUED_WORD: Final = 8  # each in a cache line of its own
_ENDED_WORD: Final = 16
_STAGING_WORD: Final = 24
_ORDER, _DONE, _LANE, _LANE_USED, _SUM = range(5)  # words of an entry
_NUM_SPANS, _NUM_USED, _SUM_KIND = range(3)  # words of a lane
_EXPECTED: Final = 3  # word of a `SumOrder`
_SPANS_WORD: Final = 8  # of a lane: the spans begin in the second cache line
OFFSETS_WORD: Final = _SPANS_WORD + MAX_SPANS * SPAN_WORDS
"""The word of a lane at which row offsets begin."""
_LANE_ALIGNMENT_BYTES: Final = 16  # of the widest access
LANES_OFFSET_BYTES: Final = _HEADER_BYTES + NUM_ENTRIES * ENTRY_BYTES


class OrderCode(enum.IntEnum):
    """The low byte of an order word."""

    RUN = 1
    SKIP = 2


class MemoryIndex(enum.IntEnum):
    """Which memory a span names. The stream's owner keeps their addresses to itself; peers' pools follow."""

    POOL = 0
    SLOTS = 1
    FIRST_PEER = 2
    STAGING = 255
    """Where a segment is copied that is to be checked before its rows are moved, or packed before it goes to the slot
    that its entry is bound to; it needs as many bytes as a slot."""


class SumKind(enum.IntEnum):
    """What an order asks to be summed."""

    NONE = 0
    MOVED = 1
    CHECKED = 2


class SumOrder(NamedTuple):
    """Sum what is moved into the segment that begins at `first_byte` of its memory, at a multiple of 16: `MOVED`.

    `CHECKED`: copy the `num_bytes` of a segment from there in `SLOTS` to the start of `STAGING`, from where the spans
    take their rows, and move these only if the sum is `expected`.
    """

    kind: SumKind
    first_byte: int
    num_bytes: int = 0
    expected: int = 0

    def words(self) -> tuple[int, ...]:
        """As it lies in a lane."""
        expected = _signed(self.expected)
        return self.kind, self.first_byte, self.num_bytes, expected, MemoryIndex.SLOTS, MemoryIndex.STAGING


NO_SUM: Final = SumOrder(SumKind.NONE, 0)


def _signed(total: int) -> int:
    """A sum as a word holds it."""
    return (total + (1 << 63)) % (1 << 64) - (1 << 63)


class Span(NamedTuple):
    """`num_rows` rows of `row_bytes`, copied between two memories in words of `word_bytes` (1 to 16). As it lies in a
    lane, without the padding.

    Row `i` of a side lies at `first_byte + offsets[table + i]` of its memory, or, where `table` is `LINEAR`, at
    `first_byte + i * row_bytes`. Tables count from the lane's first row offset. Memories begin at multiples of 16.
    """

    row_bytes: int
    num_rows: int
    word_bytes: int
    src_memory: int
    src_first_byte: int
    src_table: int
    dst_memory: int
    dst_first_byte: int
    dst_table: int


def wait_value(number: int) -> int:
    """What the order word of entry `number` has reached once there is an order."""
    return (number + 1) << 8


def order_value(number: int, code: OrderCode) -> int:
    """The order word of entry `number`."""
    return wait_value(number) | code


def done_value(number: int) -> int:
    """The done word of entry `number` once it touches nothing any more."""
    return number + 1


def order_offset_bytes(number: int) -> int:
    """Where the order word of entry `number` lies in the ring's memory."""
    return _HEADER_BYTES + (number % NUM_ENTRIES) * ENTRY_BYTES + _ORDER * 8


def done_offset_bytes(number: int) -> int:
    """Where the done word of entry `number` lies."""
    return _HEADER_BYTES + (number % NUM_ENTRIES) * ENTRY_BYTES + _DONE * 8


TIMELINE_OFFSET_BYTES: Final = _TIMELINE_WORD * 8


class Ring:
    """One mapping of a ring. `memory` is owned by it; `close()` gives it back.

    Words are aligned and of 64 bits, so each is read and written whole. On x86 and Arm servers with the GIL's barriers
    between two of these calls, what was written first is seen first.
    """

    def __init__(self, memory: HostMemory, num_lanes: int) -> None:
        """Over mapped memory. Use `create` or `attach`."""
        self.memory = memory
        self.num_lanes = num_lanes
        self.lane_bytes = (memory.num_bytes - LANES_OFFSET_BYTES) // num_lanes
        self.max_offsets = self.lane_bytes // 8 - OFFSETS_WORD
        """Row offsets that a lane has room for."""
        # Words of 64 bits, as numpy calls them; what an array does takes far longer.
        self._words = memory.array.data.cast("l")

    @classmethod
    def create(cls, num_lanes: int, max_offsets: int, staging_bytes: int = 0) -> Ring:
        """A ring whose lanes hold `max_offsets` row offsets each. Its owner is to have `STAGING` of `staging_bytes`, a
        multiple of 16, for orders of kind `CHECKED`. Raises `OSError` where memory is short."""
        lane_bytes = (OFFSETS_WORD + max_offsets) * 8
        lane_bytes += -lane_bytes % 4096
        memory = HostMemory.create(LANES_OFFSET_BYTES + num_lanes * lane_bytes, "kvxfer-ring")
        ring = cls(memory, num_lanes)
        ring._words[_STAGING_WORD] = staging_bytes
        return ring

    @classmethod
    def attach(cls, fd: int, num_bytes: int, num_lanes: int) -> Ring:
        """Map a ring that the agent made; takes over `fd`. Raises `HandoffError`."""
        memory = HostMemory.attach(fd, num_bytes, "ring")
        lane_bytes, surplus_bytes = divmod(num_bytes - LANES_OFFSET_BYTES, num_lanes)
        if lane_bytes <= OFFSETS_WORD * 8 or surplus_bytes or lane_bytes % _LANE_ALIGNMENT_BYTES:
            memory.close()
            raise HandoffError(
                f"ring: got {num_bytes} bytes, expected {LANES_OFFSET_BYTES} and then {num_lanes} lanes of equal size, "
                f"a multiple of {_LANE_ALIGNMENT_BYTES} above {OFFSETS_WORD * 8}"
            )
        return cls(memory, num_lanes)

    # ---- the agent ----

    def fill_lane(
        self, lane: int, spans: list[Span], offsets: npt.NDArray[np.int64], summed: SumOrder = NO_SUM
    ) -> None:
        """`write_lane` for spans that are objects."""
        words = np.zeros((len(spans), SPAN_WORDS), dtype=np.int64)
        words[:, :_WORDS_OF_A_SPAN] = np.array(spans, dtype=np.int64).reshape(-1, _WORDS_OF_A_SPAN)
        self.write_lane(lane, words.reshape(-1).data, offsets, summed)

    def write_lane(
        self,
        lane: int,
        span_words: memoryview,
        offsets: npt.NDArray[np.int64],
        summed: SumOrder = NO_SUM,
        added: tuple[int, int] = (0, 0),
        *,
        has_offsets: bool = False,
    ) -> None:
        """Write what the next order for this lane moves; the lane is in use by no entry. Spans are words as in `Span`,
        `[num_spans * SPAN_WORDS]` int64: at most `MAX_SPANS`, with at most `max_offsets` offsets. `added`: to one
        column of all spans a number. `has_offsets`: these were written into the lane before, and no others since."""
        num_words, num_offsets = len(span_words), len(offsets)
        assert num_words <= MAX_SPANS * SPAN_WORDS, "a segment has too many spans"
        assert num_offsets <= self.max_offsets, "a segment has too many rows"
        words, first, (column, number) = self._words, self._lane_word(lane), added
        begin, end = first + _SPANS_WORD, first + _SPANS_WORD + num_words
        words[begin:end] = span_words
        if number:
            for idx in range(column, num_words, SPAN_WORDS):
                words[begin + idx] = span_words[idx] + number
        words[first + _NUM_SPANS] = num_words // SPAN_WORDS
        words[first + _NUM_USED] = OFFSETS_WORD + num_offsets if num_offsets else end - first
        if num_offsets and not has_offsets:
            words[first + OFFSETS_WORD : first + OFFSETS_WORD + num_offsets] = offsets.data
        words[first + _SUM_KIND] = summed.kind
        if summed.kind:  # else the other words mean nothing
            for word, value in enumerate(summed.words(), first + _SUM_KIND):
                words[word] = value

    def order(self, number: int, code: OrderCode, lane: int = 0) -> None:
        """Give the order of entry `number`, or turn RUN into SKIP."""
        words, entry = self._words, self._entry_word(number)
        if code is OrderCode.RUN:
            first = self._lane_word(lane)
            words[entry + _LANE] = lane
            words[entry + _LANE_USED] = words[first + _NUM_USED]
            # A wrong sum, for a stream that does not do what it was told.
            words[entry + _SUM] = ~words[first + _SUM_KIND + _EXPECTED]
        words[entry + _ORDER] = order_value(number, code)

    def is_done(self, number: int) -> bool:
        """Whether entry `number` has ended."""
        return self._words[self._entry_word(number) + _DONE] >= done_value(number)

    def sum_of(self, number: int) -> int:
        """What entry `number`, which is done, has found as sum: 0 to 2^64 - 1."""
        return self._words[self._entry_word(number) + _SUM] % (1 << 64)

    @property
    def staging_bytes(self) -> int:
        """Bytes of `STAGING`; 0 where no order is of kind `CHECKED`."""
        return self._words[_STAGING_WORD]

    @property
    def num_enqueued(self) -> int:
        """Entries that the stream's owner has enqueued, since the ring was made."""
        return self._words[_ENQUEUED_WORD]

    @property
    def has_ended(self) -> bool:
        """Whether the stream's owner has ended and skips what is unfinished. To be looked at after `is_done`."""
        return bool(self._words[_ENDED_WORD])

    @property
    def end(self) -> str | None:
        """Why entries that are found done may not have done what their orders said. To be looked at after `is_done`."""
        return "the worker's stream has ended" if self.has_ended else None

    @property
    def timeline(self) -> int:
        """How far the worker's stream has come."""
        return self._words[_TIMELINE_WORD]

    # ---- the stream's owner ----

    def set_num_enqueued(self, num_entries: int) -> None:
        """Say how many entries were enqueued; only after they were."""
        self._words[_ENQUEUED_WORD] = num_entries

    def set_ended(self) -> None:
        """Say that no order of the agent counts any more; only then `order` may be called from this side."""
        self._words[_ENDED_WORD] = 1

    def set_timeline(self, value: int) -> None:
        """For streams that are threads; a GPU's stream writes the word itself."""
        self._words[_TIMELINE_WORD] = value

    def set_done(self, number: int) -> None:
        """For streams that are threads."""
        self._words[self._entry_word(number) + _DONE] = done_value(number)

    def set_sum(self, number: int, total: int) -> None:
        """For streams that are threads."""
        self._words[self._entry_word(number) + _SUM] = _signed(total)

    def order_of(self, number: int) -> OrderCode | None:
        """The order of entry `number`; None while there is none."""
        word = self._words[self._entry_word(number) + _ORDER]
        return None if word < wait_value(number) else OrderCode(word & 0xFF)

    def spans_of(self, number: int) -> list[Span]:
        """What entry `number` moves, as its order says."""
        first = self._lane_word(self._words[self._entry_word(number) + _LANE])
        begin = first + _SPANS_WORD
        rows = np.asarray(self._words[begin : begin + self._words[first + _NUM_SPANS] * SPAN_WORDS])
        return [Span(*row[:_WORDS_OF_A_SPAN]) for row in rows.reshape(-1, SPAN_WORDS).tolist()]

    def summed_by(self, number: int) -> SumOrder:
        """What entry `number` sums."""
        first = self._lane_word(self._words[self._entry_word(number) + _LANE]) + _SUM_KIND
        kind, first_byte, num_bytes, expected = self._words[first : first + 4].tolist()
        return SumOrder(SumKind(kind), first_byte, num_bytes, expected % (1 << 64))

    def offsets_of(self, number: int) -> npt.NDArray[np.int64]:
        """`[max_offsets]` int64 row offsets of the lane of entry `number`."""
        first = self._lane_word(self._words[self._entry_word(number) + _LANE]) + OFFSETS_WORD
        return np.asarray(self._words[first : first + self.max_offsets])

    def close(self) -> None:
        """Give the mapping back. Calling it again does nothing."""
        self._words = memoryview(b"").cast("l")
        self.memory.close()

    def _entry_word(self, number: int) -> int:
        return (_HEADER_BYTES + (number % NUM_ENTRIES) * ENTRY_BYTES) // 8

    def _lane_word(self, lane: int) -> int:
        return (LANES_OFFSET_BYTES + lane * self.lane_bytes) // 8
