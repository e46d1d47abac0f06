"""The worker's end of a ring: how much it enqueues, and that nothing is left waiting when it ends."""

from __future__ import annotations

import logging
import os
import socket
import time
import warnings
from collections.abc import Iterator

import pytest

from kvxfer.control import worker_stream
from kvxfer.control.handoff import StreamMemory
from kvxfer.control.shared_memory import HeldMemory, SharedMemory, describe
from kvxfer.control.worker_stream import MAX_UNFINISHED, WorkerStream
from kvxfer.errors import AgentLostError, TransportError
from kvxfer.memory import HostMemory
from kvxfer.streams.device import DevicePool
from kvxfer.streams.ring import MemoryIndex, OrderCode, Ring

_Wire = tuple[socket.socket, socket.socket]


class _Stream:
    """Notes what it is told and does nothing by itself."""

    def __init__(self) -> None:
        self.enqueued: list[int] = []
        self.memories: dict[int, HostMemory | DevicePool] = {}
        self.forgotten: list[HostMemory] = []
        self.num_closed = 0
        self.is_broken = False

    def enqueue(self, number: int, num_entries: int = 1) -> None:
        if self.is_broken:
            raise TransportError("the GPU refuses")
        self.enqueued += range(number, number + num_entries)

    def mark(self, stream: object | None) -> int:
        assert stream is None
        return 7

    def set_memory(self, index: int, memory: HostMemory | DevicePool) -> None:
        self.memories[index] = memory

    def forget(self, memory: HostMemory | DevicePool) -> None:
        assert isinstance(memory, HostMemory)
        assert memory.fd >= 0
        assert memory not in self.memories.values()
        self.forgotten.append(memory)

    def clear_memory(self, index: int) -> None:
        del self.memories[index]

    def close(self) -> None:
        self.num_closed += 1


@pytest.fixture
def wire() -> Iterator[_Wire]:
    """The worker's end of the connection, and the agent's."""
    ends = socket.socketpair()
    yield ends
    for end in ends:
        end.close()


@pytest.fixture
def memory() -> Iterator[StreamMemory]:
    memory = StreamMemory(Ring.create(2, 8), HostMemory.create(4096, "test-slots"))
    yield memory
    memory.close()


def test_entries_are_enqueued_as_far_as_there_is_room(memory: StreamMemory, wire: _Wire) -> None:
    stream, ring = _Stream(), memory.ring
    worker = WorkerStream(stream, memory, wire[0].fileno())
    worker.feed()
    assert stream.enqueued == []
    worker.want(3)
    worker.want(2)
    assert ring.num_enqueued == 0, "only a call of the worker enqueues"
    worker.feed()
    assert stream.enqueued == [0, 1, 2]
    assert ring.num_enqueued == 3
    assert not worker.has_backlog

    worker.want(MAX_UNFINISHED + 10)
    worker.feed()
    assert ring.num_enqueued == MAX_UNFINISHED
    assert worker.has_backlog
    for number in (0, 1, 3):
        ring.set_done(number)
    worker.feed()
    assert ring.num_enqueued == MAX_UNFINISHED + 2, "number 2 is not done, and numbers are done in order"
    for number in range(2, MAX_UNFINISHED):
        ring.set_done(number)
    worker.feed()
    assert ring.num_enqueued == MAX_UNFINISHED + 10
    assert stream.enqueued == list(range(MAX_UNFINISHED + 10))
    assert not worker.has_backlog
    for number in range(MAX_UNFINISHED, MAX_UNFINISHED + 10):
        ring.set_done(number)
    worker.close()


def test_a_peers_pool_is_unmapped_when_the_stream_is_at_rest_before_more_is_enqueued(
    memory: StreamMemory, wire: _Wire
) -> None:
    """CUDA may wait for the whole device then, and so for orders that have not come."""
    stream, ring = _Stream(), memory.ring
    worker = WorkerStream(stream, memory, wire[0].fileno())
    with HostMemory.create(4096, "peer") as peer:
        assert worker.map_peer(7, HeldMemory(describe(peer), os.dup(peer.fd))) == ""
        assert worker.map_peer(8, HeldMemory(SharedMemory(num_bytes=4097), os.dup(peer.fd))).startswith(
            "the decode worker cannot map it: pool descriptor: got 4096 bytes"
        )
    assert isinstance(mapped := stream.memories[7], HostMemory)
    assert 8 not in stream.memories
    worker.want(2)
    worker.feed()
    worker.drop_peer(7)
    worker.drop_peer(8)  # answered, too: nothing is mapped there
    worker.want(5)
    ring.set_done(0)
    worker.feed()
    assert (ring.num_enqueued, worker.take_unmapped(), mapped.array.size) == (2, [], 4096)
    assert worker.has_backlog
    ring.set_done(1)
    worker.feed()
    assert (ring.num_enqueued, worker.take_unmapped(), mapped.array.size) == (5, [7, 8], 0)
    assert (7 in stream.memories, worker.take_unmapped(), worker.has_backlog) == (False, [], False)
    for number in range(2, 5):
        ring.set_done(number)
    worker.close()


def test_who_ends_skips_what_is_unfinished_and_says_so_first(memory: StreamMemory, wire: _Wire) -> None:
    stream, ring = _Stream(), memory.ring
    worker = WorkerStream(stream, memory, wire[0].fileno())
    worker.want(4)
    worker.feed()
    ring.order(0, OrderCode.RUN)
    ring.set_done(0)
    ring.order(1, OrderCode.RUN)
    assert not ring.has_ended
    worker.end()
    assert ring.has_ended
    assert [ring.order_of(number) for number in range(5)] == [OrderCode.RUN, *[OrderCode.SKIP] * 3, None]
    assert not worker.is_quiet()
    assert not worker.drain(0.01)
    worker.want(9)
    worker.feed()
    assert ring.num_enqueued == 4, "nothing is enqueued any more"
    for number in (1, 2, 3):
        ring.set_done(number)
    assert worker.drain(0.0)
    worker.close()
    worker.close()
    assert stream.num_closed == 1
    assert memory.slots.fd == ring.memory.fd == -1


def test_a_stream_that_does_not_come_to_rest_keeps_its_memory(
    memory: StreamMemory, wire: _Wire, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(worker_stream, "DRAIN_S", 0.01)
    stream = _Stream()
    worker = WorkerStream(stream, memory, wire[0].fileno())
    worker.want(1)
    worker.feed()
    with caplog.at_level(logging.ERROR, "kvxfer.worker"):
        worker.close()
    assert "its memory stays mapped" in caplog.text
    assert stream.num_closed == 0
    assert isinstance(memory.slots, HostMemory)
    assert memory.slots.array.size == 4096
    assert memory.ring.order_of(0) is OrderCode.SKIP


def test_entries_that_were_enqueued_by_half_are_skipped_as_well(memory: StreamMemory, wire: _Wire) -> None:
    stream = _Stream()
    worker = WorkerStream(stream, memory, wire[0].fileno())
    worker.want(2)
    stream.is_broken = True
    with pytest.raises(TransportError):
        worker.feed()
    assert memory.ring.num_enqueued == 0, "the agent gives them no order"
    worker.end()
    for number in range(2):
        assert memory.ring.order_of(number) is OrderCode.SKIP
        memory.ring.set_done(number)
    assert memory.ring.order_of(2) is None
    worker.close()


def test_the_agent_can_use_the_first_entries_while_others_are_enqueued(memory: StreamMemory, wire: _Wire) -> None:
    stream, ring = _Stream(), memory.ring
    seen: list[int] = []
    enqueue = stream.enqueue

    def look_first(number: int, num_entries: int = 1) -> None:
        seen.append(ring.num_enqueued)
        enqueue(number, num_entries)

    stream.enqueue = look_first  # type: ignore[method-assign]
    worker = WorkerStream(stream, memory, wire[0].fileno())
    worker.want(20)
    worker.feed()
    assert stream.enqueued == list(range(20))
    assert seen == [0, 8, 16]
    for number in range(20):
        ring.set_done(number)
    worker.close()


def test_an_agent_that_hangs_up_leaves_nothing_waiting_though_the_worker_does_not_look(
    memory: StreamMemory, wire: _Wire
) -> None:
    """As while it waits for its whole device."""
    stream, ring = _Stream(), memory.ring
    worker = WorkerStream(stream, memory, wire[0].fileno())
    worker.want(3)
    worker.feed()
    wire[1].send(b"a word")
    time.sleep(0.05)
    assert not ring.has_ended, "what an agent says is no end"
    wire[1].close()
    deadline_s = time.monotonic() + 5
    while ring.order_of(2) is not OrderCode.SKIP:
        assert time.monotonic() < deadline_s
        time.sleep(0.001)
    assert ring.has_ended
    worker.want(9)
    worker.feed()
    assert stream.enqueued == [0, 1, 2]
    for number in range(3):
        ring.set_done(number)
    worker.close()


def test_moved_slots_replace_the_old_ones_and_both_are_given_back(memory: StreamMemory, wire: _Wire) -> None:
    stream = _Stream()
    worker = WorkerStream(stream, memory, wire[0].fileno())
    moved = HostMemory.create(4096, "test-slots")
    worker.replace_slots(moved)
    assert stream.memories == {MemoryIndex.SLOTS: moved}
    worker.close()
    assert moved.fd == memory.slots.fd == -1


def test_what_the_slots_have_left_is_given_back_once_the_stream_is_at_rest(memory: StreamMemory, wire: _Wire) -> None:
    """Slots may move often in the life of a worker, and nobody else has those pages any more."""
    stream = _Stream()
    worker = WorkerStream(stream, memory, wire[0].fileno())
    worker.want(1)
    worker.feed()
    moved = [HostMemory.create(4096, "test-slots") for _ in range(3)]
    for each in moved:
        worker.replace_slots(each)
        worker.feed()
    assert stream.forgotten == [], "an entry waits for its order"
    memory.ring.set_done(0)
    worker.feed()
    assert stream.forgotten == [memory.slots, *moved[:2]]
    assert [each.fd < 0 for each in (memory.slots, *moved)] == [True, True, True, False]
    worker.close()
    worker.feed()
    assert len(stream.forgotten) == 3
    assert moved[2].fd < 0


def test_a_forked_child_touches_nothing(memory: StreamMemory, wire: _Wire) -> None:
    """The ring is not mapped there: a touch would kill the child."""
    stream = _Stream()
    worker = WorkerStream(stream, memory, wire[0].fileno())
    worker.want(1)
    worker.feed()
    worker.want(2)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", DeprecationWarning)  # Newer Pythons warn where threads run.
        child = os.fork()
    if child == 0:
        try:
            worker.feed()
            worker.end()
            worker.close()
            worker.mark(None)
        except AgentLostError:
            os._exit(0 if stream.enqueued == [0] and not stream.num_closed else 1)
        os._exit(2)
    assert os.waitpid(child, 0) == (child, 0)
    assert not memory.ring.has_ended
    memory.ring.set_done(0)
    assert worker.mark(None) == 7
    worker.close()
