"""A ticket that is never opened: its sources hear of it, paired or not, and the worker hears nothing."""

from __future__ import annotations

import pytest

from kvxfer.control.ids import new_id
from kvxfer.control.messages import AbortLeg, RejectTicket, Source, Ticket
from kvxfer.errors import RefusedError
from kvxfer.transfer import Reason
from tests.decode.driver import DecodeDriver


def _reject(driver: DecodeDriver, *sources: Source) -> str:
    ticket = Ticket(transfer=new_id(), sources=sources)
    driver.core.reject(RejectTicket(ticket=ticket), driver.now)
    driver.tick(0.0)
    return ticket.transfer


def test_a_paired_source_hears_of_it_at_once() -> None:
    driver = DecodeDriver()
    source = driver.pair()
    transfer = _reject(driver, source)
    assert [message.reason for message in driver.to(source, AbortLeg, transfer)] == [Reason.REJECTED]
    driver.quiesced(source, transfer)
    assert not driver.events
    driver.assert_idle()


def test_an_unpaired_source_hears_of_it_once_it_is_paired() -> None:
    driver = DecodeDriver()
    source = Source(endpoint="tcp://127.0.0.1:1", incarnation=new_id())
    transfer = _reject(driver, source)
    assert driver.pairings == [source]
    driver.pair(source=source)
    assert [message.reason for message in driver.to(source, AbortLeg, transfer)][-1] is Reason.REJECTED
    driver.quiesced(source, transfer)
    assert not driver.events
    driver.assert_idle()


def test_a_source_that_cannot_be_reached_is_given_up() -> None:
    driver = DecodeDriver()
    source = Source(endpoint="tcp://127.0.0.1:1", incarnation=new_id())
    _reject(driver, source)
    driver.lose(source)
    assert not driver.events
    driver.assert_idle()


def test_an_open_transfer_is_aborted_not_rejected() -> None:
    driver = DecodeDriver()
    source = driver.pair()
    transfer = driver.open((source,), 8)
    with pytest.raises(RefusedError, match="abort it"):
        driver.core.reject(RejectTicket(ticket=Ticket(transfer=transfer, sources=(source,))), driver.now)
