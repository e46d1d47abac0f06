"""The rules R1 to R12, R16 and R17 of safe transfers as the receiving side keeps them; each fails without its rule."""

from __future__ import annotations

import pytest

from kvxfer.control.messages import AbortLeg, Credits, Grant, Quiesced, QuiescedAck, Source
from kvxfer.decode.lifecycle import REMIND_S
from kvxfer.layout import TokenRange
from kvxfer.slots import SlotState
from kvxfer.transfer import EventKind, Reason
from tests.decode.driver import DecodeDriver
from tests.prefill.driver import ROW_BYTES, SEGMENT_BYTES

FAILED = EventKind.FAILED


def _with_scatter(num_slots: int = 4) -> tuple[DecodeDriver, Source, str]:
    """A transfer of two segments: the first is being scattered, the second's slot is credited."""
    driver = DecodeDriver(num_slots)
    source = driver.pair()
    transfer = driver.open((source,), 8)
    driver.chunk(source, transfer, 0, 8)
    driver.segment(source, transfer, 0, driver.credits(source, transfer)[0])
    assert len(driver.scatters) == 1
    return driver, source, transfer


def test_r1_the_terminal_event_waits_for_an_emitted_scatter() -> None:
    """R1: a scatter that no thread has begun is outstanding, and its flag is set so that it never begins."""
    driver, _, transfer = _with_scatter()
    driver.abort(transfer)
    assert driver.ends(transfer) == []
    assert driver.scatters[0].cancel.is_set
    driver.end_scatters()
    assert driver.ends(transfer) == [(EventKind.ABORTED, Reason.ABORTED_BY_WORKER)]
    assert not driver.scattered


def test_r1_nothing_is_scattered_after_an_abort() -> None:
    """R1: a segment that arrives later goes nowhere; its slot comes back."""
    driver, source, transfer = _with_scatter()
    slot = driver.credits(source, transfer)[0]
    driver.abort(transfer)
    driver.end_scatters()
    driver.segment(source, transfer, 1, slot)
    assert not driver.scatters
    assert driver.slots.num_free == 4


def test_r2_an_abort_is_repeated_until_it_is_answered_and_the_answer_acknowledged() -> None:
    """R2: slots stay lent until `quiesced`; the answer to a forgotten transfer is acknowledged as well."""
    driver, source, transfer = _with_scatter()
    driver.abort(transfer)
    driver.end_scatters()
    driver.tick(REMIND_S)
    driver.tick(REMIND_S)
    assert len(driver.to(source, AbortLeg)) == 3
    assert driver.count(SlotState.CREDITED) == 1
    driver.quiesced(source, transfer)
    driver.quiesced(source, transfer)
    driver.tick(REMIND_S)
    assert len(driver.to(source, AbortLeg)) == 3
    assert len(driver.to(source, QuiescedAck)) == 2
    driver.assert_idle()


def test_r3_grants_count_up_and_carry_the_lowest_live_one() -> None:
    """R3: what lies below the floor is over; it never passes a transfer whose legs are not closed."""
    driver = DecodeDriver()
    source = driver.pair()
    first, second = (driver.open((source,), 4) for _ in range(2))
    driver.abort(second)
    driver.quiesced(source, second)
    driver.abort(first)  # ended, but its abort was not answered: a grant may still be under way
    third = driver.open((source,), 4)
    driver.quiesced(source, first)
    fourth = driver.open((source,), 4)
    grants = driver.to(source, Grant)
    assert [grant.transfer for grant in grants] == [first, second, third, fourth]
    assert [(grant.generation, grant.floor) for grant in grants] == [(1, 1), (2, 1), (3, 1), (4, 3)]
    assert driver.core.floor() == 3


def test_r3_messages_of_another_generation_are_refused() -> None:
    """R3: a late segment of an earlier try may name a slot that this try was lent."""
    driver = DecodeDriver()
    source = driver.pair()
    transfer = driver.open((source,), 4)
    driver.abort(transfer)
    driver.quiesced(source, transfer)
    assert driver.open((source,), 4, transfer=transfer) == transfer
    driver.chunk(source, transfer, 0, 4)
    slot = driver.credits(source, transfer)[0]
    driver.segment(source, transfer, 0, slot, generation=1)
    assert not driver.scatters
    assert driver.core.refused["stale"] == 1
    driver.segment(source, transfer, 0, slot, generation=2)
    assert len(driver.scatters) == 1


@pytest.mark.parametrize("is_scattered", [True, False])
def test_r4_a_finished_that_was_there_wins_over_the_deadline(is_scattered: bool) -> None:
    """R4: all rows are here, at most being put into their pages: that is success, however late the clock is judged."""
    driver, source, transfer = _with_scatter()
    driver.segment(source, transfer, 1, driver.credits(source, transfer)[0])
    if is_scattered:
        driver.end_scatters()
    driver.now += 1000.0
    driver.receive(source, driver.finished_message(source, transfer, 1, 2, 8 * ROW_BYTES))
    driver.tick()
    driver.end_scatters()
    assert driver.ends(transfer) == [(EventKind.LANDED, None)]


def test_r4_of_several_ends_the_first_one_stands() -> None:
    """R4: abort, deadline, a lost peer and late messages in a row give one terminal event."""
    driver, source, transfer = _with_scatter()
    driver.leg_failed(source, transfer, Reason.GATHER_FAILED)
    driver.abort(transfer)
    driver.tick(1000.0)
    driver.end_scatters()
    driver.receive(source, driver.finished_message(source, transfer, 1, 2, 8 * ROW_BYTES))
    driver.lose(source)
    assert driver.ends(transfer) == [(FAILED, Reason.GATHER_FAILED)]


def test_r5_a_slot_of_an_unknown_write_is_quarantined() -> None:
    """R5: the sender names it with `quiesced`; the other credited slots are free."""
    driver = DecodeDriver()
    source = driver.pair()
    transfer = driver.open((source,), 12)
    driver.chunk(source, transfer, 0, 12)
    driver.leg_failed(source, transfer, Reason.WRITE_UNKNOWN)
    driver.quiesced(source, transfer, driver.credits(source, transfer)[1])
    assert driver.ends(transfer) == [(FAILED, Reason.WRITE_UNKNOWN)]
    assert driver.count(SlotState.QUARANTINED) == 1
    assert driver.count(SlotState.FREE) == 3


def test_r6_a_new_run_of_a_source_frees_nothing_of_the_old_one() -> None:
    """R6: another incarnation is another peer; the slots lent to the old one stay set aside."""
    driver, source, transfer = _with_scatter()
    driver.end_scatters()
    driver.lose(source)
    again = driver.pair()
    assert driver.slots.num_quarantined(source.incarnation) == 1
    assert driver.slots.num_quarantined(again.incarnation) == 0
    other = driver.open((again,), 4)
    driver.deliver(again, other, 4)
    assert driver.ends(other) == [(EventKind.LANDED, None)]
    assert driver.ends(transfer) == [(FAILED, Reason.PEER_LOST)]


def test_r7_a_stopped_source_cannot_delay_the_terminal_event() -> None:
    """R7: the deadline suffices; slots wait for the source, pages do not."""
    driver, _, transfer = _with_scatter()
    driver.end_scatters()
    driver.tick(61.0)
    assert driver.ends(transfer) == [(FAILED, Reason.DEADLINE)]
    assert driver.count(SlotState.CREDITED) == 1


def test_r8_a_lost_worker_hears_nothing_and_its_pool_is_used_until_the_last_scatter_ends() -> None:
    """R8: terminals go to nobody, sources are told, the pool is not quiet before."""
    driver, source, _ = _with_scatter()
    driver.lose_worker()
    assert driver.to(source, AbortLeg)[0].reason is Reason.WORKER_LOST
    assert driver.core.num_touching_pool == 1
    driver.core.attach_worker(driver.layout)
    driver.end_scatters()
    assert driver.core.num_touching_pool == 0
    assert not driver.events


def test_r9_quarantine_ends_with_the_engine_object_alone_and_is_capped() -> None:
    """R9: at the cap a source gets no more credits, others do; only `release_quarantine` frees."""
    driver = DecodeDriver(num_slots=8)
    sick, healthy = driver.pair(), driver.pair()
    for _ in range(3):
        transfer = driver.open((sick,), 16)
        driver.chunk(sick, transfer, 0, 16)
        driver.leg_failed(sick, transfer, Reason.WRITE_UNKNOWN)
        driver.quiesced(sick, transfer, *driver.credits(sick, transfer)[:1])
    assert driver.slots.num_quarantined(sick.incarnation) == 2
    assert driver.num_credited(sick, transfer) == 0
    other = driver.open((healthy,), 16)
    driver.deliver(healthy, other, 16)
    assert driver.ends(other) == [(EventKind.LANDED, None)]
    driver.tick(10_000.0)
    assert driver.slots.release_quarantine() == 2
    driver.assert_idle()


def test_r10_the_answer_to_a_query_stands_in_for_lost_notices() -> None:
    """R10: a segment notice and `finished` were lost; the status brings them, and what came before is not repeated."""
    driver, source, transfer = _with_scatter()
    first_slot, second_slot = driver.scatters[0].slot, driver.credits(source, transfer)[0]
    driver.tick(REMIND_S)
    finished = driver.finished_message(source, transfer, 1, 2, 8 * ROW_BYTES)
    written = ((0, 0, first_slot, SEGMENT_BYTES), (0, 1, second_slot, SEGMENT_BYTES))
    driver.status(source, transfer, state="finished", segments=written, finished=finished)
    assert [scatter.segment for scatter in driver.scatters] == [0, 1]
    driver.end_scatters()
    assert driver.ends(transfer) == [(EventKind.LANDED, None)]


def test_r10_a_repeated_notice_does_no_harm_when_its_slot_was_lent_again() -> None:
    """R10: ids are compared whole and kept in a bitmap; slot numbers come back and prove nothing."""
    driver = DecodeDriver(num_slots=1)
    source = driver.pair()
    transfer = driver.open((source,), 8)
    driver.chunk(source, transfer, 0, 8)
    driver.segment(source, transfer, 0, 0)
    driver.end_scatters()
    assert driver.credits(source, transfer) == [0]
    driver.segment(source, transfer, 0, 0)
    driver.status(source, transfer, state="active", segments=((0, 0, 0, SEGMENT_BYTES),))
    assert not driver.scatters
    driver.segment(source, transfer, 1, 0)
    driver.end_scatters()
    driver.receive(source, driver.finished_message(source, transfer, 1, 2, 8 * ROW_BYTES))
    assert driver.ends(transfer) == [(EventKind.LANDED, None)]


def test_r10_a_source_that_does_not_know_the_leg_has_failed_it() -> None:
    """R10: `unknown` means failed; what it was lent is set aside, for nobody vouches for its writes."""
    driver, source, transfer = _with_scatter()
    driver.tick(REMIND_S)
    driver.status(source, transfer, state="unknown")
    driver.end_scatters()
    assert driver.ends(transfer) == [(FAILED, Reason.STALE)]
    assert driver.count(SlotState.QUARANTINED) == 1


def test_r11_a_chunk_that_overlaps_an_earlier_one_ends_the_transfer() -> None:
    """R11: coverage is a set; rows that come twice could stand in for rows that never came."""
    driver = DecodeDriver()
    source = driver.pair()
    transfer = driver.open((source,), 8)
    driver.chunk(source, transfer, 0, 8)
    driver.chunk(source, transfer, 4, 8, chunk=1)
    assert driver.ends(transfer) == [(FAILED, Reason.MISMATCH)]


def test_r12_a_lost_connection_is_never_quiet() -> None:
    """R12: the credited slot is set aside at once: its write may still be under way."""
    driver, source, transfer = _with_scatter()
    driver.lose(source)
    assert driver.count(SlotState.QUARANTINED) == 1
    driver.end_scatters()
    assert driver.ends(transfer) == [(FAILED, Reason.PEER_LOST)]


@pytest.mark.parametrize("cause", ["peer lost", "deadline"])
def test_r12_data_that_arrived_is_not_landed_without_finished(cause: str) -> None:
    """R12: every segment was scattered, but nobody has said that these were all."""
    driver, source, transfer = _with_scatter()
    driver.segment(source, transfer, 1, driver.credits(source, transfer)[0])
    driver.end_scatters()
    assert driver.ends(transfer) == []
    if cause == "peer lost":
        driver.lose(source)
    else:
        driver.tick(61.0)
    assert [kind for kind, _ in driver.ends(transfer)] == [FAILED]


def test_r16_rows_in_have_are_neither_asked_for_nor_written_nor_counted() -> None:
    """R16: the worker vouches for them, from transfers that landed; this transfer must leave them alone."""
    driver = DecodeDriver()
    source = driver.pair()
    transfer = driver.open((source,), 12, have=(TokenRange(0, 4), TokenRange(6, 8)))
    assert driver.to(source, Grant)[0].have == ((TokenRange(0, 4), TokenRange(6, 8)),)
    driver.deliver(source, transfer, 12)
    tokens = {int(token) for scatter in driver.scattered for token in scatter.source.plan.blocks[0].tokens}
    assert tokens == {4, 5, 8, 9, 10, 11}
    assert driver.ends(transfer) == [(EventKind.LANDED, None)]


def test_r16_a_failed_transfer_vouches_for_nothing() -> None:
    """R16: half of it was scattered, yet the same request again asks for every row."""
    driver, source, transfer = _with_scatter()
    driver.end_scatters()
    driver.leg_failed(source, transfer, Reason.GATHER_FAILED)
    driver.quiesced(source, transfer)
    again = driver.open((source,), 8)
    assert driver.to(source, Grant, again)[0].have == ((),)
    driver.chunk(source, again, 0, 8)
    driver.receive(source, driver.finished_message(source, again, 1, 2, 8 * ROW_BYTES))
    assert driver.ends(again) == []


def test_r17_a_leg_holds_at_most_its_credits_and_none_without_data() -> None:
    """R17: nothing before it wants, then `credits_per_leg` at a time; a slot that was filled is no credit any more."""
    driver = DecodeDriver(num_slots=8, credits_per_leg=2)
    source = driver.pair()
    transfer = driver.open((source,), 16)
    assert not driver.to(source, Credits)
    assert driver.chunk(source, transfer, 0, 16) == 4
    assert len(driver.credits(source, transfer)) == 2
    for segment, slot in enumerate(driver.credits(source, transfer)):
        driver.segment(source, transfer, segment, slot)
    assert driver.num_credited(source, transfer) == 4
    assert len(driver.credits(source, transfer)) == 2
    assert driver.count(SlotState.SCATTERING) == 2


def test_r17_a_slot_is_lent_again_only_after_its_scatter() -> None:
    """R17: else the next write would overwrite rows on their way into pages."""
    driver = DecodeDriver(num_slots=1)
    source = driver.pair()
    transfer = driver.open((source,), 8)
    driver.chunk(source, transfer, 0, 8)
    driver.segment(source, transfer, 0, 0)
    assert driver.num_credited(source, transfer) == 1
    driver.end_scatters()
    assert driver.num_credited(source, transfer) == 2


def test_r2_quiesced_of_a_forgotten_transfer_is_acknowledged() -> None:
    """R2: the sender repeats it until then; after `landed` nothing of the transfer is left here."""
    driver = DecodeDriver()
    source = driver.pair()
    transfer = driver.open((source,), 4)
    driver.deliver(source, transfer, 4)
    driver.receive(source, Quiesced(transfer=transfer, generation=1))
    assert len(driver.to(source, QuiescedAck)) == 1
    driver.assert_idle()
