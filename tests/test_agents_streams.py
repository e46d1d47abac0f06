"""Real agents whose workers move the rows by their own streams: slots that move, workers that are torn away, modes."""

from __future__ import annotations

import threading
import time
from pathlib import Path
from typing import Any

import pytest

from kvxfer.control.client import DecodeClient, PrefillClient
from kvxfer.control.worker_stream import WorkerStream
from kvxfer.decode.agent import DecodeAgent
from kvxfer.errors import RefusedError
from kvxfer.prefill.agent import PrefillAgent
from kvxfer.streams import host_stream
from kvxfer.transfer import EventKind, Reason
from tests.agent_world import WAIT_S, AgentWorld
from tests.idle_agent import until
from tests.test_agents import ENGINES, Split, build


def _in_loop(agent: PrefillAgent | DecodeAgent, job: str) -> None:
    """Have a method of the agent called in its loop, with the time, and wait until that was done."""
    done = threading.Event()
    tick = agent.tick

    def once(now: float) -> None:
        agent.tick = tick  # type: ignore[method-assign]
        getattr(agent, job)(now)
        done.set()

    agent.tick = once  # type: ignore[method-assign]
    assert done.wait(WAIT_S)


@pytest.mark.parametrize("transport", ENGINES)
def test_landing_slots_move_under_a_stream(tmp_path: Path, transport: str) -> None:
    with AgentWorld(tmp_path, transport, placement="worker") as world:
        build(world, Split(dst_size=2))
        world.move(40, chunk_tokens=15)
        agent = world.threads[tmp_path / "d1"].agent
        assert isinstance(agent, DecodeAgent)
        for salt in (1, 2):
            _in_loop(agent, "_renew_slots")
            world.move(40, salt=salt)
        assert agent._sidecar.slots.move == 2


class _Held:
    """The first copy of any host stream waits until `go_on` is set, as a kernel of a killed worker may."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.began, self.go_on, self.ended = threading.Event(), threading.Event(), threading.Event()
        self._copy = host_stream._copy
        monkeypatch.setattr(host_stream, "_copy", self._hold)

    def _hold(self, *args: Any) -> None:  # noqa: ANN401
        is_first = not self.began.is_set()
        if is_first:
            self.began.set()
            assert self.go_on.wait(WAIT_S)
        self._copy(*args)
        if is_first:
            self.ended.set()


@pytest.mark.parametrize("transport", ENGINES)
def test_what_a_killed_worker_still_writes_reaches_no_slot(
    tmp_path: Path, transport: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its gather ends while the next worker's rows lie in the same slot."""
    monkeypatch.setattr(WorkerStream, "_watch", lambda *_: None)  # nobody is left to look
    split = Split()
    with AgentWorld(tmp_path, transport, placement="worker") as world:
        build(world, split, num_slots=1)
        agent = world.threads[tmp_path / "p0"].agent
        assert isinstance(agent, PrefillAgent)
        world.move(10)
        held = _Held(monkeypatch)
        request = world.begin(5, salt=77)
        until(lambda: bool(agent._core.transfers[request.ticket.transfer].legs))
        world.submit(request, 0, 5)
        assert held.began.wait(WAIT_S)
        _, killed = world.prefill.pop()
        killed._link.handoff.close()
        assert world.wait(world.decode[0][1], request).event is EventKind.FAILED
        world.join_prefill("p0", split.sources()[0])
        assert agent._sidecar.slots.move == 1

        request = world.begin(40, salt=3)
        slots = agent._sidecar.slots.view(0).copy()
        held.go_on.set()
        assert held.ended.wait(WAIT_S)
        assert (agent._sidecar.slots.view(0) == slots).all(), "the lost worker's stream has written a slot"
        world.submit_all(request, 11)
        world.finish(request)
        world.verify()


def test_a_worker_that_leaves_in_good_order_costs_no_engine(tmp_path: Path) -> None:
    split = Split()
    with AgentWorld(tmp_path, placement="worker") as world:
        build(world, split)
        world.move(10)
        agent = world.threads[tmp_path / "p0"].agent
        request = world.begin(40)
        world.submit(request, 0, 20)
        world.prefill.pop()[1].close()
        # Whichever is seen first: that the stream has ended, that its worker is gone, or, by a grant, its pairing.
        reasons = (Reason.GATHER_FAILED, Reason.WORKER_LOST, Reason.PEER_LOST)
        assert world.wait(world.decode[0][1], request).reason in reasons
        world.decode[0][0].expected[:] = world.decode[0][0].memory.array  # some rows may be there
        world.join_prefill("p0", split.sources()[0])
        assert agent._sidecar.slots.move == agent._sidecar.transport.counters.num_rotations == 0
        world.move(40, salt=1)


def test_a_mode_that_needs_a_mapped_pool_refuses_a_stream(tmp_path: Path) -> None:
    with AgentWorld(tmp_path) as world:
        world.start_prefill("p0", mode="raw")
        layout = Split().sources()[0]
        world.placement = "worker"
        with pytest.raises(
            RefusedError, match="mode raw needs a pool that this agent maps: hand it over with placement agent"
        ):
            world.join_prefill("p0", layout)
        world.placement = "agent"
        world.join_prefill("p0", layout)


@pytest.mark.parametrize("name", ["p0", "d0"])
def test_an_agent_that_ends_leaves_no_stream_waiting(tmp_path: Path, name: str) -> None:
    num_threads = threading.active_count()
    with AgentWorld(tmp_path, placement="worker") as world:
        build(world, Split())
        request = world.begin(40)
        world.submit(request, 0, 20)
        world.end_agent(name)
        clients: list[PrefillClient | DecodeClient] = [client for _, client in world.prefill]
        for client in [*clients, *(client for _, client in world.decode)]:
            assert world.wait(client, request).event is EventKind.FAILED
    deadline_s = time.monotonic() + WAIT_S
    while threading.active_count() > num_threads:
        assert time.monotonic() < deadline_s
        time.sleep(0.01)
