"""Real agents whose rows are pulled out of the source's pool: exact in every split, void once a lease is revoked."""

from __future__ import annotations

import os
import threading
import time
from pathlib import Path

import pytest

from kvxfer.control.pull_share import PULL_SOCKET
from kvxfer.layout import TokenRange
from kvxfer.ops.config import TransferMode
from kvxfer.prefill.agent import PrefillAgent
from kvxfer.prefill.leg import Mode
from kvxfer.transfer import EventKind, Reason
from tests.agent_world import WAIT_S, AgentWorld
from tests.test_agents import SPLITS, Split, build
from tests.test_agents_ends import _Gate, ends


def _chosen(world: AgentWorld) -> set[Mode]:
    """The ways that legs in mode auto took, over all prefill agents."""
    agents = [thread.agent for thread in world.threads.values()]
    return {mode for agent in agents if isinstance(agent, PrefillAgent) for mode in agent._core._life.num_chosen}


@pytest.mark.parametrize("mode", ["p2p", "auto"])
@pytest.mark.parametrize("name", SPLITS)
def test_every_split_is_pulled_exactly(tmp_path: Path, name: str, mode: TransferMode) -> None:
    """All bytes of all pools are compared, guards and foreign pages too. No slot and no descriptor is used."""
    split = SPLITS[name]
    with AgentWorld(tmp_path) as world:
        build(world, split, mode=mode)
        for salt, chunk_tokens in ((0, 1 << 20), (0x3C, 9)):
            request = world.move(split.num_tokens, chunk_tokens=chunk_tokens, salt=salt)
            assert [event.stats.num_descriptors for event in request.events] == [0] * len(request.events)
            for event in request.events[: len(world.decode)]:
                assert event.aux == (b"aux %d" % split.num_tokens,) * len(world.prefill)
        if mode == "auto" and split.num_tokens:
            assert _chosen(world) == {Mode.P2P}


def test_a_prefix_that_is_held_is_not_pulled(tmp_path: Path) -> None:
    with AgentWorld(tmp_path) as world:
        build(world, Split(dst_size=2), mode="p2p")
        world.move(41, chunk_tokens=10, first=7)
        world.move(41, chunk_tokens=10, salt=5, have=(TokenRange(0, 6), TokenRange(20, 33)))


def test_a_pool_that_cannot_be_had_is_sent_over_the_wire_or_refused(tmp_path: Path) -> None:
    """As on another host: nobody answers at the path that the source names."""
    for mode, name in (("auto", "a"), ("p2p", "b")):
        with AgentWorld(tmp_path / name) as world:
            build(world, Split(dst_size=2), mode=mode)  # type: ignore[arg-type]
            (tmp_path / name / "p0" / PULL_SOCKET).unlink()
            if mode == "auto":
                world.move(37)
                assert _chosen(world)
                assert Mode.P2P not in _chosen(world)
                continue
            request = world.begin(37)
            world.submit_all(request, 37)
            event = ends(world.decode[0][1], request.ticket)
            assert (event.event, event.reason) == (EventKind.FAILED, Reason.PEER_REFUSED)
            assert "mode p2p: the decode agent cannot map this pool: pull socket" in event.detail
            assert PULL_SOCKET in event.detail
            world.verify()


@pytest.mark.parametrize("ender", ["prefill worker", "decode worker", "deadline"])
def test_rows_under_way_when_the_transfer_ends_do_not_land(tmp_path: Path, ender: str) -> None:
    """The copy is held, the transfer ends, the source's pages are written anew, the copy goes on: it is void."""
    with AgentWorld(tmp_path) as world:
        build(world, Split(), mode="p2p")
        world.move(20)
        (seat, decode_client), (_, prefill_client) = world.decode[0], world.prefill[0]
        gate = _Gate(world.threads[tmp_path / "d0"].agent)
        request = world.begin(40, deadline_s=1.0 if ender == "deadline" else 60.0)
        world.submit_all(request, 40)
        assert gate.reached.wait(WAIT_S)
        if ender == "prefill worker":
            prefill_client.abort(request.ticket)
        elif ender == "decode worker":
            decode_client.abort(request.ticket)
        assert ends(prefill_client, request.ticket).event in (EventKind.ABORTED, EventKind.FAILED)
        assert decode_client.next_event(0.1) is None  # its copy is not over
        gate.open()
        assert ends(decode_client, request.ticket).event in (EventKind.ABORTED, EventKind.FAILED)
        seat.expected[:] = seat.memory.array
        world.move(40, salt=7)


def test_a_worker_that_is_replaced_shares_its_own_pool(tmp_path: Path) -> None:
    with AgentWorld(tmp_path) as world:
        build(world, Split(dst_size=2), mode="p2p")
        world.move(37)
        old_seat, old_client = world.prefill.pop()
        old_client.close()
        old_seat.memory.array[:] = 0xDD
        world.join_prefill("p0", Split(dst_size=2).sources()[0])
        for salt in (1, 2):
            world.move(37, salt=salt)


def test_pulls_leave_nothing(tmp_path: Path) -> None:
    """Descriptors, threads and mappings are flat over transfers, and back at the start after all."""
    at_first = _held()
    with AgentWorld(tmp_path) as world:
        build(world, Split(dst_size=2), mode="p2p", num_threads=1)
        world.move(3)
        during = _held()
        for _ in range(10):
            world.move(3, chunk_tokens=2)
        assert _held() == during
    deadline_s = time.monotonic() + 5.0
    while _held() != at_first and time.monotonic() < deadline_s:
        time.sleep(0.01)
    assert _held() == at_first


def _held() -> tuple[int, int, int]:
    maps = Path("/proc/self/maps").read_text(encoding="utf-8")
    return threading.active_count(), len(os.listdir("/proc/self/fd")), maps.count("/memfd:")
