"""Chunks on the prefill side, from submit to the first row: planned for a leg, announced, released when they are ready.

A chunk is planned as soon as its leg is there, so that its peer and whoever moves its rows can prepare; no row is read
before the timeline of the worker's stream says that it is written.
"""

from __future__ import annotations

import logging
import time
from typing import NamedTuple

from kvxfer.addresses import BlockAddresses, PageTable, count_runs, resolve
from kvxfer.control.messages import Chunk, PullChunk, PullReady
from kvxfer.errors import LayoutError
from kvxfer.operations import SegmentSource
from kvxfer.prefill.leg import ChunkWork, Leg, Mode, UnreadyChunk
from kvxfer.prefill.lifecycle import Lifecycle
from kvxfer.prefill.policy import choose_mode
from kvxfer.prefill.transfer import NO_PAGES, SubmittedChunk, Transfer
from kvxfer.segments import ChunkPlan
from kvxfer.transfer import LegState, Reason
from kvxfer.wire import plan_chunk

_log = logging.getLogger("kvxfer.prefill")


def plan_for_leg(life: Lifecycle, transfer: Transfer, leg: Leg, chunk: SubmittedChunk, now: float) -> None:
    """Plan one chunk of an active leg, announce it, queue its segments; no row is read before it is ready."""
    if leg.state is not LegState.ACTIVE:
        return
    assert life.layout is not None
    began_s = time.perf_counter()
    route, grant = leg.peer.route, leg.grant
    tables = tuple(chunk.tables.get(group.name, NO_PAGES) for group in route.groups)
    ranges = tuple(table.token_range for table in tables)
    try:
        plan = plan_chunk(route, ranges, grant.wanted, grant.have, chunk.layers, leg.peer.segment_bytes)
        if plan.num_segments and leg.mode is Mode.AUTO and leg.can_pull:
            _choose(life, leg, 0, plan.num_bytes)
        is_pulled = plan.num_segments > 0 and leg.mode is Mode.P2P
        addresses = () if is_pulled else resolve(plan, route, "src", life.layout, tables)  # its peer's task
    except LayoutError as error:
        life.fail(transfer, Reason.LAYOUT_MISMATCH, str(error), now)
        return
    if is_pulled and leg.lease is None:
        life.fail(transfer, Reason.PEER_REFUSED, "mode p2p: no lease word is free", now)
        return
    leg.num_chunks += 1
    leg.num_rows += plan.num_rows
    leg.num_segments += plan.num_segments
    leg.num_bytes += plan.num_bytes
    announcement = Chunk(
        transfer=leg.transfer,
        generation=grant.generation,
        chunk=chunk.chunk,
        ranges=ranges,
        layers=chunk.layers,
        num_segments=plan.num_segments,
        num_bytes=plan.num_bytes,
    )
    what: ChunkWork | PullReady
    if is_pulled:
        life.send(leg, _to_pull(leg, announcement, tables))
        leg.uncounted[chunk.chunk] = plan, tables
        what = PullReady(transfer=leg.transfer, generation=grant.generation, chunk=chunk.chunk)
    else:
        _count_and_choose(life, leg, plan, addresses)
        life.send(leg, announcement)
        what = ChunkWork(chunk.chunk, SegmentSource(plan, addresses))
        life.sender.expect_work(leg, plan.num_segments)
    plan_s = time.perf_counter() - began_s
    transfer.plan_s += plan_s
    life.totals.plan_s += plan_s
    if plan.num_segments and chunk.ready > life.timeline:
        leg.unready.append(UnreadyChunk(chunk.ready, what))
        life.unready_legs[leg] = None
    else:
        _release(life, leg, what)


def _count_and_choose(life: Lifecycle, leg: Leg, plan: ChunkPlan, addresses: tuple[BlockAddresses, ...]) -> None:
    """Rows that nobody pulls go by the way that their runs make the fastest."""
    num_runs = count_runs(plan, addresses)
    leg.num_runs += num_runs
    if plan.num_segments and leg.mode is Mode.AUTO:
        _choose(life, leg, num_runs, plan.num_bytes)


def _release(life: Lifecycle, leg: Leg, what: ChunkWork | PullReady) -> None:
    """The rows of a planned chunk may be read."""
    if isinstance(what, PullReady):
        leg.pulling.add(what.chunk)
        life.send(leg, what)
    else:
        life.sender.add_work(leg, what)


def reach_timeline(life: Lifecycle, value: int, now: float) -> None:
    """The worker's stream has come so far: go on with the chunks that were waiting for it."""
    if value <= life.timeline:
        return
    life.timeline = value
    released: dict[str, None] = {}  # transfers
    for leg in list(life.unready_legs):
        ready = [each for each in leg.unready if each.ready <= value]
        leg.unready = [each for each in leg.unready if each.ready > value]
        if not leg.unready:
            del life.unready_legs[leg]
        for each in ready:
            _release(life, leg, each.what)
            released[leg.transfer] = None
    for transfer in released:
        life.advance(life.transfers[transfer], now)


def _choose(life: Lifecycle, leg: Leg, num_runs: int, num_bytes: int) -> None:
    """Settle the way of a leg with its first rows."""
    choice = choose_mode(
        can_pull=leg.can_pull,
        why_not_raw=_why_not_raw(life, leg),
        figures=leg.peer.figures,
        num_runs=num_runs,
        num_bytes=num_bytes,
        segment_bytes=leg.peer.segment_bytes,
    )
    leg.mode = choice.mode
    life.num_chosen[choice.mode] += 1
    _log.debug("transfer %s to %s: %s, %s", leg.transfer, leg.peer.incarnation, choice.mode.value, choice.why)


def _why_not_raw(life: Lifecycle, leg: Leg) -> str:
    if not life.may_send_raw:
        return "the pool is not registered with the engine"
    if not life.is_raw_measured:
        return "the path out of the pool's memory was not measured"
    return "the peer wants checksums, which only packed bytes have" if leg.peer.verify else ""


def _to_pull(leg: Leg, chunk: Chunk, tables: tuple[PageTable, ...]) -> PullChunk:
    """What tells a peer that has the pool mapped where the chunk's rows lie and under which lease they may be read."""
    assert leg.lease is not None
    word, value = leg.lease
    return PullChunk(
        transfer=chunk.transfer,
        generation=chunk.generation,
        chunk=chunk.chunk,
        ranges=chunk.ranges,
        layers=chunk.layers,
        num_segments=chunk.num_segments,
        num_bytes=chunk.num_bytes,
        pages=tuple(table.pages.astype("<u4").tobytes() for table in tables),
        lease_word=word,
        lease_value=value,
    )


class Outlook(NamedTuple):
    """What whoever moves rows should prepare for."""

    num_gathers: int
    """Gathers that will follow those that were taken as actions if nothing ends early, as far as it is planned."""
    ready: int
    """The lowest value of the worker's timeline that a chunk is waiting for; 0 for none."""


def look_ahead(life: Lifecycle) -> Outlook:
    """The outlook now."""
    if not life.unready_legs:
        return Outlook(life.sender.num_to_gather, 0)
    ready = min(each.ready for leg in life.unready_legs for each in leg.unready)
    return Outlook(life.sender.num_to_gather, ready)
