"""One prefill feeds several decode groups: the source is free, and the transfer sent, after the last of them."""

from __future__ import annotations

from kvxfer.control.messages import LegFailed
from kvxfer.layout import Shard
from kvxfer.transfer import EventKind, Reason
from tests.prefill.driver import PrefillDriver


def test_sent_waits_for_every_group_whatever_its_size() -> None:
    driver = PrefillDriver(num_slots=8)
    transfer = driver.ticket(num_decode_groups=2)
    single = driver.pair()
    pair = [driver.pair(Shard(rank=rank, size=2), rank=rank, world=2) for rank in range(2)]
    driver.submit(transfer, 0, 16)
    driver.grant(single, transfer, 16, num_decode_groups=2)
    driver.run([single], transfer)
    assert driver.kinds(transfer) == []
    driver.grant(pair[0], transfer, 16, num_decode_groups=2)
    driver.run([pair[0]], transfer)
    assert driver.kinds(transfer) == []
    driver.grant(pair[1], transfer, 16, num_decode_groups=2)
    driver.run([pair[1]], transfer)
    assert driver.kinds(transfer) == [EventKind.SOURCE_FREE, EventKind.SENT]
    driver.assert_idle()


def test_a_group_of_another_ticket_is_refused() -> None:
    driver = PrefillDriver()
    transfer = driver.ticket(num_decode_groups=2)
    first, second = driver.pair(), driver.pair()
    driver.grant(first, transfer, 16, num_decode_groups=2)
    driver.grant(second, transfer, 16, num_decode_groups=1)
    assert [message.reason for message in driver.to(second, LegFailed)] == [Reason.MISMATCH]
    assert driver.kinds(transfer) == []


def test_a_rejected_ticket_ends_for_its_worker_at_once() -> None:
    """The decode side never granted anything: its abort alone tells the waiting worker."""
    driver = PrefillDriver()
    transfer = driver.ticket()
    peer = driver.pair()
    driver.submit(transfer, 0, 16)
    driver.abort_leg(peer, transfer)
    assert driver.kinds(transfer) == [EventKind.FAILED]
