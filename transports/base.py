"""What every transport does: moves bytes into registered regions of a peer.

A transport knows nothing of KV, requests or pages. One conformance suite (tests/transports/test_conformance.py)
runs over all of them.

Data that a write reported `DONE` is in the peer's memory: the agents announce it over their own ordered control
connection afterwards, so a notice cannot precede its data on any engine.
"""

from __future__ import annotations

import enum
from dataclasses import dataclass
from typing import Protocol

import msgspec
import numpy as np
import numpy.typing as npt

from kvxfer.errors import ContractError
from kvxfer.streams.device import PoolHandle


class MemoryKind(enum.Enum):
    """Where a region lies."""

    HOST = "host"
    DEVICE = "device"


_DEVICE = MemoryKind.DEVICE  # Python 3.11 looks a member up by a function


@dataclass(frozen=True, slots=True)
class Region:
    """Local memory to be registered. `fd` is the memfd behind it, where there is one (the owner keeps it).

    Memory of a GPU lies on the one that this process knows as `device_index`; `handle` lets other processes of the
    host map it.
    """

    address: int
    num_bytes: int
    fd: int | None = None
    kind: MemoryKind = MemoryKind.HOST
    device_index: int = 0
    handle: PoolHandle | None = None

    @property
    def gpu_index(self) -> int:
        """`device_index` of memory of a GPU, -1 for host memory."""
        return self.device_index if self.kind is _DEVICE else -1


class RegionDescriptor(msgspec.Struct, frozen=True, gc=False):
    """A registered region as peers name it."""

    region_id: int
    num_bytes: int


@dataclass(frozen=True, slots=True)
class WriteBatch:
    """Copies from local memory into one region of a peer.

    `src_addresses` `[n]` uint64, virtual addresses inside registered regions; `dst_offsets` `[n]` uint64, bytes from
    the start of the peer's region; `lengths` `[n]` uint64, bytes.
    """

    dst_region: RegionDescriptor
    src_addresses: npt.NDArray[np.uint64]
    dst_offsets: npt.NDArray[np.uint64]
    lengths: npt.NDArray[np.uint64]

    @property
    def num_entries(self) -> int:
        return len(self.lengths)

    @property
    def num_bytes(self) -> int:
        return int(self.lengths.sum())


class ContiguousWrite(msgspec.Struct, frozen=True, gc=False):
    """One copy into a region of a peer, as most are: a packed slot. What a `WriteBatch` of one entry is, for less.

    `src_address`: virtual address inside a registered region; `dst_offset`: bytes from the start of the peer's region.
    """

    dst_region: RegionDescriptor
    src_address: int
    dst_offset: int
    num_bytes: int

    def as_batch(self) -> WriteBatch:
        """The same as arrays. Raises `ContractError` for numbers that are no uint64."""
        try:
            entry = np.array((self.src_address, self.dst_offset, self.num_bytes), dtype=np.uint64)
        except OverflowError as error:
            raise ContractError(
                f"ContiguousWrite: got source {self.src_address}, offset {self.dst_offset}, {self.num_bytes} bytes, "
                "expected numbers from 0 to 2**64 - 1"
            ) from error
        return WriteBatch(self.dst_region, entry[:1], entry[1:2], entry[2:])


class Outcome(enum.Enum):
    """How a write ended."""

    DONE = "done"  # all bytes are in the peer's memory
    FAILED = "failed"  # the write has stopped: nothing of it reads or writes any more
    UNKNOWN = "unknown"  # it may still read its source and write its target until rotate() or the peer's proven death


_DONE = Outcome.DONE


class Completion(msgspec.Struct, frozen=True, gc=False):
    """End of one write. `detail` says what the engine reported; it is empty for `DONE`."""

    write_id: int
    outcome: Outcome
    detail: str = ""


@dataclass(frozen=True, slots=True)
class Limits:
    """What a transport can do."""

    max_entries_per_peer: int
    """Descriptors in flight to one peer; more in one batch are split inside the adapter."""
    memory_kinds: frozenset[MemoryKind]
    failed_write_stops: bool
    """Whether a write that the engine reports as failed has stopped (`FAILED`) or may go on (`UNKNOWN`)."""
    rotate_stops_peer_writes: bool
    """Whether `rotate()` of a target also ends what peers are writing into it. `rotate()` always ends the writes of
    its own side; where this is false, a stopped peer may still write into the landing slots it was given."""


@dataclass(slots=True)
class Counters:
    """What a transport has done since it was made; read by the metrics, written by the engine's thread alone."""

    num_writes: int = 0
    num_descriptors: int = 0
    num_bytes: int = 0
    num_failed: int = 0
    num_unknown: int = 0
    num_rotations: int = 0
    post_s: float = 0.0
    """Seconds spent inside the engine's posting calls; on paths that copy inline this is the transfer itself."""

    def count(self, outcome: Outcome, num_descriptors: int, num_bytes: int) -> None:
        """Note the end of a write."""
        self.num_writes += 1
        if outcome is _DONE:
            self.num_descriptors += num_descriptors
            self.num_bytes += num_bytes
        elif outcome is Outcome.FAILED:
            self.num_failed += 1
        else:
            self.num_unknown += 1


class Transport(Protocol):
    """Moves bytes. Every method is called from the agent's loop thread and returns at once, but for `add_peer`,
    `rotate` and `close`, which may take as long as the engine needs (tens to hundreds of milliseconds)."""

    name: str
    limits: Limits
    counters: Counters

    def register(self, region: Region) -> RegionDescriptor:
        """Make `region` usable as a source and as a target. Raises `RegistrationError`."""
        ...

    def deregister(self, descriptor: RegionDescriptor) -> None:
        """Undo `register`. The caller has seen the end of every write that uses the region."""
        ...

    def metadata(self) -> bytes:
        """All that a peer needs to write into the regions registered so far."""
        ...

    def add_peer(self, peer: str, metadata: bytes) -> None:
        """Know `peer` (its incarnation) by its metadata; again with newer metadata after it registered more.

        Raises `PeerLostError` where it cannot be reached, `ProtocolError` for metadata that is none.
        """
        ...

    def drop_peer(self, peer: str) -> None:
        """Forget `peer`. Writes to it that are still in flight end as `FAILED` or `UNKNOWN`, never as `DONE` later."""
        ...

    def submit_write(self, peer: str, write: WriteBatch | ContiguousWrite) -> int:
        """Start a write; returns its id, whose one `Completion` comes out of `poll()`. Writes end in any order.

        Raises `BoundsError` where an entry lies outside the regions it names, `ContractError` for what is no table of
        entries, `PeerLostError` for an unknown peer; nothing was started then.
        """
        ...

    def poll(self) -> list[Completion]:
        """The writes that ended since the last call."""
        ...

    def fileno(self) -> int:
        """A descriptor that is readable while `poll()` has something to return."""
        ...

    def path(self, peer: str) -> str:
        """The path in use to `peer` as the engine tells it (`"cma"`, `"tcp"`, `"rc"`, ...), or `"unknown"`."""
        ...

    def rotate(self) -> None:
        """Replace the engine object. When it returns, no write of the old one can read or write local memory that
        was handed to it; such writes have been reported. Writes that still ended in short order were let do so, and
        those not yet begun go out through the new object, which knows all regions and peers. `metadata()` may have
        changed: peers that write into this side's regions need it anew."""
        ...

    def close(self) -> None:
        """End every write, free every resource. Calling it again does nothing."""
        ...
