"""Real agents with slots on a GPU, and workers with pools there, by a driver whose GPU is host memory."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import msgspec
import pytest

from kvxfer.control import shared_memory
from kvxfer.control.handoff_messages import PoolPlacement
from kvxfer.control.worker_stream import WorkerStream
from kvxfer.decode.agent import DecodeAgent
from kvxfer.memory import HostMemory
from kvxfer.ops.config import SlotConfig
from kvxfer.streams import cuda_marks, device, legacy
from kvxfer.streams.device import IPC_HANDLE_BYTES, DevicePool, PoolHandle
from kvxfer.streams.stream_mover import StreamMover
from kvxfer.transfer import EventKind
from kvxfer.transports import _loopback_gpu
from tests.agent_world import SLOT_BYTES, AgentWorld
from tests.idle_agent import until
from tests.streams.fake_ipc import UUID, FakeIpc
from tests.streams.installed_cuda import installed
from tests.test_agents import KV, STATE, Split, build
from tests.test_agents_streams import _in_loop

SLOTS = SlotConfig(kind="device", num_slots=4, slot_bytes=SLOT_BYTES)
PLACEMENTS: list[PoolPlacement] = ["worker", "agent"]


def _share(pool: DevicePool) -> PoolHandle:
    """Of a pool that is memory of the tests; as if another process had it."""
    ipc = pool.address.to_bytes(IPC_HANDLE_BYTES, "little")
    return PoolHandle(UUID, pool.num_bytes, 0, pool.num_bytes, 1, ipc)


@contextmanager
def as_if_apart(monkeypatch: pytest.MonkeyPatch) -> Iterator[FakeIpc]:
    """The driver's GPU; what agents and workers share in this process counts as another process's."""
    made = FakeIpc()
    with installed(made, monkeypatch):
        for module in (device, legacy, _loopback_gpu):
            monkeypatch.setattr(module, "cuda", lambda: made)
        share = device.share_legacy
        monkeypatch.setattr(legacy, "share_legacy", lambda pool: msgspec.structs.replace(share(pool), pid=1))
        monkeypatch.setattr(shared_memory, "share_legacy", _share)
        monkeypatch.setattr(cuda_marks, "_stream_handle", lambda stream, _device_index: stream or 0)
        yield made
        assert (made.scratch, made.opened, made.registered) == ({}, [], {})
        assert list(made.streams) == [0]


@pytest.fixture
def cuda(monkeypatch: pytest.MonkeyPatch) -> Iterator[FakeIpc]:
    with as_if_apart(monkeypatch) as made:
        yield made


def world_of(path: Path, cuda: FakeIpc, placement: PoolPlacement) -> AgentWorld:
    world = AgentWorld(path, placement=placement)

    def as_handed(memory: HostMemory) -> DevicePool:
        cuda.pools[memory.address] = memory.num_bytes
        return DevicePool(memory.address, memory.num_bytes, 0)

    world.as_handed = as_handed
    return world


@pytest.mark.parametrize("verify", ["off", "full"])
@pytest.mark.parametrize("placement", PLACEMENTS)
def test_rows_arrive(tmp_path: Path, cuda: FakeIpc, placement: PoolPlacement, verify: str) -> None:
    with world_of(tmp_path, cuda, placement) as world:
        split = Split(specs=(KV, STATE))
        world.start_prefill("p0", slots=SLOTS)
        world.join_prefill("p0", split.sources()[0])
        world.start_decode("d0", slots=SLOTS, verify=verify)
        world.join_decode("d0", split.target(0))
        world.move(37, chunk_tokens=11)
        world.move(37, salt=3)


@pytest.mark.parametrize("placement", PLACEMENTS)
def test_landing_slots_move(tmp_path: Path, cuda: FakeIpc, placement: PoolPlacement) -> None:
    with world_of(tmp_path, cuda, placement) as world:
        build(world, Split(dst_size=2), slots=SLOTS)
        world.move(40, chunk_tokens=15)
        agent = world.threads[tmp_path / "d1"].agent
        assert isinstance(agent, DecodeAgent)
        for salt in (1, 2):
            old = agent._sidecar.slots.address(0)
            _in_loop(agent, "_renew_slots")
            assert old not in cuda.scratch, "memory that the slots have left is kept"
            world.move(40, salt=salt)
        assert agent._sidecar.slots.move == 2


def test_what_a_killed_worker_still_writes_reaches_no_slot(
    tmp_path: Path, cuda: FakeIpc, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(WorkerStream, "_watch", lambda *_: None)  # nobody is left to look
    with world_of(tmp_path, cuda, "worker") as world:
        split = Split()
        agent = world.start_prefill("p0", slots=SLOTS)
        others = set(cuda.streams)
        world.join_prefill("p0", split.sources()[0])
        streams = [stream for handle, stream in cuda.streams.items() if handle not in others]
        world.start_decode("d0", slots=SLOTS)
        world.join_decode("d0", split.target(0))
        world.move(10)
        request = world.begin(5, salt=77)
        until(lambda: bool(agent._core.transfers[request.ticket.transfer].legs))
        go_on = threading.Event()
        for stream in streams:
            stream.push(go_on.is_set)
        world.submit(request, 0, 5)
        rows = agent._sidecar.rows
        assert isinstance(rows, StreamMover)
        until(lambda: bool(rows._entries.is_any_running))  # an order that the stream has not come to
        old = agent._sidecar.slots.address(0)
        _, killed = world.prefill.pop()
        killed._link.handoff.close()
        assert world.wait(world.decode[0][1], request).event is EventKind.FAILED
        until(lambda: agent._sidecar.slots.move == 1)
        assert agent._sidecar.slots.address(0) != old
        go_on.set()
        world.join_prefill("p0", split.sources()[0])
        world.move(40, salt=3)
