"""A fake GPU that also has memory with descriptors: each allocation is a memfd, and whoever maps it sees its bytes."""

from __future__ import annotations

import ctypes
import mmap
import os
from types import SimpleNamespace

from tests.streams.fake_cuda import OK, CUresult
from tests.streams.fake_ipc import FakeIpc

_GRANULE_BYTES = 2 << 20
_MAP_FIXED = 0x10
_FAILED = (1 << 64) - 1
_libc = ctypes.CDLL(None, use_errno=True)
_libc.mmap.restype = ctypes.c_uint64
_libc.mmap.argtypes = [ctypes.c_uint64, ctypes.c_size_t, ctypes.c_int, ctypes.c_int, ctypes.c_int, ctypes.c_long]
_libc.munmap.argtypes = [ctypes.c_uint64, ctypes.c_size_t]


def _mmap(address: int, num_bytes: int, access: int, flags: int, fd: int) -> int:
    mapped: int = _libc.mmap(address, num_bytes, access, flags, fd, 0)
    assert mapped != _FAILED, os.strerror(ctypes.get_errno())
    return mapped


class FakeVmm(FakeIpc):
    """`held` are the descriptors of allocations that were made or imported and not released, `mapped` the addresses
    at which somebody has one mapped."""

    CUmemAllocationType = SimpleNamespace(CU_MEM_ALLOCATION_TYPE_PINNED=1)
    CUmemAllocationHandleType = SimpleNamespace(CU_MEM_HANDLE_TYPE_POSIX_FILE_DESCRIPTOR=1)
    CUmemAllocationGranularity_flags = SimpleNamespace(CU_MEM_ALLOC_GRANULARITY_MINIMUM=0)
    CUmemLocationType = SimpleNamespace(CU_MEM_LOCATION_TYPE_DEVICE=1)
    CUmemAccess_flags = SimpleNamespace(CU_MEM_ACCESS_FLAGS_PROT_READ=1, CU_MEM_ACCESS_FLAGS_PROT_READWRITE=3)
    CUmemLocation = CUmemAccessDesc = SimpleNamespace

    def __init__(self) -> None:
        super().__init__()
        self.held: list[int] = []
        self.mapped: dict[int, int] = {}  # bytes, by address
        self.CUdevice_attribute.CU_DEVICE_ATTRIBUTE_GPU_DIRECT_RDMA_WITH_CUDA_VMM_SUPPORTED = 1

    @staticmethod
    def CUmemAllocationProp() -> SimpleNamespace:
        return SimpleNamespace(allocFlags=SimpleNamespace())

    def cuPointerGetAttribute(self, attribute: int, address: int) -> tuple[int, int]:
        return (0, 0) if address in self.mapped else super().cuPointerGetAttribute(attribute, address)

    def cuMemGetAllocationGranularity(self, _properties: SimpleNamespace, _flag: int) -> tuple[int, int]:
        return 0, _GRANULE_BYTES

    def cuMemCreate(self, num_bytes: int, properties: SimpleNamespace, flags: int) -> tuple[int, int]:
        assert self._depth
        assert (num_bytes % _GRANULE_BYTES, flags, properties.allocFlags.gpuDirectRDMACapable) == (0, 0, 1)
        fd = os.memfd_create("fake-vmm")
        os.ftruncate(fd, num_bytes)
        self.held.append(fd)
        return 0, fd

    def cuMemExportToShareableHandle(self, allocation: int, kind: int, flags: int) -> tuple[int, int]:
        assert (kind, flags, allocation in self.held) == (1, 0, True)
        return 0, os.dup(allocation)

    def cuMemImportFromShareableHandle(self, fd: int, _kind: int) -> tuple[int, ...]:
        assert self._depth
        if not os.readlink(f"/proc/self/fd/{fd}").startswith("/memfd:fake-vmm"):
            return (CUresult.CUDA_ERROR_INVALID_VALUE,)
        self.held.append(os.dup(fd))
        return 0, self.held[-1]

    def cuMemAddressReserve(self, num_bytes: int, *_rest: int) -> tuple[int, int]:
        return 0, _mmap(0, num_bytes, 0, mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS, -1)

    def cuMemMap(self, address: int, num_bytes: int, offset: int, allocation: int, flags: int) -> tuple[int, ...]:
        assert (offset, flags) == (0, 0)
        if os.fstat(allocation).st_size < num_bytes:
            return (CUresult.CUDA_ERROR_INVALID_VALUE,)
        _mmap(address, num_bytes, mmap.PROT_READ | mmap.PROT_WRITE, mmap.MAP_SHARED | _MAP_FIXED, allocation)
        self.mapped[address] = num_bytes
        self.scratch[address] = (ctypes.c_char * num_bytes).from_address(address)
        return OK

    def cuMemSetAccess(
        self, address: int, _num_bytes: int, access: list[SimpleNamespace], count: int
    ) -> tuple[int, ...]:
        assert (address in self.mapped, len(access), count) == (True, 1, 1)
        return OK

    def cuMemUnmap(self, address: int, num_bytes: int) -> tuple[int, ...]:
        assert self.mapped.pop(address) == num_bytes
        del self.scratch[address]
        flags = mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS | _MAP_FIXED
        _mmap(address, num_bytes, 0, flags, -1)
        return OK

    def cuMemAddressFree(self, address: int, num_bytes: int) -> tuple[int, ...]:
        assert _libc.munmap(address, num_bytes) == 0
        return OK

    def cuMemRelease(self, allocation: int) -> tuple[int, ...]:
        self.held.remove(allocation)
        os.close(allocation)
        return OK
