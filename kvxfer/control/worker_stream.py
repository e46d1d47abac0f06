"""The worker's end of a ring: feeds the stream that moves rows for the agent, from within the worker's own calls.

`feed()` enqueues what the agent has asked for, as far as the stream has room, and is called whenever the worker asks or
hears anything. Nothing polls. One thread sleeps in the kernel until the agent hangs up: a worker that waits for its
whole device at that moment waits for the stream, too, and could not look itself.
"""

from __future__ import annotations

import logging
import os
import select
import threading
import time

from kvxfer.control.handoff import StreamMemory
from kvxfer.control.peer_memories import PeerMemories
from kvxfer.control.shared_memory import HeldMemory, as_device_pool
from kvxfer.errors import AgentLostError
from kvxfer.memory import HostMemory
from kvxfer.streams.device import MappedPool
from kvxfer.streams.ring import MemoryIndex, OrderCode
from kvxfer.streams.row_stream import RowStream

MAX_UNFINISHED = 128
"""Entries that may be enqueued and not done. Each takes four places of a launch queue, or five where segments are
checked or entries bound to slots, and the queue has 1024 on GPUs seen so far; a full one blocks the worker."""
_BATCH = 8
"""Entries that are enqueued before the agent hears of them and can use the first."""
DRAIN_S = 5.0
"""A stream that has nothing left to wait for ends what it has begun long before."""
_NAP_S = 0.0002

_log = logging.getLogger("kvxfer.worker")


class WorkerStream:
    """Owns a stream and the memory that the agent shares with it; `close()` gives all back, in this order."""

    def __init__(
        self, stream: RowStream, memory: StreamMemory, connection_fd: int, *, device_index: int | None = None
    ) -> None:
        """`device_index`: the GPU of the stream, None for one of host memory. The agent is gone once the other end of
        `connection_fd` is, which must stay open until `close()`."""
        self._stream = stream
        self._ring = memory.ring
        self._slots = [memory.slots]  # the newest last; those that they have left stay until the stream is at rest
        self._peers = PeerMemories(stream, device_index)
        self._num_wanted = 0
        self._num_enqueued = 0
        self._num_done = 0
        self._unmapped: list[int] = []
        self._is_ended = False
        self._is_closed = False
        self._pid = os.getpid()
        self._lock = threading.Lock()  # of what is enqueued, and whether more may be
        self._wake_fd = os.eventfd(0, os.EFD_CLOEXEC)
        self._guard = threading.Thread(target=self._watch, args=(connection_fd,), name="kvxfer-guard", daemon=True)
        self._guard.start()

    @property
    def has_backlog(self) -> bool:
        """Whether `feed()` has something to enqueue as soon as there is room."""
        return not self._is_ended and (self._num_wanted > self._num_enqueued or self._peers.must_rest)

    def want(self, num_entries: int) -> None:
        """The agent wants so many entries enqueued since the ring was made."""
        self._num_wanted = max(self._num_wanted, num_entries)

    def feed(self) -> None:
        """Enqueue what is wanted, as far as there is room. Raises `TransportError` where a GPU refuses."""
        if self._is_ended or self._pid != os.getpid():
            return
        self._drop_old_slots()
        if self._peers.must_rest and not (self.is_quiet() and self._unmap_peers()):
            return
        if not self.has_backlog:
            return
        self._look()
        end = min(self._num_wanted, self._num_done + MAX_UNFINISHED)
        while self._num_enqueued < end:
            with self._lock:
                if self._is_ended:
                    return
                first, self._num_enqueued = self._num_enqueued, min(end, self._num_enqueued + _BATCH)
                self._stream.enqueue(first, self._num_enqueued - first)  # those that fail need their orders, too
            self._ring.set_num_enqueued(self._num_enqueued)

    def mark(self, stream: object | None) -> int:
        """The value that the timeline has reached once `stream` has done what it was given so far.

        Raises `AgentLostError` in a forked child: the stream is its parent's.
        """
        if self._pid != os.getpid():
            raise AgentLostError("a forked child has no stream: connect anew")
        return self._stream.mark(stream)

    def replace_slots(self, slots: HostMemory | MappedPool) -> None:
        """The agent's slots have moved to `slots`, which is this object's now; no order is under way. Raises
        `TransportError` where a GPU cannot use them, which are the caller's then."""
        self._stream.set_memory(MemoryIndex.SLOTS, as_device_pool(slots))
        self._slots.append(slots)

    def map_peer(self, index: int, memory: HeldMemory) -> str:
        """Map the pool of a peer, so that orders may name it by `index`; why that cannot be, or nothing. Lets go of
        `memory`."""
        if self._is_ended or self._pid != os.getpid():
            memory.close()
            return "the stream that moves rows has ended"
        return self._peers.map(index, memory)

    def drop_peer(self, index: int) -> None:
        """No order names `index` any more: unmap what it stands for when the stream is at rest, before anything more is
        enqueued."""
        self._peers.drop(index)

    def take_unmapped(self) -> list[int]:
        """Indices that were dropped and stand for nothing any more."""
        unmapped, self._unmapped = self._unmapped, []
        return unmapped

    def end(self) -> None:
        """No agent gives orders any more: skip what has not ended and enqueue nothing. Calling it again does nothing.

        A skipped entry touches no page, even if its turn comes late; one that is bound to a slot writes that, which the
        agent knows. May be called from any thread.
        """
        if self._pid != os.getpid():
            return
        with self._lock:
            if self._is_ended:
                return
            self._is_ended = True
            self._ring.set_ended()
            for number in range(max(0, self._num_enqueued - MAX_UNFINISHED), self._num_enqueued):
                if not self._ring.is_done(number):
                    self._ring.order(number, OrderCode.SKIP)

    def is_quiet(self) -> bool:
        """Whether every entry that was enqueued has ended."""
        if self._pid == os.getpid():
            self._look()
        return self._num_done == self._num_enqueued

    def drain(self, timeout_s: float) -> bool:
        """After `end()`: wait for what is under way; whether all has ended."""
        deadline_s = time.monotonic() + timeout_s
        while not self.is_quiet():
            if time.monotonic() >= deadline_s:
                return False
            time.sleep(_NAP_S)
        return True

    def close(self) -> None:
        """End, wait for the stream and give everything back. Calling it again does nothing.

        A stream that does not come to rest keeps its memory: what it still does must not hit anything else.
        """
        if self._is_closed or self._pid != os.getpid():
            return
        self._is_closed = True
        os.eventfd_write(self._wake_fd, 1)
        self._guard.join()
        os.close(self._wake_fd)
        self.end()
        if not self.drain(DRAIN_S):
            _log.error("the stream that moves rows has not ended within %.0f s: its memory stays mapped", DRAIN_S)
            return
        self._stream.close()
        self._peers.close()
        self._ring.close()
        for slots in self._slots:
            slots.close()

    def _watch(self, connection_fd: int) -> None:
        """End as soon as the agent has hung up; until then, or until `close()`, sleep."""
        poller = select.poll()
        poller.register(connection_fd, select.POLLRDHUP)
        poller.register(self._wake_fd, select.POLLIN)
        if self._wake_fd not in dict(poller.poll()):
            self.end()

    def _unmap_peers(self) -> bool:
        self._unmapped += self._peers.unmap()
        return True

    def _drop_old_slots(self) -> None:
        """Give back what the slots have left: this mapping alone keeps those pages from the system."""
        while len(self._slots) > 1 and self.is_quiet():
            self._stream.forget(as_device_pool(self._slots[0]))
            self._slots.pop(0).close()

    def _look(self) -> None:
        """Count on over the entries that have ended, up to the first that has not."""
        while self._num_done < self._num_enqueued and self._ring.is_done(self._num_done):
            self._num_done += 1
