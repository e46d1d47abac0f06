"""NIXL over UCX: one engine object for all peers, posted to by one thread."""

from __future__ import annotations

import itertools
import logging
import os
import uuid

from kvxfer.errors import PeerLostError, ProtocolError, RegistrationError, TransportError
from kvxfer.transports._completions import CompletionQueue
from kvxfer.transports._engine_thread import EngineError, EngineThread
from kvxfer.transports._metadata import Metadata, PublishedRegion, decode_metadata, encode_metadata
from kvxfer.transports._nixl_engine import MAX_PEER_ENTRIES, NixlEngine, NixlOptions, load_bindings
from kvxfer.transports._regions import RemoteRegion, checked_entries
from kvxfer.transports.base import (
    Completion,
    Counters,
    Limits,
    MemoryKind,
    Region,
    RegionDescriptor,
    WriteBatch,
)

_NAME = "nixl"
# Writes that move at all end within this time, so that a rotation takes only stuck ones with it.
_ROTATE_DRAIN_S = 0.1
_logger = logging.getLogger(__name__)


class NixlTransport:
    """`Transport` over NIXL. Owns one nixlAgent with its progress thread, one posting thread and one eventfd."""

    name = _NAME
    limits = Limits(
        max_entries_per_peer=MAX_PEER_ENTRIES,
        memory_kinds=frozenset({MemoryKind.HOST}),
        failed_write_stops=False,
        # Over CMA the kernel copies straight into the target: nothing there can refuse it.
        rotate_stops_peer_writes=False,
    )

    def __init__(self, incarnation: str, options: NixlOptions | None = None) -> None:
        """Start an engine whose name begins with `incarnation`. Raises `EngineMissingError`."""
        self.counters = Counters()
        self._incarnation = incarnation
        self._bindings = load_bindings(options or NixlOptions())
        self._completions = CompletionQueue()
        self._ids = itertools.count(1)
        self._regions: dict[int, Region] = {}
        self._peers: dict[str, Metadata] = {}
        self._engine = self._new_engine()
        self._thread = EngineThread(f"nixl-{incarnation[:8]}", self._engine, self._completions, self.counters)
        self._thread.start(self._engine)
        self._closed = False

    def _new_engine(self) -> NixlEngine:
        # A peer that knew an older object under the same name would keep its stale connection.
        return NixlEngine(self._bindings, f"{self._incarnation}-{uuid.uuid4().hex[:8]}")

    def register(self, region: Region) -> RegionDescriptor:
        if region.kind not in self.limits.memory_kinds:
            raise RegistrationError(f"got {region.kind.value} memory, expected host memory")
        try:
            self._engine.register(region)
        except EngineError as fault:
            raise RegistrationError(f"{fault.detail}: check that it is mapped, and `ulimit -l`") from fault
        region_id = next(self._ids)
        self._regions[region_id] = region
        return RegionDescriptor(region_id, region.num_bytes)

    def deregister(self, descriptor: RegionDescriptor) -> None:
        region = self._regions.pop(descriptor.region_id, None)
        if region is None:
            raise RegistrationError(f"got region {descriptor.region_id}, expected one of {sorted(self._regions)}")
        try:
            self._engine.deregister(region)
        except EngineError as fault:
            raise RegistrationError(fault.detail) from fault

    def metadata(self) -> bytes:
        regions = [PublishedRegion(key, region.num_bytes, region.address) for key, region in self._regions.items()]
        return encode_metadata(
            Metadata(_NAME, self._engine.endpoint, regions, os.getpid(), engine=self._engine.metadata())
        )

    def add_peer(self, peer: str, metadata: bytes) -> None:
        parsed = decode_metadata(metadata, _NAME)
        known = self._peers.get(peer)
        if known is not None and known.endpoint != parsed.endpoint:
            self.drop_peer(peer)
        self._load_peer(peer, parsed)
        self._peers[peer] = parsed

    def _load_peer(self, peer: str, parsed: Metadata) -> None:
        try:
            self._thread.call(lambda: self._engine.add_peer(peer, parsed.engine))
        except EngineError as fault:
            if isinstance(fault.__cause__, self._bindings.nixlBackendError):
                raise PeerLostError(f"peer {peer} cannot be reached: {fault.detail}") from fault
            raise ProtocolError(fault.detail) from fault

    def drop_peer(self, peer: str) -> None:
        if self._peers.pop(peer, None) is not None:
            self._thread.drop(peer, lambda: self._forget(peer))

    def _forget(self, peer: str) -> None:
        try:
            self._engine.drop_peer(peer)
        except EngineError as fault:
            _logger.warning("%s", fault.detail)

    def submit_write(self, peer: str, batch: WriteBatch) -> int:
        known = self._peers.get(peer)
        if known is None:
            raise PeerLostError(f"got peer {peer}, expected one that add_peer made known")
        remote = {region.region_id: RemoteRegion(region.num_bytes, region.address) for region in known.regions}
        entries = checked_entries(batch, self._regions.values(), remote)
        write_id = next(self._ids)
        self._thread.submit(write_id, peer, entries)
        return write_id

    def poll(self) -> list[Completion]:
        return self._completions.drain()

    def fileno(self) -> int:
        return self._completions.fileno()

    def path(self, peer: str) -> str:  # noqa: ARG002
        return "unknown"

    def rotate(self) -> None:
        self._thread.stop(_ROTATE_DRAIN_S)
        self._engine.destroy()
        self._engine = self._new_engine()
        for region in self._regions.values():
            self._engine.register(region)
        for peer, known in list(self._peers.items()):
            try:
                self._load_peer(peer, known)
            except TransportError as error:
                _logger.warning("peer %s is lost in a rotation: %s", peer, error)
                self.drop_peer(peer)
        self.counters.num_rotations += 1
        self._thread.start(self._engine)

    def close(self) -> None:
        if self._closed:
            return
        self._closed = True
        self._thread.stop(0.0)
        self._thread.abandon_all("the transport was closed")
        self._engine.destroy()
        self._completions.close()
