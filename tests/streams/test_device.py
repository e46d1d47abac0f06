"""Pools of a GPU that are mapped from other processes, against a driver that keeps account of what is mapped."""

from __future__ import annotations

import ctypes
from types import SimpleNamespace

import pytest

from kvxfer.errors import ContractError, HandoffError
from kvxfer.streams import device, driver
from kvxfer.streams.device import IPC_HANDLE_BYTES, PoolHandle, map_pool
from tests.streams.fake_cuda import OK, CUresult, FakeCuda

READ, READWRITE = 1, 3
ALLOCATION, ADDRESS = 77, 1 << 30
UUIDS = ["ab" * 16, "cd" * 16, "ef" * 16]
HANDLE = PoolHandle(UUIDS[0], 1000, 0, 4096, 1)
LEGACY = PoolHandle(UUIDS[0], 1000, 256, 4096, 1, b"h" * IPC_HANDLE_BYTES)


class IpcHandle:
    def __init__(self) -> None:
        self.contents = ctypes.create_string_buffer(IPC_HANDLE_BYTES)

    def getPtr(self) -> int:
        return ctypes.addressof(self.contents)


class FakeMemory(FakeCuda):
    """Memory of GPU 0 among three, of which 0 and 1 reach each other: one allocation, which `refused` access flags
    cannot map. Contexts are numbered like their GPUs."""

    CUmemAllocationHandleType = SimpleNamespace(CU_MEM_HANDLE_TYPE_POSIX_FILE_DESCRIPTOR=1)
    CUmemLocationType = SimpleNamespace(CU_MEM_LOCATION_TYPE_DEVICE=1)
    CUmemAccess_flags = SimpleNamespace(
        CU_MEM_ACCESS_FLAGS_PROT_READ=READ, CU_MEM_ACCESS_FLAGS_PROT_READWRITE=READWRITE
    )
    CUmemLocation = CUmemAccessDesc = SimpleNamespace
    CUipcMemHandle = IpcHandle

    def __init__(self, *refused: int) -> None:
        super().__init__()
        self.refused = refused
        self.held: list[str] = []
        self.access: int | None = None
        self.reader: int | None = None
        self.contexts: list[int] = []

    def cuDeviceGetCount(self) -> tuple[int, int]:
        return 0, len(UUIDS)

    def cuDeviceGet(self, device_index: int) -> tuple[int, int]:
        return 0, device_index

    def cuDeviceGetUuid(self, device: int) -> tuple[int, SimpleNamespace]:
        return 0, SimpleNamespace(bytes=bytes.fromhex(UUIDS[device]))

    def cuDeviceCanAccessPeer(self, reader: int, owner: int) -> tuple[int, int]:
        assert reader != owner
        return 0, int({reader, owner} == {0, 1})

    def cuDevicePrimaryCtxRetain(self, device: int) -> tuple[int, int]:
        self.contexts.append(device)
        return 0, device

    def cuCtxPushCurrent(self, context: int) -> tuple[int, ...]:
        self.current = context
        return OK

    def cuCtxPopCurrent(self) -> tuple[int, int]:
        return 0, self.current

    def cuIpcOpenMemHandle(self, handle: IpcHandle, flags: int) -> tuple[int, int]:
        assert (handle.contents.raw, flags) == (LEGACY.ipc, 1)
        self.reader = self.current
        return self._take("opened", ADDRESS)

    def cuIpcCloseMemHandle(self, address: int) -> tuple[int]:
        assert (address, self.current) == (ADDRESS, self.reader)
        return self._leave("opened")

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
        assert access[0].location.type == 1
        self.access, self.reader = access[0].flags, access[0].location.id
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


def install(cuda: FakeMemory, monkeypatch: pytest.MonkeyPatch) -> None:
    for module in (driver, device):
        monkeypatch.setattr(module, "cuda", lambda: cuda)
        monkeypatch.setattr(module, "gpu", driver.Gpu)


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


def test_a_pool_that_cannot_be_mapped_leaves_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    cuda = FakeMemory(READ, READWRITE)
    install(cuda, monkeypatch)
    with pytest.raises(HandoffError, match="cuMemSetAccess: got CUDA_ERROR_INVALID_VALUE"):
        map_pool(HANDLE, 5, is_read_only=True)
    assert cuda.held == []


@pytest.mark.parametrize(
    ("handle", "fd", "held"), [(HANDLE, 5, ["imported", "reserved", "mapped"]), (LEGACY, None, ["opened"])]
)
@pytest.mark.parametrize("reader", [None, 0, 1])
def test_a_pool_is_mapped_for_the_gpu_that_reads_it(
    handle: PoolHandle, fd: int | None, held: list[str], reader: int | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Only that GPU gets leave to use it, and a context; what torch would take for its own is no tensor."""
    cuda = FakeMemory()
    install(cuda, monkeypatch)
    mapped = map_pool(handle, fd, device_index=reader)
    assert cuda.held == held
    assert (cuda.reader, cuda.contexts) == (reader or 0, [reader or 0])
    assert (mapped.pool.address, mapped.pool.device_index) == (ADDRESS + handle.offset_bytes, reader or 0)
    if reader == 1:
        with pytest.raises(ContractError, match=r"got memory of GPU (ab)+, expected that of cuda:1"):
            mapped.tensor()
    mapped.close()
    assert cuda.held == []


@pytest.mark.parametrize(("handle", "fd"), [(HANDLE, 5), (LEGACY, None)])
def test_a_pool_of_a_gpu_that_is_no_peer_is_refused(
    handle: PoolHandle, fd: int | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    cuda = FakeMemory()
    install(cuda, monkeypatch)
    with pytest.raises(
        HandoffError, match=r"got memory of GPU (ab)+, expected some that GPU (ef)+ reaches.*no peer access"
    ):
        map_pool(handle, fd, device_index=2)
    assert (cuda.held, cuda.contexts) == ([], [2])
