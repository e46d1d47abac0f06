"""A decode agent's landing slots move to other memory, and the message that says so is lost."""

from __future__ import annotations

import time
from pathlib import Path

import pytest

from kvxfer.control.messages import Credits, DecodeToPrefill, NewRegion
from kvxfer.decode.agent import DecodeAgent
from kvxfer.decode.pairing import PrefillPeer
from kvxfer.transports.loopback import LoopbackTransport
from tests.agent_world import WAIT_S, AgentWorld
from tests.test_agents import ENGINES, Split, build


def move_slots(world: AgentWorld, tmp_path: Path) -> tuple[DecodeAgent, int]:
    """Let the decode agent move its landing slots; returns it and the region that it has left."""
    agent = world.threads[tmp_path / "d0"].agent
    assert isinstance(agent, DecodeAgent)
    old_region = agent._sidecar.region.region_id
    tick = agent.tick

    def move_once(now: float) -> None:
        agent.tick = tick  # type: ignore[method-assign]
        agent._renew_slots(now)

    agent.tick = move_once  # type: ignore[method-assign]
    deadline_s = time.monotonic() + WAIT_S
    while agent._sidecar.region.region_id == old_region:
        assert time.monotonic() < deadline_s
        time.sleep(0.01)
    return agent, old_region


@pytest.mark.parametrize("transport", ENGINES)
@pytest.mark.parametrize("lost", [NewRegion, Credits])
def test_what_is_lost_of_a_move_is_said_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, transport: str, lost: type
) -> None:
    sent: list[object] = []
    send = PrefillPeer.send

    def lose_first(peer: PrefillPeer, message: DecodeToPrefill) -> None:
        is_first = isinstance(message, lost) and not any(isinstance(each, lost) for each in sent)
        sent.append(message)
        if not is_first:
            send(peer, message)

    with AgentWorld(tmp_path, transport) as world:
        build(world, Split())
        world.move(8)
        monkeypatch.setattr(PrefillPeer, "send", lose_first)
        agent, old_region = move_slots(world, tmp_path)
        world.move(20)
        assert sum(isinstance(each, NewRegion) for each in sent) == (2 if lost is NewRegion else 1)
        (credit, *_) = [each for each in sent if isinstance(each, Credits)]
        assert credit.region_id == agent._sidecar.region.region_id != old_region
        assert all(peer.new_region is None for peer in agent._links._peers.values())


def test_a_move_that_is_said_again_leaves_the_engine_alone(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The answer may be late: by then writes into the new slots are under way, and adding a peer again ends them."""
    added: list[str] = []
    add_peer = LoopbackTransport.add_peer
    send = PrefillPeer.send

    def note(transport: LoopbackTransport, peer: str, metadata: bytes) -> None:
        added.append(peer)
        add_peer(transport, peer, metadata)

    def say_twice(peer: PrefillPeer, message: DecodeToPrefill) -> None:
        if isinstance(message, NewRegion):
            send(peer, message)
        send(peer, message)

    with AgentWorld(tmp_path) as world:
        build(world, Split())
        world.move(8)
        monkeypatch.setattr(LoopbackTransport, "add_peer", note)
        monkeypatch.setattr(PrefillPeer, "send", say_twice)
        agent, _ = move_slots(world, tmp_path)
        world.move(20)
        assert added == [agent.incarnation]
