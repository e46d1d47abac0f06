"""A fake GPU whose memory has legacy handles: whoever opens one sees the memory itself."""

from __future__ import annotations

import ctypes
from collections.abc import Iterator
from contextlib import contextmanager
from types import SimpleNamespace
from typing import Final

import pytest

from kvxfer import slot_memory
from kvxfer.streams import device, driver, legacy
from kvxfer.transports import _loopback_gpu
from tests.streams.fake_cuda import OK, CUresult, FakeCuda

UUID = "ab" * 16
IPC_HANDLE_BYTES = 64


class Handle:
    """64 bytes; here they begin with the address."""

    def __init__(self) -> None:
        self._bytes = ctypes.create_string_buffer(IPC_HANDLE_BYTES)

    def getPtr(self) -> int:
        return ctypes.addressof(self._bytes)

    @property
    def address(self) -> int:
        return ctypes.c_int64.from_buffer(self._bytes).value

    @address.setter
    def address(self, value: int) -> None:
        ctypes.c_int64.from_buffer(self._bytes).value = value


class FakeIpc(FakeCuda):
    """`opened` are the addresses that somebody has mapped, once for each time."""

    CUpointer_attribute = SimpleNamespace(CU_POINTER_ATTRIBUTE_IS_LEGACY_CUDA_IPC_CAPABLE=29)
    CUipcMemHandle: Final = Handle

    CUflushGPUDirectRDMAWritesTarget = SimpleNamespace(CU_FLUSH_GPU_DIRECT_RDMA_WRITES_TARGET_CURRENT_CTX=0)
    CUflushGPUDirectRDMAWritesScope = SimpleNamespace(CU_FLUSH_GPU_DIRECT_RDMA_WRITES_TO_OWNER=100)

    def __init__(self, writes_ordering: int = 200) -> None:
        """`writes_ordering`: how far the GPU sees in order what network adapters write to it."""
        super().__init__()
        self.opened: list[int] = []
        self.pools: dict[int, int] = {}
        """Memory of others that has a handle: bytes, by address."""
        self._kept: list[object] = []  # as long as somebody may still have it mapped
        self.num_flushes = 0
        self.CUdevice_attribute = SimpleNamespace(
            **vars(FakeCuda.CUdevice_attribute),
            CU_DEVICE_ATTRIBUTE_GPU_DIRECT_RDMA_SUPPORTED=1,
            CU_DEVICE_ATTRIBUTE_GPU_DIRECT_RDMA_WRITES_ORDERING=writes_ordering,
        )

    def cuFlushGPUDirectRDMAWrites(self, target: int, scope: int) -> tuple[int, ...]:
        assert self._depth
        assert (target, scope) == (0, 100)
        self.num_flushes += 1
        return OK

    def cuDeviceGetCount(self) -> tuple[int, int]:
        return 0, 1

    def cuDeviceGetUuid(self, _device: int) -> tuple[int, SimpleNamespace]:
        return 0, SimpleNamespace(bytes=bytes.fromhex(UUID))

    def cuPointerGetAttribute(self, attribute: int, address: int) -> tuple[int, int]:
        assert attribute == 29
        return 0, int(address in self.scratch)

    def cuMemGetAddressRange(self, address: int) -> tuple[int, int, int]:
        return 0, address, len(self.scratch[address])

    def cuIpcGetMemHandle(self, address: int) -> tuple[int, Handle]:
        handle = Handle()
        handle.address = address
        return 0, handle

    def cuIpcOpenMemHandle(self, handle: Handle, _flags: int) -> tuple[int, ...]:
        assert self._depth
        if handle.address not in self.scratch.keys() | self.pools.keys():
            return (CUresult.CUDA_ERROR_INVALID_VALUE,)
        self.opened.append(handle.address)
        return 0, handle.address

    def cuMemFree(self, address: int) -> tuple[int, ...]:
        if address in self.opened:
            self._kept.append(self.scratch[address])
        return super().cuMemFree(address)

    def cuIpcCloseMemHandle(self, address: int) -> tuple[int, ...]:
        self.opened.remove(address)
        return OK

    def cuMemcpyDtoDAsync(self, dst: int, src: int, num_bytes: int, stream: int) -> tuple[int, ...]:
        self._check_block(dst, num_bytes)
        self._check_block(src, num_bytes)
        return self._copy(dst, src, num_bytes, stream)

    def _check_block(self, address: int, num_bytes: int) -> None:
        if not any(first <= address <= address + num_bytes <= first + size for first, size in self.pools.items()):
            super()._check_block(address, num_bytes)

    @staticmethod
    def bytes_at(address: int, num_bytes: int) -> ctypes.Array[ctypes.c_uint8]:
        """What lies there, to be read and written."""
        return (ctypes.c_uint8 * num_bytes).from_address(address)


@contextmanager
def installed(made: FakeIpc, monkeypatch: pytest.MonkeyPatch) -> Iterator[FakeIpc]:
    """Have slots and loopback use `made`."""
    for module in (driver, device, legacy, _loopback_gpu):
        monkeypatch.setattr(module, "cuda", lambda: made)
    driver.gpu.cache_clear()
    monkeypatch.setattr(slot_memory, "PROBE_BYTES", 4096)
    yield made
    made.cuStreamDestroy(0)
    driver.gpu.cache_clear()
