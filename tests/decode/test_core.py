"""The decode core along a transfer's life: open, pairing, chunks, landed; and every way in which it ends otherwise."""

from __future__ import annotations

import numpy as np
import pytest

from kvxfer.control.ids import new_id
from kvxfer.control.messages import AbortLeg, Chunk, Grant, GroupPages, Open, Source, Ticket
from kvxfer.control.pages import encode_pages
from kvxfer.errors import LayoutError, RefusedError
from kvxfer.layout import LayerRange, PoolLayout, Shard, TokenRange
from kvxfer.slots import SlotState
from kvxfer.transfer import EventKind, Reason
from tests.decode.driver import DecodeDriver
from tests.prefill.driver import ROW_BYTES, SEGMENT_BYTES, pool_layout

LANDED = [(EventKind.LANDED, None)]


def test_a_transfer_waits_for_pairing_then_asks_each_source_once() -> None:
    driver = DecodeDriver()
    source = Source(endpoint="tcp://127.0.0.1:1", incarnation=new_id())
    first = driver.open((source,), 4)
    second = driver.open((source,), 4)
    assert driver.pairings == [source, source]
    assert not driver.sent
    driver.pair(source=source)
    assert [grant.transfer for grant in driver.to(source, Grant)] == [first, second]
    for transfer in (first, second):
        driver.deliver(source, transfer, 4)
        assert driver.ends(transfer) == LANDED
    driver.assert_idle()


@pytest.mark.parametrize("end", [0, 1])
def test_zero_rows_land_by_finished_alone(end: int) -> None:
    """No tokens at all, and one token that belongs to the other rank."""
    driver = DecodeDriver(shard=Shard(rank=1, size=2))
    source = driver.pair()
    transfer = driver.open((source,), end)
    assert driver.ends(transfer) == []
    driver.deliver(source, transfer, end)
    assert driver.ends(transfer) == LANDED
    driver.assert_idle()


def test_sources_of_a_transfer_that_ended_unpaired_are_told_once_they_are_paired() -> None:
    """Or their worker would wait for its deadline. The first word may come too early to be answered."""
    driver = DecodeDriver()
    paired, pairing = driver.pair(), Source(endpoint="tcp://127.0.0.1:1", incarnation=new_id())
    transfer = driver.open((paired, pairing), 4)
    driver.abort(transfer)
    assert driver.ends(transfer) == [(EventKind.ABORTED, Reason.ABORTED_BY_WORKER)]
    assert [len(driver.to(source, AbortLeg)) for source in (paired, pairing)] == [1, 1]
    driver.pair(source=pairing)
    assert [len(driver.to(source, AbortLeg)) for source in (paired, pairing)] == [1, 2]
    assert not driver.to(pairing, Grant)
    for source in (paired, pairing):
        driver.quiesced(source, transfer)
    driver.assert_idle()


def test_chunks_may_overtake_each_other() -> None:
    """Segments of two chunks in any order; `finished` may even come before a scatter has ended."""
    driver = DecodeDriver()
    source = driver.pair()
    transfer = driver.open((source,), 8)
    driver.chunk(source, transfer, 4, 8, chunk=1)
    driver.chunk(source, transfer, 0, 4, chunk=0)
    first, second = driver.credits(source, transfer)
    driver.segment(source, transfer, 0, second, chunk=0)
    driver.segment(source, transfer, 0, first, chunk=1)
    driver.receive(source, driver.finished_message(source, transfer, 2, 2, 8 * ROW_BYTES))
    driver.end_scatter()
    assert driver.ends(transfer) == []
    driver.end_scatter()
    assert driver.ends(transfer) == LANDED


def _stages(driver: DecodeDriver, *layers: tuple[int, int]) -> tuple[Source, ...]:
    return tuple(driver.pair(pool_layout(layers=each)) for each in layers)


def test_pipeline_stages_feed_one_transfer() -> None:
    """Landed when both have finished; `aux` stands in the ticket's order, whoever comes first."""
    driver = DecodeDriver(layout=pool_layout(layers=(0, 2)))
    sources = _stages(driver, (0, 1), (1, 2))
    transfer = driver.open(sources, 6)
    assert [grant.home for source in sources for grant in driver.to(source, Grant)] == [True, False]
    driver.deliver(sources[1], transfer, 6)
    assert driver.ends(transfer) == []
    driver.deliver(sources[0], transfer, 6)
    assert driver.ends(transfer) == LANDED
    assert driver.events[0].aux == tuple(source.incarnation.encode() for source in sources)
    assert driver.events[0].stats.num_rows == 12
    layers = [scatter.source.plan.blocks[0].layers for scatter in driver.scattered]
    assert layers == [LayerRange(1, 2)] * 2 + [LayerRange(0, 1)] * 2


@pytest.mark.parametrize("layers", [[(0, 1)], [(0, 1), (0, 2)]])
def test_sources_that_miss_or_repeat_a_layer_are_refused_before_a_byte_moves(layers: list[tuple[int, int]]) -> None:
    driver = DecodeDriver(layout=pool_layout(layers=(0, 2)))
    sources = _stages(driver, *layers)
    transfer = driver.open(sources, 6)
    assert driver.ends(transfer) == [(EventKind.FAILED, Reason.LAYOUT_MISMATCH)]
    assert "layers" in driver.events[0].detail
    for source in sources:
        assert not driver.to(source, Grant)
        abort = driver.to(source, AbortLeg)[0]
        assert (abort.reason, abort.detail) == (Reason.LAYOUT_MISMATCH, driver.events[0].detail)
        driver.quiesced(source, transfer)
    driver.assert_idle()


def test_shards_of_the_source_feed_one_transfer() -> None:
    """Three prefill ranks to rank 1 of 2: each owes its own tokens."""
    driver = DecodeDriver(shard=Shard(rank=1, size=2))
    sources = tuple(driver.pair(_shard(rank)) for rank in range(3))
    transfer = driver.open(sources, 13)
    for source in sources:
        driver.deliver(source, transfer, 13)
    assert driver.ends(transfer) == LANDED
    tokens = [int(token) for scatter in driver.scattered for token in scatter.source.plan.blocks[0].tokens]
    assert sorted(tokens) == [1, 3, 5, 7, 9, 11]


def _shard(rank: int) -> PoolLayout:
    return pool_layout(Shard(rank=rank, size=3))


_TWICE = encode_pages(np.array([3, 3]), "pages")


@pytest.mark.parametrize(
    ("groups", "message"),
    [
        ((GroupPages(name="kv", tokens=TokenRange(0, 8), pages=_TWICE),), "page 3 twice"),
        ((GroupPages(name="kv", tokens=TokenRange(0, 4), pages=encode_pages([64], "")),), "64"),
        ((GroupPages(name="kv", tokens=TokenRange(0, 8), pages=encode_pages([1], "")),), "got 1, expected 2"),
        ((GroupPages(name="kv", tokens=TokenRange(0, 4), pages=b"\0"),), "multiple of 4"),
        ((GroupPages(name="draft", tokens=TokenRange(0, 0)),), "'draft'"),
        ((GroupPages(name="kv", tokens=TokenRange(0, 0)),) * 2, "at most once"),
        (
            (
                GroupPages(
                    name="kv",
                    tokens=TokenRange(0, 4),
                    pages=encode_pages([1], ""),
                    have=(TokenRange(0, 2), TokenRange(1, 3)),
                ),
            ),
            "disjoint",
        ),
        (
            (GroupPages(name="kv", tokens=TokenRange(0, 4), pages=encode_pages([1], ""), have=(TokenRange(2, 5),)),),
            "within",
        ),
    ],
)
def test_a_bad_open_is_refused_and_leaves_nothing(groups: tuple[GroupPages, ...], message: str) -> None:
    driver = DecodeDriver()
    source = driver.pair()
    ticket = Ticket(transfer=new_id(), sources=(source,))
    with pytest.raises(LayoutError, match=message):
        driver.core.open(Open(ticket=ticket, groups=groups, deadline_s=1.0), driver.now)
    assert driver.core.take_actions() == []
    driver.assert_idle()
    driver.deliver(source, driver.open((source,), 8, transfer=ticket.transfer), 8)
    assert driver.ends(ticket.transfer) == LANDED


def test_a_transfer_is_opened_once_and_an_agent_named_once() -> None:
    driver = DecodeDriver()
    source = driver.pair()
    transfer = driver.open((source,), 4)
    with pytest.raises(RefusedError, match="open already"):
        driver.open((source,), 4, transfer=transfer)
    with pytest.raises(LayoutError, match="one agent twice"):
        driver.open((source, source), 4)
    driver.deliver(source, transfer, 4)
    assert driver.ends(transfer) == LANDED


def test_without_a_pool_nothing_is_opened() -> None:
    driver = DecodeDriver()
    driver.lose_worker()
    with pytest.raises(RefusedError, match="no pool"):
        driver.open((Source(endpoint="tcp://127.0.0.1:1", incarnation=new_id()),), 4)


@pytest.mark.parametrize(
    ("chunk", "segment", "num_bytes", "message"),
    [
        (1, 0, SEGMENT_BYTES, "was not announced"),
        (0, 2, SEGMENT_BYTES, "was not announced"),
        (0, 0, SEGMENT_BYTES - 1, "expected 32"),
    ],
)
def test_a_false_segment_ends_the_transfer_before_its_bytes_reach_a_page(
    chunk: int, segment: int, num_bytes: int, message: str
) -> None:
    driver = DecodeDriver()
    source = driver.pair()
    transfer = driver.open((source,), 8)
    driver.chunk(source, transfer, 0, 8)
    slot = driver.credits(source, transfer)[0]
    driver.segment(source, transfer, segment, slot, chunk=chunk, num_bytes=num_bytes)
    assert not driver.scatters
    assert driver.ends(transfer) == [(EventKind.FAILED, Reason.MISMATCH)]
    assert message in driver.events[0].detail
    driver.quiesced(source, transfer)
    driver.assert_idle()


def test_a_segment_in_a_slot_that_was_not_lent_is_dropped() -> None:
    """Another leg's slot, and one that nobody holds."""
    driver = DecodeDriver()
    source, other = driver.pair(), driver.pair()
    transfer, foreign = driver.open((source,), 4), driver.open((other,), 4)
    driver.chunk(source, transfer, 0, 4)
    driver.chunk(other, foreign, 0, 4)
    for slot in (driver.credits(other, foreign)[0], 3, 60_000):
        driver.segment(source, transfer, 0, slot)
    assert not driver.scatters
    assert driver.core.refused["repeated segment"] == 3
    assert driver.ends(transfer) == driver.ends(foreign) == []


@pytest.mark.parametrize("wrong", ["segments", "bytes", "groups"])
def test_a_chunk_that_both_sides_plan_differently_ends_the_transfer(wrong: str) -> None:
    driver = DecodeDriver()
    source = driver.pair()
    transfer = driver.open((source,), 8)
    message = Chunk(
        transfer=transfer,
        generation=1,
        chunk=0,
        ranges=(TokenRange(0, 8),) * (2 if wrong == "groups" else 1),
        layers=None,
        num_segments=3 if wrong == "segments" else 2,
        num_bytes=8 * ROW_BYTES + (wrong == "bytes"),
    )
    driver.receive(source, message)
    assert driver.ends(transfer) == [(EventKind.FAILED, Reason.MISMATCH)]


@pytest.mark.parametrize(("num_segments", "num_bytes", "end"), [(3, 8 * ROW_BYTES, 8), (2, 1, 8), (2, 64, 12)])
def test_counts_that_disagree_at_the_end_are_incomplete(num_segments: int, num_bytes: int, end: int) -> None:
    """What was announced against `finished`, and what came against what the transfer was opened for."""
    driver = DecodeDriver()
    source = driver.pair()
    transfer = driver.open((source,), end)
    driver.chunk(source, transfer, 0, 8)
    for segment in range(2):
        driver.segment(source, transfer, segment, driver.credits(source, transfer)[0])
    driver.end_scatters()
    driver.receive(source, driver.finished_message(source, transfer, 1, num_segments, num_bytes))
    assert driver.ends(transfer) == [(EventKind.FAILED, Reason.INCOMPLETE)]


def test_a_failed_scatter_fails_the_transfer() -> None:
    driver = DecodeDriver()
    source = driver.pair()
    transfer = driver.open((source,), 4)
    driver.chunk(source, transfer, 0, 4)
    driver.segment(source, transfer, 0, driver.credits(source, transfer)[0])
    driver.end_scatter(error="no memory")
    assert driver.ends(transfer) == [(EventKind.FAILED, Reason.SCATTER_FAILED)]
    assert driver.to(source, AbortLeg)
    driver.quiesced(source, transfer)
    driver.assert_idle()


def test_an_abort_of_the_prefill_worker_is_a_failure_here() -> None:
    """`aborted` is for the worker that asked for it."""
    driver = DecodeDriver()
    source = driver.pair()
    transfer = driver.open((source,), 4)
    driver.leg_failed(source, transfer, Reason.ABORTED_BY_WORKER)
    assert driver.ends(transfer) == [(EventKind.FAILED, Reason.ABORTED_BY_PEER)]


@pytest.mark.parametrize("state", ["pairing", "granted", "credited", "scattering", "all scattering"])
@pytest.mark.parametrize("cause", ["worker", "deadline", "peer lost", "source failed", "worker lost", "shutdown"])
def test_any_end_at_any_state(state: str, cause: str) -> None:
    """One terminal event (none for a lost worker) once own scatters ended; all slots back when the source is quiet."""
    driver = DecodeDriver()
    source = Source(endpoint="tcp://127.0.0.1:1", incarnation=new_id())
    if state != "pairing":
        driver.pair(source=source)
    transfer = driver.open((source,), 8)
    if state not in ("pairing", "granted"):
        driver.chunk(source, transfer, 0, 8)
    for segment in range({"scattering": 1, "all scattering": 2}.get(state, 0)):
        driver.segment(source, transfer, segment, driver.credits(source, transfer)[0])
    expected = _end(driver, source, transfer, cause)
    if driver.scatters:
        assert driver.ends(transfer) == []
    driver.end_scatters()
    assert driver.ends(transfer) == expected
    if state == "pairing" and cause not in ("peer lost", "source failed"):
        driver.pair(source=source)
        assert not driver.to(source, Grant)
    if driver.to(source, AbortLeg):
        driver.quiesced(source, transfer)
    if driver.count(SlotState.QUARANTINED):
        assert cause == "peer lost"
        driver.slots.release_quarantine()
    driver.tick(1000.0)
    assert driver.ends(transfer) == expected
    driver.assert_idle()


def _end(driver: DecodeDriver, source: Source, transfer: str, cause: str) -> list[tuple[EventKind, Reason | None]]:
    """End the transfer by `cause`; returns the events to expect."""
    match cause:
        case "worker":
            driver.abort(transfer)
            return [(EventKind.ABORTED, Reason.ABORTED_BY_WORKER)]
        case "worker lost":
            driver.lose_worker()
            return []
        case "deadline":
            driver.tick(61.0)
            return [(EventKind.FAILED, Reason.DEADLINE)]
        case "source failed" if driver.to(source, Grant):
            driver.leg_failed(source, transfer, Reason.GATHER_FAILED)
            return [(EventKind.FAILED, Reason.GATHER_FAILED)]
        case "peer lost" | "source failed":
            driver.lose(source)
            return [(EventKind.FAILED, Reason.PEER_LOST)]
        case _:
            driver.core.fail_all(Reason.SHUTDOWN, "draining", driver.now)
            driver.tick()
            return [(EventKind.FAILED, Reason.SHUTDOWN)]
