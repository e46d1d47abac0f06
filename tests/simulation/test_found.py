"""What schedules have found in the cores, step by step: seeds change their meaning with every change, these do not."""

from __future__ import annotations

import pytest

from kvxfer.control.messages import Finished, Grant, Ping, PullChunk, Pulled, Query, Quiesced, Want
from kvxfer.layout import TokenRange
from kvxfer.prefill.core import PrefillCore
from kvxfer.prefill.leg import Mode
from kvxfer.transfer import EventKind, Reason
from kvxfer.transports.base import Outcome
from tests.prefill.driver import PrefillDriver
from tests.simulation.pull import LeaseWords


def _with_puller() -> tuple[PrefillDriver, str, str]:
    driver = PrefillDriver()
    driver.core = PrefillCore(driver.slots, Mode.P2P, LeaseWords())
    driver.core.attach_worker(driver.layout)
    return driver, driver.pair(), driver.ticket()


def _grant_pull(driver: PrefillDriver, peer: str, transfer: str, end: int) -> None:
    grant = Grant(
        transfer=transfer,
        generation=1,
        home=True,
        wanted=(TokenRange(0, end),),
        have=((),),
        remaining_s=60.0,
        floor=0,
        can_pull=True,
    )
    driver.receive(peer, grant)


def test_a_slot_that_a_lost_workers_transfer_gives_back_goes_to_no_other_of_its_transfers() -> None:
    driver = PrefillDriver(num_slots=1)
    first, second = driver.ticket(), driver.ticket()
    peers = driver.pair(), driver.pair()
    for transfer, peer in zip((first, second), peers, strict=True):
        driver.submit(transfer, 0, 4)
        driver.grant(peer, transfer, 4)
    driver.end_gathers()
    driver.actions.clear()
    driver.lose_worker()
    assert driver.gathers == []  # it would read the pages of a transfer that is ending
    driver.assert_idle()


def test_a_lost_want_is_said_again_when_the_peer_asks() -> None:
    driver = PrefillDriver()
    peer, transfer = driver.pair(), driver.ticket()
    driver.submit(transfer, 0, 8)
    driver.grant(peer, transfer, 8)
    (want,) = driver.to(peer, Want)
    driver.receive(peer, Query(transfer=transfer, generation=1))
    assert driver.to(peer, Want) == [want, want]


@pytest.mark.parametrize("num_times", [1, 2])
def test_a_puller_is_told_of_the_end_only_after_its_last_pull(num_times: int) -> None:
    """A source that dies in between revokes no lease: rows pulled from pages in new use must not count as landed."""
    driver, peer, transfer = _with_puller()
    driver.submit(transfer, 0, 4, last=False)
    driver.submit(transfer, 4, 8)
    _grant_pull(driver, peer, transfer, 8)
    assert [message.chunk for message in driver.to(peer, PullChunk)] == [0, 1]
    for _ in range(num_times):
        driver.receive(peer, Pulled(transfer=transfer, generation=1, chunk=0))
    assert driver.to(peer, Finished) == []
    assert driver.kinds(transfer) == []
    driver.receive(peer, Pulled(transfer=transfer, generation=1, chunk=1))
    assert len(driver.to(peer, Finished)) == 1
    assert driver.kinds(transfer) == [EventKind.SOURCE_FREE, EventKind.SENT]


def test_a_puller_that_gives_up_ends_the_transfer() -> None:
    driver, peer, transfer = _with_puller()
    driver.submit(transfer, 0, 4)
    _grant_pull(driver, peer, transfer, 4)
    driver.abort_leg(peer, transfer)
    assert driver.ends(transfer) == [(EventKind.FAILED, Reason.ABORTED_BY_PEER)]
    driver.receive(peer, Pulled(transfer=transfer, generation=1, chunk=0))
    assert driver.to(peer, Finished) == []


def test_a_leg_that_ends_after_the_floor_has_passed_it_is_forgotten_with_the_next_ping() -> None:
    driver = PrefillDriver()
    peer, transfer = driver.pair(), driver.ticket()
    driver.submit(transfer, 0, 4)
    driver.grant(peer, transfer, 4)
    driver.abort(transfer)  # its gather still runs
    driver.receive(peer, Ping(incarnation=peer, floor=2))
    assert driver.core.peers[peer].legs
    driver.end_gathers()
    driver.receive(peer, Ping(incarnation=peer, floor=2))
    assert driver.core.peers[peer].legs == {}


def test_an_abort_after_a_new_pairing_waits_for_what_the_old_pairing_left_running() -> None:
    driver = PrefillDriver()
    peer, transfer = driver.pair(), driver.ticket()
    driver.submit(transfer, 0, 4)
    driver.grant(peer, transfer, 4)
    driver.end_gathers()
    driver.credit(peer, transfer, 5)
    info = driver.core.peers[peer].info
    driver.lose(peer)
    driver.core.peer_paired(info)
    driver.abort_leg(peer, transfer)
    assert driver.to(peer, Quiesced) == []
    driver.end_write(outcome=Outcome.UNKNOWN)
    (quiesced,) = driver.to(peer, Quiesced)
    assert quiesced.unknown_slots == (5,)
