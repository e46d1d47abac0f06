"""Where the rows of a demo or bench come from, and a plain account of where each must arrive.

`expected_pool` walks token by token and counts; it shares no code with the planner that it checks.
"""

from __future__ import annotations

import functools

import numpy as np
import numpy.typing as npt

from kvxfer.cli.protocol import Expected, FileRows, PageList, PatternRows, RowSource
from kvxfer.layout import Group, Placement, PoolLayout, Shard

ByteArray = npt.NDArray[np.uint8]
Offsets = npt.NDArray[np.int64]

_PATTERN_BYTES = 1 << 22


def read_rows(source: RowSource, layer_idx: int) -> ByteArray:
    """Rows of one layer: `[num_tokens, row_bytes]` uint8."""
    if isinstance(source, PatternRows):
        return _pattern_rows(source, layer_idx)
    rows: ByteArray = _file_rows(source)[layer_idx]
    return rows


def _file_rows(source: FileRows) -> ByteArray:
    shape = (source.num_layers, source.num_tokens, source.row_bytes)
    if 0 in shape:
        return np.empty(shape, dtype=np.uint8)
    return np.memmap(source.path, dtype=np.uint8, mode="r", shape=shape)


def _pattern_rows(source: PatternRows, layer_idx: int) -> ByteArray:
    block, offsets = pattern_windows(source, layer_idx)
    rows: ByteArray = np.lib.stride_tricks.sliding_window_view(block, source.row_bytes)[offsets]
    return rows


def pattern_windows(source: PatternRows, layer_idx: int) -> tuple[ByteArray, Offsets]:
    """Each row of a layer is a window into one block of random bytes, at an offset that hashes layer and token.

    Returns the block, one for all layers, and where each token's row begins in it: `[num_tokens]` int64.
    """
    block = _random_bytes(source.seed, _PATTERN_BYTES + source.row_bytes)
    tokens = np.arange(source.num_tokens, dtype=np.uint64) + np.uint64((layer_idx << 32) + 1)
    # Fibonacci hashing: multiply by 2^64 / golden ratio, keep the upper bits.
    offsets = (tokens * np.uint64(0x9E3779B97F4A7C15)) >> np.uint64(64 - 22)
    return block, offsets.astype(np.int64)


@functools.cache
def _random_bytes(seed: int, num_bytes: int) -> ByteArray:
    return np.random.default_rng(seed).integers(0, 256, num_bytes, dtype=np.uint8)


def write_rows(pool: ByteArray, group: Group, pages: list[int], source: RowSource) -> None:
    """Put token `t` into row `t % page_tokens` of `pages[t // page_tokens]`, in every layer of an unsharded group."""
    tokens = np.arange(source.num_tokens)
    page_of_token = np.asarray(pages, dtype=np.int64)[tokens // group.page_tokens]
    for layer_idx in range(source.num_layers):
        layer = np.lib.stride_tricks.as_strided(
            pool[group.base_offset_bytes + layer_idx * group.layer_stride_bytes :],
            (group.num_pages, group.page_tokens, group.row_bytes),
            (group.page_stride_bytes, group.row_stride_bytes, 1),
        )
        layer[page_of_token, tokens % group.page_tokens] = read_rows(source, layer_idx)


def expected_pool(layout: PoolLayout, pool_bytes: int, fill: int, groups: dict[str, Expected]) -> ByteArray:
    """The whole pool as it must be after a transfer: `[pool_bytes]` uint8, `fill` where nothing belongs."""
    image = np.full(pool_bytes, fill, dtype=np.uint8)
    for group in layout.groups:
        if group.name not in groups:
            continue
        expected = groups[group.name]
        if group.placement is Placement.STATE:
            _place_state(image, group, layout.shard, expected)
        else:
            owners = layout.shard if group.placement is Placement.SHARDED else Shard()
            slots = owned_rows(group, owners, expected.pages)
            for layer_idx in range(expected.source.num_layers):
                rows = read_rows(expected.source, layer_idx)
                layer_start = group.base_offset_bytes + layer_idx * group.layer_stride_bytes
                for token, offset in slots:
                    start = layer_start + offset
                    image[start : start + group.row_bytes] = rows[token]
    return image


def owned_rows(group: Group, owners: Shard, pages: PageList) -> list[tuple[int, int]]:
    """(token, offset in bytes within a layer) of each row that the rank owns, found by counting up to it."""
    slots = []
    num_owned = 0
    first_page: int | None = None
    for token in range(pages.end_token):
        if token // owners.interleave % owners.size != owners.rank:
            continue
        if token >= pages.first_token:
            if first_page is None:
                first_page = num_owned // group.page_tokens
            page = pages.pages[num_owned // group.page_tokens - first_page]
            row = num_owned % group.page_tokens
            slots.append((token, page * group.page_stride_bytes + row * group.row_stride_bytes))
        num_owned += 1
    return slots


def _place_state(image: ByteArray, group: Group, shard: Shard, expected: Expected) -> None:
    for layer_idx in range(expected.source.num_layers):
        whole = read_rows(expected.source, layer_idx)[0]
        start = group.base_offset_bytes + layer_idx * group.layer_stride_bytes
        start += expected.pages.pages[0] * group.page_stride_bytes
        for part in group.parts:
            part_bytes, whole = whole[: part.num_bytes], whole[part.num_bytes :]
            if part.split:
                share = part.num_bytes // shard.size
                part_bytes = part_bytes[shard.rank * share : (shard.rank + 1) * share]
            image[start : start + part_bytes.size] = part_bytes
            start += part_bytes.size


def first_difference(actual: ByteArray, expected: ByteArray, layout: PoolLayout) -> str:
    """Where two pools first differ, in words; empty when they do not."""
    if np.array_equal(actual, expected):
        return ""
    wrong = np.flatnonzero(actual != expected)
    offset = int(wrong[0])
    return describe_difference(layout, wrong.size, offset, int(actual[offset]), int(expected[offset]))


def describe_difference(layout: PoolLayout, num_wrong: int, offset: int, got: int, expected: int) -> str:
    """`num_wrong` bytes of a pool differ, the first at `offset`."""
    inside = [group.name for group in layout.groups if group.base_offset_bytes <= offset < group.extent_bytes]
    where = f"group {inside[0]!r}" if inside else "outside all groups"
    return f"{num_wrong} bytes differ, the first at byte {offset} of the pool ({where}): got {got}, expected {expected}"
