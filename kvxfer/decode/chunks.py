"""Chunks that a source announces, in this side's addresses, and in the source's where its pool is mapped."""

from __future__ import annotations

from kvxfer.addresses import PageTable, check_pages, resolve
from kvxfer.control.messages import Chunk, PullChunk, Segment
from kvxfer.control.pages import decode_pages
from kvxfer.decode.receive import NO_PAGES, Receive, ReceivedChunk, ReceiveLeg, RowsToPull
from kvxfer.errors import LayoutError
from kvxfer.layout import PoolLayout
from kvxfer.operations import SegmentSource
from kvxfer.wire import plan_chunk

MAX_CHUNKS = 1 << 16


def plan_received(layout: PoolLayout, receive: Receive, leg: ReceiveLeg, message: Chunk | PullChunk) -> ReceivedChunk:
    """Plan an announced chunk as the source did. Raises `LayoutError` where it is not what was announced."""
    assert leg.info is not None
    groups = leg.info.route.groups
    if len(message.ranges) != len(groups) or len(leg.chunks) >= MAX_CHUNKS:
        raise LayoutError(f"chunk {message.chunk}: got ranges of {len(message.ranges)} groups, not {len(groups)}")
    layers = message.layers
    layers_of = [group.layers if layers is None else group.layers.intersect(layers) for group in groups]
    leg.coverage.add(zip(range(len(groups)), layers_of, message.ranges, strict=True))
    plan = plan_chunk(leg.info.route, message.ranges, leg.wanted, leg.have, layers, leg.info.segment_bytes)
    tables = tuple(receive.tables.get(group.name, NO_PAGES) for group in groups)
    addresses = resolve(plan, leg.info.route, "dst", layout, tables)
    if (plan.num_segments, plan.num_bytes) != (message.num_segments, message.num_bytes):
        raise LayoutError(
            f"chunk {message.chunk}: got {message.num_segments} segments of {message.num_bytes} bytes, "
            f"expected {plan.num_segments} of {plan.num_bytes}"
        )
    return ReceivedChunk(SegmentSource(plan, addresses), bytearray(plan.num_segments), plan.num_segments)


def rows_to_pull(leg: ReceiveLeg, message: PullChunk, chunk: ReceivedChunk) -> RowsToPull:
    """Where the rows of a chunk lie in the source's pool, mapped here. Raises `LayoutError` for pages outside it."""
    assert leg.info is not None
    route, layout = leg.info.route, leg.info.layout
    if layout is None:
        raise LayoutError(f"chunk {message.chunk}: got one to be pulled, but the source's pool is not mapped here")
    if len(message.pages) != len(route.groups):
        raise LayoutError(f"chunk {message.chunk}: got pages of {len(message.pages)} groups, not {len(route.groups)}")
    tables = []
    for group, token_range, data in zip(route.groups, message.ranges, message.pages, strict=True):
        pages = decode_pages(data)
        check_pages(layout.groups[group.src_idx], layout.shard, token_range, pages)
        tables.append(PageTable(token_range, pages))
    addresses = resolve(chunk.source.plan, route, "src", layout, tuple(tables))
    return RowsToPull(addresses, (message.lease_word, message.lease_value))


def segment_problem(chunk: ReceivedChunk | None, message: Segment) -> str | None:
    """What is wrong with a notice, or None."""
    if chunk is None or message.segment >= len(chunk.has_come):
        return f"segment {message.segment} of chunk {message.chunk}: was not announced"
    first_byte, end_byte = chunk.source.plan.segment_range(message.segment)
    if message.num_bytes != end_byte - first_byte:
        return (
            f"segment {message.segment} of chunk {message.chunk}: got {message.num_bytes} bytes, "
            f"expected {end_byte - first_byte}"
        )
    return None
