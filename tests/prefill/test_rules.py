"""The rules R1 to R12 and R17 of safe transfers as the sending side keeps them; each test fails without its rule."""

from __future__ import annotations

import msgspec
import pytest

from kvxfer.control.ids import new_id
from kvxfer.control.messages import Finished, LegFailed, LegStatus, Ping, Query, Quiesced, QuiescedAck, Want
from kvxfer.errors import LayoutError, RefusedError
from kvxfer.layout import LayerRange, PoolLayout, Shard
from kvxfer.prefill.actions import Gather, Notify, Write
from kvxfer.prefill.core import RESEND_S
from kvxfer.slots import SlotState
from kvxfer.transfer import EventKind, LegState, Reason
from kvxfer.transports.base import Outcome
from tests.prefill.driver import SEGMENT_BYTES, PrefillDriver, pages_for, pool_layout


def _with_write(num_slots: int = 4) -> tuple[PrefillDriver, str, str]:
    """A transfer of two segments: the write of the first was emitted, the second is packed and has no credit."""
    driver = PrefillDriver(num_slots)
    peer, transfer = driver.pair(), driver.ticket()
    driver.submit(transfer, 0, 8)
    driver.grant(peer, transfer, 8)
    driver.end_gathers()
    driver.credit(peer, transfer, 5)
    assert len(driver.writes) == 1
    return driver, peer, transfer


def test_r1_a_leg_is_quiet_only_when_every_emitted_operation_has_ended() -> None:
    """R1: outstanding from the moment the core emits, not from the moment the engine accepts."""
    driver, peer, transfer = _with_write()
    driver.abort_leg(peer, transfer)
    assert driver.to(peer, LegFailed)
    assert not driver.to(peer, Quiesced)
    driver.end_write(outcome=Outcome.FAILED)  # "never posted" is an end as well
    assert len(driver.to(peer, Quiesced)) == 1


def test_r1_a_gather_that_no_thread_has_begun_counts() -> None:
    """R1: a gather in the executor's queue is outstanding."""
    driver = PrefillDriver()
    peer, transfer = driver.pair(), driver.ticket()
    driver.submit(transfer, 0, 4)
    driver.grant(peer, transfer, 4)
    driver.abort_leg(peer, transfer)
    assert not driver.to(peer, Quiesced)
    assert driver.kinds(transfer) == []  # its pages are not quiet either
    driver.end_gather()
    assert len(driver.to(peer, Quiesced)) == 1
    assert driver.kinds(transfer) == [EventKind.FAILED]


@pytest.mark.parametrize("num_sharing", [1, 2])
def test_r1_nothing_is_emitted_after_an_abort_and_what_was_is_cancelled(num_sharing: int) -> None:
    """R1: the flag that executors look at is set, and neither credits nor ends of operations emit anything."""
    driver = PrefillDriver()
    transfer = driver.ticket()
    peers = [driver.pair(rank=rank, world=num_sharing) for rank in range(num_sharing)]
    for peer in peers:
        driver.grant(peer, transfer, 16)
    driver.submit(transfer, 0, 16)
    driver.end_gather()
    driver.credit(peers[0], transfer, 0)
    driver.abort_leg(peers[0], transfer)
    assert all(gather.cancel.is_set for gather in driver.gathers)
    assert all(write.cancel.is_set for write in driver.writes)
    driver.actions.clear()
    for peer in peers:
        driver.credit(peer, transfer, 1, 2)
    driver.end_gathers()
    driver.end_write()
    driver.tick(1.0)
    assert not [action for action in driver.actions if isinstance(action, Gather | Write)]
    driver.assert_idle()


def test_r2_an_abort_of_an_unknown_leg_is_answered_and_leaves_a_tombstone() -> None:
    """R2, R3: `quiesced` in any state, also for what was never heard of; the late grant is refused."""
    driver = PrefillDriver()
    peer, transfer = driver.pair(), driver.ticket()
    driver.abort_leg(peer, transfer, generation=3)
    assert [(message.transfer, message.generation) for message in driver.to(peer, Quiesced)] == [(transfer, 3)]
    driver.grant(peer, transfer, 8, generation=3)
    assert not driver.to(peer, LegFailed)
    assert driver.core.refused["stale"] == 1


def test_r2_every_asker_is_answered_each_time() -> None:
    """R2: two ranks abort one transfer, each twice; each abort gets its `quiesced`."""
    driver = PrefillDriver()
    transfer = driver.ticket()
    peers = [driver.pair(Shard(rank=rank, size=2), rank=rank, world=2) for rank in range(2)]
    for peer in peers:
        driver.grant(peer, transfer, 8)
    driver.abort_leg(peers[0], transfer)
    driver.abort_leg(peers[1], transfer)
    driver.abort_leg(peers[0], transfer)
    driver.abort_leg(peers[1], transfer)
    assert len(driver.to(peers[0], Quiesced)) >= 2
    assert len(driver.to(peers[1], Quiesced)) >= 2
    assert not driver.core.transfers  # the sender has forgotten the transfer, not the answer


def test_r2_quiesced_is_sent_again_until_it_is_acknowledged() -> None:
    """R2: a lost `quiesced` would keep credited slots for ever."""
    driver, peer, transfer = _with_write()
    driver.abort_leg(peer, transfer)
    driver.end_write()
    driver.tick(RESEND_S)
    driver.tick(RESEND_S)
    assert len(driver.to(peer, Quiesced)) == 3
    driver.receive(peer, QuiescedAck(transfer=transfer, generation=1))
    driver.tick(RESEND_S)
    assert len(driver.to(peer, Quiesced)) == 3


@pytest.mark.parametrize("by", ["ping", "grant"])
def test_r3_a_grant_below_the_lowest_live_generation_is_refused(by: str) -> None:
    """R3: whatever the decode side has done with is refused, without a tombstone for each."""
    driver = PrefillDriver()
    peer, transfer = driver.pair(), driver.ticket()
    if by == "ping":
        driver.receive(peer, Ping(incarnation=peer, floor=5))
    else:
        driver.grant(peer, driver.ticket(), 8, generation=5, floor=5)
    driver.grant(peer, transfer, 8, generation=4, floor=5)
    driver.submit(transfer, 0, 8)
    assert not driver.gathers
    assert driver.core.refused["stale"] == 1


def test_r3_tombstones_go_when_the_floor_passes_them_and_never_exceed_their_cap(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """R3: memory stays bounded, also for a peer that aborts without end."""
    monkeypatch.setattr("kvxfer.prefill.peers.MAX_TOMBSTONES_PER_PEER", 4)
    driver = PrefillDriver()
    peer = driver.pair()
    for generation in range(1, 7):
        driver.abort_leg(peer, new_id(), generation)
    known = driver.core.peers[peer]
    assert len(known.tombstones) <= 4
    assert known.is_refused((new_id(), 1))  # what went at the cap lies below the floor now
    driver.receive(peer, Ping(incarnation=peer, floor=7))
    assert not known.tombstones


def test_r4_the_last_write_ended_before_the_clock_is_judged() -> None:
    """R4: what was there already wins over the deadline, and the first terminal stands."""
    driver, peer, transfer = _with_write()
    driver.credit(peer, transfer, 6)
    driver.now += 1000.0
    driver.end_write()
    driver.end_write()
    driver.tick()
    driver.abort(transfer)
    driver.lose(peer)
    assert driver.kinds(transfer) == [EventKind.SOURCE_FREE, EventKind.SENT]


def test_r4_of_two_ends_the_first_one_stands() -> None:
    """R4: an abort, a deadline, a lost peer and a lost worker in a row give one terminal event."""
    driver, peer, transfer = _with_write()
    driver.abort(transfer)
    driver.tick(1000.0)
    driver.lose(peer)
    driver.end_write()
    assert driver.ends(transfer) == [(EventKind.ABORTED, Reason.ABORTED_BY_WORKER)]


def test_r5_a_write_with_an_unknown_end_quarantines_both_slots() -> None:
    """R5: unlike a stopped one, it may go on reading its slot and writing the peer's."""
    driver, peer, transfer = _with_write()
    driver.credit(peer, transfer, 6)
    driver.end_write(outcome=Outcome.UNKNOWN)
    driver.end_write(outcome=Outcome.FAILED)
    assert driver.count(SlotState.QUARANTINED) == 1
    assert driver.count(SlotState.FREE) == 3
    assert [message.unknown_slots for message in driver.to(peer, Quiesced)] == [(5,)]
    assert driver.events[-1].reason is Reason.WRITE_UNKNOWN


def test_r5_a_slot_that_two_peers_read_is_quarantined_when_either_write_is_unknown() -> None:
    """R5: a shared slot is free only when no write of either peer can still read it."""
    driver = PrefillDriver()
    transfer = driver.ticket()
    peers = [driver.pair(rank=rank, world=2) for rank in range(2)]
    for peer in peers:
        driver.grant(peer, transfer, 4)
    driver.submit(transfer, 0, 4)
    driver.end_gather()
    driver.credit(peers[0], transfer, 0)
    driver.credit(peers[1], transfer, 0)
    driver.end_write(driver.writes[0], Outcome.UNKNOWN)
    assert driver.count(SlotState.QUARANTINED) == 0  # the other write reads it still
    driver.end_write()
    assert driver.count(SlotState.QUARANTINED) == 1


def test_r6_a_new_run_of_a_peer_frees_nothing_of_the_old_one() -> None:
    """R6: a new incarnation proves nothing about the old one's writes."""
    driver, peer, transfer = _with_write()
    driver.end_write(outcome=Outcome.UNKNOWN)
    driver.lose(peer)
    driver.pair()
    driver.tick(1000.0)
    assert driver.slots.num_quarantined(peer) == 1
    assert driver.ends(transfer) == [(EventKind.FAILED, Reason.WRITE_UNKNOWN)]


def test_r7_a_stopped_peer_cannot_delay_the_terminal_event() -> None:
    """R7: the deadline suffices; the write that hangs keeps its slot, not the worker's pages."""
    driver, _, transfer = _with_write()
    driver.tick(61.0)
    assert driver.ends(transfer) == [(EventKind.FAILED, Reason.DEADLINE)]
    assert len(driver.writes) == 1
    assert driver.count(SlotState.IN_FLIGHT) == 1
    driver.end_write()
    assert len(driver.ends(transfer)) == 1


def test_r8_a_lost_worker_hears_nothing_and_its_pool_is_used_until_the_last_gather_ends() -> None:
    """R8: terminals go to nobody, not to the next worker either; legs are told; the pool is not quiet before."""
    driver = PrefillDriver()
    peer, transfer = driver.pair(), driver.ticket()
    idle = driver.ticket()
    driver.submit(transfer, 0, 8)
    driver.grant(peer, transfer, 8)
    driver.lose_worker()
    assert driver.to(peer, LegFailed)[0].reason is Reason.WORKER_LOST
    assert driver.core.num_reading_pool == 2
    driver.core.attach_worker(driver.layout)
    driver.end_gathers()
    assert driver.core.num_reading_pool == 0
    assert not driver.events
    assert idle not in driver.core.transfers
    driver.assert_idle()


def test_r9_quarantine_ends_with_the_engine_object_alone() -> None:
    """R9: neither time nor the peer's end frees a slot; `release_quarantine` after a rotation does."""
    driver, peer, _ = _with_write()
    driver.end_write(outcome=Outcome.UNKNOWN)
    driver.lose(peer)
    driver.tick(10_000.0)
    assert driver.count(SlotState.QUARANTINED) == 1
    assert driver.slots.release_quarantine() == 1
    driver.assert_idle()


def test_r9_a_peer_of_unknown_writes_cannot_take_all_slots() -> None:
    """R9: quarantine is capped per peer: at the cap it gets no more slots, and others go on."""
    driver = PrefillDriver(num_slots=4)
    sick, healthy = driver.pair(), driver.pair()
    for generation in range(1, 5):
        transfer = driver.ticket()
        driver.submit(transfer, 0, 16)
        driver.grant(sick, transfer, 16, generation=generation)
        driver.end_gathers()
        driver.credit(sick, transfer, 0, generation=generation)
        while driver.writes:
            driver.end_write(outcome=Outcome.UNKNOWN)
        driver.abort(transfer)
    assert driver.count(SlotState.QUARANTINED) == 2
    transfer = driver.ticket()
    driver.submit(transfer, 0, 16)
    driver.grant(healthy, transfer, 16)
    driver.run([healthy], transfer)
    assert driver.kinds(transfer)[-1] is EventKind.SENT


def test_r10_a_query_recovers_lost_notices() -> None:
    """R10: (chunk, segment, slot, bytes) of all that was written, `finished` when it was, `unknown` otherwise."""
    driver, peer, transfer = _with_write()
    driver.end_write()
    query = Query(transfer=transfer, generation=1)
    driver.receive(peer, query)
    driver.credit(peer, transfer, 7)
    driver.end_write()
    driver.receive(peer, query)
    driver.receive(peer, Query(transfer=transfer, generation=2))
    first, second, unknown = driver.to(peer, LegStatus)
    written = [(notice.chunk, notice.segment, notice.slot, notice.num_bytes) for notice in second.segments]
    assert (first.state, first.segments, first.finished) == ("active", second.segments[:1], None)
    assert written == [(0, 0, 5, SEGMENT_BYTES), (0, 1, 7, SEGMENT_BYTES)]
    assert second.finished == driver.to(peer, Finished)[0]
    assert (unknown.state, unknown.segments) == ("unknown", ())


@pytest.mark.parametrize(
    ("first", "end", "layers"), [(4, 8, None), (0, 4, LayerRange(0, 1)), (3, 5, None), (0, 16, None)]
)
def test_r11_a_submit_that_overlaps_is_refused_and_changes_nothing(
    first: int, end: int, layers: LayerRange | None
) -> None:
    """R11: coverage is a set; a row that came twice could hide one that never came."""
    driver = PrefillDriver()
    peer, transfer = driver.pair(), driver.ticket()
    driver.grant(peer, transfer, 16)
    driver.submit(transfer, 0, 8, last=False)
    before = driver.leg(peer, transfer).num_rows
    with pytest.raises(LayoutError):
        driver.submit(transfer, first, end, layers=layers)
    assert driver.leg(peer, transfer).num_rows == before
    driver.submit(transfer, 8, 16)
    driver.run([peer], transfer)
    assert driver.kinds(transfer) == [EventKind.SOURCE_FREE, EventKind.SENT]


@pytest.mark.parametrize("layers", [LayerRange(0, 9), LayerRange(5, 9), LayerRange(0, 4), LayerRange(2, 5)])
def test_r11_layers_that_no_group_of_the_pool_holds_are_refused(layers: LayerRange) -> None:
    """R11: nothing of them could ever be sent, and the decode side would wait for them until its deadline."""
    (low,), (high,) = (pool_layout(layers=each).groups for each in ((0, 3), (4, 5)))
    high = msgspec.structs.replace(high, name="high", base_offset_bytes=low.extent_bytes)
    driver = PrefillDriver(layout=PoolLayout(groups=(low, high), dtype_tag="bf16"))
    transfer = driver.ticket()
    with pytest.raises(LayoutError, match=rf"layers: got \[{layers.first}, {layers.end}\).*\[0, 3\), \[4, 5\)"):
        driver.submit(transfer, 0, 4, layers=layers)
    driver.submit(transfer, 0, 4, layers=LayerRange(1, 3), last=False)
    driver.submit(transfer, 4, 8, layers=LayerRange(4, 5))


def test_r11_a_chunk_without_groups_may_only_end_a_transfer() -> None:
    """R11: where all rows are at the decode side already there is nothing to submit but the end."""
    driver = PrefillDriver()
    peer, transfer = driver.pair(), driver.ticket()
    driver.grant(peer, transfer, 0)
    with pytest.raises(LayoutError, match="groups: got none, expected at least one"):
        driver.submit(transfer, 0, 0, groups=(), last=False)
    driver.submit(transfer, 0, 0, groups=())
    assert driver.kinds(transfer) == [EventKind.SOURCE_FREE, EventKind.SENT]


def test_r11_a_submit_after_the_last_or_after_the_end_is_refused() -> None:
    """R11: `last` twice, and any submit to a transfer that has ended."""
    driver = PrefillDriver()
    peer, transfer = driver.pair(), driver.ticket()
    driver.submit(transfer, 0, 8)
    with pytest.raises(LayoutError, match="after the one marked last"):
        driver.submit(transfer, 8, 12)
    driver.grant(peer, transfer, 8)
    driver.run([peer], transfer)
    with pytest.raises(RefusedError, match="has ended"):
        driver.submit(transfer, 8, 12)
    assert driver.kinds(transfer) == [EventKind.SOURCE_FREE, EventKind.SENT]


def test_r12_losing_the_control_connection_is_not_the_end_of_a_write() -> None:
    """R12: the slot stays in flight until the engine has reported the write's end."""
    driver, peer, transfer = _with_write()
    driver.lose(peer)
    assert driver.count(SlotState.IN_FLIGHT) == 1
    assert driver.ends(transfer) == [(EventKind.FAILED, Reason.PEER_LOST)]
    leg = next(iter(driver.core.transfers[transfer].legs.values()))
    assert leg.state is LegState.STOPPING
    driver.end_write()
    driver.assert_idle()


def test_r17_a_credit_is_asked_for_packed_data_alone_and_serves_one_write() -> None:
    """R17: a leg wants as many credits as it holds slots, and writes once for each."""
    driver = PrefillDriver(num_slots=2)
    peer, transfer = driver.pair(), driver.ticket()
    driver.grant(peer, transfer, 16)
    assert not driver.to(peer, Want)
    driver.submit(transfer, 0, 16, groups=(pages_for(driver.layout, 0, 16),))
    driver.end_gathers()
    assert [message.num_leased for message in driver.to(peer, Want)] == [2]
    assert not driver.writes
    driver.credit(peer, transfer, 3)
    assert [write.notice.slot for write in driver.writes] == [3]
    driver.end_write()
    assert driver.to(peer, Want)[-1].num_leased == 3
    assert not [action for action in driver.actions if isinstance(action, Notify)]
