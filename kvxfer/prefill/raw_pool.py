"""The worker's pool as the engine reads it itself: for mode raw, and for rows that a gather has failed to pack."""

from __future__ import annotations

from kvxfer.control.handoff_events import ReceivedPool
from kvxfer.errors import RefusedError, TransportError
from kvxfer.sidecar import Sidecar
from kvxfer.transports.base import MemoryKind, Region, RegionDescriptor


class RawPool:
    """A pool that the agent maps, registered with its engine from `register` until `release`."""

    def __init__(self, sidecar: Sidecar) -> None:
        self._sidecar = sidecar
        self._region: RegionDescriptor | None = None
        self.address = 0
        """Where the pool begins, as the engine knows it; also of one that was released."""

    def register(self, pool: ReceivedPool, *, is_needed: bool) -> bool:
        """Let the engine read `pool`; whether it does. Raises `RefusedError` where it does not and must, with the
        remedy."""
        region = _region_of(pool)
        if region is None:
            if is_needed:
                raise RefusedError("mode raw needs a pool that this agent maps: hand it over with placement agent")
            return False
        try:
            self._region = self._sidecar.transport.register(region)
        except TransportError as error:
            if is_needed:
                raise RefusedError(f"mode raw: the engine cannot read this pool: {error}") from error
            self._sidecar.log.warning("rows cannot be sent without packing, should that fail: %s", error)
            return False
        self.address = region.address
        return True

    def release(self) -> None:
        """The engine reads the pool no more. Calling it again does nothing."""
        if self._region is not None:
            self._sidecar.transport.deregister(self._region)
            self._region = None


def _region_of(pool: ReceivedPool) -> Region | None:
    if pool.memory is not None:
        return Region(pool.memory.address, pool.memory.num_bytes, pool.memory.fd)
    if pool.device is None:
        return None
    mapped = pool.device.pool
    return Region(mapped.address, mapped.num_bytes, kind=MemoryKind.DEVICE, device_index=mapped.device_index)
