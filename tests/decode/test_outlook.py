"""What the decode core tells whoever moves rows to prepare for: announced segments, until they come or never will."""

from __future__ import annotations

from tests.decode.driver import DecodeDriver
from tests.decode.test_pull import PullDriver
from tests.prefill.driver import SEGMENT_ROWS


def test_announced_segments_are_foreseen_until_they_come() -> None:
    driver = DecodeDriver()
    source = driver.pair()
    transfer = driver.open((source,), 5 * SEGMENT_ROWS)
    assert driver.core.num_moves_to_come == 0
    driver.chunk(source, transfer, 0, 3 * SEGMENT_ROWS)
    driver.chunk(source, transfer, 3 * SEGMENT_ROWS, 5 * SEGMENT_ROWS, chunk=1)
    assert driver.core.num_moves_to_come == 5
    driver.segment(source, transfer, 0, driver.credits(source, transfer)[0])
    assert driver.core.num_moves_to_come == 4
    driver.end_scatters()
    assert driver.core.num_moves_to_come == 4


def test_an_end_leaves_nothing_to_come() -> None:
    driver = DecodeDriver()
    source = driver.pair()
    transfers = [driver.open((source,), 2 * SEGMENT_ROWS) for _ in range(2)]
    for transfer in transfers:
        driver.chunk(source, transfer, 0, 2 * SEGMENT_ROWS)
    driver.abort(transfers[0])
    assert driver.core.num_moves_to_come == 2
    driver.lose_worker()
    assert driver.core.num_moves_to_come == 0


def test_a_pull_is_foreseen_from_its_announcement_until_it_is_ready() -> None:
    driver = PullDriver()
    source = driver.map()
    transfer = driver.open((source,), 4 * SEGMENT_ROWS)
    for chunk in range(2):
        driver.announce(source, transfer, 2 * chunk * SEGMENT_ROWS, 2 * (chunk + 1) * SEGMENT_ROWS, chunk=chunk)
    assert not driver.pulls
    assert driver.core.num_moves_to_come == 2
    driver.ready(source, transfer, 1)
    assert len(driver.pulls) == 1
    assert driver.core.num_moves_to_come == 1
    driver.abort(transfer)
    assert driver.core.num_moves_to_come == 0
