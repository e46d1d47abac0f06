"""Memory of a GPU: where a pool lies, and how other processes on the host come to map it.

Two kinds can be shared. Memory of `allocate_pool` has a POSIX descriptor and maps everywhere. Memory from plain
cudaMalloc, torch's caching allocator included, has a legacy IPC handle, which maps only between processes of different
PID values. Who mapped a pool cannot share it on: pass the original handle. Importing this needs neither CUDA nor torch.
"""

from __future__ import annotations

import contextlib
import ctypes
import os
from collections.abc import Iterator
from dataclasses import dataclass
from typing import TYPE_CHECKING, Annotated, Any, Final

import msgspec

from kvxfer.errors import ContractError, HandoffError, TransportError
from kvxfer.streams.driver import Gpu, check, cuda, find_gpu, gpu

if TYPE_CHECKING:
    import torch

IPC_HANDLE_BYTES: Final = 64
_ALIGNMENT_BYTES: Final = 16
_NumBytes = Annotated[int, msgspec.Meta(ge=0, lt=1 << 53)]
_LAZY_PEER_ACCESS: Final = 1  # CU_IPC_MEM_LAZY_ENABLE_PEER_ACCESS, the only flag there is
_ANOTHER_WAY: Final = "make the pool with allocate_pool(), or use placement worker, which shares no pool"


@dataclass(frozen=True, slots=True)
class DevicePool:
    """`num_bytes` from `address`, for kernels of the GPU that this process knows as `device_index`: the one where they
    lie, or another that reaches them as a peer. Whoever made it frees it."""

    address: int
    num_bytes: int
    device_index: int

    def __post_init__(self) -> None:
        if self.address <= 0 or self.address % _ALIGNMENT_BYTES:
            raise ContractError(f"pool address: got {self.address:#x}, expected a multiple of {_ALIGNMENT_BYTES}")
        if self.num_bytes < 1 or self.device_index < 0:
            raise ContractError(
                f"pool: got {self.num_bytes} bytes on device {self.device_index}, expected at least 1 byte and device 0"
            )

    @classmethod
    def of(cls, tensor: torch.Tensor) -> DevicePool:
        """The memory of a contiguous CUDA tensor, which must outlive whatever uses it. Raises `ContractError`."""
        if not hasattr(tensor, "is_cuda"):
            raise ContractError(f"pool: got {type(tensor).__name__}, expected a torch tensor on a GPU")
        if not tensor.is_cuda or not tensor.is_contiguous():
            raise ContractError(f"pool: got strides {tensor.stride()} on {tensor.device}, expected contiguous on a GPU")
        return cls(tensor.data_ptr(), tensor.numel() * tensor.element_size(), tensor.get_device())


class PoolHandle(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """What names a pool to other processes. `ipc` is a legacy handle; where it is empty, a descriptor goes along.

    The pool begins `offset_bytes` into the `mapped_bytes` that the handle or descriptor stands for. `pid` is that of
    the process that shares it, as it sees itself.
    """

    gpu_uuid: Annotated[str, msgspec.Meta(pattern="^[0-9a-f]{32}$")]
    num_bytes: _NumBytes
    offset_bytes: _NumBytes
    mapped_bytes: _NumBytes
    pid: _NumBytes
    ipc: Annotated[bytes, msgspec.Meta(max_length=IPC_HANDLE_BYTES)] = b""


class MappedPool:
    """A pool's memory mapped into this process by CUDA's virtual memory calls or a legacy handle."""

    def __init__(
        self,
        device: Gpu,
        handle: PoolHandle,
        address: int,
        allocation: Any | None,  # noqa: ANN401
        *,
        fd: int = -1,
        is_read_only: bool = False,
    ) -> None:
        """Use `allocate_pool` or `map_pool`. `allocation` is None for legacy handles. Takes over `fd`."""
        self.handle = handle
        self.fd = fd
        """The descriptor that goes along with `handle`, of memory that was allocated here; -1 for what was mapped from
        another process, which cannot be shared on: forward what was sent."""
        self.is_read_only = is_read_only
        """Whether CUDA keeps this process from writing here: a kernel that tries breaks its context."""
        self.pool = DevicePool(address + handle.offset_bytes, handle.num_bytes, device.device_index)
        self._gpu = device
        self._address = address
        self._allocation = allocation
        self._is_closed = False

    @property
    def num_bytes(self) -> int:
        """Bytes of the pool."""
        return self.handle.num_bytes

    @property
    def is_shareable(self) -> bool:
        """Whether `handle`, with `fd`, lets other processes map it."""
        return self.fd >= 0

    def tensor(self) -> torch.Tensor:
        """`[num_bytes]` uint8 on the GPU, over this memory. Must be gone, like its views, before `close()`.

        Raises `ContractError` for memory of another GPU, which torch would take for one that this GPU has.
        """
        import torch

        if self._gpu.uuid != self.handle.gpu_uuid:
            raise ContractError(
                f"pool: got memory of GPU {self.handle.gpu_uuid}, expected that of cuda:{self.pool.device_index}, "
                "which only reaches it as a peer: pull its rows"
            )

        return torch.as_tensor(_ArrayInterface(self.pool), device=f"cuda:{self.pool.device_index}")

    def close(self) -> None:
        """Unmap; what this process allocated is freed once nobody maps it. No stream may touch it any more. Calling it
        again does nothing."""
        if self._is_closed:
            return
        self._is_closed = True
        if self.fd >= 0:
            os.close(self.fd)
            self.fd = -1
        with self._gpu:
            self._release()

    def _release(self) -> None:
        driver = cuda()
        if self._allocation is None:
            check("cuIpcCloseMemHandle", driver.cuIpcCloseMemHandle(self._address))
            return
        _unmap(self._address, self.handle.mapped_bytes)
        check("cuMemRelease", driver.cuMemRelease(self._allocation))


class _ArrayInterface:
    """Shows a pool to torch, which keeps this object but does not own the memory."""

    def __init__(self, pool: DevicePool) -> None:
        self.__cuda_array_interface__ = {
            "shape": (pool.num_bytes,),
            "typestr": "|u1",
            "data": (pool.address, False),
            "strides": None,
            "version": 3,
        }


def allocate_pool(num_bytes: int, device_index: int) -> MappedPool:
    """Memory on a GPU that other processes can map, and RDMA NICs where the GPU allows that.

    Raises `ContractError`, `EngineMissingError`, and `TransportError` where the GPU is out of memory.
    """
    if num_bytes < 1:
        raise ContractError(f"num_bytes: got {num_bytes}, expected at least 1")
    driver, device = cuda(), gpu(device_index)
    properties = driver.CUmemAllocationProp()
    properties.type = driver.CUmemAllocationType.CU_MEM_ALLOCATION_TYPE_PINNED
    properties.location = _location(device_index)
    properties.requestedHandleTypes = driver.CUmemAllocationHandleType.CU_MEM_HANDLE_TYPE_POSIX_FILE_DESCRIPTOR
    properties.allocFlags.gpuDirectRDMACapable = device.attribute("GPU_DIRECT_RDMA_WITH_CUDA_VMM_SUPPORTED")
    minimum = driver.CUmemAllocationGranularity_flags.CU_MEM_ALLOC_GRANULARITY_MINIMUM
    with device:
        granule_bytes = int(
            check("cuMemGetAllocationGranularity", driver.cuMemGetAllocationGranularity(properties, minimum))
        )
        mapped_bytes = num_bytes + -num_bytes % granule_bytes
        allocation = check("cuMemCreate", driver.cuMemCreate(mapped_bytes, properties, 0))
        fd = -1
        try:
            fd = _export(allocation)
            address = _map(allocation, mapped_bytes, device_index, is_read_only=False)
        except TransportError:
            if fd >= 0:
                os.close(fd)
            driver.cuMemRelease(allocation)
            raise
    handle = PoolHandle(device.uuid, num_bytes, 0, mapped_bytes, os.getpid())
    return MappedPool(device, handle, address, allocation, fd=fd)


def share_legacy(pool: DevicePool) -> PoolHandle:
    """The legacy IPC handle of a pool from cudaMalloc, such as a tensor of torch's caching allocator.

    Raises `HandoffError` for memory that has none, with the remedy.
    """
    driver, device = cuda(), gpu(pool.device_index)
    legacy = driver.CUpointer_attribute.CU_POINTER_ATTRIBUTE_IS_LEGACY_CUDA_IPC_CAPABLE
    with device, _refusing("pool"):
        if not check("cuPointerGetAttribute", driver.cuPointerGetAttribute(legacy, pool.address)):
            raise HandoffError(
                "pool: got memory without a legacy IPC handle, expected plain cudaMalloc: switch expandable segments "
                f"off (PYTORCH_CUDA_ALLOC_CONF=expandable_segments:False) or {_ANOTHER_WAY}"
            )
        base, mapped_bytes = check("cuMemGetAddressRange", driver.cuMemGetAddressRange(pool.address))
        offset_bytes = pool.address - int(base)
        if offset_bytes + pool.num_bytes > mapped_bytes:
            raise HandoffError(
                f"pool: got {pool.num_bytes} bytes, expected at most {mapped_bytes - offset_bytes}, where the "
                "allocation ends"
            )
        ipc = check("cuIpcGetMemHandle", driver.cuIpcGetMemHandle(base))
    return PoolHandle(
        device.uuid,
        pool.num_bytes,
        offset_bytes,
        int(mapped_bytes),
        os.getpid(),
        ctypes.string_at(ipc.getPtr(), IPC_HANDLE_BYTES),
    )


def map_pool(
    handle: PoolHandle, fd: int | None = None, *, is_read_only: bool = False, device_index: int | None = None
) -> MappedPool:
    """Map a pool that another process shared. `fd` stays the caller's.

    `device_index`: the GPU that is to use it; None for the one on which it lies. `is_read_only`: rows are only pulled
    from it, so map it without leave to write. Legacy handles and some drivers have no such mappings; there it is
    writable all the same, and `MappedPool.is_read_only` says so.

    Raises `HandoffError` where that cannot be, with the remedy; nothing is mapped then.
    """
    if (fd is None) != bool(handle.ipc) or len(handle.ipc) not in (0, IPC_HANDLE_BYTES):
        raise HandoffError(
            f"pool: got a legacy handle of {len(handle.ipc)} bytes and descriptor {fd}, expected one of the two"
        )
    if handle.offset_bytes < 0 or not 0 < handle.num_bytes <= handle.mapped_bytes - handle.offset_bytes:
        raise HandoffError(
            f"pool: got {handle.num_bytes} bytes at {handle.offset_bytes}, expected a part of {handle.mapped_bytes}"
        )
    owner_index = find_gpu(handle.gpu_uuid)
    if owner_index is None:
        raise HandoffError(
            f"pool: got a handle of GPU {handle.gpu_uuid}, expected one of the GPUs that this process sees: give both "
            "processes the same GPU (CUDA_VISIBLE_DEVICES, the container's devices)"
        )
    device = gpu(owner_index if device_index is None else device_index)
    if device.device_index != owner_index and not device.can_access(owner_index):
        raise HandoffError(
            f"pool: got memory of GPU {handle.gpu_uuid}, expected some that GPU {device.uuid} reaches: these two have "
            "no peer access"
        )
    with device, _refusing("pool"):
        if fd is None:
            return MappedPool(device, handle, _open_legacy(handle), None)
        driver = cuda()
        kind = driver.CUmemAllocationHandleType.CU_MEM_HANDLE_TYPE_POSIX_FILE_DESCRIPTOR
        allocation = check("cuMemImportFromShareableHandle", driver.cuMemImportFromShareableHandle(fd, kind))
        try:
            address, is_read_only = _map_as(allocation, handle.mapped_bytes, device.device_index, is_read_only)
        except TransportError:
            driver.cuMemRelease(allocation)
            raise
    return MappedPool(device, handle, address, allocation, is_read_only=is_read_only)


def _map_as(allocation: Any, mapped_bytes: int, device_index: int, is_read_only: bool) -> tuple[int, bool]:  # noqa: ANN401
    """Map an allocation; its address, and whether it is read-only, which not every driver can do."""
    if is_read_only:
        with contextlib.suppress(TransportError):
            return _map(allocation, mapped_bytes, device_index, is_read_only=True), True
    return _map(allocation, mapped_bytes, device_index, is_read_only=False), False


def _open_legacy(handle: PoolHandle) -> int:
    if handle.pid == os.getpid():
        raise HandoffError(
            f"pool: got a legacy handle from a process that has the PID of this one, {handle.pid}; CUDA refuses that: "
            f"let the containers share a PID namespace (shareProcessNamespace: true), or {_ANOTHER_WAY}"
        )
    driver = cuda()
    ipc = driver.CUipcMemHandle()
    ctypes.memmove(ipc.getPtr(), handle.ipc, IPC_HANDLE_BYTES)
    return int(check("cuIpcOpenMemHandle", driver.cuIpcOpenMemHandle(ipc, _LAZY_PEER_ACCESS)))


def _location(device_index: int) -> Any:  # noqa: ANN401
    driver = cuda()
    location = driver.CUmemLocation()
    location.type = driver.CUmemLocationType.CU_MEM_LOCATION_TYPE_DEVICE
    location.id = device_index
    return location


def _export(allocation: Any) -> int:  # noqa: ANN401
    """A descriptor by which other processes map an allocation."""
    driver = cuda()
    kind = driver.CUmemAllocationHandleType.CU_MEM_HANDLE_TYPE_POSIX_FILE_DESCRIPTOR
    fd = int(check("cuMemExportToShareableHandle", driver.cuMemExportToShareableHandle(allocation, kind, 0)))
    os.set_inheritable(fd, False)
    return fd


def _map(allocation: Any, mapped_bytes: int, device_index: int, *, is_read_only: bool) -> int:  # noqa: ANN401
    """Map an allocation; its address."""
    driver = cuda()
    address = int(check("cuMemAddressReserve", driver.cuMemAddressReserve(mapped_bytes, 0, 0, 0)))
    try:
        check("cuMemMap", driver.cuMemMap(address, mapped_bytes, 0, allocation, 0))
        try:
            access = driver.CUmemAccessDesc()
            access.location = _location(device_index)
            flags = driver.CUmemAccess_flags
            access.flags = (
                flags.CU_MEM_ACCESS_FLAGS_PROT_READ if is_read_only else flags.CU_MEM_ACCESS_FLAGS_PROT_READWRITE
            )
            check("cuMemSetAccess", driver.cuMemSetAccess(address, mapped_bytes, [access], 1))
        except TransportError:
            driver.cuMemUnmap(address, mapped_bytes)
            raise
    except TransportError:
        driver.cuMemAddressFree(address, mapped_bytes)
        raise
    return address


def _unmap(address: int, mapped_bytes: int) -> None:
    driver = cuda()
    check("cuMemUnmap", driver.cuMemUnmap(address, mapped_bytes))
    check("cuMemAddressFree", driver.cuMemAddressFree(address, mapped_bytes))


@contextlib.contextmanager
def _refusing(what: str) -> Iterator[None]:
    """What CUDA refuses in here is a hand-off that failed."""
    try:
        yield
    except TransportError as error:
        raise HandoffError(f"{what}: {error}; {_ANOTHER_WAY}") from error
