"""The host packer: rows of any size at any stride, in threads, beyond 4 GiB, and never outside its pool or slot."""

from __future__ import annotations

import mmap
import os
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from kvxfer.errors import LayoutError
from kvxfer.layout import Group, LayerRange, Placement, PoolLayout, Shard, TokenRange
from kvxfer.rows_host import (
    gather_pieces,
    gather_segment,
    scatter_pieces,
    scatter_segment,
    split_pieces,
)
from kvxfer.wire import BlockAddresses, ChunkPlan, PageTable, match_layouts, plan_chunk, resolve
from tests.wire_world import Geometry, GroupSpec, make_layout

Mover = Callable[[np.ndarray, ChunkPlan, tuple[BlockAddresses, ...], int, np.ndarray], int]


def plan_of(num_tokens: int, row_bytes: int, num_layers: int, segment_bytes: int) -> ChunkPlan:
    layout = make_layout((GroupSpec("kv", Placement.SHARDED, num_layers, row_bytes),), Geometry(4), 1000, Shard())
    ranges = (TokenRange(0, num_tokens),)
    return plan_chunk(match_layouts(layout, layout, 0, 1), ranges, ranges, ((),), None, segment_bytes)


def random_addresses(
    rng: np.random.Generator, num_rows: int, row_bytes: int, grid_bytes: int, layer_stride_bytes: int
) -> BlockAddresses:
    """Rows that do not overlap, in any order, `grid_bytes` (at least `row_bytes`) apart."""
    offsets = rng.permutation(num_rows * 2)[:num_rows].astype(np.int64) * grid_bytes
    return BlockAddresses(
        base_offset_bytes=3, layer_stride_bytes=layer_stride_bytes, row_offsets=offsets, row_bytes=row_bytes
    )


@settings(max_examples=80, deadline=None, derandomize=True, database=None)
@given(
    num_tokens=st.sampled_from([1, 2, 63, 300]),
    row_bytes=st.sampled_from([1, 2, 8, 577, 1152]),
    gap_bytes=st.sampled_from([0, 0, 1, 64]),
    num_layers=st.integers(1, 3),
    num_jobs=st.integers(1, 4),
    seed=st.integers(0, 99),
)
def test_rows_at_any_stride(
    num_tokens: int, row_bytes: int, gap_bytes: int, num_layers: int, num_jobs: int, seed: int
) -> None:
    rng = np.random.default_rng(seed)
    plan = plan_of(num_tokens, row_bytes, num_layers, 90 * 1152)
    grid_bytes = row_bytes + gap_bytes
    layer_stride_bytes = num_tokens * 2 * grid_bytes + 5
    addresses = (random_addresses(rng, num_tokens, row_bytes, grid_bytes, layer_stride_bytes),)
    src = rng.integers(0, 256, num_layers * layer_stride_bytes + 3, dtype=np.uint8)
    landed = np.full_like(src, 0xA5)
    expected = landed.copy()
    for layer in range(num_layers):
        for offset in addresses[0].row_offsets + (3 + layer * layer_stride_bytes):
            expected[offset : offset + row_bytes] = src[offset : offset + row_bytes]
    for segment_idx in range(plan.num_segments):
        first_byte, end_byte = plan.segment_range(segment_idx)
        slot = np.zeros(end_byte - first_byte, dtype=np.uint8)
        jobs = split_pieces(plan, plan.pieces(segment_idx), num_jobs)
        assert len(jobs) <= num_jobs
        assert sum(gather_pieces(src, plan, addresses, job, slot) for job in reversed(jobs)) == slot.size
        whole = np.zeros_like(slot)
        assert gather_segment(src, plan, addresses, segment_idx, whole) == slot.size
        np.testing.assert_array_equal(slot, whole)
        assert sum(scatter_pieces(landed, plan, addresses, job, slot) for job in reversed(jobs)) == slot.size
    np.testing.assert_array_equal(landed, expected)


def test_rows_off_the_grid_that_need_several_stages() -> None:
    rng = np.random.default_rng(0)
    plan = plan_of(1500, 577, 1, 1 << 20)
    addresses = (random_addresses(rng, 1500, 577, 600, 0),)
    src = rng.integers(0, 256, 3000 * 600 + 3, dtype=np.uint8)
    slot = np.zeros(1500 * 577, dtype=np.uint8)
    assert gather_segment(src, plan, addresses, 0, slot) == slot.size
    expected = np.concatenate([src[offset + 3 : offset + 3 + 577] for offset in addresses[0].row_offsets])
    np.testing.assert_array_equal(slot, expected)


def test_threads_share_a_segment() -> None:
    rng = np.random.default_rng(1)
    plan = plan_of(2000, 64, 4, 2000 * 64 * 4)
    addresses = (random_addresses(rng, 2000, 64, 64, 4000 * 64),)
    src = rng.integers(0, 256, 4 * 4000 * 64 + 3, dtype=np.uint8)
    whole, slot = np.zeros(plan.num_bytes, dtype=np.uint8), np.zeros(plan.num_bytes, dtype=np.uint8)
    gather_segment(src, plan, addresses, 0, whole)
    jobs = split_pieces(plan, plan.pieces(0), 3)
    sizes = [sum(piece.end_row - piece.first_row for piece in job) for job in jobs]
    assert len(jobs) == 3
    assert max(sizes) - min(sizes) <= 2
    with ThreadPoolExecutor(3) as pool:
        assert sum(pool.map(lambda job: gather_pieces(src, plan, addresses, job, slot), jobs)) == plan.num_bytes
    np.testing.assert_array_equal(slot, whole)


@pytest.mark.parametrize("mover", [gather_segment, scatter_segment])
@pytest.mark.parametrize("bad_offset", [-1, -(1 << 62), 997, 1 << 33, 1 << 62])
def test_rows_outside_the_pool_move_nothing(mover: Mover, bad_offset: int) -> None:
    plan = plan_of(3, 4, 1, 64)
    pool, slot = np.full(1000, 1, dtype=np.uint8), np.full(64, 2, dtype=np.uint8)
    fits = BlockAddresses(0, 0, np.array([0, 996, 8], dtype=np.int64), 4)
    assert mover(pool.copy(), plan, (fits,), 0, slot.copy()) == 12
    with pytest.raises(LayoutError, match=r"row offsets: got .*, expected 0 to 996: rows of 4 bytes in a pool of 1000"):
        mover(pool, plan, (BlockAddresses(0, 0, np.array([0, bad_offset, 8], dtype=np.int64), 4),), 0, slot)
    assert (pool == 1).all()
    assert (slot == 2).all()


@pytest.mark.parametrize("mover", [gather_segment, scatter_segment])
def test_a_slot_that_is_too_small_moves_nothing(mover: Mover) -> None:
    plan = plan_of(3, 4, 1, 64)
    pool, slot = np.full(1000, 1, dtype=np.uint8), np.full(11, 2, dtype=np.uint8)
    with pytest.raises(LayoutError, match=r"slot: got 11 bytes, expected at least 12"):
        mover(pool, plan, (BlockAddresses(0, 0, np.array([0, 4, 8], dtype=np.int64), 4),), 0, slot)
    assert (pool == 1).all()
    assert (slot == 2).all()


@pytest.mark.parametrize("row_stride_bytes", [1152, 1160])
def test_pools_far_beyond_4_gib(row_stride_bytes: int) -> None:
    """A sparse 3 TiB mapping with a large page stride and high page ids: only the touched pages cost memory."""
    page_stride_bytes = 1152 << 20
    group = Group(
        name="kv",
        layers=LayerRange(0, 2),
        base_offset_bytes=1152,
        layer_stride_bytes=1152 << 17,
        page_stride_bytes=page_stride_bytes,
        num_pages=2600,
        page_tokens=4,
        row_stride_bytes=row_stride_bytes,
        row_bytes=1152,
    )
    layout = PoolLayout(groups=(group,), dtype_tag="bf16")
    route = match_layouts(layout, layout, 0, 1)
    wanted = (TokenRange(0, 7),)
    pages = np.array([2599, 5], dtype=np.int64)
    plan = plan_chunk(route, wanted, wanted, ((),), None, 1 << 20)
    addresses = resolve(plan, route, "src", layout, (PageTable(wanted[0], pages),))
    fd = os.memfd_create("sparse")
    os.ftruncate(fd, group.extent_bytes)
    with mmap.mmap(fd, group.extent_bytes) as mapping:
        os.close(fd)
        pool = np.frombuffer(mapping, dtype=np.uint8)
        rng = np.random.default_rng(3)
        rows = rng.integers(0, 256, (2, 7, 1152), dtype=np.uint8)
        assert scatter_segment(pool, plan, addresses, 0, rows.ravel()) == rows.size
        for layer in range(2):
            for token in range(7):
                page = int(pages[token // 4])
                first = 1152 + layer * (1152 << 17) + page * page_stride_bytes + token % 4 * row_stride_bytes
                np.testing.assert_array_equal(pool[first : first + 1152], rows[layer, token])
        slot = np.zeros(rows.size, dtype=np.uint8)
        assert gather_segment(pool, plan, addresses, 0, slot) == rows.size
        np.testing.assert_array_equal(slot, rows.ravel())
        del pool
