"""What the transports over an asynchronous engine share: one engine object, one thread that posts to it."""

from __future__ import annotations

import itertools
import logging
import os
import pathlib
from abc import ABC, abstractmethod
from typing import Protocol

from kvxfer.errors import PeerLostError, ProtocolError, RegistrationError
from kvxfer.transports._completions import CompletionQueue
from kvxfer.transports._engine_thread import EngineError, EngineThread, PostingEngine
from kvxfer.transports._metadata import Metadata, decode_metadata, encode_metadata, published
from kvxfer.transports._regions import RemoteRegion, check_new_region, checked_write
from kvxfer.transports.base import (
    Completion,
    ContiguousWrite,
    Counters,
    Limits,
    Region,
    RegionDescriptor,
    WriteBatch,
)

# A rotation waits while writes still end at least this often: it takes only stuck ones with it.
_ROTATE_PATIENCE_S = 0.25
_BOOT_ID = pathlib.Path("/proc/sys/kernel/random/boot_id")
_logger = logging.getLogger(__name__)


def host_id() -> str:
    """Names the running system that this process lives on."""
    return _BOOT_ID.read_text().strip()


class UnreachablePeerError(EngineError):
    """The engine understood a peer's metadata but could not reach it."""


class EngineObject(PostingEngine, Protocol):
    """An engine as one object that a rotation destroys and makes anew. All methods raise `EngineError` alone."""

    endpoint: str
    """Names this object among all that ever were."""

    def register(self, region: Region) -> None: ...

    def deregister(self, region: Region) -> None: ...

    def metadata(self) -> bytes: ...

    def add_peer(self, peer: str, metadata: Metadata) -> None: ...

    def drop_peer(self, peer: str) -> None: ...

    def is_stale_for(self, metadata: Metadata) -> bool:
        """Whether this object should be replaced before the peer with `metadata` is added: it remembers a dead process
        in its place, or holds too much of peers that are gone."""
        ...

    def path(self, peer: str) -> str: ...

    def destroy(self) -> None:
        """End everything the object does and free it."""
        ...


class EngineTransport(ABC):
    """`Transport` over an `EngineObject`. Owns the object, its posting thread and an eventfd; `close()` frees them.

    A rotation changes `metadata()`: peers that write into this side's regions need it anew.
    """

    name: str
    limits: Limits

    def __init__(self, incarnation: str) -> None:
        """Start the engine; peers know this side by `incarnation`. Raises `EngineMissingError`."""
        self.counters = Counters()
        self._incarnation = incarnation
        self._completions = CompletionQueue()
        self._ids = itertools.count(1)
        self._regions: dict[int, Region] = {}
        self._peers: dict[str, Metadata] = {}
        self._remote: dict[str, dict[int, RemoteRegion]] = {}  # regions of each peer
        self._closed = False
        self._engine = self._new_engine()
        self._thread = EngineThread(f"{self.name}-post", self._completions, self.counters)
        self._thread.start(self._engine)

    @abstractmethod
    def _new_engine(self) -> EngineObject:
        """Start an engine object. Raises `EngineMissingError`, `TransportError`."""

    def register(self, region: Region) -> RegionDescriptor:
        check_new_region(region, self._regions.values(), self.limits)
        self._register(self._engine, region)
        region_id = next(self._ids)
        self._regions[region_id] = region
        return RegionDescriptor(region_id, region.num_bytes)

    def _register(self, engine: EngineObject, region: Region) -> None:
        try:
            engine.register(region)
        except EngineError as error:
            raise RegistrationError(
                f"{error.detail}: got address {region.address:#x}, expected mapped memory within the limit of "
                "locked memory (`ulimit -l`)"
            ) from error

    def deregister(self, descriptor: RegionDescriptor) -> None:
        region = self._regions.pop(descriptor.region_id, None)
        if region is None:
            raise RegistrationError(f"got region {descriptor.region_id}, expected one of {sorted(self._regions)}")
        try:
            self._engine.deregister(region)
        except EngineError as error:
            raise RegistrationError(error.detail) from error

    def metadata(self) -> bytes:
        regions = [published(key, region, address=region.address) for key, region in self._regions.items()]
        return encode_metadata(
            Metadata(
                transport=self.name,
                endpoint=self._engine.endpoint,
                regions=regions,
                pid=os.getpid(),
                host=host_id(),
                engine=self._engine.metadata(),
            )
        )

    def add_peer(self, peer: str, metadata: bytes) -> None:
        parsed = decode_metadata(metadata, self.name)
        known = self._peers.get(peer)
        if known is not None and known.endpoint != parsed.endpoint:
            self.drop_peer(peer)
        if self._engine.is_stale_for(parsed):
            self.rotate()
        self._load_peer(self._engine, peer, parsed)
        self._peers[peer] = parsed
        self._remote[peer] = {
            region.region_id: RemoteRegion(region.num_bytes, region.address, region.gpu_index)
            for region in parsed.regions
        }

    def _load_peer(self, engine: EngineObject, peer: str, parsed: Metadata) -> None:
        try:
            self._thread.call(lambda: engine.add_peer(peer, parsed))
        except UnreachablePeerError as error:
            raise PeerLostError(f"peer {peer} cannot be reached: {error.detail}") from error
        except EngineError as error:
            raise ProtocolError(error.detail) from error

    def drop_peer(self, peer: str) -> None:
        if self._peers.pop(peer, None) is not None:
            del self._remote[peer]
            self._thread.drop(peer, lambda: self._forget(peer))

    def _forget(self, peer: str) -> None:
        try:
            self._engine.drop_peer(peer)
        except EngineError as error:
            _logger.warning("%s", error.detail)

    def submit_write(self, peer: str, write: WriteBatch | ContiguousWrite) -> int:
        remote = self._remote.get(peer)
        if remote is None:
            raise PeerLostError(f"got peer {peer}, expected one that add_peer made known")
        entries = checked_write(write, self._regions, remote)
        write_id = next(self._ids)
        self._thread.submit(write_id, peer, entries)
        return write_id

    def poll(self) -> list[Completion]:
        return self._completions.drain()

    def fileno(self) -> int:
        return self._completions.fileno()

    def path(self, peer: str) -> str:
        return self._engine.path(peer) if peer in self._peers else "unknown"

    def rotate(self) -> None:
        fresh = self._new_engine()
        for region in self._regions.values():
            self._register(fresh, region)
        # Up to here a failure has changed nothing.
        self._thread.stop(_ROTATE_PATIENCE_S)
        self._engine.destroy()
        self._engine = fresh
        for peer, known in list(self._peers.items()):
            try:
                self._load_peer(fresh, peer, known)
            except (PeerLostError, ProtocolError) as error:
                _logger.warning("a rotation lost peer %s: %s", peer, error)
                self.drop_peer(peer)
        self.counters.num_rotations += 1
        self._thread.start(fresh)

    def close(self) -> None:
        if self._closed:
            return
        self._closed = True
        self._thread.stop(0.0)
        self._thread.abandon_all("the transport was closed")
        self._peers.clear()
        self._remote.clear()
        self._engine.destroy()
        self._completions.close()
