"""Loopback: shared memory between processes of one user on one host, with faults and a wire's pace on request.

A region with a memfd is published as (pid, descriptor, inode, size); a peer opens it through /proc and maps it. It
needs no engine, works inside one process too, and is the transport that tests and the laptop demo run on. Memory of a
GPU is published by its legacy handle, or by its descriptor, to other processes; it has the wire's pace, but no faults.
"""

from __future__ import annotations

import contextlib
import heapq
import itertools
import os
import random
import threading
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

from kvxfer.errors import ConfigError, PeerLostError, RegistrationError, TransportError
from kvxfer.transports._completions import CompletionQueue
from kvxfer.transports._loopback_copies import CopyThread
from kvxfer.transports._loopback_gpu import GpuWrites
from kvxfer.transports._loopback_paced import PacedWrites
from kvxfer.transports._loopback_peer import LoopbackPeer, endpoint_here
from kvxfer.transports._metadata import Metadata, PublishedRegion, decode_metadata, encode_metadata, published
from kvxfer.transports._regions import Entries, check_new_region, checked_entries
from kvxfer.transports.base import (
    Completion,
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
_NO_FAULTS = LoopbackFaults()  # without a draw a write


@dataclass(slots=True)
class _Write:
    write_id: int
    peer: LoopbackPeer
    entries: Entries
    num_bytes: int
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
        self._options = options
        self._random = random.Random(self._faults.seed)
        self._ids = itertools.count(1)
        self._regions: dict[int, Region] = {}
        self._peers: dict[str, LoopbackPeer] = {}
        self._completions = CompletionQueue()
        self._changed = threading.Condition()  # guards the schedule, the ends of writes and the counters
        self._due: list[tuple[float, int, Callable[[], object]]] = []
        self._writes: dict[int, _Write] = {}  # not finished with: neither reported nor still able to move bytes
        self._wire_free_at_s = 0.0
        self._closed = False
        self._paced: PacedWrites | GpuWrites | None = None
        if gpu_index >= 0:
            self.limits = replace(self.limits, memory_kinds=frozenset({MemoryKind.DEVICE}))
            self._paced = GpuWrites(gpu_index, self._completions.fileno())
        elif options.num_copy_processes and self._faults is _NO_FAULTS:
            self._paced = PacedWrites(options.num_copy_processes, self._completions.fileno())
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
            with self._giving_up(self._paced):
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

    def drop_peer(self, peer: str) -> None:
        dropped = self._peers.pop(peer, None)
        if dropped is None:
            return
        with self._copies.paused():
            if self._paced is not None:
                with self._giving_up(self._paced):
                    self._paced.drop_peer(
                        dropped, [write.write_id for write in self._writes.values() if write.peer is dropped]
                    )
            self._end_all("the peer was dropped", dropped)
            dropped.close()

    def submit_write(self, peer: str, batch: WriteBatch) -> int:
        known = self._peers.get(peer)
        if known is None:
            raise PeerLostError(f"got peer {peer}, expected one that add_peer made known")
        entries = checked_entries(batch, self._regions.values(), known.regions)
        write = _Write(next(self._ids), known, entries, entries.num_bytes)
        with self._changed:
            self._writes[write.write_id] = write
            if self._paced is None or not self._submit_paced(self._paced, write, batch.dst_region.region_id):
                self._plan(write)
        return write.write_id

    def poll(self) -> list[Completion]:
        if self._paced is None:
            return self._completions.drain()
        try:
            ended, busy_s = self._paced.collect()
        except (OSError, TransportError) as error:
            self._give_up(self._paced, error)
            return self._completions.drain()
        if not ended:
            return self._completions.drain()
        with self._changed:
            self.counters.post_s += busy_s
            for write_id in ended:
                write = self._writes.pop(write_id)
                self.counters.count(Outcome.DONE, write.entries.num_entries, write.num_bytes)
        return [Completion(write_id, Outcome.DONE) for write_id in ended] + self._completions.drain()

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
                with self._giving_up(self._paced):
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
            self._report(write, Outcome.UNKNOWN, "injected: reported before it moved")
            gone = partial(self._finish, write, Outcome.UNKNOWN, "")  # what was reported already is not again
            self._at(now_s + self._faults.late_s, partial(self._begin, write, write.entries, gone))
            return
        if fate == "fail":
            self._at(now_s + delay_s, partial(self._finish, write, Outcome.FAILED, "injected failure"))
            return
        due_s = self._take_wire(write) + delay_s
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

    def _take_wire(self, write: _Write) -> float:
        """Put the write behind those before it; when it will have passed."""
        held_s = self._options.wire_s(write.entries.num_entries, write.num_bytes)
        self._wire_free_at_s = max(time.monotonic(), self._wire_free_at_s) + held_s
        return self._wire_free_at_s

    def _submit_paced(self, paced: PacedWrites | GpuWrites, write: _Write, dst_region: int) -> bool:
        """Let processes copy the write, where that is worth it; whether this is so. `_changed` is held."""
        try:
            pieces: Any = paced.pieces(write.entries, write.peer, dst_region, self._regions)
            if pieces is None:
                return False
            if write.peer.is_dead():
                self._finish(write, Outcome.FAILED, f"process {write.peer.pid} of the peer has ended")
            else:
                paced.submit(write.write_id, pieces, self._take_wire(write))
        except (OSError, TransportError) as error:
            self._give_up(paced, error)
            self._finish(write, Outcome.FAILED, str(error))
        return True

    def _give_up(self, paced: PacedWrites | GpuWrites, error: Exception) -> None:
        """One of those that copy has ended: end the others, and their writes."""
        for write_id in paced.give_up():
            self._finish(self._writes[write_id], Outcome.FAILED, str(error))

    @contextlib.contextmanager
    def _giving_up(self, paced: PacedWrites | GpuWrites) -> Iterator[None]:
        try:
            yield
        except (OSError, TransportError) as error:
            self._give_up(paced, error)

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

    def _begin(self, write: _Write, entries: Entries, then: Callable[[], object]) -> None:
        """Move `entries`, then call `then`, unless the write has been ended or its peer has died meanwhile."""

        def is_wanted() -> bool:
            return write.write_id in self._writes and not write.peer.is_dead()

        def on_end(all_moved: bool, busy_s: float) -> None:
            with self._changed:
                self.counters.post_s += busy_s
            if all_moved:
                then()
            else:
                self._finish(write, Outcome.FAILED, f"process {write.peer.pid} of the peer has ended")

        self._copies.submit(entries, is_wanted, on_end)

    def _finish(self, write: _Write, outcome: Outcome, detail: str) -> None:
        """End a write for good, unless it has ended."""
        if self._writes.pop(write.write_id, None) is not None:
            self._report(write, outcome, detail)

    def _report(self, write: _Write, outcome: Outcome, detail: str) -> None:
        with self._changed:
            if write.reported:
                return
            write.reported = True
            self.counters.count(outcome, write.entries.num_entries, write.num_bytes)
        self._completions.put(Completion(write.write_id, outcome, detail))

    def _end_all(self, detail: str, peer: LoopbackPeer | None = None) -> None:
        for write in [write for write in list(self._writes.values()) if peer is None or write.peer is peer]:
            self._finish(write, Outcome.FAILED, detail)
