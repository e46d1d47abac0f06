"""Agents with slots on a GPU whose workers have the same process id, each as it sees its own, as process 1 of two
containers does: here worker and agent are one process. The driver's GPU is host memory."""

from __future__ import annotations

import logging
import os
from collections.abc import Iterator
from pathlib import Path

import msgspec
import pytest

from kvxfer.control import shared_memory
from kvxfer.control.client import PrefillClient
from kvxfer.decode.agent import DecodeAgent
from kvxfer.errors import HandoffError, PeerLostError, RefusedError
from kvxfer.sidecar import Sidecar
from kvxfer.slot_memory import SlotMemory
from kvxfer.streams import cuda_marks, device, legacy
from kvxfer.streams.device import DevicePool
from kvxfer.transports import _loopback_gpu, _loopback_peer
from kvxfer.transports._metadata import decode_metadata
from kvxfer.transports.base import MemoryKind
from kvxfer.transports.loopback import LoopbackTransport
from tests.agent_world import WAIT_S, AgentWorld
from tests.idle_agent import IdleAgent, until
from tests.streams.fake_cuda import CUresult
from tests.streams.fake_vmm import FakeVmm
from tests.streams.installed_cuda import installed
from tests.test_agents import KV, STATE, Split, build
from tests.test_agents_gpu_slots import SLOTS, _share, world_of
from tests.test_agents_streams import _in_loop


@pytest.fixture
def cuda(monkeypatch: pytest.MonkeyPatch) -> Iterator[FakeVmm]:
    made = FakeVmm()
    num_fds = len(os.listdir("/proc/self/fd"))
    with installed(made, monkeypatch):
        for module in (device, legacy, _loopback_gpu):
            monkeypatch.setattr(module, "cuda", lambda: made)
        monkeypatch.setattr(shared_memory, "share_legacy", _share)  # pools lie in host memory, as if of others
        monkeypatch.setattr(cuda_marks, "_stream_handle", lambda stream, _device_index: stream or 0)
        yield made
        assert (made.scratch, made.opened, made.registered, made.held) == ({}, [], {}, [])
    assert len(os.listdir("/proc/self/fd")) == num_fds


def _sidecars(world: AgentWorld) -> list[Sidecar]:
    return [thread.agent._sidecar for thread in world.threads.values()]


@pytest.mark.parametrize("verify", ["off", "full"])
def test_rows_arrive_by_slots_that_have_a_descriptor(tmp_path: Path, cuda: FakeVmm, verify: str) -> None:
    with world_of(tmp_path, cuda, "worker") as world:
        split = Split(specs=(KV, STATE))
        world.start_prefill("p0", slots=SLOTS)
        world.start_decode("d0", slots=SLOTS, verify=verify)
        assert not any(each.slots.has_fd for each in _sidecars(world)), "not before a worker needs it"
        world.join_prefill("p0", split.sources()[0])
        world.join_decode("d0", split.target(0))
        assert all(each.slots.has_fd for each in _sidecars(world))
        assert not any(each.must_rotate for each in _sidecars(world)), "the memory before is kept"
        world.move(37, chunk_tokens=11)
        world.move(37, salt=3)


def test_slots_of_other_workers_stay_plain_memory(
    tmp_path: Path, cuda: FakeVmm, monkeypatch: pytest.MonkeyPatch
) -> None:
    share = device.share_legacy
    monkeypatch.setattr(legacy, "share_legacy", lambda pool: msgspec.structs.replace(share(pool), pid=1))
    with world_of(tmp_path, cuda, "worker") as world:
        build(world, Split(), slots=SLOTS)
        world.move(37, chunk_tokens=11)
        assert [each.slots.move for each in _sidecars(world)] == [0, 0]


def test_an_agent_that_maps_the_pool_keeps_its_slots(tmp_path: Path, cuda: FakeVmm) -> None:
    """No worker maps them."""
    with world_of(tmp_path, cuda, "agent") as world:
        world.start_prefill("p0", slots=SLOTS)
        world.join_prefill("p0", Split().sources()[0])
        assert not any(each.slots.has_fd for each in _sidecars(world))


def test_slots_that_move_again_have_a_descriptor(tmp_path: Path, cuda: FakeVmm) -> None:
    with world_of(tmp_path, cuda, "worker") as world:
        build(world, Split(dst_size=2), slots=SLOTS)
        world.move(40, chunk_tokens=15)
        agent = world.threads[tmp_path / "d1"].agent
        assert isinstance(agent, DecodeAgent)
        old = agent._sidecar.slots.address(0)
        _in_loop(agent, "_renew_slots")
        assert old not in cuda.mapped, "memory that the slots have left is kept"
        world.move(40, salt=1)
        assert (agent._sidecar.slots.move, agent._sidecar.slots.has_fd) == (2, True)


def test_the_next_worker_finds_them_so(tmp_path: Path, cuda: FakeVmm) -> None:
    with world_of(tmp_path, cuda, "worker") as world:
        build(world, Split(), slots=SLOTS)
        world.prefill.pop()[1].close()
        until(lambda: _sidecars(world)[0].desk.seat.is_empty)
        world.join_prefill("p0", Split().sources()[0])
        world.move(40, salt=1)
        assert [each.slots.move for each in _sidecars(world)] == [1, 1]


def test_without_memory_to_move_to_the_worker_hears_the_remedy(tmp_path: Path, cuda: FakeVmm) -> None:
    with world_of(tmp_path, cuda, "worker") as world:
        world.start_prefill("p0", slots=SLOTS)
        cuda.fail("cuMemCreate", CUresult.CUDA_ERROR_OUT_OF_MEMORY)
        with pytest.raises(HandoffError, match=r"has the PID of this one, .*shareProcessNamespace"):
            world.join_prefill("p0", Split().sources()[0])
        cuda.fail("cuMemCreate", 0)
        until(lambda: _sidecars(world)[0].desk.seat.is_empty)
        world.join_prefill("p0", Split().sources()[0])


def test_a_worker_beside_another_moves_nothing(tmp_path: Path, cuda: FakeVmm, monkeypatch: pytest.MonkeyPatch) -> None:
    """One that comes to an agent which serves another worker already, and would need other slots than that has."""
    share = device.share_legacy
    with world_of(tmp_path, cuda, "worker") as world:
        with monkeypatch.context() as patched:
            patched.setattr(legacy, "share_legacy", lambda pool: msgspec.structs.replace(share(pool), pid=1))
            build(world, Split(), slots=SLOTS)
        monkeypatch.setattr(SlotMemory, "can_be_mapped_by", lambda *_: False)
        memory = world.prefill[0][0].memory
        pool = DevicePool(memory.address, memory.num_bytes, 0)
        with pytest.raises(RefusedError, match="one agent serves one worker"):
            PrefillClient.connect(tmp_path / "p0", pool, Split().sources()[0], timeout_s=WAIT_S)
        assert [each.slots.move for each in _sidecars(world)] == [0, 0]
        world.move(40, salt=1)


@pytest.mark.parametrize("name", ["loopback", "nixl"])
def test_what_it_costs_with_nixl_is_said(
    tmp_path: Path, cuda: FakeVmm, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch, name: str
) -> None:
    agent = IdleAgent(tmp_path / "agent", slots=SLOTS)
    assert cuda.held == []
    monkeypatch.setattr(agent.sidecar.transport, "name", name)
    with caplog.at_level(logging.WARNING):
        agent.sidecar.renew_slots(has_fd=True)
    (text,) = [record.getMessage() for record in caplog.records]
    assert "on GPU 0, which others map by a descriptor: a worker has the process id of this agent" in text
    assert ("0.4 GB/s" in text and "shareProcessNamespace" in text and "pinned_host" in text) == (name == "nixl")
    agent.end()


# ---- loopback, by descriptors ----


def test_peers_of_another_pid_namespace_are_refused(cuda: FakeVmm, monkeypatch: pytest.MonkeyPatch) -> None:
    """Process 1 there is another one here: its descriptors would name memory of whoever that is."""
    slots = SlotMemory(SLOTS, has_fd=True)
    assert slots.region.kind is MemoryKind.DEVICE
    writer, target = LoopbackTransport(None, 0), LoopbackTransport(None, 0)
    target.register(slots.region)
    metadata = target.metadata()
    (region,) = decode_metadata(metadata, "loopback").regions
    assert region.fd == slots.memory.fd
    with monkeypatch.context() as patched:
        patched.setattr(_loopback_peer, "_pid_namespace", lambda: "pid:[7]")
        with pytest.raises(PeerLostError, match=r"expected one in pid:\[7\], the PID namespace of this process"):
            writer.add_peer("target", metadata)
    with monkeypatch.context() as patched:
        patched.setattr(_loopback_peer, "_SYS_PIDFD_GETFD", -1)  # no such call
        with pytest.raises(
            PeerLostError, match=r"region 1: descriptor \d+ of process \d+ cannot be had: .*ptrace_scope"
        ):
            writer.add_peer("target", metadata)
    writer.add_peer("target", metadata)
    assert len(cuda.mapped) == 2
    writer.close()
    target.close()
    slots.close()
