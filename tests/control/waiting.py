"""Helpers of the channel tests."""

from __future__ import annotations

import os
import time

from kvxfer.control.channel import Channel, PeerListener, Selector
from kvxfer.control.handoff_listener import HandoffListener

INCARNATION = "ab" * 16


def next_frame(channel: Channel) -> tuple[bytes, bytes]:
    """The next message, which must come soon."""
    deadline_s = time.monotonic() + 5
    while (received := channel.receive()) is None:
        assert time.monotonic() < deadline_s
        Selector([channel]).wait(0.2)
    return received


def port_of(listener: PeerListener) -> int:
    return int(listener.endpoint.rpartition(":")[2])


def num_descriptors() -> int:
    """File descriptors that this process has open."""
    return len(os.listdir("/proc/self/fd"))


def wait_readable(item: HandoffListener, timeout_s: float = 5) -> bool:
    """Whether `item` has something to do within the time."""
    return bool(Selector([item]).wait(timeout_s))
