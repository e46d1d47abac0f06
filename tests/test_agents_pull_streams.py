"""Pulls where streams of the workers move the rows: the decode worker maps the source's pool, and lets go of it."""

from __future__ import annotations

from pathlib import Path

import pytest

from kvxfer.control.handoff_messages import PoolPlacement
from kvxfer.decode.agent import DecodeAgent
from kvxfer.peer_pools import StreamPeerPools
from kvxfer.prefill.leg import Mode
from kvxfer.streams.ring import MemoryIndex
from tests.agent_world import AgentWorld
from tests.test_agents import SPLITS, Split, build
from tests.test_agents_pull import _chosen

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
