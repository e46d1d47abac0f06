"""Indices of peers' pools, from the request to map one until the worker has unmapped it."""

from __future__ import annotations

import os
from typing import cast

import pytest

from kvxfer.control.handoff_messages import PeerPool, PeerPoolDropped, PeerWord
from kvxfer.control.messages import PeerPoolMapped, PeerPoolUnmapped
from kvxfer.control.shared_memory import HeldMemory, SharedMemory
from kvxfer.peer_pools import StreamPeerPools
from kvxfer.streams.ring import MemoryIndex
from kvxfer.streams.stream_mover import StreamMover

FIRST = MemoryIndex.FIRST_PEER.value
NUM_INDICES = MemoryIndex.STAGING - MemoryIndex.FIRST_PEER


class _Mover:
    """Says which indices orders name, and notes whether its stream is to rest."""

    def __init__(self) -> None:
        self.used: set[int] = set()
        self.must_rest = False

    def uses_peer(self, index: int) -> bool:
        return index in self.used

    def let_rest(self, must_rest: bool) -> None:
        self.must_rest = must_rest


class World:
    def __init__(self) -> None:
        self.mover = _Mover()
        self.told: list[PeerWord] = []
        self.answers: list[str] = []
        self.peers = StreamPeerPools(cast(StreamMover, self.mover), self._tell)

    def _tell(self, word: PeerWord, memory: HeldMemory | None) -> None:
        assert (memory is not None) == isinstance(word, PeerPool)
        self.told.append(word)
        if memory is not None:
            memory.close()

    def map(self) -> int:
        memory = HeldMemory(SharedMemory(num_bytes=4096), os.memfd_create("pool"))
        index = self.peers.map(memory, self.answers.append)
        assert memory.fd == -1, "whoever took it closes it"
        return index

    def is_mapped(self, index: int, detail: str = "") -> None:
        self.peers.hear(PeerPoolMapped(index=index, detail=detail))


@pytest.fixture
def world() -> World:
    return World()


def test_an_index_is_free_again_once_the_worker_has_unmapped_it(world: World) -> None:
    index = world.map()
    assert world.told == [PeerPool(index=FIRST, memory=SharedMemory(num_bytes=4096))]
    assert world.answers == []
    world.is_mapped(index)
    assert world.answers == [""]
    world.mover.used = {index}
    world.peers.drop(index)
    world.peers.drop(index)
    world.peers.advance()
    assert len(world.told) == 1, "an order still names it"
    world.mover.used = set()
    world.peers.advance()
    world.peers.advance()
    assert world.told[1:] == [PeerPoolDropped(index=index)]
    assert world.mover.must_rest
    assert world.peers.num_free == NUM_INDICES - 1
    assert world.map() == FIRST + 1
    world.peers.hear(PeerPoolUnmapped(index=index))
    assert not world.mover.must_rest
    assert world.peers.num_free == NUM_INDICES - 1
    world.peers.hear(PeerPoolUnmapped(index=index))  # proves nothing
    assert world.peers.num_free == NUM_INDICES - 1


def test_the_stream_rests_until_the_last_is_unmapped(world: World) -> None:
    indices = [world.map(), world.map()]
    for index in indices:
        world.is_mapped(index)
        world.peers.drop(index)
    world.peers.advance()
    world.peers.hear(PeerPoolUnmapped(index=indices[1]))
    assert world.mover.must_rest
    world.peers.hear(PeerPoolUnmapped(index=indices[0]))
    assert not world.mover.must_rest
    assert world.peers.num_free == NUM_INDICES


def test_a_pool_that_is_refused_takes_no_index(world: World) -> None:
    index = world.map()
    world.is_mapped(index, "no peer access")
    assert world.answers == ["no peer access"]
    assert world.peers.num_free == NUM_INDICES
    world.peers.drop(index)  # nothing is mapped under it
    world.peers.advance()
    assert len(world.told) == 1


@pytest.mark.parametrize("detail", ["", "no peer access"])
def test_an_answer_that_comes_after_the_drop_is_nobodys(world: World, detail: str) -> None:
    index = world.map()
    world.peers.drop(index)
    world.is_mapped(index, detail)
    assert world.answers == []
    world.peers.advance()
    assert world.told[1:] == [PeerPoolDropped(index=index)]
    world.peers.hear(PeerPoolUnmapped(index=index))
    assert world.peers.num_free == NUM_INDICES


def test_there_are_no_more_indices_than_a_stream_has(world: World) -> None:
    indices = [world.map() for _ in range(NUM_INDICES)]
    assert indices == list(range(FIRST, FIRST + NUM_INDICES))
    assert world.map() == -1
    assert world.answers == [f"the decode worker has {NUM_INDICES} pools mapped already"]
    world.peers.drop(-1)
    world.peers.advance()
    assert len(world.told) == NUM_INDICES
