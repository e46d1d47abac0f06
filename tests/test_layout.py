"""Layouts that cannot be are refused, with the field, what was got and what was expected."""

from __future__ import annotations

import msgspec
import pytest

from kvxfer.errors import LayoutError
from kvxfer.layout import MAX_OFFSET, Group, LayerRange, Placement, PoolLayout, Shard, StatePart, TokenRange

GROUP = Group(
    name="kv",
    layers=LayerRange(2, 5),
    base_offset_bytes=128,
    layer_stride_bytes=1 << 20,
    page_stride_bytes=4096,
    num_pages=10,
    page_tokens=16,
    row_stride_bytes=200,
    row_bytes=144,
)


def changed(**fields: object) -> Group:
    """`GROUP` with other fields, checked as if it came from a peer."""
    encoded = msgspec.to_builtins(GROUP) | msgspec.to_builtins(fields)
    return msgspec.convert(encoded, Group)


def test_extent_is_the_end_of_the_last_row() -> None:
    assert GROUP.extent_bytes == 128 + 2 * (1 << 20) + 9 * 4096 + 15 * 200 + 144
    assert changed(num_pages=0).extent_bytes == 128
    assert changed(layers=LayerRange(2, 2)).extent_bytes == 128


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"row_stride_bytes": 143}, r"group 'kv': row_stride_bytes: got 143, expected at least row_bytes 144"),
        ({"page_stride_bytes": 3143}, r"group 'kv': page_stride_bytes: got 3143, expected at least 3144"),
        ({"placement": Placement.STATE}, r"group 'kv': parts: got 0, expected some"),
        ({"parts": (StatePart("conv", 16),)}, r"group 'kv': parts: got 1, expected .* none for the others"),
        ({"placement": Placement.STATE, "parts": (StatePart("conv", 144),)}, r"page_tokens: got 16, expected 1"),
        ({"layer_stride_bytes": MAX_OFFSET}, rf"group 'kv': ends at byte \d+, expected at most {MAX_OFFSET}"),
        ({"num_pages": 1 << 40, "page_stride_bytes": 1 << 40}, r"group 'kv': ends at byte \d+, expected at most"),
    ],
)
def test_impossible_groups_are_refused(fields: dict[str, object], message: str) -> None:
    with pytest.raises((LayoutError, msgspec.ValidationError), match=message):
        changed(**fields)


@pytest.mark.parametrize(
    ("field", "bad_value"),
    [
        ("num_pages", -1),
        ("row_bytes", 0),
        ("page_tokens", 0),
        ("page_stride_bytes", 1 << 63),
        ("base_offset_bytes", -(1 << 63)),
        ("row_bytes", 1.5),
        ("name", ""),
        ("unknown", 1),
    ],
)
def test_fields_out_of_bounds_do_not_parse(field: str, bad_value: object) -> None:
    with pytest.raises(msgspec.ValidationError, match=field):
        changed(**{field: bad_value})


def test_ranges_that_end_before_they_begin() -> None:
    with pytest.raises(LayoutError, match=r"token range \[3, 2\)"):
        TokenRange(3, 2)
    with pytest.raises(LayoutError, match=r"layer range \[1, 0\)"):
        LayerRange(1, 0)
    with pytest.raises(LayoutError, match=r"shard.rank: got 2, expected below shard.size 2"):
        Shard(2, 2)


@pytest.mark.parametrize("range_type", [TokenRange, LayerRange])
def test_intersection_is_what_both_hold(range_type: type[TokenRange] | type[LayerRange]) -> None:
    for first in range(5):
        for end in range(first, 5):
            for other_first in range(5):
                for other_end in range(other_first, 5):
                    common = range_type(first, end).intersect(range_type(other_first, other_end))  # type: ignore[arg-type]
                    expected = set(range(first, end)) & set(range(other_first, other_end))
                    assert set(range(common.first, common.end)) == expected


def test_split_parts_are_cut_evenly() -> None:
    part = StatePart("ssm", 96, split=True)
    assert part.local_bytes(Shard(1, 3)) == 32
    assert StatePart("conv", 96).local_bytes(Shard(1, 3)) == 96
    with pytest.raises(LayoutError, match=r"state part 'ssm': got 96 bytes, expected a multiple of shard.size 5"):
        part.local_bytes(Shard(0, 5))


def test_pool_layouts() -> None:
    layout = PoolLayout(groups=(GROUP,), dtype_tag="bf16")
    layout.check_fits(GROUP.extent_bytes)
    with pytest.raises(LayoutError, match=rf"group 'kv': ends at byte {GROUP.extent_bytes}, but the pool has"):
        layout.check_fits(GROUP.extent_bytes - 1)
    with pytest.raises(LayoutError, match=r"groups: got the names \['kv', 'kv'\], expected each once"):
        PoolLayout(groups=(GROUP, GROUP), dtype_tag="bf16")
    with pytest.raises(LayoutError, match=r"groups: got 0, expected 1 to 64"):
        PoolLayout(groups=(), dtype_tag="bf16")
    with pytest.raises(LayoutError, match=r"replica: got 2, expected below num_replicas 2"):
        PoolLayout(groups=(GROUP,), dtype_tag="bf16", replica=2, num_replicas=2)


def test_row_bytes_of_state_are_the_sum_of_the_local_parts() -> None:
    parts = (StatePart("conv", 48), StatePart("ssm", 96, split=True))
    state = changed(placement=Placement.STATE, parts=parts, page_tokens=1, row_bytes=48 + 48)
    PoolLayout(groups=(state,), dtype_tag="bf16", shard=Shard(1, 2))
    with pytest.raises(LayoutError, match=r"group 'kv': row_bytes: got 96, expected 80, .* on rank 0 of 3"):
        PoolLayout(groups=(state,), dtype_tag="bf16", shard=Shard(0, 3))


def test_layouts_survive_the_wire() -> None:
    layout = PoolLayout(groups=(GROUP,), dtype_tag="bf16", shard=Shard(1, 4, 16), replica=1, num_replicas=2)
    assert msgspec.msgpack.decode(msgspec.msgpack.encode(layout), type=PoolLayout) == layout
