"""Real agents that move rows of shared pools on a GPU by streams of their own, against a driver whose streams are
threads and pools that lie in host memory."""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from kvxfer.control import handoff_listener, shared_memory
from kvxfer.control.client import PrefillClient
from kvxfer.decode.agent import DecodeAgent
from kvxfer.errors import HandoffError, RefusedError
from kvxfer.memory import HostMemory
from kvxfer.sidecar import TICK_S
from kvxfer.streams import cuda_marks
from kvxfer.streams.device import IPC_HANDLE_BYTES, DevicePool, MappedPool, PoolHandle
from kvxfer.streams.staged_stream import StagedRowStream
from kvxfer.transfer import EventKind
from tests.agent_world import WAIT_S, AgentWorld
from tests.idle_agent import until
from tests.streams.fake_cuda import CUresult, FakeCuda, Stream
from tests.streams.installed_cuda import installed
from tests.test_agents import KV, SPLITS, STATE, Split, build
from tests.test_agents_streams import _in_loop


class Mapped(MappedPool):
    """A pool that is mapped in this process anyway."""

    def __init__(self, handle: PoolHandle) -> None:
        self.handle = handle
        self.pool = DevicePool(int.from_bytes(handle.ipc[:8], "little"), handle.num_bytes, 0)
        self.is_mapped = True

    def close(self) -> None:
        self.is_mapped = False


class Gpu:
    """The driver, and every mapping of a pool that was made."""

    def __init__(self, cuda: FakeCuda) -> None:
        self.cuda = cuda
        self.mapped: list[Mapped] = []

    def share(self, pool: DevicePool) -> PoolHandle:
        return PoolHandle(
            "ab" * 16, pool.num_bytes, 0, pool.num_bytes, 1, pool.address.to_bytes(IPC_HANDLE_BYTES, "little")
        )

    def map(self, handle: PoolHandle, fd: int | None, **_: object) -> Mapped:
        assert fd is None
        self.mapped.append(Mapped(handle))
        return self.mapped[-1]

    def hold(self) -> threading.Event:
        """Let no stream go on that has been made, until the event is set."""
        go_on = threading.Event()
        for handle, stream in self.cuda.streams.items():
            if handle:
                stream.push(go_on.is_set)
        return go_on


@pytest.fixture
def gpu(monkeypatch: pytest.MonkeyPatch) -> Iterator[Gpu]:
    with installed(FakeCuda(), monkeypatch) as cuda:
        made = Gpu(cuda)
        monkeypatch.setattr(shared_memory, "share_legacy", made.share)
        monkeypatch.setattr(shared_memory, "map_pool", made.map)
        monkeypatch.setattr(cuda_marks, "_stream_handle", lambda stream, _device_index: stream or 0)
        yield made
        assert not any(each.is_mapped for each in made.mapped)
        assert cuda.registered == {}
        assert cuda.scratch == {}
        assert list(cuda.streams) == [0]


def world_of(path: Path) -> AgentWorld:
    world = AgentWorld(path, placement="agent")
    world.as_handed = lambda memory: DevicePool(memory.address, memory.num_bytes, 0)
    return world


@pytest.mark.parametrize("split", SPLITS.values(), ids=SPLITS)
def test_rows_arrive(tmp_path: Path, gpu: Gpu, split: Split) -> None:
    with world_of(tmp_path) as world:
        build(world, split)
        world.move(split.num_tokens, chunk_tokens=11)
        world.move(split.num_tokens, salt=9)
    assert len(gpu.mapped) == len(split.sources()) + split.num_ranks


def test_segments_with_checksums(tmp_path: Path, gpu: Gpu) -> None:
    with world_of(tmp_path) as world:
        split = Split(specs=(KV, STATE))
        world.start_prefill("p0")
        world.join_prefill("p0", split.sources()[0])
        world.start_decode("d0", verify="full")
        world.join_decode("d0", split.target(0))
        world.move(37, chunk_tokens=11)
    assert gpu.mapped


def write_late(memory: HostMemory, stream: Stream) -> threading.Event:
    """What `memory` holds is written by `stream`, which does nothing before the event is set."""
    rows, go_on = memory.array.copy(), threading.Event()
    memory.array[:] = 0

    def write() -> bool:
        if go_on.is_set():
            memory.array[:] = rows
        return go_on.is_set()

    stream.push(write)
    return go_on


def test_rows_are_read_when_the_stream_that_writes_them_has_come_there(tmp_path: Path, gpu: Gpu) -> None:
    """Without the wait for the timeline zeros would arrive."""
    with world_of(tmp_path) as world:
        build(world, Split())
        request = world.begin(40, salt=5)
        (seat, client), source = world.prefill[0], request.sources[0]
        go_on = write_late(seat.memory, gpu.cuda.streams[0])
        world.submit_all(request, 40)
        assert source is not None
        assert client.next_event(0.2) is None
        go_on.set()
        world.finish(request)
        world.verify()


def test_a_pool_stays_mapped_until_what_touches_it_has_ended(tmp_path: Path, gpu: Gpu) -> None:
    with world_of(tmp_path) as world:
        build(world, Split())
        request = world.begin(40)
        go_on = gpu.hold()
        try:
            world.submit(request, 0, 20)
            (_, killed), mapped = world.prefill.pop(), gpu.mapped[0]
            time.sleep(0.05)  # some are given to the GPU
            killed._link.handoff.close()
            time.sleep(0.1)
            assert mapped.is_mapped
        finally:
            go_on.set()
        until(lambda: not mapped.is_mapped)
        assert world.wait(world.decode[0][1], request).event is EventKind.FAILED
        world.join_prefill("p0", Split().sources()[0])
        world.decode[0][0].expected[:] = world.decode[0][0].memory.array  # some rows may be there
        world.move(40, salt=3)


@pytest.mark.parametrize("name", ["p0", "d0"])
def test_an_agent_that_ends_touches_no_pool_when_its_worker_hears_of_it(tmp_path: Path, gpu: Gpu, name: str) -> None:
    with world_of(tmp_path) as world:
        build(world, Split())
        request = world.begin(40)
        world.submit(request, 0, 20)
        world.end_agent(name)
        client: Any = (world.prefill if name == "p0" else world.decode)[0][1]
        assert world.wait(client, request).event is EventKind.FAILED
        assert sum(each.is_mapped for each in gpu.mapped) == 1


def test_landing_slots_move(tmp_path: Path, gpu: Gpu) -> None:
    with world_of(tmp_path) as world:
        build(world, Split())
        agent = world.threads[tmp_path / "d0"].agent
        assert isinstance(agent, DecodeAgent)
        for salt in (1, 2):
            world.move(40, salt=salt)
            _in_loop(agent, "_renew_slots")
        world.move(40, salt=3)
        assert agent._sidecar.slots.move == 2
    assert gpu.mapped


def test_engines_read_no_pool_of_a_gpu(tmp_path: Path, gpu: Gpu) -> None:
    with world_of(tmp_path) as world:
        world.start_prefill("p0", mode="raw")
        with pytest.raises(RefusedError, match=r"mode raw: the engine cannot read this pool: got device memory"):
            world.join_prefill("p0", Split().sources()[0])
    assert gpu.mapped


def test_rows_are_pulled_from_pool_to_pool(tmp_path: Path, gpu: Gpu) -> None:
    """Each decode agent maps the prefill worker's pool as well, until its own worker or the other side has gone."""
    split = Split(dst_size=2)
    with world_of(tmp_path) as world:
        build(world, split, mode="p2p")
        world.move(40, chunk_tokens=15)
        assert [each.is_mapped for each in gpu.mapped].count(True) == len(gpu.mapped) == 3 + 2
        world.prefill.pop()[1].close()
        until(lambda: [each.is_mapped for each in gpu.mapped].count(True) == 2)
        world.join_prefill("p0", split.sources()[0])
        world.move(40, salt=4)


@pytest.mark.parametrize("turn_s", [1e-12, 10.0])
def test_agents_say_once_when_turns_are_too_long_for_their_slots(
    tmp_path: Path, gpu: Gpu, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture, turn_s: float
) -> None:
    has_too_few = turn_s > 1
    monkeypatch.setattr(StagedRowStream, "turn_s", turn_s)
    with world_of(tmp_path) as world, caplog.at_level(logging.WARNING):
        build(world, Split())
        world.move(40)
        agents = [thread.agent for thread in world.threads.values()]
        until(lambda: not has_too_few or all(agent.figures().num_slots_wanted for agent in agents))
        time.sleep(3 * TICK_S)
        wanted = [agent.figures().num_slots_wanted for agent in agents]
        warned = [text for text in caplog.messages if text.startswith("slots.num_slots: got 4, expected ")]
        assert [num > 4 for num in wanted] == [has_too_few] * 2
        assert len(warned) == 2 * has_too_few
    assert gpu.mapped


def test_what_keeps_an_agent_from_mapping_reaches_its_worker(
    tmp_path: Path, gpu: Gpu, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuse(*_: object, **__: object) -> None:
        raise HandoffError("pool: got a legacy handle from a process that has the PID of this one: share PIDs")

    with world_of(tmp_path) as world, monkeypatch.context() as patched:
        world.start_prefill("p0")
        patched.setattr(shared_memory, "map_pool", refuse)
        with pytest.raises(HandoffError, match=r"^pool: got a legacy handle .*: share PIDs$"):
            world.join_prefill("p0", Split().sources()[0])
        patched.setattr(shared_memory, "map_pool", gpu.map)
        gpu.cuda.fail("cuMemAlloc", CUresult.CUDA_ERROR_OUT_OF_MEMORY)
        with pytest.raises(RefusedError, match="nothing can move the rows of this pool: cuMemAlloc: got CUDA"):
            world.join_prefill("p0", Split().sources()[0])
        gpu.cuda.fail("cuMemAlloc", 0)
        world.join_prefill("p0", Split().sources()[0])


def test_an_agent_without_cuda_refuses_in_words(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with HostMemory.create(1 << 16, "pool") as memory, world_of(tmp_path) as world:
        monkeypatch.setattr(shared_memory, "share_legacy", Gpu(FakeCuda()).share)
        world.start_prefill("p0")
        pool = DevicePool(memory.address, memory.num_bytes, 0)
        with pytest.raises(HandoffError, match="got memory of a GPU, which this process cannot reach: GPU streams"):
            PrefillClient.connect(tmp_path / "p0", pool, Split().sources()[0], placement="agent", timeout_s=WAIT_S)


def test_a_worker_that_hangs_up_while_its_pool_is_mapped_leaves_nothing(
    tmp_path: Path, gpu: Gpu, monkeypatch: pytest.MonkeyPatch
) -> None:
    began, go_on = threading.Event(), threading.Event()

    def slow(handle: PoolHandle, fd: int | None, **_: object) -> Mapped:
        began.set()
        assert go_on.wait(WAIT_S)
        return gpu.map(handle, fd)

    monkeypatch.setattr(shared_memory, "map_pool", slow)
    monkeypatch.setattr(handoff_listener, "MAPPING_TIMEOUT_S", 0.05)
    with world_of(tmp_path) as world:
        world.start_prefill("p0")
        with pytest.raises(TimeoutError):
            world.join_prefill("p0", Split().sources()[0])
        assert began.is_set()
        time.sleep(0.05)
        go_on.set()
        until(lambda: bool(gpu.mapped) and not gpu.mapped[0].is_mapped)
        monkeypatch.setattr(handoff_listener, "MAPPING_TIMEOUT_S", WAIT_S)
        world.join_prefill("p0", Split().sources()[0])
