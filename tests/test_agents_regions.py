"""A decode agent's landing slots move to other memory, and the message that says so is lost."""

from __future__ import annotations

import time
from pathlib import Path

import pytest

from kvxfer.control.messages import Credits, DecodeToPrefill, NewRegion
from kvxfer.decode.agent import DecodeAgent
from kvxfer.decode.pairing import PrefillPeer
from tests.agent_world import WAIT_S, AgentWorld
from tests.test_agents import ENGINES, Split, build


@pytest.mark.parametrize("transport", ENGINES)
@pytest.mark.parametrize("lost", [NewRegion, Credits])
def test_what_is_lost_of_a_move_is_said_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, transport: str, lost: type
) -> None:
    sent: list[object] = []
    send = PrefillPeer.send

    def lose_first(peer: PrefillPeer, message: DecodeToPrefill) -> bool:
        is_first = isinstance(message, lost) and not any(isinstance(each, lost) for each in sent)
        sent.append(message)
        return is_first or send(peer, message)

    with AgentWorld(tmp_path, transport) as world:
        build(world, Split())
        world.move(8)
        monkeypatch.setattr(PrefillPeer, "send", lose_first)
        agent = world.threads[tmp_path / "d0"].agent
        assert isinstance(agent, DecodeAgent)
        old_region = agent._sidecar.region.region_id
        tick = agent.tick

        def move_slots(now: float) -> None:
            agent.tick = tick  # type: ignore[method-assign]
            agent._renew_slots(now)

        agent.tick = move_slots  # type: ignore[method-assign]
        deadline_s = time.monotonic() + WAIT_S
        while agent._sidecar.region.region_id == old_region:
            assert time.monotonic() < deadline_s
            time.sleep(0.01)
        world.move(20)
        assert sum(isinstance(each, NewRegion) for each in sent) == (2 if lost is NewRegion else 1)
        (credit, *_) = [each for each in sent if isinstance(each, Credits)]
        assert credit.region_id == agent._sidecar.region.region_id != old_region
        assert all(peer.new_region is None for peer in agent._links._peers.values())
