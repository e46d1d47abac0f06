"""NIXL over UCX."""

from __future__ import annotations

import uuid

from kvxfer.errors import RegistrationError, TransportError
from kvxfer.streams.driver import gpu
from kvxfer.transports._engine_transport import EngineTransport
from kvxfer.transports._nixl_engine import MAX_PEER_ENTRIES, NixlEngine, NixlOptions, load_bindings
from kvxfer.transports.base import Limits, MemoryKind, Region, RegionDescriptor


class NixlTransport(EngineTransport):
    """`Transport` over NIXL 1.5 and UCX.

    A write that UCX reports as failed may still be under way, so its end is `UNKNOWN`; only destroying the engine
    object (`rotate()`) ends it for certain.
    """

    name = "nixl"
    limits = Limits(
        max_entries_per_peer=MAX_PEER_ENTRIES,
        memory_kinds=frozenset(MemoryKind),
        failed_write_stops=False,
        # Over CMA the kernel copies straight into the target: nothing there can refuse it.
        rotate_stops_peer_writes=False,
    )

    def __init__(
        self, incarnation: str, options: NixlOptions | None = None, *, is_target: bool = True, gpu_index: int = -1
    ) -> None:
        """With `gpu_index` peers write between memory of that GPU. Raises `EngineMissingError`, also where CUDA is
        missing then, and `TransportError` where UCX does not start."""
        self._is_target = is_target
        self._has_gpu_slots = gpu_index >= 0
        self._gpu = gpu(gpu_index) if gpu_index >= 0 else None
        self._bindings = load_bindings(options or NixlOptions())
        super().__init__(incarnation)

    def register(self, region: Region) -> RegionDescriptor:
        if region.kind is MemoryKind.DEVICE and self._gpu is None:
            self._begin_with_gpu(region.device_index)
        return super().register(region)

    def _begin_with_gpu(self, gpu_index: int) -> None:
        """UCX looks for GPUs when it starts, in the context that is current then: start it anew."""
        try:
            self._gpu = gpu(gpu_index)
            self.rotate()
        except TransportError as error:
            self._gpu = None
            raise RegistrationError(f"got device memory, which UCX cannot be started for: {error}") from error

    def _new_engine(self) -> NixlEngine:
        # A peer that knew an older object under the same name would keep its stale connection.
        endpoint = f"{self._incarnation}-{uuid.uuid4().hex[:8]}"
        return NixlEngine(self._bindings, endpoint, self._is_target, self._gpu, has_gpu_slots=self._has_gpu_slots)
