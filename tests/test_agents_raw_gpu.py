"""Rows that leave a pool on a GPU without packing: by the engine, out of the agent's mapping. The driver's GPU is host
memory."""

from __future__ import annotations

import logging
from collections.abc import Iterator
from pathlib import Path

import pytest

from kvxfer.errors import RefusedError, RegistrationError, TransportError
from kvxfer.prefill.agent import PrefillAgent
from kvxfer.streams.own_mover import OwnStreamMover
from kvxfer.streams.staged_stream import StagedRowStream
from kvxfer.transfer import EventKind, Reason
from kvxfer.transports.base import MemoryKind, Region, RegionDescriptor
from kvxfer.transports.loopback import LoopbackTransport
from tests.agent_world import AgentWorld
from tests.idle_agent import until
from tests.streams.fake_ipc import FakeIpc
from tests.test_agents import DRAFT, KV, SPLITS, Split, build
from tests.test_agents_gpu_slots import SLOTS, as_if_apart, world_of
from tests.test_agents_own_streams import write_late
from tests.test_agents_streams import _in_loop


@pytest.fixture
def cuda(monkeypatch: pytest.MonkeyPatch) -> Iterator[FakeIpc]:
    with as_if_apart(monkeypatch) as made:
        yield made


def _agent(world: AgentWorld) -> PrefillAgent:
    agent = world.threads[world.path / "p0"].agent
    assert isinstance(agent, PrefillAgent)
    return agent


class FailingLaunch:
    """Stands in for a stream's launches: from number `first_failing` on none succeeds."""

    def __init__(self, agent: PrefillAgent, first_failing: int) -> None:
        rows = agent._sidecar.rows
        assert isinstance(rows, OwnStreamMover)
        assert isinstance(rows._stream, StagedRowStream)
        self._run = rows._stream._run
        self._num_left = first_failing
        rows._stream._run = self  # type: ignore[method-assign]

    def __call__(self, *arguments: object, **named: object) -> None:
        if self._num_left == 0:
            raise TransportError("injected: this launch fails")
        self._num_left -= 1
        self._run(*arguments, **named)  # type: ignore[arg-type]


@pytest.mark.parametrize("first_failing", [0, 3], ids=["the first gather", "in mid-transfer"])
def test_a_gather_that_cannot_be_launched_makes_its_legs_go_on_run_by_run(
    tmp_path: Path, cuda: FakeIpc, caplog: pytest.LogCaptureFixture, first_failing: int
) -> None:
    """Exact, with the rows that were packed before; so do all transfers after it: the stream has ended."""
    with world_of(tmp_path, cuda, "agent") as world:
        build(world, Split(dst_size=2, specs=(KV, DRAFT)), slots=SLOTS)
        world.move(40, chunk_tokens=25)
        agent = _agent(world)
        FailingLaunch(agent, first_failing)
        with caplog.at_level(logging.WARNING):
            stats = world.move(40, chunk_tokens=25, salt=1).events[-1].stats
        assert stats.num_segments < stats.num_descriptors
        assert (stats.num_descriptors == stats.num_runs) == (first_failing == 0)
        assert agent._core._life.num_fallbacks > 0
        assert "a gather has failed, its rows go run by run: injected: this launch fails" in caplog.text
        stats = world.move(40, salt=2).events[-1].stats
        assert stats.num_descriptors == stats.num_runs


def test_what_must_be_verified_is_not_sent_without_packing(tmp_path: Path, cuda: FakeIpc) -> None:
    with world_of(tmp_path, cuda, "agent") as world:
        world.start_prefill("p0", slots=SLOTS)
        world.join_prefill("p0", Split().sources()[0])
        world.start_decode("d0", slots=SLOTS, verify="full")
        world.join_decode("d0", Split().target(0))
        FailingLaunch(_agent(world), 2)
        request = world.begin(40)
        world.submit_all(request, 40)
        event = world.wait(world.prefill[0][1], request)
        assert (event.event, event.reason) == (EventKind.FAILED, Reason.GATHER_FAILED)
        assert "injected: this launch fails" in event.detail
        assert world.wait(world.decode[0][1], request).event is EventKind.FAILED


@pytest.mark.parametrize("split", SPLITS.values(), ids=SPLITS)
def test_mode_raw(tmp_path: Path, cuda: FakeIpc, split: Split) -> None:
    with world_of(tmp_path, cuda, "agent") as world:
        build(world, split, slots=SLOTS, mode="raw")
        for salt in (1, 2):
            stats = world.move(split.num_tokens, chunk_tokens=11, salt=salt).events[-1].stats
            assert stats.num_descriptors == stats.num_runs


def test_rows_are_read_when_the_stream_that_writes_them_has_come_there(tmp_path: Path, cuda: FakeIpc) -> None:
    """Without the wait for the timeline zeros would arrive."""
    with world_of(tmp_path, cuda, "agent") as world:
        build(world, Split(), slots=SLOTS, mode="raw")
        request = world.begin(40, salt=5)
        seat, client = world.prefill[0]
        go_on = write_late(seat.memory, cuda.streams[0])
        world.submit_all(request, 40)
        assert client.next_event(0.2) is None
        go_on.set()
        world.finish(request)
        world.verify()


def test_the_engine_knows_the_pool_as_long_as_its_worker_is_there(tmp_path: Path, cuda: FakeIpc) -> None:
    with world_of(tmp_path, cuda, "agent") as world:
        build(world, Split(), slots=SLOTS, mode="raw")
        agent = _agent(world)
        transport = agent._sidecar.transport
        assert isinstance(transport, LoopbackTransport)
        pool = world.prefill[0][0].memory
        slots, registered = transport._regions.values()
        assert slots == agent._sidecar.slots.region
        assert registered == Region(pool.address, pool.num_bytes, kind=MemoryKind.DEVICE, device_index=0)
        _in_loop(agent, "_rotate")
        world.move(40, salt=1)
        world.prefill.pop()[1].close()
        until(lambda: agent._sidecar.desk.seat.is_empty)
        assert list(transport._regions.values()) == [slots]
        world.join_prefill("p0", Split().sources()[0])
        world.move(40, salt=2)


def test_an_engine_that_cannot_read_the_pool_leaves_packing_alone(
    tmp_path: Path, cuda: FakeIpc, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    register = LoopbackTransport.register

    def refuse(transport: LoopbackTransport, region: Region) -> RegionDescriptor:
        if region.handle is None:
            raise RegistrationError("got device memory, expected what this engine can read")
        return register(transport, region)

    monkeypatch.setattr(LoopbackTransport, "register", refuse)
    with world_of(tmp_path, cuda, "agent") as world:
        with caplog.at_level(logging.WARNING):
            build(world, Split(), slots=SLOTS)
        assert "rows cannot be sent without packing, should that fail: got device memory" in caplog.text
        world.move(40)
        FailingLaunch(_agent(world), 2)
        request = world.begin(40, salt=1)
        world.submit_all(request, 40)
        event = world.wait(world.prefill[0][1], request)
        assert (event.event, event.reason) == (EventKind.FAILED, Reason.GATHER_FAILED)
        assert world.wait(world.decode[0][1], request).event is EventKind.FAILED
        world.start_prefill("p1", slots=SLOTS, mode="raw")
        with pytest.raises(RefusedError, match="mode raw: the engine cannot read this pool: got device memory"):
            world.join_prefill("p1", Split().sources()[0])


def test_a_pool_that_stays_with_its_worker_is_read_by_no_engine(tmp_path: Path, cuda: FakeIpc) -> None:
    with world_of(tmp_path, cuda, "worker") as world:
        world.start_prefill("p0", slots=SLOTS, mode="raw")
        with pytest.raises(RefusedError, match=r"mode raw needs a pool that this agent maps: .*placement agent"):
            world.join_prefill("p0", Split().sources()[0])
