"""Cores that take on nothing new, and what becomes of peers that have said goodbye after their part was done."""

from __future__ import annotations

import pytest

from kvxfer.control.messages import LegFailed, Quiesced
from kvxfer.errors import RefusedError
from kvxfer.layout import Shard
from kvxfer.transfer import EventKind, LegState, Reason
from tests.decode.driver import DecodeDriver
from tests.prefill.driver import PrefillDriver


def test_a_draining_prefill_core_ends_what_nobody_has_asked_for_and_lets_the_rest_end() -> None:
    driver = PrefillDriver()
    peer, open_one, waiting = driver.pair(), driver.ticket(), driver.ticket()
    driver.grant(peer, open_one, 16)
    assert driver.core.begin_drain(driver.now) == 1
    driver.tick()
    assert driver.ends(waiting) == [(EventKind.FAILED, Reason.SHUTDOWN)]
    with pytest.raises(RefusedError) as refused:
        driver.ticket()
    assert refused.value.reason is Reason.SHUTDOWN
    with pytest.raises(RefusedError):
        driver.submit("a" * 32, 0, 16)  # a sibling's ticket
    for late in (waiting, "b" * 32):
        driver.grant(peer, late, 16, generation=2, home=False)
        assert [each.reason for each in driver.to(peer, LegFailed) if each.transfer == late] == [Reason.SHUTDOWN]
        assert [each.transfer for each in driver.to(peer, Quiesced)][-1] == late
    driver.submit(open_one, 0, 16)
    driver.run([peer], open_one)
    assert driver.ends(open_one) == [(EventKind.SENT, None)]
    driver.assert_idle()


def test_a_draining_prefill_core_takes_the_other_ranks_of_an_open_transfer() -> None:
    driver = PrefillDriver()
    peers = [driver.pair(Shard(rank, 2, 1), rank=rank, world=2) for rank in range(2)]
    transfer = driver.ticket()
    driver.grant(peers[0], transfer, 16)
    assert driver.core.begin_drain(driver.now) == 0
    driver.grant(peers[1], transfer, 16)
    driver.submit(transfer, 0, 16)
    driver.run(peers, transfer)
    assert driver.ends(transfer) == [(EventKind.SENT, None)]


def test_a_draining_decode_core_refuses_to_open_and_lets_the_rest_end() -> None:
    driver = DecodeDriver()
    source = driver.pair()
    transfer = driver.open((source,), 16)
    driver.core.is_draining = True
    with pytest.raises(RefusedError) as refused:
        driver.open((source,), 16)
    assert refused.value.reason is Reason.SHUTDOWN
    driver.deliver(source, transfer, 16)
    assert driver.ends(transfer) == [(EventKind.LANDED, None)]
    driver.assert_idle()


@pytest.mark.parametrize("said_goodbye", [True, False])
def test_a_finished_leg_outlives_a_peer_that_said_goodbye(said_goodbye: bool) -> None:
    """One rank of a group has all its rows and drains; the other one is still being sent to."""
    driver = PrefillDriver()
    peers = [driver.pair(Shard(rank, 2, 1), rank=rank, world=2) for rank in range(2)]
    transfer = driver.ticket()
    for peer in peers:
        driver.grant(peer, transfer, 16)
    driver.submit(transfer, 0, 16)
    driver.run(peers[:1], transfer)
    assert driver.leg(peers[0], transfer).state is LegState.FINISHED
    driver.core.peer_gone(peers[0], Reason.PEER_LOST, driver.now, said_goodbye=said_goodbye)
    driver.tick()
    driver.run(peers[1:], transfer)
    wanted = (EventKind.SENT, None) if said_goodbye else (EventKind.FAILED, Reason.PEER_LOST)
    assert driver.ends(transfer) == [wanted]


@pytest.mark.parametrize("has_finished", [True, False])
def test_rows_on_their_way_into_pages_need_no_source(has_finished: bool) -> None:
    driver = DecodeDriver()
    source = driver.pair()
    transfer = driver.open((source,), 4)
    plan = driver.plan(source, transfer, 0, 4)
    driver.chunk(source, transfer, 0, 4)
    driver.segment(source, transfer, 0, driver.credits(source, transfer)[0], num_bytes=plan.num_bytes)
    if has_finished:
        driver.receive(source, driver.finished_message(source, transfer, 1, 1, plan.num_bytes))
    aborts = driver.core.aborts_for(source.incarnation, Reason.PEER_LOST, "it is silent")
    assert [(abort.transfer, abort.detail) for abort in aborts] == (
        [] if has_finished else [(transfer, "it is silent")]
    )
    driver.lose(source)
    assert not driver.ends(transfer)
    driver.end_scatters()
    wanted = (EventKind.LANDED, None) if has_finished else (EventKind.FAILED, Reason.PEER_LOST)
    assert driver.ends(transfer) == [wanted]
    driver.assert_idle()
