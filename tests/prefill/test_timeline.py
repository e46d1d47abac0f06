"""R14: nothing of a chunk leaves before the worker's timeline has reached its value; one never reached harms no other.

Also what the core tells whoever moves rows to prepare for.
"""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from kvxfer.control.messages import Chunk, Finished, PullChunk, PullReady
from kvxfer.control.pull_share import LeaseTable
from kvxfer.errors import LayoutError
from kvxfer.layout import Shard
from kvxfer.prefill.leg import Mode
from kvxfer.transfer import EventKind, Reason
from tests.prefill.driver import SEGMENT_ROWS, PrefillDriver
from tests.prefill.test_pull import PullDriver


@pytest.fixture
def leases() -> Iterator[LeaseTable]:
    table = LeaseTable()
    yield table
    table.close()


@pytest.mark.parametrize("mode", [Mode.PACKED, Mode.SERIAL, Mode.RAW])
@pytest.mark.parametrize("is_granted_first", [True, False])
def test_no_row_is_read_before_its_chunk_is_ready(mode: Mode, is_granted_first: bool) -> None:
    driver = PrefillDriver(mode=mode)
    peer, transfer = driver.pair(), driver.ticket()
    if is_granted_first:
        driver.grant(peer, transfer, 16)
    driver.submit(transfer, 0, 16, ready=5)
    if not is_granted_first:
        driver.grant(peer, transfer, 16)
    driver.run([peer], transfer)
    driver.reach(4)
    driver.run([peer], transfer)
    assert not any([driver.gathers, driver.writes, driver.to(peer, Finished), driver.events])
    assert driver.to(peer, Chunk), "the peer may prepare"
    driver.reach(5)
    driver.run([peer], transfer)
    assert driver.kinds(transfer) == [EventKind.SOURCE_FREE, EventKind.SENT]
    driver.assert_idle()


def test_a_peer_that_pulls_is_told_when_the_rows_are_there(leases: LeaseTable) -> None:
    driver = PullDriver(leases)
    peer, transfer = driver.pair(), driver.ticket()
    driver.let(peer, transfer, 16)
    driver.submit(transfer, 0, 16, ready=1)
    (told,) = driver.to(peer, PullChunk)
    assert driver.is_leased(told)
    assert not driver.to(peer, PullReady), "it may prepare, and no more"
    driver.pulled(peer, transfer)  # what cannot be true changes nothing
    assert not driver.to(peer, Finished)
    assert not driver.events
    driver.reach(1)
    assert [message.chunk for message in driver.to(peer, PullReady)] == [0]
    driver.pulled(peer, transfer)
    assert driver.kinds(transfer) == [EventKind.SOURCE_FREE, EventKind.SENT]


def test_chunks_go_in_the_order_in_which_they_become_ready() -> None:
    driver = PrefillDriver(num_slots=16)
    peer, transfer = driver.pair(), driver.ticket()
    driver.grant(peer, transfer, 24)
    driver.submit(transfer, 0, 8, last=False, ready=3)
    driver.submit(transfer, 8, 16, last=False)
    driver.submit(transfer, 16, 24, ready=2)
    assert len(driver.gathers) == 2
    driver.reach(2)
    assert len(driver.gathers) == 4
    assert driver.core.outlook.ready == 3
    driver.reach(2)
    assert len(driver.gathers) == 4
    driver.reach(9)
    assert driver.core.outlook.ready == 0
    driver.run([peer], transfer)
    assert driver.ends(transfer) == [(EventKind.SENT, None)]


def test_a_chunk_without_rows_for_anybody_waits_for_nothing() -> None:
    driver = PrefillDriver()
    peer, transfer = driver.pair(), driver.ticket()
    driver.grant(peer, transfer, 0)
    driver.submit(transfer, 0, 0, ready=5)
    assert driver.ends(transfer) == [(EventKind.SENT, None)]


def test_a_value_that_is_never_reached_ends_its_own_transfer_at_its_deadline() -> None:
    driver = PrefillDriver()
    peer = driver.pair()
    doomed, other = driver.ticket(), driver.ticket()
    for transfer in (doomed, other):
        driver.grant(peer, transfer, 16)
    driver.submit(doomed, 0, 16, ready=1 << 60, deadline_s=5.0)
    driver.submit(other, 0, 16)
    driver.run([peer], other)
    assert driver.ends(other) == [(EventKind.SENT, None)]
    driver.tick(5.0)
    assert driver.ends(doomed) == [(EventKind.FAILED, Reason.DEADLINE)]
    assert driver.core.outlook.ready == 0
    driver.reach(1 << 60)
    assert not driver.gathers
    driver.assert_idle()


@pytest.mark.parametrize("end", ["abort", "peer", "worker"])
def test_what_ends_early_releases_nothing_later(end: str) -> None:
    driver = PrefillDriver()
    peer, transfer = driver.pair(), driver.ticket()
    driver.grant(peer, transfer, 16)
    driver.submit(transfer, 0, 16, ready=1)
    {"abort": lambda: driver.abort(transfer), "peer": lambda: driver.lose(peer), "worker": driver.lose_worker}[end]()
    assert driver.core.outlook.num_gathers == 0
    driver.reach(1)
    driver.assert_idle()


def test_a_refused_chunk_leaves_nothing_that_waits() -> None:
    driver = PrefillDriver()
    peer, transfer = driver.pair(), driver.ticket()
    driver.grant(peer, transfer, 16)
    driver.submit(transfer, 0, 8, last=False, ready=1)
    with pytest.raises(LayoutError):
        driver.submit(transfer, 4, 8, ready=1)  # its rows were submitted already
    driver.submit(transfer, 8, 16, ready=1)
    driver.reach(1)
    driver.run([peer], transfer)
    assert driver.ends(transfer) == [(EventKind.SENT, None)]


def test_a_new_worker_has_a_new_timeline() -> None:
    driver = PrefillDriver()
    driver.reach(7)
    driver.lose_worker()
    driver.core.attach_worker(driver.layout)
    peer, transfer = driver.pair(), driver.ticket()
    driver.grant(peer, transfer, 16)
    driver.submit(transfer, 0, 16, ready=1)
    assert not driver.gathers
    driver.reach(1)
    assert driver.gathers


# ---- outlook ----


def test_all_planned_gathers_are_foreseen_ready_or_not() -> None:
    driver = PrefillDriver(num_slots=2)
    peer, transfer = driver.pair(), driver.ticket()
    driver.submit(transfer, 0, 8 * SEGMENT_ROWS, last=False, ready=1)
    assert driver.core.outlook.num_gathers == 0, "nobody has asked for rows yet"
    driver.grant(peer, transfer, 12 * SEGMENT_ROWS)
    assert driver.core.outlook.num_gathers == 8
    driver.submit(transfer, 8 * SEGMENT_ROWS, 12 * SEGMENT_ROWS)
    assert len(driver.gathers) == 2
    assert driver.core.outlook.num_gathers == 10
    driver.reach(1)
    driver.end_gathers()
    driver.abort(transfer)
    assert driver.core.outlook.num_gathers == 0


def test_gathers_that_legs_share_are_foreseen_once() -> None:
    """TP ranks that hold the same shard; a rank of another shard has its own."""
    driver = PrefillDriver(num_slots=16)
    transfer = driver.ticket()
    peers = [driver.pair(Shard(rank % 2, 2), rank=rank, world=4) for rank in range(4)]
    for peer in peers:
        driver.grant(peer, transfer, 16)
    driver.submit(transfer, 0, 16, ready=1)
    segments_a_shard = driver.leg(peers[0], transfer).num_segments
    assert driver.core.outlook.num_gathers == 2 * segments_a_shard
    driver.reach(1)
    assert len(driver.gathers) == 2 * segments_a_shard
    assert driver.core.outlook.num_gathers == 0


def test_rows_that_go_unpacked_are_no_gathers() -> None:
    driver = PrefillDriver(mode=Mode.RAW)
    peer, transfer = driver.pair(), driver.ticket()
    driver.grant(peer, transfer, 16)
    driver.submit(transfer, 0, 16, ready=1)
    assert driver.core.outlook.num_gathers == 0


def test_serial_goes_on_where_a_later_chunk_is_ready_first() -> None:
    """The chunk that is packed is not held back for one with a lower number, which waits behind it."""
    driver = PrefillDriver(num_slots=8, mode=Mode.SERIAL)
    peer, transfer = driver.pair(), driver.ticket()
    driver.grant(peer, transfer, 24)
    driver.submit(transfer, 0, 12, last=False, ready=1)
    driver.submit(transfer, 12, 24)
    driver.reach(1)
    driver.run([peer], transfer)
    assert driver.ends(transfer) == [(EventKind.SENT, None)]
    driver.assert_idle()
