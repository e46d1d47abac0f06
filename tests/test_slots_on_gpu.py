"""Slots on a GPU, by a driver whose GPU is host memory: where they lie, who maps them, when they are given back."""

from __future__ import annotations

import os
import select
import socket
import time
from collections.abc import Iterator
from pathlib import Path

import msgspec
import numpy as np
import numpy.typing as npt
import pytest

from kvxfer.control.client_link import _open_stream
from kvxfer.control.handoff import StreamMemory
from kvxfer.control.handoff_listener import HandoffListener
from kvxfer.control.shared_memory import SharedMemory, attach, share
from kvxfer.errors import (
    BoundsError,
    ConfigError,
    EngineMissingError,
    HandoffError,
    PeerLostError,
    ProtocolError,
    RegistrationError,
    TransportError,
)
from kvxfer.memory import HostMemory
from kvxfer.ops.config import SlotConfig
from kvxfer.slot_memory import SlotMemory
from kvxfer.streams.device import MappedPool, PoolHandle
from kvxfer.streams.legacy import allocate_legacy
from kvxfer.streams.ring import Ring
from kvxfer.transports import Completion, MemoryKind, Outcome, Region, RegionDescriptor, WriteBatch, create_transport
from kvxfer.transports._metadata import decode_metadata
from kvxfer.transports.loopback import LoopbackTransport
from kvxfer.transports.loopback_options import LoopbackFaults, LoopbackOptions
from tests.control.pools import OFFER, client_of, expect_refusal
from tests.idle_agent import IdleAgent
from tests.streams.fake_cuda import CUresult
from tests.streams.fake_ipc import UUID, FakeIpc, installed

CONFIG = SlotConfig(kind="device", num_slots=2, slot_bytes=8192)
NUM_BYTES = 2 * 8192 + 4096
HANDLE = PoolHandle(UUID, NUM_BYTES, 0, NUM_BYTES, 1, bytes(64))


@pytest.fixture
def cuda(monkeypatch: pytest.MonkeyPatch) -> Iterator[FakeIpc]:
    with installed(FakeIpc(), monkeypatch) as made:
        yield made
        assert (made.scratch, made.opened, made.num_events) == ({}, [], 0), "something was not given back"


def test_slots_are_memory_of_the_gpu_that_is_named(cuda: FakeIpc) -> None:
    dashed = f"GPU-{UUID[:8]}-{UUID[8:12]}-{UUID[12:16]}-{UUID[16:20]}-{UUID[20:]}"
    for named in (0, UUID, dashed, dashed.upper().replace("GPU-", "")):
        slots = SlotMemory.at_start(msgspec.structs.replace(CONFIG, gpu=named))
        assert slots.is_on_gpu
        region = slots.region
        assert (region.kind, region.device_index, region.num_bytes) == (MemoryKind.DEVICE, 0, NUM_BYTES)
        assert list(cuda.scratch) == [region.address]
        assert (slots.address(1), slots.probe_address) == (region.address + 8192, region.address + 2 * 8192)
        shared, fds = share(slots.memory)
        assert (shared.num_bytes, shared.gpu, fds) == (NUM_BYTES, region.handle, [])
        assert not slots.leave(), "an engine may still reach it"
        slots.close()
        slots.close()
        assert cuda.scratch == {}


def test_what_the_gpu_has_not_is_an_error_of_the_configuration(cuda: FakeIpc) -> None:
    with pytest.raises(
        ConfigError, match=r"^slots.gpu: got 11111111222233334444555555555555, expected a GPU that this"
    ):
        SlotMemory.at_start(msgspec.structs.replace(CONFIG, gpu="11111111222233334444555555555555"))
    with pytest.raises(ConfigError, match=r"on GPU 7, .*CUDA_ERROR_INVALID_DEVICE.*names no GPU.*pinned_host"):
        SlotMemory.at_start(msgspec.structs.replace(CONFIG, gpu=7))
    with pytest.raises(ConfigError, match=r"slots.slot_bytes: got 5000 .*expected a multiple of 16"):
        SlotMemory.at_start(msgspec.structs.replace(CONFIG, slot_bytes=5000))
    cuda.fail("cuIpcGetMemHandle", CUresult.CUDA_ERROR_INVALID_VALUE)
    with pytest.raises(ConfigError, match="cuIpcGetMemHandle"):
        SlotMemory.at_start(CONFIG)
    assert cuda.scratch == {}
    cuda.fail("cuMemAlloc", CUresult.CUDA_ERROR_OUT_OF_MEMORY)
    with pytest.raises(ConfigError, match=r"got 2 slots of 8192 bytes.*no memory left.*pinned_host"):
        SlotMemory.at_start(CONFIG)


@pytest.mark.parametrize(("writes_ordering", "num_flushes"), [(0, 1), (100, 0), (200, 0)])
def test_a_gpu_is_told_to_look_at_what_adapters_have_written(
    writes_ordering: int, num_flushes: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    with installed(FakeIpc(writes_ordering), monkeypatch) as made:
        slots = SlotMemory(CONFIG)
        slots.flush()
        assert made.num_flushes == num_flushes
        slots.close()
    on_host = SlotMemory(SlotConfig(num_slots=1, slot_bytes=4096))
    on_host.flush()
    on_host.close()


@pytest.mark.skipif(Path("/dev/nvidiactl").exists(), reason="needs a host without CUDA")
def test_without_cuda_the_remedy_is_named() -> None:
    with pytest.raises(
        EngineMissingError, match=r'^slots.kind: got "device", which needs CUDA: .*or let them lie in host'
    ):
        SlotMemory.at_start(CONFIG)
    with pytest.raises(HandoffError, match=r"^slots: got memory of a GPU, which this process cannot reach: "):
        attach(SharedMemory(num_bytes=NUM_BYTES, gpu=HANDLE), [], "slots")


def test_engines_without_a_gpu_refuse_it() -> None:
    with pytest.raises(ConfigError, match=r'slots.kind: got "device" with transport mooncake, expected "pinned_host"'):
        create_transport("mooncake", incarnation="me", gpu_index=0)
    transport = LoopbackTransport()
    with pytest.raises(RegistrationError, match="got device memory, expected one of: host"):
        transport.register(Region(4096, NUM_BYTES, kind=MemoryKind.DEVICE))
    transport.close()


# ---- who maps them ----


@pytest.mark.usefixtures("cuda")
def test_pools_in_host_memory_are_refused(tmp_path: Path) -> None:
    listener = HandoffListener(tmp_path, has_gpu_slots=True)
    with client_of(tmp_path) as client:
        pool = HostMemory.create(8192, "pool")
        socket.send_fds(client, [OFFER], [pool.fd])
        expect_refusal(listener, client, "pool: got one in host memory, expected one on a GPU, where the slots")
        pool.close()
    listener.close()
    ring, slots = Ring.create(1, 16), SlotMemory(CONFIG)
    assert isinstance(slots.memory, MappedPool)
    with pytest.raises(
        HandoffError, match=r'expected host memory for a pool in host memory: set slots.kind = "pinned_'
    ):
        _open_stream(HostMemory.create(8192, "pool"), StreamMemory(ring, slots.memory), is_prefill=True)
    ring.close()
    slots.close()


# ---- slots that move ----


def test_old_memory_waits_for_a_new_engine(cuda: FakeIpc, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    agent = IdleAgent(tmp_path / "agent", slots=CONFIG)
    sidecar = agent.sidecar
    first = sidecar.slots.address(0)
    sidecar.renew_slots()
    assert sidecar.must_rotate
    assert set(cuda.scratch) == {first, sidecar.slots.address(0)}
    assert sidecar.region.region_id == 2
    rotate = sidecar.transport.rotate

    def refuse() -> None:
        raise TransportError("no engine to be had")

    monkeypatch.setattr(sidecar.transport, "rotate", refuse)
    for do in (sidecar.rotate, sidecar.renew_slots):  # never more than one memory beside the slots
        with pytest.raises(TransportError, match="no engine"):
            do()
    assert len(cuda.scratch) == 2
    monkeypatch.setattr(sidecar.transport, "rotate", rotate)
    sidecar.rotate()
    assert list(cuda.scratch) == [sidecar.slots.address(0)]
    assert not sidecar.must_rotate
    sidecar.renew_slots()
    agent.end()  # gives back what still waits


# ---- loopback ----


class Pair:
    """A writer and a target, both in this process, with slots on the GPU."""

    def __init__(self, options: LoopbackOptions | None = None) -> None:
        self.slots = [SlotMemory(CONFIG) for _ in range(2)]
        self.writer, self.target = LoopbackTransport(options, 0), LoopbackTransport(None, 0)
        # Handles of the own process are refused: they pretend to be of another.
        for transport, slots in zip((self.writer, self.target), self.slots, strict=True):
            assert slots.region.handle is not None
            handle = msgspec.structs.replace(slots.region.handle, pid=1)
            transport.register(Region(slots.region.address, NUM_BYTES, kind=MemoryKind.DEVICE, handle=handle))
        self.writer.add_peer("target", self.target.metadata())

    def write(self, *entries: tuple[int, int, int]) -> int:
        src, dst, lengths = (np.array(column, dtype=np.uint64) for column in zip(*entries, strict=True))
        src += np.uint64(self.slots[0].address(0))
        return self.writer.submit_write("target", WriteBatch(RegionDescriptor(1, NUM_BYTES), src, dst, lengths))

    def ends(self, count: int) -> list[Completion]:
        found: list[Completion] = []
        while len(found) < count:
            assert select.select([self.writer.fileno()], [], [], 5.0)[0], "a write that does not end"
            found += self.writer.poll()
        return found

    def bytes(self, which: int) -> npt.NDArray[np.uint8]:
        address = self.slots[which].address(0)
        return np.ctypeslib.as_array(FakeIpc.bytes_at(address, NUM_BYTES))

    def close(self) -> None:
        self.writer.close()
        self.target.close()
        for slots in self.slots:
            slots.close()


def test_the_gpu_copies_at_the_pace_of_the_wire(cuda: FakeIpc) -> None:
    pair = Pair(LoopbackOptions(wire_bytes_per_s=1e6))
    pair.bytes(0)[:] = np.random.default_rng(1).integers(1, 256, NUM_BYTES)
    began_s = time.monotonic()
    ids = [pair.write((3, 5, 1), (100, 8192, 8192)), pair.write((0, 17000, 577)), pair.write((0, 0, 0))]
    ends = pair.ends(3)
    assert time.monotonic() - began_s >= 8770e-6
    assert [(end.write_id, end.outcome) for end in ends] == [(each, Outcome.DONE) for each in ids]
    expected = np.zeros(NUM_BYTES, dtype=np.uint8)
    for src, dst, length in ((3, 5, 1), (100, 8192, 8192), (0, 17000, 577)):
        expected[dst : dst + length] = pair.bytes(0)[src : src + length]
    assert (pair.bytes(1) == expected).all()
    assert pair.writer.counters.num_bytes == 8770
    assert cuda.num_events == 3
    pair.write((0, 0, 1))
    pair.ends(1)
    assert cuda.num_events == 3, "events are used again"
    pair.close()


def test_a_peer_that_is_dropped_is_written_no_more_and_unmapped(cuda: FakeIpc) -> None:
    pair = Pair(LoopbackOptions(wire_bytes_per_s=1e3))
    late = pair.write((0, 0, 8192))
    assert cuda.opened == [pair.slots[1].address(0)]
    pair.writer.drop_peer("target")
    assert cuda.opened == []
    assert [(end.write_id, end.outcome) for end in pair.ends(1)] == [(late, Outcome.FAILED)]
    with pytest.raises(PeerLostError):
        pair.write((0, 0, 1))
    pair.close()


def test_a_copy_that_fails_ends_its_writes_alone(cuda: FakeIpc) -> None:
    pair = Pair()
    cuda.fail("cuMemcpyDtoDAsync", CUresult.CUDA_ERROR_INVALID_VALUE)
    pair.write((0, 0, 1))
    (end,) = pair.ends(1)
    assert end.outcome is Outcome.FAILED
    assert "cuMemcpyDtoDAsync: got CUDA_ERROR_INVALID_VALUE" in end.detail
    cuda.fail("cuMemcpyDtoDAsync", 0)
    pair.bytes(0)[7] = 42
    pair.write((7, 9, 1))
    assert pair.ends(1)[0].outcome is Outcome.DONE
    assert pair.bytes(1)[9] == 42
    cuda.fail("cuEventQuery", CUresult.CUDA_ERROR_INVALID_CONTEXT)
    pair.write((0, 0, 1))
    assert pair.ends(1)[0].outcome is Outcome.FAILED
    cuda.fail("cuEventQuery", 0)
    pair.write((0, 0, 1))
    assert pair.ends(1)[0].outcome is Outcome.DONE
    pair.close()


@pytest.mark.usefixtures("cuda")
def test_rows_are_copied_out_of_memory_of_others_as_well() -> None:
    """A pool that the agent has mapped: it has no handle to give out, and is a source alone."""
    pair = Pair()
    pool = allocate_legacy(64 << 10, 0)
    address = pool.pool.address
    rows = np.ctypeslib.as_array(FakeIpc.bytes_at(address, 64 << 10))
    rows[:] = np.random.default_rng(3).integers(1, 256, rows.size)
    own = pair.writer.register(Region(address, 64 << 10, kind=MemoryKind.DEVICE))
    assert [region.region_id for region in decode_metadata(pair.writer.metadata(), "loopback").regions] == [1]

    begin = pair.slots[0].address(0)
    pair.bytes(0)[:16] = 7
    # A row of 24 bytes of each 96 of the pool, last first, and at the end one of the slots.
    entries = [(address - begin + 96 * row, 24 * (599 - row), 24) for row in range(600)] + [(0, 24 * 600, 16)]
    write_id = pair.write(*entries)
    assert [(end.write_id, end.outcome) for end in pair.ends(1)] == [(write_id, Outcome.DONE)]
    assert (pair.bytes(1)[: 24 * 600].reshape(600, 24) == rows[: 96 * 600].reshape(600, 96)[::-1, :24]).all()
    assert (pair.bytes(1)[24 * 600 :][:16] == 7).all()
    assert (pair.writer.counters.num_descriptors, pair.writer.counters.num_bytes) == (601, 24 * 600 + 16)

    pair.writer.deregister(own)
    with pytest.raises(BoundsError, match="expected a range inside one registered region"):
        pair.write(entries[0])
    pool.close()
    pair.write((0, 0, 16))
    assert pair.ends(1)[0].outcome is Outcome.DONE
    pair.close()


def test_slots_of_different_kinds_are_refused(cuda: FakeIpc) -> None:
    pair, on_host = Pair(), LoopbackTransport()
    memory = HostMemory.create(8192, "slots")
    on_host.register(Region(memory.address, 8192, memory.fd))
    with pytest.raises(
        ProtocolError, match=r"slots.kind: got slots in memory of a GPU, and those of peer p in that of"
    ):
        pair.writer.add_peer("p", on_host.metadata())
    with pytest.raises(
        ProtocolError, match=r"slots.kind: got slots in memory of the host, and those of peer p in that"
    ):
        on_host.add_peer("p", pair.target.metadata())
    with pytest.raises(RegistrationError, match="got host memory, expected one of: device"):
        pair.writer.register(Region(memory.address, 8192, memory.fd))
    cuda.fail("cuIpcOpenMemHandle", CUresult.CUDA_ERROR_INVALID_VALUE)
    with pytest.raises(PeerLostError, match=r"peer p, region 1: .*cuIpcOpenMemHandle"):
        pair.writer.add_peer("p", pair.target.metadata())
    with pytest.raises(ConfigError, match=r"transport.options.faults: got some beside slots on a GPU"):
        LoopbackTransport(LoopbackOptions(LoopbackFaults(drop=1.0)), 0)
    on_host.close()
    pair.close()
    memory.close()


def test_nothing_is_left(cuda: FakeIpc) -> None:
    num_fds = len(os.listdir("/proc/self/fd"))
    for _ in range(2):
        pair = Pair()
        pair.write((0, 0, 8192))
        pair.close()
    assert len(os.listdir("/proc/self/fd")) == num_fds
    assert list(cuda.streams) == [0]
