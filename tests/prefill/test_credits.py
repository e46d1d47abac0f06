"""Credits are numbered and name a region: told twice they count once, and none is used that means other slots."""

from __future__ import annotations

import pytest

from kvxfer.control.messages import Credits, LegStatus, Query
from tests.prefill.driver import PrefillDriver


@pytest.fixture
def granted() -> tuple[PrefillDriver, str, str]:
    """A leg whose segments are packed and wait for credits."""
    driver = PrefillDriver()
    peer, transfer = driver.pair(), driver.ticket()
    driver.submit(transfer, 0, 64)
    driver.grant(peer, transfer, 64)
    driver.end_gathers()
    return driver, peer, transfer


def _credit(granted: tuple[PrefillDriver, str, str], first: int, *slots: int, region_id: int = 0) -> list[int]:
    """Lend slots; the slots that are written to by now."""
    driver, peer, transfer = granted
    message = Credits(transfer=transfer, generation=1, region_id=region_id, first=first, slots=slots)
    driver.receive(peer, message)
    return [write.notice.slot for write in driver.writes]


def _num_credited(granted: tuple[PrefillDriver, str, str]) -> int:
    driver, peer, transfer = granted
    driver.receive(peer, Query(transfer=transfer, generation=1))
    return driver.to(peer, LegStatus)[-1].num_credited


def test_credits_that_are_told_twice_count_once(granted: tuple[PrefillDriver, str, str]) -> None:
    assert _credit(granted, 0, 5) == [5]
    assert _credit(granted, 0, 5) == [5]
    assert _credit(granted, 0, 5, 6) == [5, 6]
    assert _credit(granted, 1, 6) == [5, 6]
    assert _num_credited(granted) == 2


def test_credits_behind_lost_ones_wait_until_all_are_told_again(granted: tuple[PrefillDriver, str, str]) -> None:
    assert _credit(granted, 1, 6) == []
    assert granted[0].core.refused["credits missing"] == 1
    assert _num_credited(granted) == 0
    assert _credit(granted, 0, 5, 6) == [5, 6]


def test_credits_of_a_region_that_was_not_told_of_are_not_used(granted: tuple[PrefillDriver, str, str]) -> None:
    driver, peer, _ = granted
    assert _credit(granted, 0, 5, region_id=3) == []
    assert driver.core.refused["other region"] == 1
    assert _num_credited(granted) == 0
    driver.core.region_moved(peer, 3)
    assert _credit(granted, 0, 5) == []  # nor one of the region that it has left
    assert _credit(granted, 0, 5, region_id=3) == [5]
