"""The end of an agent and its last events travel two ways: what a worker makes of the one before the others."""

from __future__ import annotations

import math
import socket
import threading
import time
from collections.abc import Iterator
from contextlib import ExitStack
from pathlib import Path
from typing import cast

import pytest

from kvxfer.control.channel import REMOTE, WorkerListener
from kvxfer.control.client_link import AgentLink, HandedOver
from kvxfer.control.codec import encode
from kvxfer.control.handoff import HandoffConnection
from kvxfer.control.handoff_messages import FrameReader, LastWord, pack
from kvxfer.control.messages import Ok, TransferEvent
from kvxfer.control.worker_stream import WorkerStream
from kvxfer.transfer import EventKind, Reason
from tests.control.core_agent import A, B, C, event, open_
from tests.control.waiting import next_frame

LATE_S = 0.3


class Ends:
    """An agent's ends of both connections of a worker that has `A` and `B` open."""

    def __init__(self, socket_dir: Path, stack: ExitStack) -> None:
        own, other = socket.socketpair(socket.AF_UNIX, socket.SOCK_STREAM)
        self.handoff = stack.enter_context(own)
        self.listener = stack.enter_context(WorkerListener(socket_dir))
        self.link = AgentLink(socket_dir, HandedOver(HandoffConnection(other, FrameReader(other), C), 0.0))
        stack.callback(self.link.close)
        assert self.link.channel.send(REMOTE, b"who I am")
        self.worker, _ = next_frame(self.listener)
        for transfer in (A, B):
            self.link.core.receive(encode(Ok(), self.link.core.request(open_(transfer))))
        self.link.core.outgoing.clear()

    def end(self, num_events: int | None) -> None:
        """Say the last word, if any, and hang up."""
        if num_events is not None:
            self.handoff.sendall(pack(LastWord(num_events=num_events)))
        self.handoff.close()

    def say(self, *events: TransferEvent) -> None:
        for each in events:
            assert self.listener.send(self.worker, encode(each))

    def heard(self) -> tuple[list[tuple[str, Reason | None]], float]:
        """What the worker hears of its transfers when it looks until the end, and how long it takes; no look waits."""
        began_s = now_s = time.monotonic()
        while self.link.core.lost is None:
            looked_s = now_s
            self.link.drain()
            now_s = time.monotonic()
            assert now_s - looked_s < 0.25
        elapsed_s = now_s - began_s
        events = [self.link.core.take_terminal(transfer) for transfer in (A, B)]
        return [(each.transfer, each.reason) for each in events if each is not None], elapsed_s


@pytest.fixture
def ends(tmp_path: Path) -> Iterator[Ends]:
    with ExitStack() as stack:
        yield Ends(tmp_path, stack)


def test_events_that_come_after_the_end_are_heard_first(ends: Ends) -> None:
    ends.say(event(C))  # of one that is not open here: it counts all the same
    ends.end(3)
    failed = [event(each, EventKind.FAILED, Reason.SHUTDOWN) for each in (A, B)]
    late = threading.Timer(LATE_S, lambda: ends.say(*failed))
    late.start()
    heard, elapsed_s = ends.heard()
    late.join()
    assert heard == [(A, Reason.SHUTDOWN), (B, Reason.SHUTDOWN)]
    assert LATE_S / 2 < elapsed_s < 0.95


def test_a_worker_that_looks_long_after_its_agent_has_gone_hears_all_that_it_said(ends: Ends) -> None:
    ends.say(event(A), event(B))
    ends.end(2)
    ends.listener.close()
    time.sleep(LATE_S)  # ZMQ sees the end of the connection meanwhile
    heard, elapsed_s = ends.heard()
    assert heard == [(A, None), (B, None)]
    assert elapsed_s < LATE_S


def test_no_longer_than_for_the_last_of_them(ends: Ends) -> None:
    ends.say(event(A))
    ends.end(1)
    heard, elapsed_s = ends.heard()
    assert heard == [(A, None), (B, Reason.AGENT_LOST)]
    assert elapsed_s < 0.9


def test_an_event_that_never_comes_is_not_waited_for_without_end(ends: Ends) -> None:
    ends.end(2)
    heard, elapsed_s = ends.heard()
    assert heard == [(A, Reason.AGENT_LOST), (B, Reason.AGENT_LOST)]
    assert 0.9 < elapsed_s < 3


def test_an_agent_that_was_killed_is_lost_at_once(ends: Ends) -> None:
    ends.end(None)
    heard, elapsed_s = ends.heard()
    assert heard == [(A, Reason.AGENT_LOST), (B, Reason.AGENT_LOST)]
    assert elapsed_s < 0.9


class Restless:
    """A stream that ends what it has begun only `busy_s` after it was told to end."""

    has_backlog = False

    def __init__(self, busy_s: float) -> None:
        self._busy_s = busy_s
        self._quiet_at_s = math.inf

    def want(self, num_entries: int) -> None:
        assert num_entries == 0

    def feed(self) -> None: ...

    def take_unmapped(self) -> list[int]:
        return []

    def end(self) -> None:
        self._quiet_at_s = time.monotonic() + self._busy_s

    def is_quiet(self) -> bool:
        return time.monotonic() >= self._quiet_at_s

    def close(self) -> None: ...


def test_a_stream_that_is_not_at_rest_is_waited_for_without_holding_anybody_up(ends: Ends) -> None:
    ends.link.stream = cast(WorkerStream, Restless(0.6))
    ends.end(None)
    heard, elapsed_s = ends.heard()
    assert heard == [(A, Reason.AGENT_LOST), (B, Reason.AGENT_LOST)]
    assert 0.6 <= elapsed_s < 3
