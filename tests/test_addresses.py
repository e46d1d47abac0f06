"""Pages that cannot hold the rows are refused, each with the group, what was got and what was expected."""

from __future__ import annotations

import msgspec
import numpy as np
import pytest

from kvxfer.errors import LayoutError
from kvxfer.layout import Placement, PoolLayout, Shard, StatePart, TokenRange
from kvxfer.wire import PageTable, check_pages, match_layouts, plan_chunk, resolve
from tests.wire_world import Geometry, GroupSpec, make_layout

KV = GroupSpec("kv", Placement.SHARDED, 2, 13)
STATE = GroupSpec("state", Placement.STATE, 2, parts=(StatePart("conv", 16),))


def layout(shard: Shard, num_pages: int = 50) -> PoolLayout:
    return make_layout((KV, STATE), Geometry(4), num_pages, shard)


def int64(*values: int) -> np.ndarray:
    return np.array(values, dtype=np.int64)


@pytest.mark.parametrize(
    ("pages", "message"),
    [
        (int64(0, 1), r"group 'kv': pages: got 2, expected 3 for tokens \[5, 25\) on rank 1 of 2, 4 rows a page"),
        (int64(0, 1, 2, 3), r"group 'kv': pages: got 4, expected 3"),
        (int64(), r"group 'kv': pages: got 0, expected 3"),
        (int64(0, 50, 2), r"group 'kv': pages: got page 50, expected ids from 0 to below 50"),
        (int64(0, -1, 2), r"group 'kv': pages: got page -1, expected ids from 0 to below 50"),
        (int64(0, 2**63 - 1, 2), rf"group 'kv': pages: got page {2**63 - 1}, expected"),
        (int64(7, 2, 7), r"group 'kv': pages: got page 7 twice, expected each page once"),
        (int64(0, 1, 2).astype(np.int32), r"group 'kv': pages: got 1 dimensions of int32, expected one of int64"),
        (int64(0, 1, 2)[:, None], r"group 'kv': pages: got 2 dimensions of int64, expected one of int64"),
    ],
)
def test_bad_pages(pages: np.ndarray, message: str) -> None:
    shard = Shard(1, 2)
    group = layout(shard).groups[0]
    check_pages(group, shard, TokenRange(5, 25), int64(49, 0, 7))
    with pytest.raises(LayoutError, match=message):
        check_pages(group, shard, TokenRange(5, 25), pages)


def test_state_has_one_page_or_none() -> None:
    group = layout(Shard(1, 2)).groups[1]
    check_pages(group, Shard(1, 2), TokenRange(0, 1), int64(3))
    check_pages(group, Shard(1, 2), TokenRange(0, 0), int64())
    with pytest.raises(LayoutError, match=r"group 'state': pages: got 0, expected 1"):
        check_pages(group, Shard(1, 2), TokenRange(0, 1), int64())
    with pytest.raises(LayoutError, match=r"group 'state': token range: got \[0, 2\), expected \[0, 1\)"):
        check_pages(group, Shard(1, 2), TokenRange(0, 2), int64(0, 1))


def test_tables_that_do_not_reach() -> None:
    pool = layout(Shard())
    route = match_layouts(pool, pool, 0, 1)
    wanted = (TokenRange(4, 12), TokenRange(0, 1))
    plan = plan_chunk(route, wanted, wanted, ((), ()), None, 4096)
    kv, state = PageTable(wanted[0], int64(3, 8)), PageTable(wanted[1], int64(1))
    assert [each.row_bytes for each in resolve(plan, route, "dst", pool, (kv, state))] == [13, 16]
    for token_range in (TokenRange(5, 12), TokenRange(4, 11)):
        with pytest.raises(LayoutError, match=r"group 'kv': pages are for tokens .* the plan needs \[4, 12\)"):
            resolve(plan, route, "dst", pool, (PageTable(token_range, int64(3, 8)), state))
    with pytest.raises(LayoutError, match=r"group 'kv': pages: got 1, expected at least 2"):
        resolve(plan, route, "dst", pool, (PageTable(wanted[0], int64(3)), state))
    with pytest.raises(LayoutError, match=r"group 'state': pages: got 0, expected 1 for a state blob"):
        resolve(plan, route, "dst", pool, (kv, PageTable(TokenRange(0, 0), int64())))


def test_offsets_near_the_largest_pool_are_exact() -> None:
    """Page ids and strides whose product needs 62 bits: the right byte, no wrap."""
    small = layout(Shard()).groups[0]
    page_stride_bytes, num_pages = 1 << 33, (1 << 28) + 1
    group = msgspec.structs.replace(
        small, page_stride_bytes=page_stride_bytes, num_pages=num_pages, layer_stride_bytes=1 << 40
    )
    pool = PoolLayout(groups=(group,), dtype_tag="bf16")
    route = match_layouts(pool, pool, 0, 1)
    wanted = (TokenRange(0, 6),)
    pages = int64(num_pages - 1, 1)
    check_pages(group, Shard(), wanted[0], pages)
    plan = plan_chunk(route, wanted, wanted, ((),), None, 4096)
    (addresses,) = resolve(plan, route, "src", pool, (PageTable(wanted[0], pages),))
    top = (num_pages - 1) * page_stride_bytes
    assert addresses.row_offsets.tolist() == [top, top + 13, top + 26, top + 39, 1 << 33, (1 << 33) + 13]
    assert addresses.layer_offset_bytes(plan.blocks[0], 1) == group.base_offset_bytes + (1 << 40)
