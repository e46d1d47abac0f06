"""The prefill core in modes p2p and auto: leases, what a peer is told to pull, and that every end revokes."""

from __future__ import annotations

from collections.abc import Callable, Iterator

import numpy as np
import pytest

from kvxfer.control.messages import AbortLeg, Finished, Grant, LegFailed, PathFigures, PullChunk, Pulled, Quiesced
from kvxfer.control.pages import decode_pages
from kvxfer.control.pull_share import NUM_LEASES, LeaseTable
from kvxfer.layout import Shard, TokenRange
from kvxfer.prefill.core import PrefillCore
from kvxfer.prefill.leg import Leg, Mode
from kvxfer.transfer import EventKind, LegState, Reason
from tests.prefill.driver import NUM_PAGES, PrefillDriver

SENT = [EventKind.SOURCE_FREE, EventKind.SENT]


class PullDriver(PrefillDriver):
    """A core whose peers may pull, under real lease words."""

    def __init__(self, leases: LeaseTable, mode: Mode = Mode.P2P) -> None:
        super().__init__(mode=mode)
        self.leases = leases
        self.core = PrefillCore(self.slots, mode, leases)
        self.core.attach_worker(self.layout)

    def let(self, peer: str, transfer: str, end: int, *, can_pull: bool = True) -> None:
        """The peer wants tokens `[0, end)` and has the pool mapped."""
        grant = Grant(
            transfer=transfer,
            generation=1,
            home=True,
            wanted=(TokenRange(0, end),),
            have=((),),
            remaining_s=60.0,
            floor=0,
            can_pull=can_pull,
        )
        self.receive(peer, grant)

    def pulled(self, peer: str, transfer: str, chunk: int = 0) -> None:
        self.receive(peer, Pulled(transfer=transfer, generation=1, chunk=chunk))

    def is_leased(self, message: PullChunk) -> bool:
        """What a peer would see in the lease word."""
        return int(self.leases.memory.array.view(np.uint64)[message.lease_word]) == message.lease_value


@pytest.fixture
def leases() -> Iterator[LeaseTable]:
    table = LeaseTable()
    yield table
    table.close()


def begun(driver: PullDriver, end: int = 16) -> tuple[str, str, PullChunk]:
    """A transfer whose one chunk is being pulled: peer, transfer, and what the peer was told."""
    peer, transfer = driver.pair(), driver.ticket()
    driver.let(peer, transfer, end)
    driver.submit(transfer, 0, end)
    (told,) = driver.to(peer, PullChunk)
    assert driver.is_leased(told)
    return peer, transfer, told


def test_chunks_are_pulled_and_the_end_is_told_when_all_are(leases: LeaseTable) -> None:
    driver = PullDriver(leases)
    peer, transfer = driver.pair(), driver.ticket()
    driver.let(peer, transfer, 24)
    driver.submit(transfer, 0, 8, last=False)
    driver.submit(transfer, 8, 24)
    first, second = driver.to(peer, PullChunk)
    assert (first.lease_word, first.lease_value) == (second.lease_word, second.lease_value)
    assert decode_pages(second.pages[0]).tolist() == [NUM_PAGES - 3, NUM_PAGES - 4, NUM_PAGES - 5, NUM_PAGES - 6]
    assert not driver.gathers
    assert not driver.writes
    driver.pulled(peer, transfer, 1)
    driver.pulled(peer, transfer, 1)
    driver.pulled(peer, transfer, 7)
    assert driver.kinds(transfer) == []
    assert driver.to(peer, Finished) == []
    assert driver.is_leased(first)
    driver.pulled(peer, transfer, 0)
    assert driver.kinds(transfer) == SENT
    assert driver.to(peer, Finished)[0].num_bytes == 24 * 8
    assert not driver.is_leased(first)
    driver.pulled(peer, transfer, 0)
    assert driver.kinds(transfer) == SENT
    driver.assert_idle()


def test_no_row_ends_without_a_pull(leases: LeaseTable) -> None:
    driver = PullDriver(leases)
    peer, transfer = driver.pair(), driver.ticket()
    driver.let(peer, transfer, 0)
    driver.submit(transfer, 0, 0)
    assert driver.to(peer, PullChunk) == []
    assert driver.to(peer, Finished)[0].num_segments == 0
    assert driver.kinds(transfer) == SENT


Ending = Callable[[PullDriver, str, str], None]
ENDINGS: dict[str, tuple[Ending, Reason, bool]] = {
    "abort of the worker": (lambda driver, _peer, name: driver.abort(name), Reason.ABORTED_BY_WORKER, True),
    "abort of the peer": (lambda driver, peer, name: driver.abort_leg(peer, name), Reason.ABORTED_BY_PEER, True),
    "deadline": (lambda driver, _peer, _name: driver.tick(60.0), Reason.DEADLINE, True),
    "peer lost": (lambda driver, peer, _name: driver.lose(peer), Reason.PEER_LOST, True),
    "worker lost": (lambda driver, _peer, _name: driver.lose_worker(), Reason.WORKER_LOST, False),
}


@pytest.mark.parametrize("name", ENDINGS)
def test_every_other_end_revokes_the_lease_first(leases: LeaseTable, name: str) -> None:
    """By the time the worker hears that its pages are its own again, what is still being pulled is void."""
    end, reason, is_told = ENDINGS[name]
    driver = PullDriver(leases)
    peer, transfer, told = begun(driver)
    end(driver, peer, transfer)
    assert not driver.is_leased(told)
    kind = EventKind.ABORTED if reason is Reason.ABORTED_BY_WORKER else EventKind.FAILED
    assert driver.ends(transfer) == ([(kind, reason)] if is_told else [])
    if reason is not Reason.PEER_LOST:
        assert driver.to(peer, LegFailed)[0].reason is reason
        assert driver.to(peer, Quiesced)
        driver.pulled(peer, transfer)  # too late: it changes nothing
    assert driver.to(peer, Finished) == []
    assert driver.ends(transfer) == ([(kind, reason)] if is_told else [])
    assert driver.core.num_reading_pool == 0


def test_each_decode_agent_has_a_lease_and_one_that_gives_up_ends_all(leases: LeaseTable) -> None:
    driver = PullDriver(leases)
    transfer = driver.ticket()
    peers = [driver.pair(Shard(rank=rank, size=2), rank=rank, world=2) for rank in range(2)]
    for peer in peers:
        driver.let(peer, transfer, 16)
    driver.submit(transfer, 0, 16)
    told = [driver.to(peer, PullChunk)[0] for peer in peers]
    assert told[0].lease_word != told[1].lease_word
    driver.pulled(peers[0], transfer)
    assert not driver.is_leased(told[0])
    assert driver.is_leased(told[1])
    assert driver.kinds(transfer) == []
    driver.receive(peers[1], AbortLeg(transfer=transfer, generation=1, reason=Reason.DEADLINE))
    assert not driver.is_leased(told[1])
    assert driver.ends(transfer) == [(EventKind.FAILED, Reason.ABORTED_BY_PEER)]


def test_a_peer_that_cannot_pull_is_refused_in_mode_p2p_and_served_in_mode_auto(leases: LeaseTable) -> None:
    driver = PullDriver(leases)
    peer, transfer = driver.pair(), driver.ticket()
    driver.let(peer, transfer, 8, can_pull=False)
    (failed,) = driver.to(peer, LegFailed)
    assert failed.reason is Reason.PEER_REFUSED
    assert "mode p2p: the decode agent cannot map this pool" in failed.detail
    driver = PullDriver(leases, Mode.AUTO)
    peer, transfer = driver.pair(), driver.ticket()
    driver.let(peer, transfer, 8, can_pull=False)
    driver.submit(transfer, 0, 8)
    driver.run([peer], transfer)
    assert driver.kinds(transfer) == SENT
    assert driver.core._life.num_chosen == {Mode.PACKED: 1}


def test_when_all_leases_are_out_auto_packs_and_p2p_says_so(leases: LeaseTable) -> None:
    words = [leases.take() for _ in range(NUM_LEASES - 1)]
    driver = PullDriver(leases, Mode.AUTO)
    first = begun(driver)
    peer, transfer = driver.pair(), driver.ticket()
    driver.let(peer, transfer, 8)
    driver.submit(transfer, 0, 8)
    driver.run([peer], transfer)
    assert driver.kinds(transfer) == SENT
    assert driver.core._life.num_chosen == {Mode.P2P: 1, Mode.PACKED: 1}

    strict = PullDriver(leases)
    peer, transfer = strict.pair(), strict.ticket()
    strict.let(peer, transfer, 8)
    strict.submit(transfer, 0, 8)
    assert strict.ends(transfer) == [(EventKind.FAILED, Reason.PEER_REFUSED)]
    assert "no lease word is free" in strict.events[-1].detail
    empty = strict.ticket()
    strict.let(peer, empty, 0)
    strict.submit(empty, 0, 0)
    assert strict.kinds(empty) == SENT  # no row, no lease needed

    driver.pulled(first[0], first[1])  # gives its word back
    again = strict.ticket()
    strict.let(peer, again, 8)
    strict.submit(again, 0, 8)
    strict.pulled(peer, again)
    assert strict.kinds(again) == SENT
    assert len({lease[0] for lease in words if lease is not None}) == NUM_LEASES - 1


def test_leases_are_given_back_by_every_end(leases: LeaseTable) -> None:
    """More transfers than there are words left."""
    for _ in range(NUM_LEASES - 1):
        leases.take()
    driver = PullDriver(leases)
    peer = driver.pair()
    for number in range(10):
        transfer = driver.ticket()
        driver.let(peer, transfer, 4)
        driver.submit(transfer, 0, 4)
        if number % 2:
            driver.pulled(peer, transfer)
        else:
            driver.abort(transfer)
    assert all(event.reason is not Reason.PEER_REFUSED for event in driver.events)
    driver.assert_idle()


@pytest.mark.parametrize(
    ("descriptor_s", "bytes_per_s", "is_measured", "expected"),
    [
        (1e-3, 2e9, True, Mode.PACKED),
        (1e-9, 2e9, True, Mode.RAW),
        (0.0, 0.0, True, Mode.PACKED),
        (1e-9, 2e9, False, Mode.PACKED),
    ],
    ids=["descriptors cost", "descriptors are cheap", "not measured", "measured between other memory"],
)
def test_auto_follows_the_measured_path(
    leases: LeaseTable, descriptor_s: float, bytes_per_s: float, is_measured: bool, expected: Mode
) -> None:
    driver = PullDriver(leases, Mode.AUTO)
    driver.core.allow_raw(may_send=True, is_measured=is_measured)
    peer, transfer = driver.pair(Shard(rank=0, size=2), world=2), driver.ticket()  # every second row: none touch
    info = driver.core.peers[peer].info
    object.__setattr__(info, "figures", PathFigures(path="a wire", descriptor_s=descriptor_s, bytes_per_s=bytes_per_s))
    driver.let(peer, transfer, 16, can_pull=False)
    driver.submit(transfer, 0, 16)
    leg: Leg = driver.leg(peer, transfer)
    assert leg.state is LegState.ACTIVE
    assert leg.mode is expected
    driver.run([peer], transfer)
    assert len(driver.to(peer, Finished)) == 1
