"""Landing slots and turns: who is lent one, and that a sick source takes from nobody else."""

from __future__ import annotations

import pytest

from kvxfer.control.messages import Credits, LegStatus, Want
from kvxfer.slots import SlotState
from kvxfer.transfer import EventKind, Reason
from tests.decode.driver import DecodeDriver

LANDED = [(EventKind.LANDED, None)]


def test_wants_are_counts_and_credits_never_exceed_them() -> None:
    """A want that is repeated or comes late asks for nothing new."""
    driver = DecodeDriver(num_slots=8, credits_per_leg=8)
    source = driver.pair()
    transfer = driver.open((source,), 32)
    for num_leased in (2, 2, 1, 3):
        driver.receive(source, Want(transfer=transfer, generation=1, num_leased=num_leased))
    assert driver.num_credited(source, transfer) == 3


def test_free_slots_go_round_the_legs_one_at_a_time() -> None:
    """The first leg came first and got both slots; of those that come back, each leg gets one in turn."""
    driver = DecodeDriver(num_slots=2)
    source = driver.pair()
    transfers = [driver.open((source,), 16) for _ in range(2)]
    for transfer in transfers:
        driver.chunk(source, transfer, 0, 16)
    assert [driver.num_credited(source, transfer) for transfer in transfers] == [2, 0]
    for segment in range(4):
        driver.segment(source, transfers[0], segment, driver.credits(source, transfers[0])[0])
        driver.end_scatters()
        if driver.credits(source, transfers[1]):
            break
    order = [message.transfer for message in driver.to(source, Credits)]
    assert order == [transfers[0], transfers[0], transfers[1]]


@pytest.mark.parametrize("num_stuck", [1, 3])
def test_a_source_that_never_writes_leaves_slots_for_another(num_stuck: int) -> None:
    """However many transfers it has, it holds at most half of the slots while there is another source."""
    driver = DecodeDriver(num_slots=8, credits_per_leg=4)
    silent, lively = driver.pair(), driver.pair()
    stuck = [driver.open((silent,), 64) for _ in range(num_stuck)]
    for transfer in stuck:
        driver.chunk(silent, transfer, 0, 64)
    moving = driver.open((lively,), 64)
    driver.deliver(lively, moving, 64)
    assert driver.ends(moving) == LANDED
    assert sum(len(driver.credits(silent, transfer)) for transfer in stuck) == 4


def test_one_source_alone_leaves_the_last_slot_to_one_that_comes_late() -> None:
    driver = DecodeDriver(num_slots=4, credits_per_leg=2)
    source = driver.pair()
    for _ in range(2):
        driver.chunk(source, driver.open((source,), 16), 0, 16)
    assert driver.count(SlotState.CREDITED) == 3
    late = driver.pair()
    transfer = driver.open((late,), 16)
    driver.deliver(late, transfer, 16)
    assert driver.ends(transfer) == LANDED


def test_one_slot_serves_any_number_of_legs() -> None:
    driver = DecodeDriver(num_slots=1)
    sources = [driver.pair(), driver.pair()]
    legs = [(source, driver.open((source,), 16)) for source in sources for _ in range(2)]
    left = {transfer: list(range(driver.chunk(source, transfer, 0, 16))) for source, transfer in legs}
    while any(left.values()):
        ((source, transfer),) = [leg for leg in legs if driver.credits(*leg)]
        driver.segment(source, transfer, left[transfer].pop(0), 0)
        driver.end_scatters()
    for source, transfer in legs:
        driver.receive(source, driver.finished_message(source, transfer, 1, 4, 16 * 8))
        assert driver.ends(transfer) == LANDED
    driver.assert_idle()


def test_slots_of_a_failed_leg_serve_others_once_it_is_quiet() -> None:
    driver = DecodeDriver(num_slots=2)
    source = driver.pair()
    failed, waiting = (driver.open((source,), 8) for _ in range(2))
    driver.chunk(source, failed, 0, 8)
    driver.chunk(source, waiting, 0, 8)
    assert driver.credits(source, waiting) == []
    driver.leg_failed(source, failed, Reason.GATHER_FAILED)
    assert driver.credits(source, waiting) == []
    driver.quiesced(source, failed)
    assert driver.credits(source, waiting) == [0, 1]


def test_credits_are_numbered_and_told_again_from_where_the_source_has_lost_them() -> None:
    driver = DecodeDriver(num_slots=4, credits_per_leg=4)
    source = driver.pair()
    transfer = driver.open((source,), 32)
    driver.core.slots_lie_in(7)
    for num_leased in (1, 3):
        driver.receive(source, Want(transfer=transfer, generation=1, num_leased=num_leased))
    told = driver.to(source, Credits)
    assert [(each.first, len(each.slots), each.region_id) for each in told] == [(0, 1, 7), (1, 2, 7)]
    for num_credited, expected in ((3, []), (1, [told[1]]), (0, [None])):
        num_told = len(driver.to(source, Credits))
        status = LegStatus(transfer=transfer, generation=1, state="active", num_credited=num_credited)
        driver.receive(source, status)
        again = driver.to(source, Credits)[num_told:]
        assert len(again) == len(expected)
        if num_credited:
            assert again == expected
        else:
            assert again[0].slots == told[0].slots + told[1].slots
    assert driver.count(SlotState.CREDITED) == 3


def test_credits_that_the_source_has_used_are_not_told_again() -> None:
    """A status that was under way for long, or is false, says that it has none of them."""
    driver = DecodeDriver(num_slots=4, credits_per_leg=4)
    source = driver.pair()
    transfer = driver.open((source,), 16)
    driver.chunk(source, transfer, 0, 16)
    driver.segment(source, transfer, 0, driver.credits(source, transfer)[0])
    num_told = len(driver.to(source, Credits))
    driver.receive(source, LegStatus(transfer=transfer, generation=1, state="active", num_credited=0))
    assert len(driver.to(source, Credits)) == num_told
