"""NIXL over UCX."""

from __future__ import annotations

import uuid
from dataclasses import replace

from kvxfer.streams.driver import gpu
from kvxfer.transports._engine_transport import EngineTransport
from kvxfer.transports._nixl_engine import MAX_PEER_ENTRIES, NixlEngine, NixlOptions, load_bindings
from kvxfer.transports.base import Limits, MemoryKind


class NixlTransport(EngineTransport):
    """`Transport` over NIXL 1.5 and UCX.

    A write that UCX reports as failed may still be under way, so its end is `UNKNOWN`; only destroying the engine
    object (`rotate()`) ends it for certain.
    """

    name = "nixl"
    limits = Limits(
        max_entries_per_peer=MAX_PEER_ENTRIES,
        memory_kinds=frozenset({MemoryKind.HOST}),
        failed_write_stops=False,
        # Over CMA the kernel copies straight into the target: nothing there can refuse it.
        rotate_stops_peer_writes=False,
    )

    def __init__(
        self, incarnation: str, options: NixlOptions | None = None, *, is_target: bool = True, gpu_index: int = -1
    ) -> None:
        """With `gpu_index`, memory of that GPU can be registered as well. Raises `EngineMissingError`, also where CUDA
        is missing then, and `TransportError` where UCX does not start."""
        self._is_target = is_target
        self._gpu = gpu(gpu_index) if gpu_index >= 0 else None
        if self._gpu is not None:
            self.limits = replace(self.limits, memory_kinds=frozenset(MemoryKind))
        self._bindings = load_bindings(options or NixlOptions())
        super().__init__(incarnation)

    def _new_engine(self) -> NixlEngine:
        # A peer that knew an older object under the same name would keep its stale connection.
        return NixlEngine(self._bindings, f"{self._incarnation}-{uuid.uuid4().hex[:8]}", self._is_target, self._gpu)
