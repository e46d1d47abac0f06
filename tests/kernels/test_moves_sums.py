"""Sums of what `move_rows` moves are those of numpy; of a segment that is not as announced no row is moved."""

import random
from collections.abc import Iterator
from types import ModuleType

import numpy as np
import pytest

from kvxfer.row_sums import row_sum
from kvxfer.streams.ring import LINEAR, MemoryIndex, OrderCode, Span, SumKind, SumOrder
from tests.kernels.moves_world import MEMORY_BYTES, World, all_ops, naive

POOL, SLOTS, STAGING_IN_WORLD = 0, 1, 2
SLOT_BEGIN = 4096


@pytest.fixture
def world() -> Iterator[World]:
    made = World()
    yield made
    made.close()


def pack(row_bytes: int, num_rows: int, word_bytes: int, place: int, table: int = 0) -> Span:
    """Rows out of the pool, as the table says, to `place` of the segment."""
    return Span(row_bytes, num_rows, word_bytes, POOL, 0, table, SLOTS, SLOT_BEGIN + place, LINEAR)


@all_ops
@pytest.mark.parametrize(
    ("row_bytes", "word_bytes"), [(1152, 16), (576, 16), (584, 8), (132, 4), (130, 2), (577, 1), (5, 1), (8, 8)]
)
def test_a_gather_tells_the_sum_of_its_segment(ops: ModuleType, row_bytes: int, word_bytes: int, world: World) -> None:
    num_rows = min(60, 40000 // row_bytes)
    offsets = [row * -(-row_bytes // 16) * 16 for row in range(num_rows)]
    random.Random(row_bytes).shuffle(offsets)
    world.order(3, [pack(row_bytes, num_rows, word_bytes, 0)], offsets, summed=SumOrder(SumKind.MOVED, SLOT_BEGIN))
    world.move(ops, 3, max_ctas=3)
    slot = world.memories[SLOTS].array[SLOT_BEGIN:][: row_bytes * num_rows]
    assert np.array_equal(slot[:row_bytes], world.memories[POOL].array[offsets[0] :][:row_bytes])
    assert world.ring.sum_of(3) == row_sum(slot)


@all_ops
def test_spans_of_all_widths_and_the_parts_of_a_segment_add_up(ops: ModuleType, world: World) -> None:
    """Two orders, as a segment with very many rows takes; pieces that begin anywhere in a block of the sum."""
    parts = [[(48, 9, 16), (24, 3, 8), (20, 5, 4)], [(6, 3, 2), (7, 30, 1), (1, 1, 1)]]
    place = total = 0
    for number, part in enumerate(parts):
        spans = []
        for row_bytes, num_rows, word_bytes in part:
            spans.append(pack(row_bytes, num_rows, word_bytes, place, LINEAR))
            place += row_bytes * num_rows
        world.order(number, spans, [], summed=SumOrder(SumKind.MOVED, SLOT_BEGIN))
        world.move(ops, number)
        total += world.ring.sum_of(number)
    assert total % (1 << 64) == row_sum(world.memories[SLOTS].array[SLOT_BEGIN:][:place])


@all_ops
def test_rows_that_are_left_out_do_not_count(ops: ModuleType, world: World) -> None:
    offsets = [0, MEMORY_BYTES - 16, 64, -48]
    world.memories[SLOTS].array[:] = 0
    world.order(0, [pack(48, 4, 16, 0)], offsets, summed=SumOrder(SumKind.MOVED, SLOT_BEGIN))
    world.move(ops, 0)
    assert world.ring.sum_of(0) == row_sum(world.memories[SLOTS].array[SLOT_BEGIN:][: 4 * 48])


@all_ops
def test_an_order_that_wants_no_sum_gets_none(ops: ModuleType, world: World) -> None:
    world.order(0, [pack(48, 4, 16, 0)], [0, 48, 96, 144])
    wrong = world.ring.sum_of(0)
    world.move(ops, 0)
    assert world.ring.sum_of(0) == wrong
    world.order(1, [pack(48, 4, 16, 0)], [0, 48, 96, 144], summed=SumOrder(SumKind.MOVED, SLOT_BEGIN))
    world.ring.order(1, OrderCode.SKIP)
    world.move(ops, 1)
    assert world.ring.sum_of(1) == wrong


def unpack(spans: list[Span]) -> list[Span]:
    """The way back out of the staged copy of the segment, from its beginning on."""
    return [
        Span(
            *(span.row_bytes, span.num_rows, span.word_bytes),
            *(MemoryIndex.STAGING, span.dst_first_byte - SLOT_BEGIN, LINEAR),
            *(span.src_memory, span.src_first_byte, span.src_table),
        )
        for span in spans
    ]


class Landed:
    """A segment that lies in a slot, its announced sum, and the spans that put it into the pool."""

    def __init__(self, world: World, row_bytes: int, num_rows: int, word_bytes: int) -> None:
        self.offsets = [row * -(-row_bytes // 16) * 16 for row in range(num_rows)]
        random.Random(row_bytes).shuffle(self.offsets)
        self.spans = unpack([pack(row_bytes, num_rows, word_bytes, 0)])
        self.slot = world.memories[SLOTS].array[SLOT_BEGIN:][: row_bytes * num_rows]
        self.summed = SumOrder(SumKind.CHECKED, SLOT_BEGIN, self.slot.size, row_sum(self.slot))
        self._world = world

    def move(self, ops: ModuleType, number: int, max_ctas: int = 2) -> int:
        """Scatter; the sum that was found."""
        self._world.order(number, self.spans, self.offsets, summed=self.summed)
        self._world.move(ops, number, max_ctas)
        return self._world.ring.sum_of(number)


@all_ops
@pytest.mark.parametrize(("row_bytes", "word_bytes"), [(1152, 16), (584, 8), (132, 4), (130, 2), (577, 1)])
def test_what_is_as_announced_is_scattered(ops: ModuleType, row_bytes: int, word_bytes: int, world: World) -> None:
    landed = Landed(world, row_bytes, 35, word_bytes)
    before = world.bytes()
    before[STAGING_IN_WORLD] = landed.slot.tobytes() + before[STAGING_IN_WORLD][landed.slot.size :]
    assert landed.move(ops, 2, max_ctas=3) == landed.summed.expected
    spans = [span._replace(src_memory=STAGING_IN_WORLD) for span in landed.spans]
    assert world.bytes() == naive(before, spans, landed.offsets)


@all_ops
@pytest.mark.parametrize("row_bytes", [16, 577])
@pytest.mark.parametrize("max_ctas", [1, 3])
def test_a_flipped_bit_lets_no_row_through(ops: ModuleType, row_bytes: int, max_ctas: int, world: World) -> None:
    """In the first and the last bytes, in the last block, which is not full, in every byte of a word, and anywhere."""
    landed = Landed(world, row_bytes, 51, row_bytes & -row_bytes)
    pool = world.bytes()[POOL]
    last = landed.slot.size - 1
    for number, place in enumerate([*range(16), last, last - 1, last - 15, last - 20, 500, 501, 702, 703]):
        landed.slot[place] ^= 1 << number % 8
        assert landed.move(ops, number, max_ctas) != landed.summed.expected, place
        assert world.bytes()[POOL] == pool, place
        landed.slot[place] ^= 1 << number % 8
    assert landed.move(ops, 1000) == landed.summed.expected
    assert world.bytes()[POOL] != pool


@all_ops
@pytest.mark.parametrize(
    "changed",
    [
        {"first_byte": SLOT_BEGIN + 8},
        {"first_byte": -16},
        {"first_byte": MEMORY_BYTES - 512},
        {"first_byte": 1 << 62},
        {"num_bytes": 0},
        {"num_bytes": -5},
        {"num_bytes": MEMORY_BYTES + 16},
    ],
    ids=str,
)
def test_a_segment_that_cannot_be_checked_moves_nothing(ops: ModuleType, changed: dict[str, int], world: World) -> None:
    landed = Landed(world, 64, 20, 16)
    for expected in (landed.summed.expected, 0):
        fields = {"first_byte": SLOT_BEGIN, "num_bytes": 1280, "expected": expected, **changed}
        landed.summed = SumOrder(SumKind.CHECKED, **fields)
        before = world.bytes()
        assert landed.move(ops, 2) != expected
        assert world.bytes() == before


def test_the_sum_is_what_its_definition_says(world: World) -> None:
    """The judge itself, against the definition with Python's integers."""
    data = world.memories[0].array[16 : 16 + 1000]
    padded = data.tobytes() + bytes(8)
    words = [int.from_bytes(padded[place : place + 4], "little") for place in range(0, len(padded), 4)]
    keys = [0x14D049BB133111EB, 0x5851F42D4C957F2D, 0x2545F4914F6CDD1D, 0x369DEA0F31A53F85]
    total = 0
    for block in range(len(words) // 4):
        key = (0x3C6EF372FE94F82B + block * 0x1E3779B97F4A7C15) % (1 << 64)
        key = (key ^ key >> 32) * 0x3F58476D1CE4E5B9 % (1 << 64)
        key = (key ^ key >> 32) | 1
        total += key * sum(words[4 * block + idx] * keys[idx] for idx in range(4))
    assert row_sum(data) == total % (1 << 64)
