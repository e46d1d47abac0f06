"""Slots, credits and turns of the sending side: who is packed next, what is shared, and that nothing gets stuck."""

from __future__ import annotations

import pytest

from kvxfer.control.messages import Chunk, Finished, LegFailed, Quiesced, Submit, Want
from kvxfer.layout import Shard
from kvxfer.prefill.actions import Gather, SendToPeer
from kvxfer.prefill.leg import Mode
from kvxfer.slots import SlotState
from kvxfer.transfer import EventKind, LegState, Reason
from kvxfer.transports.base import Outcome
from tests.prefill.driver import ROW_BYTES, SEGMENT_BYTES, SEGMENT_ROWS, PrefillDriver, pages_for

SENT = [EventKind.SOURCE_FREE, EventKind.SENT]


def test_a_peer_that_gives_no_credits_does_not_stop_another() -> None:
    """It holds at most half of the slots; the other's transfer runs through the rest."""
    driver = PrefillDriver(num_slots=4)
    silent, lively = driver.pair(), driver.pair()
    stuck, moving = driver.ticket(), driver.ticket()
    for peer, transfer in ((silent, stuck), (lively, moving)):
        driver.grant(peer, transfer, 64)
        driver.submit(transfer, 0, 64)
    driver.run([lively], moving)
    assert driver.kinds(moving) == SENT
    assert driver.to(silent, Want)[-1].num_leased == 2
    assert driver.count(SlotState.READY) == 2


def test_a_peer_alone_leaves_the_last_slot_to_one_that_comes_late() -> None:
    """It gave no credits before the other was there, and gives none after."""
    driver = PrefillDriver(num_slots=4)
    silent = driver.pair()
    stuck = driver.ticket()
    driver.grant(silent, stuck, 64)
    driver.submit(stuck, 0, 64)
    driver.end_gathers()
    assert driver.count(SlotState.READY) == 3
    late, moving = driver.pair(), driver.ticket()
    driver.grant(late, moving, 64)
    driver.submit(moving, 0, 64)
    driver.run([late], moving)
    assert driver.kinds(moving) == SENT


def test_slots_in_turn_are_not_kept_from_others_by_one_that_is_stuck() -> None:
    """Nothing but the clock says that it is stuck."""
    driver = PrefillDriver(num_slots=4)
    driver.slots.in_turn = True
    silent, lively = driver.pair(), driver.pair()
    stuck, moving = driver.ticket(), driver.ticket()
    for peer, transfer in ((silent, stuck), (lively, moving)):
        driver.grant(peer, transfer, 32)
        driver.submit(transfer, 0, 32)
    driver.end_gathers()
    for slot in range(32 // SEGMENT_ROWS):
        if len(driver.to(lively, Want)) <= slot:
            driver.tick(0.1)
            driver.tick(0.1)
        driver.end_gathers()
        driver.credit(lively, moving, slot)
        driver.end_write()
        driver.end_gathers()
    assert driver.kinds(moving) == SENT


def test_gathers_are_handed_out_one_at_a_time() -> None:
    """So that the first begins before the others are prepared; peers hear of all that were leased by then."""
    driver = PrefillDriver(num_slots=4)
    transfer = driver.ticket()
    peers = [driver.pair(Shard(rank=rank, size=2), rank=rank, world=2) for rank in range(2)]
    for peer in peers:
        driver.grant(peer, transfer, 64)
    groups = (pages_for(driver.layout, 0, 64),)
    driver.core.submit(Submit(transfer=transfer, groups=groups, last=True, deadline_s=60.0), driver.now)
    taken = []
    while actions := driver.core.take_actions():
        taken.append(actions)
    assert [sum(isinstance(each, Gather) for each in actions) for actions in taken] == [1] * 3, "the last slot is kept"
    wants = [each.message for each in taken[-1] if isinstance(each, SendToPeer) and isinstance(each.message, Want)]
    assert [want.num_leased for want in wants] == [2, 1]


def test_legs_of_one_peer_take_turns() -> None:
    """A long transfer does not keep a short one waiting until its end."""
    driver = PrefillDriver(num_slots=2)
    peer = driver.pair()
    long, short = driver.ticket(), driver.ticket()
    driver.grant(peer, long, 64)
    driver.grant(peer, short, 4, generation=2)
    driver.submit(long, 0, 64)
    driver.submit(short, 0, 4)
    driver.end_gathers()
    for slot in range(3):  # credits that find no slot free are no turns
        driver.credit(peer, long, slot)
    driver.end_write()
    driver.end_write()
    wants = [want for want in driver.to(peer, Want) if want.transfer == short]
    assert wants[-1].num_leased == 1


@pytest.mark.parametrize("mode", [Mode.PACKED, Mode.RAW, Mode.SERIAL])
def test_one_slot_serves_any_number_of_legs(mode: Mode) -> None:
    """Four ranks and two transfers through one sender slot; the landing slot is one as well."""
    driver = PrefillDriver(num_slots=1, mode=mode)
    peers = [driver.pair(Shard(rank=rank, size=4), rank=rank, world=4) for rank in range(4)]
    transfers = [driver.ticket(), driver.ticket()]
    for generation, transfer in enumerate(transfers, 1):
        for peer in peers:
            driver.grant(peer, transfer, 64, generation=generation)
        driver.submit(transfer, 0, 32, last=False)
        driver.submit(transfer, 32, 64)
    credited: dict[tuple[str, str], int] = {}
    while True:
        driver.end_gathers()
        for peer in peers:
            for want in driver.to(peer, Want):
                key = (peer, want.transfer)
                if not driver.writes and credited.get(key, 0) < want.num_leased:
                    credited[key] = credited.get(key, 0) + 1
                    driver.credit(peer, want.transfer, 0, generation=1 + transfers.index(want.transfer))
        if not driver.writes:
            break
        driver.end_write()
    assert [driver.kinds(transfer) for transfer in transfers] == [SENT, SENT]
    driver.assert_idle()


def test_peers_with_the_same_shard_share_gathers() -> None:
    """One gather a segment, two writes; the slot goes back after the second."""
    driver = PrefillDriver(num_slots=4)
    transfer = driver.ticket()
    peers = [driver.pair(rank=rank, world=2) for rank in range(2)]
    for peer in peers:
        driver.grant(peer, transfer, 8)
    driver.submit(transfer, 0, 8)
    assert len(driver.gathers) == 2
    driver.end_gathers()
    driver.credit(peers[0], transfer, 0, 1)
    driver.credit(peers[1], transfer, 8, 9)
    assert sorted((write.src_slot, write.notice.slot) for write in driver.writes) == [(0, 0), (0, 8), (1, 1), (1, 9)]
    driver.end_write(driver.writes[0])
    assert driver.count(SlotState.IN_FLIGHT) == 2
    while driver.writes:
        driver.end_write()
    assert driver.kinds(transfer) == SENT
    driver.assert_idle()


def test_a_peer_that_comes_late_or_holds_other_rows_gathers_for_itself() -> None:
    """Sharing is for segments that are alike: the same chunk, the same rows, at the same time."""
    driver = PrefillDriver(num_slots=8)
    transfer = driver.ticket()
    first, late = driver.pair(rank=0, world=2), driver.pair(rank=1, world=2)
    driver.grant(first, transfer, 8)
    driver.submit(transfer, 0, 8)
    driver.end_gathers()
    driver.grant(late, transfer, 8)
    assert len(driver.gathers) == 2
    driver.run([first, late], transfer)
    assert driver.kinds(transfer) == SENT


def test_raw_writes_runs_from_the_pool_and_takes_no_slot() -> None:
    """Each run is one descriptor: here the pages of a shuffled table, a rank's every other row."""
    driver = PrefillDriver(num_slots=2, mode=Mode.RAW)
    peer, transfer = driver.pair(Shard(rank=1, size=2), rank=1, world=2), driver.ticket()
    driver.grant(peer, transfer, 8)
    driver.submit(transfer, 0, 8)
    assert not driver.gathers
    assert not driver.writes
    driver.credit(peer, transfer, 6)
    (write,) = driver.writes
    assert write.src_slot is None
    assert write.runs is not None
    page = 4 * ROW_BYTES
    expected = [63 * page + 1 * ROW_BYTES, 63 * page + 3 * ROW_BYTES, 62 * page + 1 * ROW_BYTES]
    assert write.runs.src_offsets.tolist()[:3] == expected
    assert write.runs.slot_offsets.tolist() == [0, ROW_BYTES, 2 * ROW_BYTES, 3 * ROW_BYTES]
    assert write.notice.num_bytes == SEGMENT_BYTES
    assert driver.slots.num_free == 2
    driver.end_write()
    assert driver.core.transfers[transfer].num_descriptors == 4


@pytest.mark.parametrize("outcome", list(Outcome))
def test_raw_keeps_the_pages_until_its_writes_have_ended(outcome: Outcome) -> None:
    """A raw write reads the pool itself, so neither `source_free` nor a terminal event may come before its end."""
    driver = PrefillDriver(mode=Mode.RAW)
    peer, transfer = driver.pair(), driver.ticket()
    driver.grant(peer, transfer, 4)
    driver.submit(transfer, 0, 4)
    driver.credit(peer, transfer, 0)
    assert driver.core.num_reading_pool == 1
    driver.abort(transfer)
    assert driver.kinds(transfer) == []
    driver.end_write(outcome=outcome)
    assert driver.ends(transfer) == [(EventKind.ABORTED, Reason.ABORTED_BY_WORKER)]
    assert driver.core.num_reading_pool == 0


@pytest.mark.parametrize("cause", ["deadline", "abort"])
def test_a_raw_write_that_hangs_delays_the_terminal_event_to_the_deadline_at_most(cause: str) -> None:
    """The pool stays mapped all the same: `num_reading_pool` counts the write until it ends."""
    driver = PrefillDriver(mode=Mode.RAW)
    peer, transfer = driver.pair(), driver.ticket()
    driver.grant(peer, transfer, 4)
    driver.submit(transfer, 0, 4)
    driver.credit(peer, transfer, 0)
    if cause == "abort":
        driver.abort(transfer)
    driver.tick(61.0)
    assert len(driver.ends(transfer)) == 1
    assert driver.core.num_reading_pool == 1


def test_serial_sends_nothing_before_every_leg_is_packed() -> None:
    """The chunk of all legs is packed first: one leg's packing hides no other's sending."""
    driver = PrefillDriver(num_slots=8, mode=Mode.SERIAL)
    peers = [driver.pair(Shard(rank=rank, size=2), rank=rank, world=2) for rank in range(2)]
    transfer = driver.ticket()
    for peer in peers:
        driver.grant(peer, transfer, 16)
    driver.submit(transfer, 0, 16)
    for peer in peers:
        driver.credit(peer, transfer, 0, 1)
    while len(driver.gathers) > 1:
        driver.end_gather()
        assert not driver.writes
    driver.end_gather()
    assert len({write.peer for write in driver.writes}) == 2


def test_serial_packs_a_whole_chunk_before_it_sends() -> None:
    """Credits alone start nothing while a segment of the chunk is not packed; the next chunk waits for this one."""
    driver = PrefillDriver(num_slots=8, mode=Mode.SERIAL)
    peer, transfer = driver.pair(), driver.ticket()
    driver.grant(peer, transfer, 24)
    driver.submit(transfer, 0, 12, last=False)
    driver.submit(transfer, 12, 24)
    assert len(driver.gathers) == 3
    driver.credit(peer, transfer, 0, 1, 2)
    driver.end_gather()
    driver.end_gather()
    assert not driver.writes
    driver.end_gather()
    assert len(driver.writes) == 3
    assert not driver.gathers
    for _ in range(3):
        driver.end_write()
    assert len(driver.gathers) == 3
    driver.credit(peer, transfer, 0, 1, 2)
    driver.end_gathers()
    while driver.writes:
        driver.end_write()
    assert driver.kinds(transfer) == SENT


def test_wants_count_leases_over_the_legs_life() -> None:
    """Counts, not differences: a repeated or reordered want does no harm."""
    driver = PrefillDriver(num_slots=2)
    peer, transfer = driver.pair(), driver.ticket()
    driver.grant(peer, transfer, 12)
    driver.submit(transfer, 0, 12)
    driver.end_gathers()
    assert [want.num_leased for want in driver.to(peer, Want)] == [2]
    driver.credit(peer, transfer, 0)
    driver.end_write()
    assert [want.num_leased for want in driver.to(peer, Want)] == [2, 3]


def test_credits_that_come_before_the_data_are_kept() -> None:
    """A credit for a segment whose gather still runs is used as soon as the gather has ended."""
    driver = PrefillDriver(num_slots=2)
    peer, transfer = driver.pair(), driver.ticket()
    driver.grant(peer, transfer, 8)
    driver.submit(transfer, 0, 8)
    driver.credit(peer, transfer, 3, 4)
    assert not driver.writes
    driver.end_gather(driver.gathers[1])
    assert [(write.notice.segment, write.notice.slot) for write in driver.writes] == [(1, 3)]
    driver.end_gather()
    assert [(write.notice.segment, write.notice.slot) for write in driver.writes] == [(1, 3), (0, 4)]


def test_a_failed_gather_fails_the_transfer_and_frees_its_slots() -> None:
    driver = PrefillDriver()
    peer, transfer = driver.pair(), driver.ticket()
    driver.grant(peer, transfer, 12)
    driver.submit(transfer, 0, 12)
    driver.end_gather(error="row offsets: got 9, expected 0 to 8")
    assert driver.kinds(transfer) == []  # two gathers read its pages still
    driver.end_gathers()
    assert driver.ends(transfer) == [(EventKind.FAILED, Reason.GATHER_FAILED)]
    assert driver.to(peer, LegFailed)[0].detail.startswith("row offsets")
    assert len(driver.to(peer, Quiesced)) == 1
    driver.assert_idle()


def test_finished_follows_the_last_write_and_names_all_counts() -> None:
    driver = PrefillDriver()
    peer, transfer = driver.pair(), driver.ticket()
    driver.grant(peer, transfer, 10)
    driver.submit(transfer, 0, 6, last=False, aux=b"one")
    driver.submit(transfer, 6, 10, aux=b"two")
    driver.run([peer], transfer)
    chunks = driver.to(peer, Chunk)
    assert [(chunk.chunk, chunk.num_segments, chunk.num_bytes) for chunk in chunks] == [
        (0, 2, 6 * ROW_BYTES),
        (1, 1, 4 * ROW_BYTES),
    ]
    (finished,) = driver.to(peer, Finished)
    assert (finished.num_chunks, finished.num_segments, finished.num_bytes) == (2, 3, 10 * ROW_BYTES)
    assert finished.aux == b"two"
    assert driver.sent[-1] == (peer, finished)
    assert driver.leg(peer, transfer).state is LegState.FINISHED
