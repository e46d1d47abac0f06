"""The thread that looks at a ring's words: it wakes the loop once for each thing that is awaited."""

from __future__ import annotations

import threading
import time
from collections.abc import Iterator

import pytest

from kvxfer.streams import ring_watch
from kvxfer.streams.ring import Ring
from kvxfer.streams.ring_watch import Awaited, RingWatch


class Waker:
    """A ring, who watches it, and how often that has woken."""

    def __init__(self) -> None:
        self.ring = Ring.create(1, 8)
        self.num_woken = 0
        self._woken = threading.Event()
        self.watch = RingWatch(self.ring, self._wake)

    def _wake(self) -> None:
        self.num_woken += 1
        self._woken.set()

    def wait(self) -> None:
        assert self._woken.wait(10.0), "nobody was woken"
        self._woken.clear()


@pytest.fixture
def waker() -> Iterator[Waker]:
    found = Waker()
    yield found
    found.watch.close()
    found.watch.close()
    found.ring.close()


@pytest.mark.parametrize(
    ("awaited", "change"),
    [
        (Awaited(done=3, is_urgent=True), lambda ring: ring.set_done(3)),
        (Awaited(done=3, enqueued=2, is_urgent=True), lambda ring: ring.set_num_enqueued(2)),
        (Awaited(enqueued=2), lambda ring: ring.set_num_enqueued(5)),
        (Awaited(timeline=7, done=1, is_urgent=True), lambda ring: ring.set_timeline(9)),
    ],
)
def test_a_change_that_is_awaited_wakes_once(waker: Waker, awaited: Awaited, change: object) -> None:
    waker.ring.set_num_enqueued(1)
    waker.ring.set_timeline(6)
    waker.watch.wait_for(awaited)
    time.sleep(0.02)
    assert waker.num_woken == 0
    assert callable(change)
    change(waker.ring)
    waker.wait()
    time.sleep(0.02)
    assert waker.num_woken == 1


def test_what_is_awaited_anew_wakes_again_also_while_the_thread_sleeps(waker: Waker) -> None:
    for number in range(3):
        waker.ring.set_done(number)
        time.sleep(0.01)  # it sleeps, with nothing to wait for or in a long nap
        waker.watch.wait_for(Awaited(done=number, is_urgent=True))
        waker.wait()
    waker.watch.wait_for(Awaited(enqueued=99))
    time.sleep(0.1)  # naps are long by now
    began_s = time.monotonic()
    waker.watch.wait_for(Awaited(done=2, is_urgent=True))
    waker.wait()
    assert time.monotonic() - began_s < 5.0
    assert waker.num_woken == 4


def test_nothing_is_awaited_any_more(waker: Waker) -> None:
    waker.watch.wait_for(Awaited(done=0, is_urgent=True))
    waker.watch.rest()
    time.sleep(0.01)  # a look may have been under way
    waker.ring.set_done(0)
    time.sleep(0.02)
    assert waker.num_woken == 0


def test_a_loop_that_is_awake_is_left_alone(waker: Waker, monkeypatch: pytest.MonkeyPatch) -> None:
    """Not even looked for: the thread would take the interpreter from it."""
    num_looks = 0

    def is_done(_: int) -> bool:
        nonlocal num_looks
        num_looks += 1
        return False

    monkeypatch.setattr(waker.ring, "is_done", is_done)
    waker.watch.wait_for(Awaited(done=0, is_urgent=True))
    time.sleep(0.02)
    assert num_looks > 0
    waker.watch.rest()
    time.sleep(0.01)  # the nap under way
    num_looks = 0
    time.sleep(0.02)
    assert num_looks == 0
    assert waker.watch._is_asleep


@pytest.mark.parametrize(("is_urgent", "longest_s"), [(True, 0.001), (False, 0.025)])
def test_naps_get_longer_and_never_end_the_thread(is_urgent: bool, longest_s: float) -> None:
    """A word that nobody writes is looked at for as long as that takes: here for half a year."""
    naps_s = [ring_watch._nap_s(num_idle, is_urgent=is_urgent) for num_idle in (0, 20, 40, 1 << 14, 1 << 34)]
    assert naps_s == sorted(naps_s)
    assert 0.0 < naps_s[0] < 0.0001
    assert naps_s[-2:] == [longest_s, longest_s]
