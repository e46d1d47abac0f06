"""move_rows: byte-exact against a move row by row, whatever the order says; what it may not touch stays as it was."""

import dataclasses
import random
from collections.abc import Iterator
from types import ModuleType

import numpy as np
import pytest
import torch

import kvxfer.kernels
from kvxfer.errors import KernelContractError
from kvxfer.kernels import moves, reference
from kvxfer.kernels._launch import INTERPRETED
from kvxfer.memory import HostMemory
from kvxfer.streams import cuda_stream
from kvxfer.streams import ring as ring_layout
from kvxfer.streams.ring import LANES_OFFSET_BYTES, LINEAR, OrderCode, Ring, Span, order_offset_bytes, order_value
from tests.kernels.conftest import DEVICE

MEMORY_BYTES = 96 << 10
NUM_LANES, NUM_OFFSETS = 3, 900
# The reference works on addresses of host memory only, which is all these tests have.
all_ops = pytest.mark.parametrize("ops", [kvxfer.kernels, reference], ids=lambda module: module.__name__)


class World:
    """A ring and three memories of random bytes, which the device can reach."""

    def __init__(self) -> None:
        self.ring = Ring.create(NUM_LANES, NUM_OFFSETS)
        self.memories = [HostMemory.create(MEMORY_BYTES, "test-rows") for _ in range(3)]
        for idx, memory in enumerate(self.memories):
            memory.array[:] = np.random.default_rng(idx).integers(0, 256, MEMORY_BYTES, dtype=np.uint8)
        self._shared = [self.ring.memory, *self.memories]
        if DEVICE == "cuda":
            for memory in self._shared:
                assert int(torch.cuda.cudart().cudaHostRegister(memory.address, memory.num_bytes, 2)) == 0  # type: ignore[no-untyped-call]
        table = [[memory.address, memory.num_bytes] for memory in self.memories]
        self.table = torch.tensor(table, device=DEVICE)

    def move(self, ops: ModuleType, number: int, max_ctas: int = 2) -> None:
        """What a stream does for an entry whose order has come."""
        words = torch.from_numpy(self.ring.memory.array.view(np.int64))
        options = {} if ops is reference else {"max_ctas": max_ctas}
        ops.move_rows(
            words,
            self.table,
            order_offset_bytes(number) // 8,
            order_value(number, OrderCode.RUN),
            LANES_OFFSET_BYTES // 8,
            self.ring.lane_bytes // 8,
            **options,
        )
        if DEVICE == "cuda":
            torch.cuda.synchronize()

    def order(self, number: int, spans: list[Span], offsets: list[int], lane: int = 0) -> None:
        self.ring.fill_lane(lane, spans, np.array(offsets, dtype=np.int64))
        self.ring.order(number, OrderCode.RUN, lane)

    def bytes(self) -> list[bytes]:
        return [memory.array.tobytes() for memory in self.memories]

    def close(self) -> None:
        for memory in self._shared:
            if DEVICE == "cuda":
                assert int(torch.cuda.cudart().cudaHostUnregister(memory.address)) == 0  # type: ignore[no-untyped-call]
        self.ring.close()
        for memory in self.memories:
            memory.close()


@pytest.fixture
def world() -> Iterator[World]:
    made = World()
    yield made
    made.close()


def naive(before: list[bytes], spans: list[Span], offsets: list[int]) -> list[bytes]:
    """What the memories hold afterwards, by slices of bytes."""
    after = [bytearray(memory) for memory in before]
    for span in spans:
        for row in range(span.num_rows):
            src, dst = (
                first + (row * span.row_bytes if table == LINEAR else offsets[table + row])
                for first, table in ((span.src_first_byte, span.src_table), (span.dst_first_byte, span.dst_table))
            )
            taken = before[span.src_memory][src : src + span.row_bytes]
            after[span.dst_memory][dst : dst + span.row_bytes] = taken
    return [bytes(memory) for memory in after]


def random_spans(rng: random.Random, word_bytes: int, num_spans: int) -> tuple[list[Span], list[int]]:
    """Spans from memory 0 and 1 into 1 and 2, no place written twice and none read that is written."""
    spans: list[Span] = []
    offsets: list[int] = []
    free = {(memory, half): half * MEMORY_BYTES // 2 for memory in range(3) for half in range(2)}
    for _ in range(num_spans):
        row_bytes = word_bytes * rng.randint(1, max(1, min(2000, 6000 // num_spans) // word_bytes))
        num_rows = rng.randint(1, max(1, MEMORY_BYTES // 2 // num_spans // (row_bytes + 2 * word_bytes) // 2))
        # Upper halves are read, lower ones written.
        src_memory, dst_memory = rng.choice([(0, 1), (1, 2), (0, 2), (2, 0), (1, 1)])
        sides = []
        for memory, half in ((src_memory, 1), (dst_memory, 0)):
            stride = row_bytes + word_bytes * rng.randint(0, 2)
            first = free[memory, half] + word_bytes * rng.randint(0, 3)
            free[memory, half] = first + num_rows * stride
            assert free[memory, half] <= (half + 1) * MEMORY_BYTES // 2
            if rng.random() < 0.3:
                sides.append((first, LINEAR))
                continue
            places = [row * stride for row in range(num_rows)]
            rng.shuffle(places)
            sides.append((first, len(offsets)))
            offsets += places
        (src_first, src_table), (dst_first, dst_table) = sides
        spans.append(
            Span(row_bytes, num_rows, word_bytes, src_memory, src_first, src_table, dst_memory, dst_first, dst_table)
        )
    return spans, offsets


def test_kernel_and_ring_agree_on_where_words_lie() -> None:
    for name in ("MAX_SPANS", "SPAN_WORDS", "OFFSETS_WORD"):
        assert getattr(moves, name) == getattr(ring_layout, name)
    assert moves.SPANS_WORD == ring_layout.OFFSETS_WORD - ring_layout.MAX_SPANS * ring_layout.SPAN_WORDS
    assert moves.MAX_MEMORIES == cuda_stream.MAX_MEMORIES


@all_ops
@pytest.mark.parametrize("num_spans", [1, 7])
@pytest.mark.parametrize("word_bytes", [16, 8, 4, 2, 1])
def test_moves_exactly_the_rows(ops: ModuleType, word_bytes: int, num_spans: int, world: World) -> None:
    spans, offsets = random_spans(random.Random(word_bytes + num_spans), word_bytes, num_spans)
    expected = naive(world.bytes(), spans, offsets)
    world.order(4, spans, offsets)
    world.move(ops, 4)
    assert world.bytes() == expected


@all_ops
def test_a_lane_full_of_spans_with_words_of_all_widths(ops: ModuleType, world: World) -> None:
    rng = random.Random(64)
    spans: list[Span] = []
    for idx in range(ring_layout.MAX_SPANS):
        word_bytes = (16, 8, 4, 2, 1)[idx % 5]
        row_bytes = word_bytes * rng.randint(1, 12)
        spans.append(Span(row_bytes, 3, word_bytes, 0, 1024 * idx, LINEAR, 1, 1024 * (63 - idx) + 16, 0))
    offsets = [608, 0, 304]
    expected = naive(world.bytes(), spans, offsets)
    world.order(0, spans, offsets, lane=2)
    world.move(ops, 0)
    assert world.bytes() == expected


@all_ops
@pytest.mark.parametrize("max_ctas", [1, 3])
@pytest.mark.parametrize("row_bytes", [1152, 40000])
def test_rows_beyond_a_tile_and_tiles_beyond_the_programs(
    ops: ModuleType, row_bytes: int, max_ctas: int, world: World
) -> None:
    num_rows = 40000 * 2 // row_bytes
    span = Span(row_bytes, num_rows, 16, 0, 0, LINEAR, 1, 16, LINEAR)
    expected = naive(world.bytes(), [span], [])
    world.order(1, [span], [])
    world.move(ops, 1, max_ctas)
    assert world.bytes() == expected


WHOLE = Span(64, 20, 16, 0, 0, LINEAR, 1, 0, LINEAR)


@all_ops
def test_orders_that_are_not_to_run_move_nothing(ops: ModuleType, world: World) -> None:
    before = world.bytes()
    world.move(ops, 7)  # no order at all
    world.order(7, [WHOLE], [])
    world.move(ops, 8)  # another entry
    world.move(ops, 7 + ring_layout.NUM_ENTRIES)  # a later use of the same entry
    world.ring.order(7, OrderCode.SKIP)
    world.move(ops, 7)
    assert world.bytes() == before


@all_ops
@pytest.mark.parametrize("num_used", [-1, 0, 1 << 40])
def test_a_lane_of_no_or_too_many_words_moves_nothing(ops: ModuleType, num_used: int, world: World) -> None:
    before = world.bytes()
    world.order(7, [WHOLE], [])
    world.ring.memory.array.view(np.int64)[order_offset_bytes(7) // 8 + 3] = num_used
    world.move(ops, 7)
    assert world.bytes() == before


@pytest.mark.skipif(not INTERPRETED, reason="looks at scratch memory of the host")
@pytest.mark.parametrize("num_offsets", [0, 1, 2, NUM_OFFSETS])
def test_an_order_is_staged_as_far_as_it_is_in_use(num_offsets: int, world: World) -> None:
    spans = [WHOLE, dataclasses.replace(WHOLE, row_bytes=128)]
    world.order(3, spans, list(range(1, num_offsets + 1)), lane=1)
    words = torch.from_numpy(world.ring.memory.array.view(np.int64))
    lane_words = world.ring.lane_bytes // 8
    lane = words[LANES_OFFSET_BYTES // 8 + lane_words :][:lane_words]
    num_used = moves.OFFSETS_WORD + num_offsets if num_offsets else moves.SPANS_WORD + 2 * moves.SPAN_WORDS
    num_staged = num_used + num_used % 2
    for code in OrderCode.RUN, OrderCode.SKIP:
        scratch = torch.full((lane_words + 6,), -7)
        world.ring.order(3, code, 1)
        moves.stage_order(
            words,
            world.table,
            scratch,
            order_offset_bytes(3) // 8,
            order_value(3, OrderCode.RUN),
            LANES_OFFSET_BYTES // 8,
            lane_words,
        )
        assert scratch[lane_words:].tolist() == world.table.view(-1).tolist()
        if code is OrderCode.RUN:
            assert torch.equal(scratch[:num_staged], lane[:num_staged])
            assert (scratch[num_staged:lane_words] == -7).all()
        else:
            assert scratch[0] == 0
            assert (scratch[1:lane_words] == -7).all()


@all_ops
@pytest.mark.parametrize("lane", [-1, NUM_LANES])
def test_a_lane_that_is_none_moves_nothing(ops: ModuleType, lane: int, world: World) -> None:
    before = world.bytes()
    world.order(7, [WHOLE], [])
    world.ring.memory.array.view(np.int64)[order_offset_bytes(7) // 8 + 2] = lane
    world.move(ops, 7)
    assert world.bytes() == before


@all_ops
@pytest.mark.parametrize(
    "changed",
    [
        {"src_memory": 3},
        {"dst_memory": -1},
        {"row_bytes": 0},
        {"row_bytes": -16},
        {"row_bytes": 24},
        {"num_rows": 0},
        {"num_rows": -5},
        {"word_bytes": 0},
        {"word_bytes": 3},
        {"word_bytes": 32},
        {"src_first_byte": MEMORY_BYTES},
        {"dst_first_byte": -(1 << 62)},
        {"src_first_byte": 8},
        {"dst_table": -1000},
        {"src_table": 1 << 40},
    ],
    ids=str,
)
def test_spans_that_cannot_be_move_nothing(ops: ModuleType, changed: dict[str, int], world: World) -> None:
    before = world.bytes()
    world.order(2, [dataclasses.replace(WHOLE, **changed)], [])
    world.move(ops, 2)
    assert world.bytes() == before


@all_ops
def test_rows_out_of_bounds_are_left_out_and_their_neighbours_move(ops: ModuleType, world: World) -> None:
    end = MEMORY_BYTES - 48
    reads = [0, 64, -16, 128, end + 16, 192, end, 256, 8]
    writes = [end, end + 16, 0, 64, 128, -(1 << 40), 192, 1 << 40, 256]
    span = Span(48, 9, 16, 0, 0, 0, 1, 0, 9)
    moved = [0, 3, 6]
    expected = naive(
        world.bytes(),
        [dataclasses.replace(span, num_rows=3, dst_table=3)],
        [reads[row] for row in moved] + [writes[row] for row in moved],
    )
    world.order(2, [span], reads + writes)
    world.move(ops, 2)
    assert world.bytes() == expected


@all_ops
def test_more_spans_than_a_lane_has_are_cut_to_those(ops: ModuleType, world: World) -> None:
    expected = naive(world.bytes(), [WHOLE], [])
    world.order(2, [WHOLE], [])
    first = LANES_OFFSET_BYTES // 8
    world.ring.memory.array.view(np.int64)[first] = 1 << 40
    world.move(ops, 2)
    assert world.bytes() == expected


@pytest.mark.parametrize(
    ("argument", "changed"),
    [
        ("words", {"words": torch.zeros(4000, dtype=torch.int32)}),
        ("memories", {"memories": torch.zeros(3, dtype=torch.int64)}),
        ("memories", {"memories": torch.zeros(4, 2, dtype=torch.int64)[::2]}),
        ("words", {"words": torch.zeros(4002, dtype=torch.int64)[1:-1]}),
        ("memories", {"memories": torch.zeros(257, 2, dtype=torch.int64)}),
        ("entry_word", {"entry_word": 3997}),
        ("lanes_word", {"lanes_word": 4002}),
        ("lanes_word", {"lanes_word": 9}),
        ("lane_words", {"lane_words": moves.OFFSETS_WORD}),
        ("lane_words", {"lane_words": 1101}),
        ("max_ctas", {"max_ctas": 0}),
    ],
)
def test_bad_input_is_refused_by_name(argument: str, changed: dict[str, object]) -> None:
    good: dict[str, object] = {
        "words": torch.zeros(4000, dtype=torch.int64),
        "memories": torch.zeros(3, 2, dtype=torch.int64),
        "entry_word": 0,
        "run_value": 257,
        "lanes_word": 8,
        "lane_words": 1100,
    }
    with pytest.raises(KernelContractError, match=rf"^{argument}: got .*expected"):
        kvxfer.kernels.move_rows(**{**good, **changed})  # type: ignore[arg-type]


@pytest.mark.skipif(not INTERPRETED, reason="Triton compiles here")
def test_the_interpreter_compiles_nothing() -> None:
    with pytest.raises(KernelContractError, match=r"^move_rows: got no Triton compiler.*unset TRITON_INTERPRET"):
        moves.compile_move_rows(90)
