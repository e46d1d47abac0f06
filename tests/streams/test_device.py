"""Pools of a GPU that are mapped from other processes, against a driver that keeps account of what is mapped."""

from __future__ import annotations

from types import SimpleNamespace

import pytest

from kvxfer.errors import HandoffError
from kvxfer.streams import device, driver
from kvxfer.streams.device import PoolHandle, map_pool
from tests.streams.fake_cuda import CUresult, FakeCuda

READ, READWRITE = 1, 3
ALLOCATION, ADDRESS = 77, 1 << 30
HANDLE = PoolHandle("ab" * 16, 1000, 0, 4096, 1)


class FakeMemory(FakeCuda):
    """Virtual memory of a GPU: one allocation, which `refused` access flags cannot map."""

    CUmemAllocationHandleType = SimpleNamespace(CU_MEM_HANDLE_TYPE_POSIX_FILE_DESCRIPTOR=1)
    CUmemLocationType = SimpleNamespace(CU_MEM_LOCATION_TYPE_DEVICE=1)
    CUmemAccess_flags = SimpleNamespace(
        CU_MEM_ACCESS_FLAGS_PROT_READ=READ, CU_MEM_ACCESS_FLAGS_PROT_READWRITE=READWRITE
    )
    CUmemLocation = CUmemAccessDesc = SimpleNamespace

    def __init__(self, *refused: int) -> None:
        super().__init__()
        self.refused = refused
        self.held: list[str] = []
        self.access: int | None = None

    def cuDeviceGetCount(self) -> tuple[int, int]:
        return 0, 1

    def cuDeviceGetUuid(self, _device: int) -> tuple[int, SimpleNamespace]:
        return 0, SimpleNamespace(bytes=bytes.fromhex(HANDLE.gpu_uuid))

    def cuMemImportFromShareableHandle(self, fd: int, kind: int) -> tuple[int, int]:
        assert (fd, kind) == (5, 1)
        return self._take("imported", ALLOCATION)

    def cuMemAddressReserve(self, num_bytes: int, *rest: int) -> tuple[int, int]:
        assert (num_bytes, *rest) == (4096, 0, 0, 0)
        return self._take("reserved", ADDRESS)

    def cuMemMap(self, *arguments: int) -> tuple[int, ...]:
        assert arguments == (ADDRESS, 4096, 0, ALLOCATION, 0)
        return self._take("mapped", 0)[:1]

    def cuMemSetAccess(self, address: int, num_bytes: int, access: list[SimpleNamespace], count: int) -> tuple[int]:
        assert (address, num_bytes, len(access), count) == (ADDRESS, 4096, 1, 1)
        if access[0].flags in self.refused:
            return (CUresult.CUDA_ERROR_INVALID_VALUE,)
        self.access = access[0].flags
        return (0,)

    def cuMemUnmap(self, *_arguments: int) -> tuple[int]:
        return self._leave("mapped")

    def cuMemAddressFree(self, *_arguments: int) -> tuple[int]:
        return self._leave("reserved")

    def cuMemRelease(self, _allocation: int) -> tuple[int]:
        return self._leave("imported")

    def _take(self, what: str, value: int) -> tuple[int, int]:
        self.held.append(what)
        return 0, value

    def _leave(self, what: str) -> tuple[int]:
        self.held.remove(what)
        return (0,)


class TwoGpus(FakeMemory):
    """A second GPU, which has no memory of its own here."""

    def __init__(self, *, have_peer_access: bool) -> None:
        super().__init__()
        self.have_peer_access = have_peer_access
        self.user: int | None = None

    def cuDeviceGet(self, device_index: int) -> tuple[int, int]:
        return 0, device_index

    def cuDeviceGetCount(self) -> tuple[int, int]:
        return 0, 2

    def cuDeviceGetUuid(self, device: int) -> tuple[int, SimpleNamespace]:
        return 0, SimpleNamespace(bytes=bytes.fromhex(("cd" * 16, HANDLE.gpu_uuid)[device]))

    def cuDeviceCanAccessPeer(self, user: int, owner: int) -> tuple[int, int]:
        assert (user, owner) == (0, 1)
        return 0, int(self.have_peer_access)

    def cuMemSetAccess(self, address: int, num_bytes: int, access: list[SimpleNamespace], count: int) -> tuple[int]:
        self.user = access[0].location.id
        return super().cuMemSetAccess(address, num_bytes, access, count)


def install(cuda: FakeMemory, monkeypatch: pytest.MonkeyPatch) -> None:
    for module in (driver, device):
        monkeypatch.setattr(module, "cuda", lambda: cuda)
    gpu = driver.Gpu(0)
    for module in (driver, device):
        monkeypatch.setattr(module, "gpu", lambda _device_index: gpu)


@pytest.mark.parametrize(
    ("is_read_only", "refused", "access"), [(False, (), READWRITE), (True, (), READ), (True, (READ,), READWRITE)]
)
def test_a_pool_to_pull_from_is_mapped_without_leave_to_write_where_that_can_be(
    is_read_only: bool, refused: tuple[int, ...], access: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    cuda = FakeMemory(*refused)
    install(cuda, monkeypatch)
    mapped = map_pool(HANDLE, 5, is_read_only=is_read_only)
    assert cuda.access == access
    assert mapped.is_read_only == (access == READ)
    assert (mapped.pool.address, mapped.pool.num_bytes) == (ADDRESS, 1000)
    assert cuda.held == ["imported", "reserved", "mapped"]
    mapped.close()
    assert cuda.held == []


def test_memory_of_another_gpu_is_mapped_for_the_one_that_pulls(monkeypatch: pytest.MonkeyPatch) -> None:
    cuda = TwoGpus(have_peer_access=True)
    install(cuda, monkeypatch)
    mapped = map_pool(HANDLE, 5, device_index=0)
    assert (cuda.user, mapped.pool.device_index) == (0, 0)
    mapped.close()
    assert cuda.held == []


def test_memory_of_a_gpu_without_peer_access_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    cuda = TwoGpus(have_peer_access=False)
    install(cuda, monkeypatch)
    with pytest.raises(HandoffError, match=f"memory of GPU {HANDLE.gpu_uuid}, expected .* no peer access"):
        map_pool(HANDLE, 5, device_index=0)
    assert cuda.held == []


def test_a_pool_that_cannot_be_mapped_leaves_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    cuda = FakeMemory(READ, READWRITE)
    install(cuda, monkeypatch)
    with pytest.raises(HandoffError, match="cuMemSetAccess: got CUDA_ERROR_INVALID_VALUE"):
        map_pool(HANDLE, 5, is_read_only=True)
    assert cuda.held == []
