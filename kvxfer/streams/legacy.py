"""Memory of a GPU that its owner shares by a legacy handle: what UCX, too, can reach from other processes.

UCX before 1.22, as NIXL 1.5 brings it, lets peers on the host write straight into memory of cudaMalloc, or with fabric
handles, which few hosts have. What has a POSIX descriptor, as `allocate_pool` makes it, it sends through TCP, at less
than a hundredth of the rate.
"""

from __future__ import annotations

from typing import Final

from kvxfer.errors import ContractError, HandoffError
from kvxfer.streams.device import DevicePool, MappedPool, share_legacy
from kvxfer.streams.driver import check, cuda, gpu

_BLOCK_BYTES: Final = 2 << 20


class LegacyMemory(MappedPool):
    """Memory that was allocated here by `allocate_legacy`; `handle` alone lets others map it, `fd` is -1."""

    @property
    def is_shareable(self) -> bool:
        """`MappedPool.is_shareable`."""
        return True

    def _release(self) -> None:
        check("cuMemFree", cuda().cuMemFree(self._address))


def allocate_legacy(num_bytes: int, device_index: int) -> LegacyMemory:
    """Plain memory of a GPU, which processes of other PID values can map.

    Raises `ContractError`, `EngineMissingError`, `HandoffError` where it cannot be shared, and `TransportError` where
    the GPU is out of memory.
    """
    if num_bytes < 1:
        raise ContractError(f"num_bytes: got {num_bytes}, expected at least 1")
    driver, device = cuda(), gpu(device_index)
    with device:
        # Of whole blocks: less may share one with other memory, which a handle would let others map as well.
        address = int(check("cuMemAlloc", driver.cuMemAlloc(num_bytes + -num_bytes % _BLOCK_BYTES)))
        try:
            handle = share_legacy(DevicePool(address, num_bytes, device_index))
            assert handle.offset_bytes == 0, handle
        except HandoffError:
            driver.cuMemFree(address)
            raise
    return LegacyMemory(device, handle, address, None)
