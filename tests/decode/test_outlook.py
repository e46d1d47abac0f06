"""What the decode core tells whoever moves rows to prepare for: announced segments, until they come or never will."""

from __future__ import annotations

from tests.decode.driver import DecodeDriver
from tests.decode.test_pull import PullDriver
from tests.prefill.driver import SEGMENT_ROWS


def test_announced_segments_are_foreseen_until_they_come() -> None:
    driver = DecodeDriver()
    source = driver.pair()
    transfer = driver.open((source,), 5 * SEGMENT_ROWS)
    assert driver.core.num_scatters_to_come == 0
    driver.chunk(source, transfer, 0, 3 * SEGMENT_ROWS)
    driver.chunk(source, transfer, 3 * SEGMENT_ROWS, 5 * SEGMENT_ROWS, chunk=1)
    assert driver.core.num_scatters_to_come == 5
    driver.segment(source, transfer, 0, driver.credits(source, transfer)[0])
    assert driver.core.num_scatters_to_come == 4
    driver.end_scatters()
    assert driver.core.num_scatters_to_come == 4


def test_a_scatter_counts_until_it_was_taken() -> None:
    driver = DecodeDriver()
    source = driver.pair()
    transfer = driver.open((source,), 2 * SEGMENT_ROWS)
    driver.chunk(source, transfer, 0, 2 * SEGMENT_ROWS)
    seen = []
    take = driver.core.take_actions

    def looking_first() -> object:
        seen.append(driver.core.num_scatters_to_come)
        return take()

    driver.core.take_actions = looking_first  # type: ignore[method-assign, assignment]
    driver.segment(source, transfer, 0, driver.credits(source, transfer)[0])
    assert seen[0] == 2
    assert driver.core.num_scatters_to_come == 1


def test_an_end_leaves_nothing_to_come() -> None:
    driver = DecodeDriver()
    source = driver.pair()
    transfers = [driver.open((source,), 2 * SEGMENT_ROWS) for _ in range(2)]
    for transfer in transfers:
        driver.chunk(source, transfer, 0, 2 * SEGMENT_ROWS)
    driver.abort(transfers[0])
    assert driver.core.num_scatters_to_come == 2
    driver.lose_worker()
    assert driver.core.num_scatters_to_come == 0


def test_what_is_pulled_is_no_scatter() -> None:
    driver = PullDriver()
    source = driver.map()
    transfer = driver.open((source,), 2 * SEGMENT_ROWS)
    driver.tell(source, transfer, 0, 2 * SEGMENT_ROWS)
    assert driver.pulls
    assert driver.core.num_scatters_to_come == 0
