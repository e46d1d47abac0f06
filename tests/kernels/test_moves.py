"""move_rows: byte-exact against a move row by row, whatever the order says; what it may not touch stays as it was."""

import random
from collections.abc import Iterator
from types import ModuleType

import numpy as np
import pytest
import torch

import kvxfer.kernels
from kvxfer.errors import KernelContractError
from kvxfer.kernels import _row_sums, moves
from kvxfer.kernels._launch import INTERPRETED
from kvxfer.streams import cuda_track
from kvxfer.streams import ring as ring_layout
from kvxfer.streams.ring import LANES_OFFSET_BYTES, LINEAR, OrderCode, Span, order_offset_bytes, order_value
from tests.kernels.moves_world import MEMORY_BYTES, NUM_LANES, NUM_OFFSETS, World, all_ops, naive, random_spans


@pytest.fixture
def world() -> Iterator[World]:
    made = World()
    yield made
    made.close()


def test_kernel_and_ring_agree_on_where_words_lie() -> None:
    for name in ("MAX_SPANS", "SPAN_WORDS", "OFFSETS_WORD"):
        assert getattr(moves, name) == getattr(ring_layout, name)
    assert moves.SPANS_WORD == ring_layout.OFFSETS_WORD - ring_layout.MAX_SPANS * ring_layout.SPAN_WORDS
    assert moves.MAX_MEMORIES == cuda_track.MAX_MEMORIES == ring_layout.MemoryIndex.STAGING + 1
    kinds = _row_sums.SUM_NONE, _row_sums.SUM_MOVED, _row_sums.SUM_CHECKED
    assert list(kinds) == list(ring_layout.SumKind)


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
    spans = [WHOLE, WHOLE._replace(row_bytes=128)]
    world.order(3, spans, list(range(1, num_offsets + 1)), lane=1)
    words = torch.from_numpy(world.ring.memory.array.view(np.int64))
    lane_words = world.ring.lane_bytes // 8
    lane = words[LANES_OFFSET_BYTES // 8 + lane_words :][:lane_words]
    num_used = moves.OFFSETS_WORD + num_offsets if num_offsets else moves.SPANS_WORD + 2 * moves.SPAN_WORDS
    num_staged = num_used + num_used % 2
    for code in OrderCode.RUN, OrderCode.SKIP:
        scratch = torch.full((moves.scratch_words(lane_words, len(world.table)),), -7)
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
        sums_word = lane_words + 2 * len(world.table)
        assert torch.equal(scratch[lane_words:sums_word], world.table.view(-1))
        assert scratch[sums_word:-1].tolist() == [0] * (_row_sums.SUM_LANES + 1)
        if code is OrderCode.RUN:
            assert torch.equal(scratch[:num_staged], lane[:num_staged])
            assert (scratch[num_staged:lane_words] == -7).all()
        else:
            assert scratch[:3].tolist() == [0, -7, 0]
            assert (scratch[3:lane_words] == -7).all()


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
    world.order(2, [WHOLE._replace(**changed)], [])
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
        [span._replace(num_rows=3, dst_table=3)],
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
        ("entry_word", {"entry_word": 3996}),
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
