"""Real agents over real transports: every byte of every pool, in every way that rows can be split and shared."""

from __future__ import annotations

import os
import threading
import time
from dataclasses import dataclass, field
from pathlib import Path

import pytest

from kvxfer.layout import Placement, PoolLayout, Shard, StatePart, TokenRange
from kvxfer.ops.config import TransferMode
from tests.agent_world import AgentWorld, receive_pages
from tests.wire_world import Geometry, GroupSpec, make_layout

KV = GroupSpec("kv", Placement.SHARDED, 3, 24)
DRAFT = GroupSpec("draft", Placement.REPLICATED, 1, 20)
BLOB = GroupSpec("blob", Placement.STATE, 1, parts=(StatePart("whole", 60),))
STATE = GroupSpec("state", Placement.STATE, 2, parts=(StatePart("conv", 36), StatePart("ssm", 48, split=True)))
ENGINES = ["loopback", pytest.param("nixl", marks=pytest.mark.nixl)]


@dataclass(frozen=True)
class Split:
    """How both sides are split: DCP shards, pipeline stages, replicas; `world` decode agents hold `dst_size` shards."""

    src_size: int = 1
    dst_size: int = 1
    world: int = 0
    stages: int = 1
    replicas: int = 1
    src_interleave: int = 1
    dst_interleave: int = 1
    num_tokens: int = 37
    specs: tuple[GroupSpec, ...] = (KV,)
    src: Geometry = field(default=Geometry(4))
    dst: Geometry = field(default=Geometry(4))

    @property
    def num_ranks(self) -> int:
        return self.world or self.dst_size

    def sources(self) -> list[PoolLayout]:
        return [
            make_layout(
                self.specs,
                self.src,
                64,
                Shard(rank, self.src_size, self.src_interleave),
                stage=(stage, self.stages),
                replica=(replica, self.replicas),
            )
            for stage in range(self.stages)
            for replica in range(self.replicas)
            for rank in range(self.src_size)
        ]

    def target(self, rank: int) -> PoolLayout:
        shard = Shard(rank % self.dst_size, self.dst_size, self.dst_interleave)
        return make_layout(self.specs, self.dst, 64, shard)


def build(world: AgentWorld, split: Split, num_slots: int = 4, mode: TransferMode = "packed", **fields: object) -> None:
    """Agents and workers of both sides."""
    for idx, layout in enumerate(split.sources()):
        world.start_prefill(f"p{idx}", num_slots, mode=mode, **fields)
        world.join_prefill(f"p{idx}", layout)
    for rank in range(split.num_ranks):
        world.start_decode(f"d{rank}", rank, split.num_ranks, num_slots, **fields)
        world.join_decode(f"d{rank}", split.target(rank))


SPLITS = {
    "one to one": Split(),
    "one to two, pages differ": Split(dst_size=2, src=Geometry(5), dst=Geometry(3, "page_major", 7)),
    "one to three, interleaved": Split(dst_size=3, dst_interleave=2),
    "one to four, interleave is the page": Split(dst_size=4, dst_interleave=4),
    "three to two": Split(src_size=3, dst_size=2, src_interleave=2, src=Geometry(4, "page_major")),
    "two to two, alike": Split(src_size=2, dst_size=2),
    "two pipeline stages to two": Split(stages=2, dst_size=2),
    "two replicas to four": Split(replicas=2, dst_size=4),
    "the same shard twice": Split(dst_size=2, world=4),
    "draft and state": Split(dst_size=2, specs=(KV, DRAFT, STATE)),
    "draft and blob of two shards": Split(src_size=2, dst_size=3, specs=(KV, DRAFT, BLOB)),
    "one token to four": Split(dst_size=4, num_tokens=1),
    "no token": Split(dst_size=2, num_tokens=0),
    "odd rows": Split(dst_size=2, specs=(GroupSpec("kv", Placement.SHARDED, 2, 57),), dst=Geometry(4, pad_bytes=3)),
}


@pytest.mark.parametrize("name", SPLITS)
def test_every_split_is_exact(tmp_path: Path, name: str) -> None:
    split = SPLITS[name]
    with AgentWorld(tmp_path) as world:
        build(world, split)
        for salt, chunk_tokens in ((0, 1 << 20), (0x3C, 9)):
            request = world.move(split.num_tokens, chunk_tokens=chunk_tokens, salt=salt)
            for event in request.events[: len(world.decode)]:
                assert event.aux == (b"aux %d" % split.num_tokens,) * len(world.prefill)


@pytest.mark.parametrize("transport", ENGINES)
@pytest.mark.parametrize("mode", ["packed", "raw", "serial"])
def test_every_mode_is_exact_with_slots_starved(tmp_path: Path, transport: str, mode: TransferMode) -> None:
    """Two transfers at once through one or two slots a side; rows of the two differ in every byte."""
    for num_slots in (1, 2):
        with AgentWorld(tmp_path / str(num_slots), transport) as world:
            build(world, Split(dst_size=2), num_slots, mode)
            world.move_two_at_once()


@pytest.mark.nixl
def test_nixl_moves_shards_stages_and_groups(tmp_path: Path) -> None:
    with AgentWorld(tmp_path, "nixl") as world:
        build(world, Split(stages=2, dst_size=3, specs=(KV, DRAFT)), slot_bytes=4096)
        world.move(200, chunk_tokens=64)


def test_a_prefix_that_is_held_is_not_touched(tmp_path: Path) -> None:
    """Tokens before the first one, and those in `have`, keep what the decode worker has there."""
    with AgentWorld(tmp_path) as world:
        build(world, Split(dst_size=2))
        world.move(41, chunk_tokens=10, first=7)
        world.move(41, chunk_tokens=10, salt=5, have=(TokenRange(0, 6), TokenRange(20, 33)))
        world.move(10, salt=6, have=(TokenRange(0, 10),))


def test_chunks_before_the_tickets_are_opened(tmp_path: Path) -> None:
    """The prefill worker is done before any decode worker has heard of the request."""
    with AgentWorld(tmp_path) as world:
        build(world, Split(dst_size=2))
        decode, world.decode = world.decode, []
        request = world.begin(30)
        world.submit_all(request, 8)
        world.decode = decode
        for seat, client in decode:
            request.targets.append(seat.take_pages(world.ranges(seat.layout, 0, 30)))
            client.open(request.ticket, receive_pages(request.targets[-1]))
        world.finish(request)
        world.verify()


def test_many_small_transfers_leave_nothing(tmp_path: Path) -> None:
    """Descriptors, threads, slots and the cores' memory are flat over transfers, and back at the start after all."""
    at_first = _held()
    with AgentWorld(tmp_path) as world:
        build(world, Split(dst_size=2), num_threads=1)
        world.move(3)
        during = _held()
        for _ in range(12):
            world.move(3, chunk_tokens=2)
        assert _held() == during
        for thread in world.threads.values():
            core = thread.agent._core
            assert not getattr(core, "transfers", {})
            assert not getattr(core, "receives", {})
    deadline_s = time.monotonic() + 5.0
    while _held() != at_first and time.monotonic() < deadline_s:
        time.sleep(0.01)
    assert _held() == at_first


def _held() -> tuple[int, int, int]:
    """Threads, descriptors and mappings of pools and slots of this process."""
    maps = Path("/proc/self/maps").read_text(encoding="utf-8")
    return threading.active_count(), len(os.listdir("/proc/self/fd")), maps.count("/memfd:")
