"""Loopback: shared memory between processes of one user on one host, with faults and a wire's pace on request.

A region with a memfd is published as (pid, descriptor, inode, size); a peer opens it through /proc and maps it. It
needs no engine, works inside one process too, and is the transport that tests and the laptop demo run on. Memory of a
GPU is published by its legacy handle, or by its descriptor, to other processes; it has the wire's pace, but no faults.
"""

from __future__ import annotations

import heapq
import itertools
import os
import random
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import partial

from kvxfer.errors import ConfigError, PeerLostError, RegistrationError
from kvxfer.transports._completions import CompletionQueue
from kvxfer.transports._loopback_copies import CopyThread
from kvxfer.transports._loopback_gpu import GpuCopies
from kvxfer.transports._loopback_paced import Copier, PacedWrites
from kvxfer.transports._loopback_peer import LoopbackPeer, endpoint_here
from kvxfer.transports._loopback_processes import CopyProcesses
from kvxfer.transports._loopback_wire import Wire
from kvxfer.transports._metadata import Metadata, PublishedRegion, decode_metadata, encode_metadata, published
from kvxfer.transports._regions import CheckedWrite, check_new_region, checked_write
from kvxfer.transports.base import (
    Completion,
    ContiguousWrite,
    Counters,
    Limits,
    MemoryKind,
    Outcome,
    Region,
    RegionDescriptor,
    WriteBatch,
)
from kvxfer.transports.loopback_options import LoopbackFaults, LoopbackOptions

_NAME = "loopback"
_DONE = Outcome.DONE
_NO_FAULTS = LoopbackFaults()  # without a draw a write


@dataclass(slots=True)
class _Write:
    write_id: int
    peer: LoopbackPeer
    entries: CheckedWrite
    held_by_fault: bool = False
    reported: bool = False


class LoopbackTransport:
    """`Transport` over shared memory. Owns its threads and processes, one eventfd, and mappings of its peers' regions.

    Where processes copy, the thread that makes the transport must live as long as it (see `CopyProcesses`).
    """

    name = _NAME
    limits = Limits(
        max_entries_per_peer=1 << 31,
        memory_kinds=frozenset({MemoryKind.HOST}),
        failed_write_stops=True,
        rotate_stops_peer_writes=False,
    )

    def __init__(self, options: LoopbackOptions | None = None, gpu_index: int = -1) -> None:
        """With `gpu_index` all regions lie on that GPU, which copies. Raises `ConfigError` for faults beside it,
        `EngineMissingError` where CUDA is missing then."""
        options = options or LoopbackOptions()
        if options.faults is not None and gpu_index >= 0:
            raise ConfigError("transport.options.faults: got some beside slots on a GPU, expected host memory for them")
        self._gpu_index = gpu_index
        self.counters = Counters()
        self._faults = options.faults or _NO_FAULTS
        self._random = random.Random(self._faults.seed)
        self._ids = itertools.count(1)
        self._regions: dict[int, Region] = {}
        self._peers: dict[str, LoopbackPeer] = {}
        self._completions = CompletionQueue()
        self._lock = threading.RLock()  # guards the schedule, the ends of writes and the counters
        self._changed = threading.Condition(self._lock)
        self._due: list[tuple[float, int, Callable[[], object]]] = []
        self._writes: dict[int, _Write] = {}  # the thread's, while it may move bytes of them or report their ends
        self._wire = Wire(options)
        self._closed = False
        copier: Copier | None = None
        if gpu_index >= 0:
            self.limits = replace(self.limits, memory_kinds=frozenset({MemoryKind.DEVICE}))
            copier = GpuCopies(gpu_index)
        elif options.num_copy_processes and self._faults is _NO_FAULTS:
            copier = CopyProcesses(options.num_copy_processes, self._regions)
        self._paced = PacedWrites(copier, self._wire, self._report, self._completions.fileno()) if copier else None
        self._copies = CopyThread("loopback-copy")
        self._thread = threading.Thread(target=self._run, name="loopback", daemon=True)
        self._thread.start()

    def register(self, region: Region) -> RegionDescriptor:
        check_new_region(region, self._regions.values(), self.limits)
        if region.handle is None and region.fd is not None and os.fstat(region.fd).st_size != region.num_bytes:
            raise RegistrationError(
                f"got a region of {region.num_bytes} bytes whose descriptor {region.fd} holds "
                f"{os.fstat(region.fd).st_size}, expected the whole memfd to be the region"
            )
        region_id = next(self._ids)
        self._regions[region_id] = region
        return RegionDescriptor(region_id, region.num_bytes)

    def deregister(self, descriptor: RegionDescriptor) -> None:
        if self._regions.pop(descriptor.region_id, None) is None:
            raise RegistrationError(f"got region {descriptor.region_id}, expected one of {sorted(self._regions)}")
        if self._paced is not None:
            self._paced.drop_sources([descriptor.region_id])

    def metadata(self) -> bytes:
        regions = []
        for region_id, region in self._regions.items():
            if region.handle is not None:
                regions.append(published(region_id, region))
            elif region.fd is not None:  # others may be sources, but nobody else can map them
                file = os.fstat(region.fd)
                regions.append(
                    PublishedRegion(region_id, region.num_bytes, fd=region.fd, inode=file.st_ino, device=file.st_dev)
                )
        return encode_metadata(Metadata(_NAME, endpoint_here(), regions, os.getpid()))

    def add_peer(self, peer: str, metadata: bytes) -> None:
        added = LoopbackPeer(peer, decode_metadata(metadata, _NAME), self._gpu_index)
        self.drop_peer(peer)
        self._peers[peer] = added
        if self._paced is not None:
            self._paced.add_peer(added)

    def drop_peer(self, peer: str) -> None:
        dropped = self._peers.pop(peer, None)
        if dropped is None:
            return
        with self._copies.paused():
            if self._paced is not None:
                self._paced.drop_peer(dropped)
            self._end_all("the peer was dropped", dropped)
            dropped.close()

    def submit_write(self, peer: str, write: WriteBatch | ContiguousWrite) -> int:
        known = self._peers.get(peer)
        if known is None:
            raise PeerLostError(f"got peer {peer}, expected one that add_peer made known")
        entries = checked_write(write, self._regions, known.regions)
        write_id = next(self._ids)
        if self._paced is None or not self._paced.submit(write_id, known, entries, write.dst_region.region_id):
            with self._lock:
                self._writes[write_id] = planned = _Write(write_id, known, entries)
                self._plan(planned)
        return write_id

    def poll(self) -> list[Completion]:
        if self._paced is None:
            return self._completions.drain()
        done, busy_s = self._paced.collect()
        others = self._completions.drain()
        if not done:
            return others
        ends = [Completion(write.write_id, _DONE) for write in done]
        with self._lock:
            self.counters.post_s += busy_s
            for write in done:
                self.counters.count(_DONE, write.entries.num_entries, write.entries.num_bytes)
        return ends + others if others else ends

    def fileno(self) -> int:
        return self._completions.fileno() if self._paced is None else self._paced.fileno()

    def path(self, peer: str) -> str:  # noqa: ARG002 - there is one path only
        return "shared memory"

    def rotate(self) -> None:
        """End the writes that a fault holds; the others had not begun and go on."""
        with self._copies.paused():
            for write in [write for write in list(self._writes.values()) if write.held_by_fault]:
                self._finish(write, Outcome.UNKNOWN, "the transport was rotated before the write had ended")
            if self._paced is not None:
                self._paced.drop_sources(list(self._regions))  # memory may be given back now
            self.counters.num_rotations += 1

    def close(self) -> None:
        if self._closed:
            return
        with self._copies.paused():
            self._end_all("the transport was closed")
        with self._changed:
            self._closed = True
            self._changed.notify()
        self._copies.close()
        if self._paced is not None:
            self._paced.close()
        self._thread.join()
        for peer in self._peers.values():
            peer.close()
        self._peers.clear()
        self._completions.close()

    def _plan(self, write: _Write) -> None:
        """Draw the write's fate and put what follows from it on the schedule. `_changed` is held."""
        fate, delay_s = ("done", 0.0) if self._faults is _NO_FAULTS else self._draw()
        write.held_by_fault = fate in ("drop", "late") or delay_s > 0.0
        now_s = time.monotonic()
        if fate == "drop":
            return
        if fate == "late":
            self._report_once(write, Outcome.UNKNOWN, "injected: reported before it moved")
            gone = partial(self._finish, write, Outcome.UNKNOWN, "")  # what was reported already is not again
            self._at(now_s + self._faults.late_s, partial(self._begin, write, write.entries, gone))
            return
        if fate == "fail":
            self._at(now_s + delay_s, partial(self._finish, write, Outcome.FAILED, "injected failure"))
            return
        due_s = self._wire.take(write.entries.num_entries, write.entries.num_bytes) + delay_s
        end = partial(self._finish, write, Outcome.DONE, "")
        if fate == "duplicate":
            again = partial(self._begin, write, write.entries, end)
            self._begin(write, write.entries, partial(self._at, due_s, again))
        elif fate == "truncate":
            half = write.entries.part(0, write.entries.num_entries // 2)
            fail = partial(self._finish, write, Outcome.FAILED, "injected: only a part moved")
            self._at(due_s, partial(self._begin, write, half, fail))
        elif delay_s > 0.0:
            self._at(due_s, partial(self._begin, write, write.entries, end))
        else:
            # While the write holds the wire, or waits for it: nobody looks at the target before it is reported.
            self._begin(write, write.entries, partial(self._at, due_s, end))

    def _draw(self) -> tuple[str, float]:
        """A write's fate, and by how many seconds it is late."""
        delay_s = self._random.choice(self._faults.delays_s)
        left = self._random.random()
        for fate in ("drop", "fail", "truncate", "duplicate", "late"):
            left -= getattr(self._faults, fate)
            if left < 0.0:
                return fate, delay_s
        return "done", delay_s

    def _at(self, due_s: float, action: Callable[[], object]) -> None:
        """Let the schedule's thread call `action` when it is due; at once where it is due already."""
        if due_s <= time.monotonic():
            action()
            return
        with self._changed:
            entry = (due_s, next(self._ids), action)
            heapq.heappush(self._due, entry)
            if self._due[0] is entry:
                self._changed.notify()

    def _run(self) -> None:
        while (action := self._next_action()) is not None:
            action()

    def _next_action(self) -> Callable[[], object] | None:
        """Wait for the next due action; None once the transport is closed."""
        with self._changed:
            while not self._closed:
                wait_s = self._due[0][0] - time.monotonic() if self._due else None
                if wait_s is not None and wait_s <= 0.0:
                    return heapq.heappop(self._due)[2]
                self._changed.wait(wait_s)
        return None

    def _begin(self, write: _Write, entries: CheckedWrite, then: Callable[[], object]) -> None:
        """Move `entries`, then call `then`, unless the write has been ended or its peer has died meanwhile."""

        def is_wanted() -> bool:
            return write.write_id in self._writes and not write.peer.is_dead()

        def on_end(all_moved: bool, busy_s: float) -> None:
            with self._changed:
                self.counters.post_s += busy_s
            if all_moved:
                then()
            else:
                self._finish(write, Outcome.FAILED, write.peer.end_detail)

        self._copies.submit(entries, is_wanted, on_end)

    def _finish(self, write: _Write, outcome: Outcome, detail: str) -> None:
        """End a write for good, unless it has ended."""
        if self._writes.pop(write.write_id, None) is not None:
            self._report_once(write, outcome, detail)

    def _report_once(self, write: _Write, outcome: Outcome, detail: str) -> None:
        with self._lock:
            if write.reported:
                return
            write.reported = True
        self._report(write.write_id, write.entries, outcome, detail)

    def _report(self, write_id: int, entries: CheckedWrite, outcome: Outcome, detail: str) -> None:
        with self._lock:
            self.counters.count(outcome, entries.num_entries, entries.num_bytes)
        self._completions.put(Completion(write_id, outcome, detail))

    def _end_all(self, detail: str, peer: LoopbackPeer | None = None) -> None:
        for write in [write for write in list(self._writes.values()) if peer is None or write.peer is peer]:
            self._finish(write, Outcome.FAILED, detail)
