"""Helpers of the channel tests."""

from __future__ import annotations

import os
import resource
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress

from kvxfer.control.channel import Channel, Selector
from kvxfer.control.handoff_listener import HandoffListener
from kvxfer.control.peer_channel import Connection, Credentials, PeerListener, new_keys

INCARNATION = "ab" * 16
LISTENER = Credentials(new_keys())
"""Keys of the listeners under test."""
CONNECTOR = Credentials(new_keys())
"""Keys of those who connect."""


def connect(endpoint: str, incarnation: str = INCARNATION) -> Connection:
    return Connection(endpoint, incarnation, CONNECTOR, LISTENER.keys.public)


def next_frame(channel: Channel, *others: Channel) -> tuple[bytes, bytes]:
    """The next message, which must come soon. Meanwhile `others`, which have none, do their share of a handshake."""
    deadline_s = time.monotonic() + 5
    while (received := channel.receive()) is None:
        assert time.monotonic() < deadline_s
        Selector([channel, *others]).wait(0.2)
        for other in others:
            assert other.receive() is None
    return received


def port_of(listener: PeerListener) -> int:
    return int(listener.endpoint.rpartition(":")[2])


def num_descriptors() -> int:
    """File descriptors that this process has open."""
    return len(os.listdir("/proc/self/fd"))


@contextmanager
def no_more_descriptors(*, but: int = 0) -> Iterator[None]:
    """This process may open no more files than `but`."""
    limits = resource.getrlimit(resource.RLIMIT_NOFILE)
    highest = max(map(int, os.listdir("/proc/self/fd")))
    taken: list[int] = []
    resource.setrlimit(resource.RLIMIT_NOFILE, (highest + 1 + but, limits[1]))
    try:
        with suppress(OSError):
            while True:
                taken.append(os.open("/dev/null", os.O_RDONLY | os.O_CLOEXEC))
        for _ in range(but):
            os.close(taken.pop())
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, limits)
        for fd in taken:
            os.close(fd)


def wait_readable(item: HandoffListener, timeout_s: float = 5) -> bool:
    """Whether `item` has something to do within the time."""
    return bool(Selector([item]).wait(timeout_s))
