"""The posting thread against an engine that does as it is told."""

from __future__ import annotations

import itertools
import time
from collections.abc import Iterator

import numpy as np
import pytest

from kvxfer.transports import Counters, Outcome
from kvxfer.transports._completions import CompletionQueue
from kvxfer.transports._engine_thread import EngineError, EngineThread
from kvxfer.transports._regions import CheckedWrite, Entries


class FakeEngine:
    """Keeps every post under way until `finish` or `fault` names it by (peer, number of its first entry)."""

    max_post_entries = 10
    max_peer_entries = 30

    def __init__(self) -> None:
        self.posted: list[tuple[str, int, int]] = []  # peer, first entry's source, entries
        self.abandoned: list[int] = []
        self.results: dict[int, EngineError | None] = {}
        self.refuse: EngineError | None = None
        self.inline = False
        self.unready: set[str] = set()
        self.num_checks = 0
        self._tokens = itertools.count()

    def is_ready(self, peer: str) -> bool:
        return peer not in self.unready

    def post(self, peer: str, entries: CheckedWrite) -> int | None:
        if self.refuse is not None:
            raise self.refuse
        self.posted.append((peer, next(iter(entries.rows()))[0], entries.num_entries))
        return None if self.inline else next(self._tokens)

    def check(self, token: int) -> bool:
        self.num_checks += 1
        if token not in self.results:
            return False
        error = self.results.pop(token)
        if error is not None:
            raise error
        return True

    def abandon(self, token: int) -> None:
        self.abandoned.append(token)


class Harness:
    def __init__(self) -> None:
        self.engine = FakeEngine()
        self.counters = Counters()
        self.queue = CompletionQueue()
        self.thread = EngineThread("test", self.queue, self.counters)
        self.ended: dict[int, tuple[Outcome, str]] = {}
        self.thread.start(self.engine)

    def submit(self, write_id: int, peer: str, num_entries: int) -> None:
        numbers = np.arange(num_entries, dtype=np.uint64) + np.uint64(1000 * write_id)
        self.thread.submit(write_id, peer, Entries(np.column_stack((numbers, numbers, np.ones_like(numbers)))))

    def settle(self) -> None:
        """Wait until the thread has taken every command and looked at the engine once more."""
        for _ in range(2):
            self.thread.call(lambda: None)
        time.sleep(0.02)
        for end in self.queue.drain():
            assert end.write_id not in self.ended
            self.ended[end.write_id] = (end.outcome, end.detail)


@pytest.fixture
def harness() -> Iterator[Harness]:
    made = Harness()
    yield made
    made.thread.stop(0.0)
    made.thread.abandon_all("end of the test")
    made.queue.close()


def test_a_long_write_is_cut_and_kept_within_what_a_peer_may_have_in_flight(harness: Harness) -> None:
    harness.submit(1, "a", 45)
    harness.settle()
    assert harness.engine.posted == [("a", 1000, 10), ("a", 1010, 10), ("a", 1020, 10)]
    harness.engine.results[1] = None
    harness.settle()
    assert harness.engine.posted[3:] == [("a", 1030, 10)]
    harness.engine.results |= {0: None, 2: None, 3: None}
    harness.settle()
    assert harness.engine.posted[4:] == [("a", 1040, 5)]
    assert harness.ended == {}
    harness.engine.results[4] = None
    harness.settle()
    assert harness.ended == {1: (Outcome.DONE, "")}
    assert (harness.counters.num_writes, harness.counters.num_descriptors) == (1, 45)


def test_a_full_peer_holds_up_no_other(harness: Harness) -> None:
    harness.submit(1, "a", 100)
    harness.submit(2, "b", 5)
    harness.settle()
    assert ("b", 2000, 5) in harness.engine.posted


def test_a_peer_that_is_not_ready_is_waited_for_without_holding_up_others(harness: Harness) -> None:
    harness.engine.unready = {"a"}
    harness.submit(1, "a", 5)
    harness.submit(2, "b", 5)
    harness.settle()
    assert harness.engine.posted == [("b", 2000, 5)]
    harness.engine.unready = set()
    harness.settle()
    assert harness.engine.posted[1:] == [("a", 1000, 5)]


def test_writes_that_are_done_inline_need_no_look(harness: Harness) -> None:
    harness.engine.inline = True
    harness.submit(1, "a", 25)
    harness.submit(2, "a", 0)
    harness.settle()
    assert harness.ended == {1: (Outcome.DONE, ""), 2: (Outcome.DONE, "")}
    assert harness.engine.num_checks == 0


def test_a_part_that_was_never_posted_fails_the_write_and_the_next_one_goes_on(harness: Harness) -> None:
    harness.engine.refuse = EngineError(Outcome.FAILED, "no room")
    harness.submit(1, "a", 5)
    harness.settle()
    harness.engine.refuse = None
    harness.engine.inline = True
    harness.submit(2, "a", 5)
    harness.settle()
    assert harness.ended == {1: (Outcome.FAILED, "no room"), 2: (Outcome.DONE, "")}


def test_a_failed_part_leaves_the_end_unknown_while_another_is_under_way(harness: Harness) -> None:
    harness.submit(1, "a", 20)
    harness.settle()
    harness.engine.results[0] = EngineError(Outcome.FAILED, "cut off")
    harness.settle()
    assert harness.ended == {1: (Outcome.UNKNOWN, "cut off")}
    harness.engine.results[1] = None
    harness.settle()
    assert list(harness.ended) == [1]


def test_nothing_more_of_a_failed_write_is_posted(harness: Harness) -> None:
    harness.submit(1, "a", 100)
    harness.settle()
    harness.engine.results[0] = EngineError(Outcome.UNKNOWN, "lost")
    harness.settle()
    assert len(harness.engine.posted) == 3
    assert harness.ended == {1: (Outcome.UNKNOWN, "lost")}


def test_dropping_a_peer_ends_what_was_posted_as_unknown_and_the_rest_as_failed(harness: Harness) -> None:
    dropped = []
    harness.submit(1, "a", 30)
    harness.submit(2, "a", 30)
    harness.submit(3, "b", 5)
    harness.settle()
    harness.thread.drop("a", lambda: dropped.append("a"))
    harness.settle()
    assert dropped == ["a"]
    assert {write_id: end[0] for write_id, end in harness.ended.items()} == {1: Outcome.UNKNOWN, 2: Outcome.FAILED}
    of_a = [token for token, (peer, _, _) in enumerate(harness.engine.posted) if peer == "a"]
    assert sorted(harness.engine.abandoned) == of_a
    harness.engine.results |= dict.fromkeys(range(4))
    harness.settle()
    assert harness.ended.pop(3) == (Outcome.DONE, "")
    assert sorted(harness.ended) == [1, 2]


def test_stop_waits_for_what_ends_and_keeps_what_was_not_posted_for_the_next_engine(harness: Harness) -> None:
    harness.submit(1, "a", 30)
    harness.submit(2, "b", 30)
    harness.submit(3, "a", 30)
    harness.settle()
    harness.engine.unready.add("a")  # or write 3 may be posted in part before the stop is heard
    harness.engine.results |= {token: None for token in range(6) if harness.engine.posted[token][0] == "a"}
    harness.thread.stop(0.05)
    successor = FakeEngine()
    successor.inline = True
    harness.thread.start(successor)
    harness.settle()
    assert {write_id: end[0] for write_id, end in harness.ended.items()} == {
        1: Outcome.DONE,
        2: Outcome.UNKNOWN,
        3: Outcome.DONE,
    }
    assert {peer for peer, _, _ in successor.posted} == {"a"}


def test_a_stuck_write_costs_few_looks(harness: Harness) -> None:
    harness.submit(1, "a", 5)
    harness.settle()
    time.sleep(0.4)
    assert harness.engine.num_checks < 400


def test_a_call_raises_what_it_raised_on_the_thread(harness: Harness) -> None:
    def fail() -> None:
        raise EngineError(Outcome.FAILED, "bad metadata")

    with pytest.raises(EngineError, match="bad metadata"):
        harness.thread.call(fail)
    harness.thread.stop(0.0)
    with pytest.raises(EngineError, match="bad metadata"):
        harness.thread.call(fail)
