"""The wire order: which rows a source owes a destination for one chunk, and in which order they travel.

Order: group, layer, token; for state: group, part, layer. Both sides compute it from what they agreed on (`Route`) and
what they said (ranges), and each maps it to its own addresses with its own page table, so neither sends a page or
an address to the other.

    route = match_layouts(...)              once a leg, at pairing
    check_complete(routes, ...)             once a transfer, at the destination
    plan = plan_chunk(route, ...)           once a chunk, on both sides
    addresses = resolve(plan, route, ...)   once a chunk, on each side with its own pages
    plan.pieces(segment_idx)                once a segment, when it is gathered or scattered

Pure numpy, no I/O, no Python object a row.
"""

from __future__ import annotations

import numpy as np

from kvxfer.addresses import BlockAddresses, PageTable, check_pages, count_runs, resolve, runs
from kvxfer.errors import LayoutError
from kvxfer.layout import LayerRange, Placement, Shard, TokenRange
from kvxfer.ownership import Int64Array, owned_tokens, owner
from kvxfer.routes import Route, WireGroup, check_complete, match_layouts, part_interval, subtract
from kvxfer.segments import Block, ChunkPlan, Piece, cut_blocks

__all__ = [
    "STATE_ROW_BYTES",
    "Block",
    "BlockAddresses",
    "ChunkPlan",
    "PageTable",
    "Piece",
    "Route",
    "WireGroup",
    "check_complete",
    "check_pages",
    "common_tokens",
    "count_runs",
    "match_layouts",
    "plan_chunk",
    "resolve",
    "runs",
]

STATE_ROW_BYTES = 4096  # a state blob is cut into rows so that it fits slots of any size


def plan_chunk(
    route: Route,
    ranges: tuple[TokenRange, ...],
    wanted: tuple[TokenRange, ...],
    have: tuple[tuple[TokenRange, ...], ...],
    layers: LayerRange | None,
    segment_bytes: int,
) -> ChunkPlan:
    """The rows that the source of `route` owes for one chunk, cut into segments of at most `segment_bytes`.

    `ranges` are the chunk's tokens, `wanted` those that the destination opened, `have` those that it holds already;
    each stands in the order of `route.groups`. `layers` limits the chunk to some global layers. A row is owed when
    both sides own its token and hold its layer. An inactive route owes nothing; zero rows make a plan of 0 segments.

    Raises `LayoutError` where `segment_bytes` is less than a row.
    """
    if not len(ranges) == len(wanted) == len(have) == len(route.groups):
        raise LayoutError(
            f"ranges, wanted, have: got {len(ranges)}, {len(wanted)}, {len(have)} groups, expected {len(route.groups)}"
        )
    blocks: list[Block] = []
    tokens_of: dict[tuple[TokenRange, ...], Int64Array] = {}  # groups of one range share one array
    for group_idx, group in enumerate(route.groups):
        group_layers = group.layers if layers is None else group.layers.intersect(layers)
        left = subtract(ranges[group_idx].intersect(wanted[group_idx]), have[group_idx])
        if not (route.active and group_layers.num_layers and left):
            continue
        if group.placement is Placement.STATE:
            blocks += _state_blocks(route, group_idx, group_layers)
            continue
        if group.placement is Placement.SHARDED:
            if left not in tokens_of:
                tokens_of[left] = common_tokens(route.src_shard, route.dst_shard, left)
            tokens = tokens_of[left]
        elif route.sends_replicated:
            tokens = common_tokens(Shard(), Shard(), left)
        else:
            continue
        if tokens.size:
            blocks.append(Block(group_idx, group_layers, group.row_bytes, tokens.size, tokens))
    return cut_blocks(tuple(blocks), segment_bytes)


def common_tokens(src: Shard, dst: Shard, ranges: tuple[TokenRange, ...]) -> Int64Array:
    """Tokens of the ascending `ranges` that both shards own: `[num_tokens]` int64, ascending and read-only."""
    if (src.size, src.interleave) == (dst.size, dst.interleave) and src.rank != dst.rank:
        return np.empty(0, dtype=np.int64)
    finer, coarser = (src, dst) if src.size > dst.size else (dst, src)
    parts = []
    for token_range in ranges:
        tokens = owned_tokens(finer, token_range)
        if coarser.size > 1 and coarser != finer:
            tokens = tokens[owner(tokens, coarser) == coarser.rank]
        parts.append(tokens)
    tokens = np.concatenate(parts) if len(parts) > 1 else parts[0]
    tokens.flags.writeable = False  # several blocks share it
    return tokens


def _state_blocks(route: Route, group_idx: int, layers: LayerRange) -> list[Block]:
    """The bytes of each part that both sides hold, as whole rows and a tail."""
    blocks = []
    src_part_first = dst_part_first = 0  # of the part within each side's blob
    for part in route.groups[group_idx].parts:
        src_first, src_end = part_interval(part, route.src_shard)
        dst_first, dst_end = part_interval(part, route.dst_shard)
        first, end = max(src_first, dst_first), min(src_end, dst_end)
        if part.split or route.sends_replicated:
            num_left = end - first
            while num_left > 0:
                row_bytes = min(STATE_ROW_BYTES, num_left)
                num_rows = num_left // row_bytes
                blocks.append(
                    Block(
                        group_idx,
                        layers,
                        row_bytes,
                        num_rows,
                        src_first_byte=src_part_first + end - num_left - src_first,
                        dst_first_byte=dst_part_first + end - num_left - dst_first,
                    )
                )
                num_left -= num_rows * row_bytes
        src_part_first += src_end - src_first
        dst_part_first += dst_end - dst_first
    return blocks
