"""Pulls where streams of the workers move the rows: the decode worker maps the source's pool, and lets go of it."""

from __future__ import annotations

import threading
from pathlib import Path
from typing import Any

import pytest

from kvxfer.control.handoff_messages import PoolPlacement
from kvxfer.control.shared_memory import HeldMemory
from kvxfer.decode import source_pools
from kvxfer.decode.agent import DecodeAgent
from kvxfer.errors import HandoffError
from kvxfer.ops.config import TransferMode
from kvxfer.peer_pools import StreamPeerPools
from kvxfer.prefill.leg import Mode
from kvxfer.streams import host_stream
from kvxfer.streams.ring import MemoryIndex, Span
from kvxfer.transfer import EventKind, Reason
from tests.agent_world import WAIT_S, AgentWorld
from tests.idle_agent import until
from tests.test_agents import SPLITS, Split, build
from tests.test_agents_ends import ends
from tests.test_agents_pull import _chosen, _held

NUM_INDICES = MemoryIndex.STAGING - MemoryIndex.FIRST_PEER


def _decode_agent(world: AgentWorld, name: str = "d0") -> DecodeAgent:
    agent = world.threads[world.path / name].agent
    assert isinstance(agent, DecodeAgent)
    return agent


def _peers(world: AgentWorld, name: str = "d0") -> StreamPeerPools:
    peers = _decode_agent(world, name)._sidecar.peers
    assert isinstance(peers, StreamPeerPools)
    return peers


@pytest.mark.parametrize("name", SPLITS)
def test_every_split_is_pulled_exactly(tmp_path: Path, name: str) -> None:
    split = SPLITS[name]
    with AgentWorld(tmp_path, placement="worker") as world:
        build(world, split, mode="p2p")
        for salt, chunk_tokens in ((0, 1 << 20), (0x3C, 9)):
            request = world.move(split.num_tokens, chunk_tokens=chunk_tokens, salt=salt)
            assert [event.stats.num_descriptors for event in request.events] == [0] * len(request.events)


@pytest.mark.parametrize("placements", [("agent", "worker"), ("worker", "agent"), ("worker", "worker")])
def test_auto_pulls_whoever_moves_the_rows(tmp_path: Path, placements: tuple[PoolPlacement, PoolPlacement]) -> None:
    with AgentWorld(tmp_path, placement=placements[0], decode_placement=placements[1]) as world:
        build(world, Split(src_size=2, dst_size=3), mode="auto")
        world.move(40, chunk_tokens=15)
        assert _chosen(world) == {Mode.P2P}


class _HeldCopies:
    """Copies of pulled rows wait until `go_on` is set, as a slow kernel may."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.began, self.go_on = threading.Event(), threading.Event()
        self._copy = host_stream._copy
        monkeypatch.setattr(host_stream, "_copy", self._hold)

    def _hold(self, span: Span, *args: Any) -> Any:  # noqa: ANN401
        if span.src_memory >= MemoryIndex.FIRST_PEER:
            self.began.set()
            assert self.go_on.wait(WAIT_S)
        return self._copy(span, *args)


@pytest.mark.parametrize("ender", ["prefill worker", "decode worker", "deadline", "prefill worker killed"])
def test_rows_under_way_when_the_transfer_ends_do_not_land(
    tmp_path: Path, ender: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The copy is held, the transfer ends, the source's pages are written anew, the copy goes on: it is void, and no
    stream waits for anything after that."""
    with AgentWorld(tmp_path, placement="worker") as world:
        build(world, Split(), mode="p2p")
        world.move(20)
        (seat, decode_client), (source, prefill_client) = world.decode[0], world.prefill[0]
        held = _HeldCopies(monkeypatch)
        request = world.begin(40, deadline_s=1.0 if ender == "deadline" else 60.0)
        world.submit_all(request, 40)
        until(lambda: decode_client.next_event(0) is None and held.began.is_set())
        if ender == "prefill worker":
            prefill_client.abort(request.ticket)
        elif ender == "decode worker":
            decode_client.abort(request.ticket)
        elif ender == "prefill worker killed":
            world.prefill.pop()[1].close()
        if ender != "prefill worker killed":
            assert ends(prefill_client, request.ticket).event in (EventKind.ABORTED, EventKind.FAILED)
        source.memory.array[:] = 0xDD
        assert decode_client.next_event(0.1) is None  # its copy is not over
        held.go_on.set()
        event = ends(decode_client, request.ticket)
        assert event.event in (EventKind.ABORTED, EventKind.FAILED)
        seat.expected[:] = seat.memory.array
        if ender == "prefill worker killed":
            assert event.reason is Reason.WORKER_LOST
            world.join_prefill("p0", Split().sources()[0])
        world.move(40, salt=7)


def test_a_source_that_pairs_anew_takes_no_index_for_ever(tmp_path: Path) -> None:
    """Each new worker of the source is mapped, and the one before unmapped by then or soon: also while transfers go on,
    for which entries wait in the stream."""
    split = Split(src_size=2)
    with AgentWorld(tmp_path, placement="worker") as world:
        build(world, split, mode="p2p")
        peers, stream = _peers(world), world.decode[0][1]._link.stream
        assert stream is not None
        num_mapped = len(stream._peers._mapped)
        assert num_mapped == 0
        world.move(20)
        assert len(stream._peers._mapped) == 2
        for salt in range(1, 5):
            _, client = world.prefill.pop()
            client.close()
            world.join_prefill("p1", split.sources()[1])
            world.move(30, salt=salt)
        until(lambda: world.decode[0][1].next_event(0) is None and peers.num_free == NUM_INDICES - 2)
        assert len(stream._peers._mapped) == 2


def test_a_pool_that_the_decode_worker_cannot_map_is_sent_over_the_wire(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuse(memory: HeldMemory, _device_index: int | None) -> None:
        memory.close()
        raise HandoffError("pool: got memory of GPU 1, expected some that GPU 0 reaches")

    monkeypatch.setattr(HeldMemory, "attach", refuse)
    modes: tuple[TransferMode, ...] = ("auto", "p2p")
    for mode in modes:
        with AgentWorld(tmp_path / mode, placement="worker") as world:
            build(world, Split(), mode=mode)
            if mode == "auto":
                world.move(37)
                assert Mode.P2P not in _chosen(world)
            else:
                request = world.begin(37)
                world.submit_all(request, 37)
                event = world.wait(world.decode[0][1], request)
                assert event.reason is Reason.PEER_REFUSED
                assert "the decode worker cannot map it: pool: got memory of GPU 1" in event.detail
            assert _peers(world).num_free == NUM_INDICES


def test_a_decode_worker_that_answers_late_gets_rows_over_the_wire_until_then(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(source_pools, "PULL_TIMEOUT_S", 0.05)
    with AgentWorld(tmp_path, placement="worker") as world:
        build(world, Split(), mode="auto")
        request = world.begin(20)  # the worker is in no call of its client from now on
        agent = _decode_agent(world)
        until(lambda: any(info.pull_trouble for info in agent._core.sources.values()))
        (info,) = agent._core.sources.values()
        assert info.pull_trouble.startswith("the decode worker, which must call its client for that, took over")
        world.submit_all(request, 20)
        world.finish(request)
        assert Mode.P2P not in _chosen(world)
        world.move(20, salt=1)
        assert Mode.P2P in _chosen(world)


@pytest.mark.parametrize("name", ["p0", "d0"])
def test_an_agent_that_ends_while_rows_are_pulled_leaves_no_stream_waiting(
    tmp_path: Path, name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    num_threads = threading.active_count()
    with AgentWorld(tmp_path, placement="worker") as world:
        build(world, Split(), mode="p2p")
        world.move(10)
        held = _HeldCopies(monkeypatch)
        request = world.begin(40)
        world.submit_all(request, 40)
        until(lambda: world.decode[0][1].next_event(0) is None and held.began.is_set())
        ending = threading.Thread(target=world.end_agent, args=(name,))
        ending.start()
        (_, prefill_client), (_, decode_client) = world.prefill[0], world.decode[0]
        if name == "p0":
            assert world.wait(prefill_client, request).event is EventKind.FAILED
        else:
            agent = _decode_agent(world)
            until(lambda: not any(receive.is_open for receive in list(agent._core.receives.values())))
        held.go_on.set()
        assert world.wait(decode_client, request).event is EventKind.FAILED
        if name == "d0":
            assert world.wait(prefill_client, request).event is EventKind.FAILED
        ending.join(WAIT_S)
    until(lambda: threading.active_count() <= num_threads)


def test_pulls_leave_nothing(tmp_path: Path) -> None:
    """Descriptors, threads and mappings are flat over transfers, and back at the start after all."""
    at_first = _held()
    with AgentWorld(tmp_path, placement="worker") as world:
        build(world, Split(dst_size=2), mode="p2p", num_threads=1)
        world.move(3)
        during = _held()
        for _ in range(5):
            world.move(3, chunk_tokens=2)
        assert _held() == during
    until(lambda: _held() == at_first)
