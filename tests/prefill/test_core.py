"""The prefill core along a transfer's life: tickets, grants and chunks in any order, ends, refusals, recovery."""

from __future__ import annotations

import tracemalloc

import numpy as np
import pytest

from kvxfer.control.ids import new_id
from kvxfer.control.messages import AbortLeg, Chunk, Finished, GroupPages, LegFailed, Quiesced
from kvxfer.control.pages import encode_pages
from kvxfer.errors import LayoutError, RefusedError
from kvxfer.layout import LayerRange, Shard, TokenRange
from kvxfer.transfer import EventKind, Reason
from kvxfer.transports.base import Outcome
from tests.prefill.driver import PrefillDriver, pages_for, pool_layout

SENT = [EventKind.SOURCE_FREE, EventKind.SENT]


@pytest.mark.parametrize("order", ["grant first", "chunks first", "between"])
def test_grants_and_chunks_come_in_any_order(order: str) -> None:
    driver = PrefillDriver()
    peer, transfer = driver.pair(), driver.ticket()
    if order == "grant first":
        driver.grant(peer, transfer, 24)
    driver.submit(transfer, 0, 8, last=False)
    if order == "between":
        driver.grant(peer, transfer, 24)
    driver.submit(transfer, 8, 24)
    if order == "chunks first":
        driver.grant(peer, transfer, 24)
    driver.run([peer], transfer)
    assert driver.kinds(transfer) == SENT
    assert driver.to(peer, Finished)[0].num_chunks == 2
    driver.assert_idle()


def test_sent_waits_for_every_rank_of_the_decode_group() -> None:
    """Two of three ranks have everything; the third has not asked yet."""
    driver = PrefillDriver()
    transfer = driver.ticket()
    peers = [driver.pair(Shard(rank=rank, size=3), rank=rank, world=3) for rank in range(3)]
    driver.submit(transfer, 0, 16)
    for peer in peers[:2]:
        driver.grant(peer, transfer, 16)
    driver.run(peers[:2], transfer)
    assert driver.kinds(transfer) == []
    driver.grant(peers[2], transfer, 16)
    driver.run(peers[2:], transfer)
    assert driver.kinds(transfer) == SENT
    assert driver.events[-1].stats.num_rows == 16


def test_source_free_comes_before_sent_once_all_is_packed() -> None:
    """The pages may go while the last slots are on the wire."""
    driver = PrefillDriver()
    peer, transfer = driver.pair(), driver.ticket()
    driver.grant(peer, transfer, 8)
    driver.submit(transfer, 0, 8)
    driver.end_gather()
    assert driver.kinds(transfer) == []
    driver.end_gather()
    assert driver.kinds(transfer) == [EventKind.SOURCE_FREE]
    driver.run([peer], transfer)
    assert driver.kinds(transfer) == SENT


@pytest.mark.parametrize("case", ["no tokens", "other rank's tokens", "all in have"])
def test_zero_rows_finish_at_once(case: str) -> None:
    driver = PrefillDriver()
    transfer = driver.ticket()
    peer = driver.pair(Shard(rank=1, size=2), rank=1, world=2) if case == "other rank's tokens" else driver.pair()
    end = {"no tokens": 0, "other rank's tokens": 1, "all in have": 6}[case]
    driver.grant(peer, transfer, end, have=(TokenRange(0, 6),) if case == "all in have" else ())
    driver.submit(transfer, 0, end)
    (finished,) = driver.to(peer, Finished)
    assert (finished.num_chunks, finished.num_segments, finished.num_bytes) == (1, 0, 0)
    if case == "other rank's tokens":
        owner = driver.pair(Shard(rank=0, size=2), rank=0, world=2)
        driver.grant(owner, transfer, end)
        driver.run([owner], transfer)
    assert driver.kinds(transfer) == SENT
    driver.assert_idle()


def test_rows_that_the_decode_side_has_are_not_sent() -> None:
    driver = PrefillDriver()
    peer, transfer = driver.pair(), driver.ticket()
    driver.grant(peer, transfer, 20, have=(TokenRange(0, 6), TokenRange(10, 12)))
    driver.submit(transfer, 0, 20)
    tokens = {int(token) for gather in driver.gathers for token in gather.source.plan.blocks[0].tokens}
    assert tokens == {*range(6, 10), *range(12, 20)}
    driver.run([peer], transfer)
    assert driver.kinds(transfer) == SENT


def test_a_chunk_of_layers_carries_those_layers() -> None:
    """A model that submits layer by layer: the same tokens, each layer once."""
    driver = PrefillDriver(layout=pool_layout(layers=(0, 3)))  # the decode side holds the first alone
    peer, transfer = driver.pair(), driver.ticket()
    driver.grant(peer, transfer, 4)
    driver.submit(transfer, 0, 4, layers=LayerRange(1, 3), last=False)
    driver.submit(transfer, 0, 4, layers=LayerRange(0, 1))
    assert [(chunk.layers, chunk.num_segments) for chunk in driver.to(peer, Chunk)] == [
        (LayerRange(1, 3), 0),
        (LayerRange(0, 1), 1),
    ]
    driver.run([peer], transfer)
    assert driver.kinds(transfer) == SENT


def test_too_few_rows_fail_as_incomplete() -> None:
    """Success over rows that never came would be silent corruption."""
    driver = PrefillDriver()
    peer, transfer = driver.pair(), driver.ticket()
    driver.grant(peer, transfer, 16)
    driver.submit(transfer, 0, 8)
    driver.run([peer], transfer)
    assert driver.ends(transfer) == [(EventKind.FAILED, Reason.INCOMPLETE)]
    assert "8 rows of the 16" in driver.events[-1].detail
    assert not driver.to(peer, Finished)


_TWICE = encode_pages(np.array([3, 3]), "pages")


@pytest.mark.parametrize(
    ("groups", "message"),
    [
        ((GroupPages(name="kv", tokens=TokenRange(4, 12), pages=_TWICE),), "page 3 twice"),
        ((GroupPages(name="kv", tokens=TokenRange(4, 8), pages=encode_pages([63], "")),), "page 63 twice in one"),
        ((GroupPages(name="kv", tokens=TokenRange(4, 8), pages=encode_pages([64], "")),), "64"),
        ((GroupPages(name="kv", tokens=TokenRange(4, 12), pages=encode_pages([5], "")),), "got 1, expected 2"),
        ((GroupPages(name="kv", tokens=TokenRange(4, 8), pages=b"\0\0\0"),), "multiple of 4"),
        ((GroupPages(name="ky", tokens=TokenRange(0, 0)),), "'ky'"),
        ((pages_for(pool_layout(), 4, 8), pages_for(pool_layout(), 8, 12)), "at most once"),
    ],
)
def test_a_bad_submit_is_refused_and_the_transfer_goes_on(groups: tuple[GroupPages, ...], message: str) -> None:
    driver = PrefillDriver()
    peer, transfer = driver.pair(), driver.ticket()
    driver.grant(peer, transfer, 16)
    driver.submit(transfer, 0, 4, last=False)
    with pytest.raises(LayoutError, match=message):
        driver.submit(transfer, 0, 0, groups=groups)
    driver.submit(transfer, 4, 16)
    driver.run([peer], transfer)
    assert driver.kinds(transfer) == SENT


def test_a_page_that_chunks_share_keeps_its_id() -> None:
    """Chunks may meet inside a page; both must name the same one."""
    driver = PrefillDriver()
    peer, transfer = driver.pair(), driver.ticket()
    driver.grant(peer, transfer, 8)
    driver.submit(transfer, 0, 6, last=False)
    other = GroupPages(name="kv", tokens=TokenRange(6, 8), pages=encode_pages([7], ""))
    with pytest.raises(LayoutError, match="expected 62, which an earlier chunk named"):
        driver.submit(transfer, 6, 8, groups=(other,))
    driver.submit(transfer, 6, 8)
    driver.run([peer], transfer)
    assert driver.kinds(transfer) == SENT


@pytest.mark.parametrize("tokens", [(1 << 31, 1 << 31), ((1 << 31) - 4, 1 << 31)])
def test_a_far_token_range_costs_no_memory(tokens: tuple[int, int]) -> None:
    """Pages are kept by what was named, not by how far the range lies out."""
    driver = PrefillDriver()
    transfer = driver.ticket()
    pages = encode_pages(np.arange(1 if tokens[0] < tokens[1] else 0), "pages")
    tracemalloc.start()
    groups = (GroupPages(name="kv", tokens=TokenRange(*tokens), pages=pages),)
    driver.submit(transfer, 0, 0, groups=groups)
    _, peak_bytes = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    assert peak_bytes < 1 << 20


def test_a_transfer_of_another_agents_ticket_begins_with_its_first_word() -> None:
    """Of several sources one makes the ticket; this one learns of it by a grant or by its worker's submit."""
    driver = PrefillDriver()
    peer = driver.pair()
    by_grant, by_submit = new_id(), new_id()
    driver.grant(peer, by_grant, 4, home=False)
    driver.submit(by_submit, 0, 4)
    driver.submit(by_grant, 0, 4)
    driver.grant(peer, by_submit, 4, generation=2, home=False)
    for transfer, generation in ((by_grant, 1), (by_submit, 2)):
        driver.end_gathers()
        driver.credit(peer, transfer, 0, generation=generation)
        driver.end_write()
    assert driver.kinds(by_grant) == driver.kinds(by_submit) == SENT


@pytest.mark.parametrize("home", [True, False])
def test_grants_for_tickets_that_never_were_or_have_ended_are_refused(home: bool) -> None:
    """A foreign ticket is told at once; so is one whose transfer has ended here, with the reason."""
    driver = PrefillDriver()
    peer, ended = driver.pair(), driver.ticket()
    driver.abort(ended)
    driver.grant(peer, ended, 4, generation=1, home=home)
    refusal = driver.to(peer, LegFailed)[0]
    assert (refusal.reason, "has ended (aborted_by_worker)" in refusal.detail) == (Reason.STALE, True)
    if home:
        driver.grant(peer, new_id(), 4, generation=2)
        assert driver.to(peer, LegFailed)[1].reason is Reason.UNKNOWN_TRANSFER
    assert len(driver.to(peer, Quiesced)) == len(driver.to(peer, LegFailed))
    driver.assert_idle()


def test_a_transfer_that_only_a_grant_made_known_tells_the_worker_nothing() -> None:
    """Its worker has never heard of it; a later submit is refused instead."""
    driver = PrefillDriver()
    peer, transfer = driver.pair(), new_id()
    driver.grant(peer, transfer, 4, home=False, remaining_s=5.0)
    driver.tick(6.0)
    assert not driver.events
    with pytest.raises(RefusedError, match=r"has ended \(deadline\)") as refused:
        driver.submit(transfer, 0, 4)
    assert refused.value.reason is Reason.STALE


def test_an_abort_that_overtakes_its_grant_ends_the_transfer_at_once() -> None:
    """A decode worker that refuses the request before its agent was paired: nobody waits for the deadline."""
    driver = PrefillDriver()
    peer, transfer, foreign = driver.pair(), driver.ticket(), new_id()
    driver.submit(transfer, 0, 8)
    driver.abort_leg(peer, transfer, generation=1)
    assert driver.ends(transfer) == [(EventKind.FAILED, Reason.ABORTED_BY_PEER)]
    driver.abort_leg(peer, foreign, generation=2)  # another agent's ticket, which this worker has yet to submit to
    with pytest.raises(RefusedError, match="has ended"):
        driver.submit(foreign, 0, 8)
    driver.assert_idle()


def test_a_submit_to_a_transfer_that_is_ending_is_stale() -> None:
    driver = PrefillDriver()
    peer, transfer = driver.pair(), driver.ticket()
    driver.grant(peer, transfer, 8)
    driver.submit(transfer, 0, 4, last=False)
    driver.abort(transfer)
    with pytest.raises(RefusedError, match="is ending: aborted_by_worker") as refused:
        driver.submit(transfer, 4, 8)
    assert refused.value.reason is Reason.STALE


def test_the_worker_hears_who_gave_up_and_why() -> None:
    """Whether the decode agent had asked for the transfer before or not, and when it is lost."""
    driver = PrefillDriver()
    peer = driver.pair(Shard(rank=1, size=2), rank=1, world=2)
    known, unknown, lost = (driver.ticket() for _ in range(3))
    driver.grant(peer, known, 8, generation=1)
    driver.grant(peer, lost, 8, generation=3)
    for generation, transfer in ((1, known), (2, unknown)):
        detail = "layout: row_bytes: got 24, expected 25"
        abort = AbortLeg(transfer=transfer, generation=generation, reason=Reason.LAYOUT_MISMATCH, detail=detail)
        driver.receive(peer, abort)
    driver.lose(peer)
    name = f"decode agent {peer} at 10.0.0.7 (dst_rank 1 of 2)"
    gave_up = f"{name} gave up: layout_mismatch: layout: row_bytes: got 24, expected 25"
    assert [event.detail for event in driver.events] == [gave_up, gave_up, f"{name} is gone"]


def test_a_deadline_says_what_was_missing() -> None:
    driver = PrefillDriver(num_slots=8)
    nobody, some, unsubmitted = (driver.ticket(deadline_s=5.0, num_decode_groups=number) for number in (1, 3, 1))
    single, first = driver.pair(), driver.pair(Shard(rank=0, size=2), rank=0, world=2)
    driver.submit(nobody, 0, 8, deadline_s=5.0)
    driver.submit(some, 0, 8, deadline_s=5.0)
    driver.grant(single, some, 8, num_decode_groups=3)
    driver.grant(first, some, 8, num_decode_groups=3)
    driver.grant(single, unsubmitted, 8, generation=2)
    driver.tick(5.0)
    driver.end_gathers()
    passed = "the deadline of the prefill side has passed"
    assert {event.transfer: event.detail for event in driver.events} == {
        nobody: f"{passed}: 0 of 1 decode groups have opened it",
        some: f"{passed}: 1 of 3 decode groups have opened it, 1 of the 2 agents of one more",
        unsubmitted: f"{passed}: its last chunk was not submitted",
    }


def test_an_abort_of_a_decode_agent_that_is_not_paired_yet_ends_the_transfer() -> None:
    """Its worker has gone, so it will never be; it has no leg that could still need an answer."""
    driver = PrefillDriver()
    transfer = driver.ticket()
    driver.abort_leg(new_id(), transfer)
    assert driver.ends(transfer) == [(EventKind.FAILED, Reason.ABORTED_BY_PEER)]
    driver.assert_idle()


def test_a_stale_abort_does_not_end_a_later_try() -> None:
    driver = PrefillDriver()
    peer, transfer = driver.pair(), driver.ticket()
    driver.grant(peer, transfer, 8, generation=2)
    driver.abort_leg(peer, transfer, generation=1)
    driver.submit(transfer, 0, 8)
    driver.end_gathers()
    driver.credit(peer, transfer, 0, 1, generation=2)
    driver.end_write()
    driver.end_write()
    assert driver.kinds(transfer) == SENT


@pytest.mark.parametrize("state", ["ticket", "granted", "submitted", "filling", "packed", "in flight"])
@pytest.mark.parametrize(
    "cause", ["worker", "peer", "deadline", "peer deadline", "peer lost", "worker lost", "refused"]
)
def test_any_end_at_any_state(state: str, cause: str) -> None:
    """One terminal event at most (none for a lost worker), `quiesced` to whoever asked, everything back to start."""
    driver = PrefillDriver()
    peer, transfer = driver.pair(), driver.ticket()
    if state not in ("ticket", "submitted"):
        driver.grant(peer, transfer, 8, remaining_s=30.0)
    if state not in ("ticket", "granted"):
        driver.submit(transfer, 0, 8)
    if state in ("packed", "in flight"):
        driver.end_gathers()
    if state == "in flight":
        driver.credit(peer, transfer, 0)
    expected = _end(driver, peer, transfer, cause, has_leg=state not in ("ticket", "submitted"))
    driver.end_gathers()
    while driver.writes:
        driver.end_write(outcome=Outcome.FAILED)
    driver.tick(200.0)
    ends = driver.ends(transfer)
    if expected is None:
        assert ends == [], "the worker is gone"
    else:
        assert ends == [expected]
    driver.assert_idle()


def _end(
    driver: PrefillDriver, peer: str, transfer: str, cause: str, *, has_leg: bool
) -> tuple[EventKind, Reason] | None:
    """End the transfer by `cause`; returns the event to expect. What needs a leg ends by the deadline without one."""
    match cause:
        case "worker":
            driver.abort(transfer)
            return EventKind.ABORTED, Reason.ABORTED_BY_WORKER
        case "worker lost":
            driver.lose_worker()
            return None
        case "peer":
            driver.abort_leg(peer, transfer)
            reason = Reason.ABORTED_BY_PEER
        case "peer lost":
            driver.lose(peer)
            reason = Reason.PEER_LOST
        case "peer deadline":
            driver.tick(31.0)
            reason = Reason.DEADLINE
        case "deadline":
            driver.tick(61.0)
            reason = Reason.DEADLINE
        case _:
            driver.core.fail_all(Reason.SHUTDOWN, "draining", driver.now)
            return EventKind.FAILED, Reason.SHUTDOWN
    return EventKind.FAILED, reason if has_leg or cause == "peer" else Reason.DEADLINE
