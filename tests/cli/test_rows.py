"""The plain account of where rows belong, against cases worked out by hand."""

from pathlib import Path

import numpy as np

from kvxfer.cli.pools import GroupShape, choose_pages, cut_chunks, lay_out, page_tables, state_parts
from kvxfer.cli.protocol import Expected, FileRows, PageList, PatternRows
from kvxfer.cli.rows import expected_pool, first_difference, read_rows, write_rows
from kvxfer.layout import Group, LayerRange, Placement, PoolLayout, Shard, StatePart

_FILL = 9


def _file(tmp_path: Path, rows: np.ndarray) -> FileRows:
    path = tmp_path / "rows"
    path.write_bytes(rows.tobytes())
    num_layers, num_tokens, row_bytes = rows.shape
    return FileRows(path=str(path), num_layers=num_layers, num_tokens=num_tokens, row_bytes=row_bytes)


def _group(placement: Placement, row_bytes: int, **changes: object) -> Group:
    facts: dict[str, object] = {
        "name": "kv",
        "layers": LayerRange(0, 2),
        "base_offset_bytes": 5,
        "layer_stride_bytes": 40,
        "page_stride_bytes": 2 * row_bytes,
        "num_pages": 3,
        "page_tokens": 2,
        "row_stride_bytes": row_bytes,
        "row_bytes": row_bytes,
        "placement": placement,
    }
    return Group(**(facts | changes))  # type: ignore[arg-type]


def test_sharded_rows_by_hand(tmp_path: Path) -> None:
    # 9 tokens over 2 ranks, interleave 2: rank 1 owns 2, 3, 6, 7. From token 3 on its pages begin with row 1 of the
    # first one: token 3 there, tokens 6 and 7 in the next.
    rows = (np.arange(18, dtype=np.uint8) + 100).reshape(2, 9, 1).repeat(3, axis=2)
    layout = PoolLayout(groups=(_group(Placement.SHARDED, 3),), shard=Shard(1, 2, 2), dtype_tag="u8")
    pages = PageList(first_token=3, end_token=9, pages=[2, 0])
    pool = expected_pool(layout, 100, _FILL, {"kv": Expected(pages=pages, source=_file(tmp_path, rows))})
    expected = np.full(100, _FILL, dtype=np.uint8)
    for layer in range(2):
        start = 5 + layer * 40
        expected[start + 12 + 3 : start + 12 + 6] = 100 + 9 * layer + 3
        expected[start : start + 3] = 100 + 9 * layer + 6
        expected[start + 3 : start + 6] = 100 + 9 * layer + 7
    assert first_difference(pool, expected, layout) == ""


def test_replicated_rows_go_to_every_rank(tmp_path: Path) -> None:
    rows = np.arange(2 * 3 * 4, dtype=np.uint8).reshape(2, 3, 4)
    layout = PoolLayout(groups=(_group(Placement.REPLICATED, 4),), shard=Shard(1, 2, 1), dtype_tag="u8")
    pages = PageList(first_token=0, end_token=3, pages=[1, 0])
    pool = expected_pool(layout, 100, _FILL, {"kv": Expected(pages=pages, source=_file(tmp_path, rows))})
    assert pool[5 + 8 : 5 + 16].tolist() == list(range(8))
    assert pool[5 : 5 + 4].tolist() == [8, 9, 10, 11]
    assert pool[5 + 4 : 5 + 8].tolist() == [_FILL] * 4


def test_state_parts_of_a_rank(tmp_path: Path) -> None:
    parts = (StatePart("split", 6, split=True), StatePart("whole", 2))
    group = _group(
        Placement.STATE, 4, layers=LayerRange(0, 1), page_tokens=1, parts=parts, page_stride_bytes=4, num_pages=2
    )
    layout = PoolLayout(groups=(group,), shard=Shard(2, 3, 1), dtype_tag="u8")
    blob = np.array([[[1, 2, 3, 4, 5, 6, 7, 8]]], dtype=np.uint8)
    pages = PageList(first_token=0, end_token=1, pages=[1])
    pool = expected_pool(layout, 100, _FILL, {"kv": Expected(pages=pages, source=_file(tmp_path, blob))})
    assert pool[5:13].tolist() == [_FILL] * 4 + [5, 6, 7, 8]


def test_first_difference_says_where() -> None:
    layout = PoolLayout(groups=(_group(Placement.SHARDED, 3),), dtype_tag="u8")
    expected = np.zeros(100, dtype=np.uint8)
    actual = expected.copy()
    actual[[7, 99]] = 1
    assert first_difference(actual, expected, layout) == (
        "2 bytes differ, the first at byte 7 of the pool (group 'kv'): got 1, expected 0"
    )
    actual[7] = 0
    assert "byte 99 of the pool (outside all groups)" in first_difference(actual, expected, layout)


def test_pattern_rows_differ() -> None:
    source = PatternRows(seed=1, num_layers=3, num_tokens=50, row_bytes=32)
    rows = np.concatenate([read_rows(source, layer) for layer in range(3)])
    assert len(np.unique(rows, axis=0)) == 150
    assert np.array_equal(read_rows(source, 1), rows[50:100])


def test_written_rows_are_where_an_unsharded_rank_expects_them() -> None:
    shapes = [GroupShape("kv", LayerRange(0, 3), 7, Placement.SHARDED)]
    layout, num_bytes = lay_out(shapes, {"kv": 6}, 4, Shard(), "u8")
    source = PatternRows(seed=1, num_layers=3, num_tokens=11, row_bytes=7)
    pages = choose_pages(3, 6, shuffled=True, seed=1)
    pool = np.full(num_bytes, _FILL, dtype=np.uint8)
    write_rows(pool, layout.groups[0], pages, source)
    wanted = Expected(pages=PageList(first_token=0, end_token=11, pages=pages), source=source)
    assert first_difference(pool, expected_pool(layout, num_bytes, _FILL, {"kv": wanted}), layout) == ""


def test_state_parts_add_up() -> None:
    for num_ranks in (1, 3, 4):
        for state_bytes in (1, 2, 7, 65_536):
            parts = state_parts(state_bytes, num_ranks)
            assert sum(part.num_bytes for part in parts) == state_bytes
            assert all(part.num_bytes % num_ranks == 0 for part in parts if part.split)


def test_chunks_cover_the_sequence_once() -> None:
    paging = page_tables(Placement.SHARDED, 10, 4, 2, 1, shuffled=True)
    chunks = cut_chunks({"kv": paging}, frozenset(), 10, 5)
    ranges = [(chunk.groups["kv"].first_token, chunk.groups["kv"].end_token, chunk.last) for chunk in chunks]
    assert ranges == [(0, 5, False), (5, 10, True)]
    assert [chunk.groups["kv"].pages for chunk in chunks] == [paging.src_pages[:2], paging.src_pages[1:]]
    empty = page_tables(Placement.SHARDED, 0, 4, 2, 1, shuffled=True)
    assert [chunk.last for chunk in cut_chunks({"kv": empty}, frozenset(), 0, 5)] == [True]
