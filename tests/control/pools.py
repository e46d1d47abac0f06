"""Pools and workers for the hand-off tests."""

from __future__ import annotations

import fcntl
import os
import socket
import threading
import time
from pathlib import Path

from kvxfer.control.handoff import HandoffConnection, hand_over
from kvxfer.control.handoff_listener import HandoffEvent, HandoffListener, ReceivedPool, RefusedHandoff
from kvxfer.control.handoff_messages import PoolOffer, pack
from kvxfer.control.shared_memory import SharedMemory
from kvxfer.layout import Group, LayerRange, PoolLayout
from kvxfer.memory import HostMemory
from tests.control.waiting import wait_readable

POOL_BYTES = 8192


def layout(num_pages: int = 16) -> PoolLayout:
    """Two layers of `num_pages` pages of 256 bytes; 16 of them fill the pool."""
    group = Group(
        name="kv",
        layers=LayerRange(0, 2),
        layer_stride_bytes=4096,
        page_stride_bytes=256,
        num_pages=num_pages,
        page_tokens=4,
        row_stride_bytes=64,
        row_bytes=64,
    )
    return PoolLayout(groups=(group,), dtype_tag="bf16")


OFFER = pack(PoolOffer(num_bytes=POOL_BYTES, layout=layout(), pool=SharedMemory(num_bytes=POOL_BYTES)))


def next_events(listener: HandoffListener) -> list[HandoffEvent]:
    """What happens next, which must be soon."""
    for _ in range(50):
        wait_readable(listener)
        if events := listener.poll(time.monotonic()):
            return events
    raise AssertionError("nothing happened")


def client_of(tmp_path: Path) -> socket.socket:
    """A worker that is about to say something unusual."""
    client = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
    client.settimeout(5)
    client.connect(str(tmp_path / "handoff.sock"))
    return client


def accepted(listener: HandoffListener, tmp_path: Path, memory: HostMemory) -> tuple[HandoffConnection, ReceivedPool]:
    """A hand-over that goes well."""
    results: list[HandoffConnection] = []
    worker = threading.Thread(target=lambda: results.append(hand_over(tmp_path, memory, layout(), 5.0)))
    worker.start()
    (event,) = next_events(listener)
    worker.join()
    assert isinstance(event, ReceivedPool)
    return results[0], event


def memfd(num_bytes: int, seals: int) -> int:
    """An empty memfd with some seals; the caller closes it."""
    fd = os.memfd_create("odd", os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING)
    os.ftruncate(fd, num_bytes)
    fcntl.fcntl(fd, fcntl.F_ADD_SEALS, seals)
    return fd


def select_ready(listener: HandoffListener) -> bool:
    """Whether the listener has something to do now."""
    return wait_readable(listener, timeout_s=0)


def expect_refusal(listener: HandoffListener, client: socket.socket, told: str) -> None:
    """The agent logs `told`, sends it to the worker, and hangs up."""
    (event,) = next_events(listener)
    assert isinstance(event, RefusedHandoff)
    assert told in event.detail
    data = b""
    try:
        while part := client.recv(4096):
            data += part
    except ConnectionResetError:
        pass  # The agent did not read all that was sent.
    assert told in data.decode("latin-1")
    assert listener.poll(time.monotonic()) == []
