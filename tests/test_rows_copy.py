"""Rows from pool to pool: any two layouts, in parts, by stripes or by index, and never outside a pool."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from kvxfer import rows_copy
from kvxfer.errors import LayoutError
from kvxfer.layout import Placement, Shard, TokenRange
from kvxfer.rows_copy import copy_part, find_stripes
from kvxfer.wire import BlockAddresses, ChunkPlan, PageTable, match_layouts, plan_chunk, resolve
from tests.wire_world import Geometry, GroupSpec, make_layout

POISON = 0xA5


def plan_of(num_tokens: int, row_bytes: int, num_layers: int) -> ChunkPlan:
    layout = make_layout((GroupSpec("kv", Placement.SHARDED, num_layers, row_bytes),), Geometry(4), 1000, Shard())
    ranges = (TokenRange(0, num_tokens),)
    return plan_chunk(match_layouts(layout, layout, 0, 1), ranges, ranges, ((),), None, 1 << 20)


def random_addresses(
    rng: np.random.Generator, num_rows: int, page_rows: int, row_bytes: int, gap_bytes: int
) -> BlockAddresses:
    """Pages in any order, rows `gap_bytes` apart within them; layers behind one another."""
    num_pages = -(-num_rows // page_rows)
    rows = np.arange(num_rows)
    stride_bytes = row_bytes + gap_bytes
    pages = rng.permutation(2 * num_pages)[rows // page_rows]
    offsets = (pages * page_rows + rows % page_rows) * stride_bytes
    return BlockAddresses(3, 2 * num_pages * page_rows * stride_bytes + 5, offsets.astype(np.int64), row_bytes)


def copied_row_by_row(
    src_pool: np.ndarray, src: BlockAddresses, dst_pool: np.ndarray, dst: BlockAddresses, num_layers: int
) -> np.ndarray:
    expected = dst_pool.copy()
    for layer in range(num_layers):
        for src_offset, dst_offset in zip(src.row_offsets, dst.row_offsets, strict=True):
            src_first = 3 + layer * src.layer_stride_bytes + src_offset
            dst_first = 3 + layer * dst.layer_stride_bytes + dst_offset
            expected[dst_first : dst_first + src.row_bytes] = src_pool[src_first : src_first + src.row_bytes]
    return expected


@pytest.mark.parametrize("min_stripe_bytes", [0, 1 << 30], ids=["stripes", "index"])
@settings(max_examples=60, deadline=None, derandomize=True, database=None)
@given(
    num_rows=st.sampled_from([1, 2, 3, 37, 300]),
    row_bytes=st.sampled_from([1, 8, 577, 1152]),
    page_rows=st.tuples(st.sampled_from([1, 2, 5, 64]), st.sampled_from([1, 3, 16, 64])),
    gap_bytes=st.tuples(st.sampled_from([0, 7, 3 * 1152]), st.sampled_from([0, 8])),
    num_layers=st.integers(1, 3),
    num_parts=st.integers(1, 5),
    seed=st.integers(0, 99),
)
def test_parts_together_copy_every_row_and_nothing_else(
    min_stripe_bytes: int,
    num_rows: int,
    row_bytes: int,
    page_rows: tuple[int, int],
    gap_bytes: tuple[int, int],
    num_layers: int,
    num_parts: int,
    seed: int,
) -> None:
    rng = np.random.default_rng(seed)
    plan = plan_of(num_rows, row_bytes, num_layers)
    src, dst = (
        random_addresses(rng, num_rows, rows, row_bytes, gap) for rows, gap in zip(page_rows, gap_bytes, strict=True)
    )
    src_pool = rng.integers(0, 256, num_layers * src.layer_stride_bytes + 3, dtype=np.uint8)
    src_pool.flags.writeable = False
    dst_pool = np.full(num_layers * dst.layer_stride_bytes + 3, POISON, dtype=np.uint8)
    expected = copied_row_by_row(src_pool, src, dst_pool, dst, num_layers)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(rows_copy, "_MIN_STRIPE_BYTES", min_stripe_bytes)
        num_copied = [
            copy_part(src_pool, (src,), dst_pool, (dst,), plan, part, num_parts) for part in reversed(range(num_parts))
        ]
    assert sum(num_copied) == plan.num_bytes
    np.testing.assert_array_equal(dst_pool, expected)


def test_stripes_follow_the_pages() -> None:
    """A quarter of the tokens of pages of 64 is 16 rows a page, and lands side by side: one stripe a source page."""
    layout = make_layout((GroupSpec("kv", Placement.SHARDED, 2, 8),), Geometry(64), 64, Shard())
    target = make_layout((GroupSpec("kv", Placement.SHARDED, 2, 8),), Geometry(64), 64, Shard(1, 4))
    route = match_layouts(layout, target, 1, 4)
    wanted = (TokenRange(0, 1024),)
    plan = plan_chunk(route, wanted, wanted, ((),), None, 1 << 20)
    pages = np.random.default_rng(5).permutation(64)
    src = resolve(plan, route, "src", layout, (PageTable(wanted[0], pages[:16]),))[0]
    dst = resolve(plan, route, "dst", target, (PageTable(wanted[0], pages[:4]),))[0]
    assert find_stripes(src.row_offsets, dst.row_offsets) == [(16 * page, 16 * page + 16) for page in range(16)]


def test_stripes_of_rows_at_random_distances_are_pairs() -> None:
    offsets = np.array([0, 10, 30, 60, 100], dtype=np.int64)
    assert find_stripes(offsets, offsets[::-1].copy()) == [(0, 2), (2, 4), (4, 5)]


@pytest.mark.parametrize("side", ["src", "dst"])
@pytest.mark.parametrize("bad_offset", [-1, 993, 1 << 33, -(1 << 62)])
def test_rows_outside_a_pool_move_nothing(side: str, bad_offset: int) -> None:
    """The second layer of the last row would already lie outside at 993."""
    plan = plan_of(3, 4, 2)
    fits = BlockAddresses(0, 4, np.array([0, 992, 8], dtype=np.int64), 4)
    bad = BlockAddresses(0, 4, np.array([0, bad_offset, 8], dtype=np.int64), 4)
    src_pool, dst_pool = np.full(1000, 1, dtype=np.uint8), np.full(1000, 2, dtype=np.uint8)
    src, dst = (bad, fits) if side == "src" else (fits, bad)
    with pytest.raises(LayoutError, match=r"row offsets: got .*, expected 0 to 996: rows of 4 bytes in a pool of 1000"):
        copy_part(src_pool, (src,), dst_pool, (dst,), plan, 0, 1)
    assert (dst_pool == 2).all()
    assert copy_part(src_pool, (fits,), dst_pool, (fits,), plan, 0, 1) == 24
