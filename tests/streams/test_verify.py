"""verify = full with streams of workers: each side sums or digests as it can; nothing of a changed segment lands."""

from __future__ import annotations

import time
from pathlib import Path

import pytest

from kvxfer.control.handoff_messages import PoolPlacement
from kvxfer.decode.actions import Scatter
from kvxfer.decode.agent import DecodeAgent
from kvxfer.layout import Placement
from kvxfer.operations import Move
from kvxfer.row_mover import HostExecutor
from kvxfer.streams.stream_mover import StreamMover
from kvxfer.transfer import EventKind, Reason
from tests.agent_world import AgentWorld
from tests.test_agents import KV, Split
from tests.wire_world import Geometry, GroupSpec

SLOT_BYTES = 4096
PLACEMENTS: list[PoolPlacement] = ["worker", "agent"]
senders = pytest.mark.parametrize("sender", PLACEMENTS)
receivers = pytest.mark.parametrize("receiver", PLACEMENTS)


def build(
    world: AgentWorld, split: Split, sender: PoolPlacement, receiver: PoolPlacement, slot_bytes: int = SLOT_BYTES
) -> None:
    for idx, layout in enumerate(split.sources()):
        world.start_prefill(f"p{idx}", slot_bytes=slot_bytes, mode="packed")
        world.placement = sender
        world.join_prefill(f"p{idx}", layout)
    for rank in range(split.num_ranks):
        world.start_decode(f"d{rank}", rank, split.num_ranks, slot_bytes=slot_bytes, verify="full")
        world.placement = receiver
        world.join_decode(f"d{rank}", split.target(rank))
    world.placement = "worker"  # who waits lets the streams go on


@pytest.fixture
def checks(monkeypatch: pytest.MonkeyPatch) -> set[tuple[str, bytes, bool]]:
    """Who scattered segments with a checksum of which kind, and whether a thread looked at them before."""
    seen: set[tuple[str, bytes, bool]] = set()
    kinds: list[bytes] = []
    scatter_of_agent = DecodeAgent._scatter

    def scatter(agent: DecodeAgent, action: Scatter) -> None:
        kinds.append(action.notice.checksum[:1])
        scatter_of_agent(agent, action)

    monkeypatch.setattr(DecodeAgent, "_scatter", scatter)
    for executor in (StreamMover, HostExecutor):
        original = executor.scatter

        def spy(self: object, move: Move, slot: int, look: object, original: object = original) -> None:
            assert (move.row_sum is None) == (look is not None), "each segment is checked, once"
            seen.add((type(self).__name__, kinds[-1], look is not None))
            original(self, move, slot, look)  # type: ignore[operator]

        monkeypatch.setattr(executor, "scatter", spy)
    return seen


@senders
@receivers
def test_the_sender_says_which_kind_and_the_receiver_checks_it(
    sender: PoolPlacement, receiver: PoolPlacement, checks: set[tuple[str, bytes, bool]], tmp_path: Path
) -> None:
    with AgentWorld(tmp_path) as world:
        build(world, Split(dst_size=2), sender, receiver)
        for salt in range(2):
            world.move(60, chunk_tokens=25, salt=salt)
    kind = b"s" if sender == "worker" else b"x"
    executor = "StreamMover" if receiver == "worker" else "HostExecutor"
    assert checks == {(executor, kind, not sender == receiver == "worker")}


def test_slots_that_begin_anywhere_are_digested_by_threads(
    checks: set[tuple[str, bytes, bool]], tmp_path: Path
) -> None:
    with AgentWorld(tmp_path) as world:
        build(world, Split(), "worker", "worker", slot_bytes=SLOT_BYTES + 8)
        world.move(60, chunk_tokens=25)
    assert checks == {("StreamMover", b"x", True)}


SPECS = {
    "rows of 96": KV,
    "577": GroupSpec("kv", Placement.SHARDED, 3, 577),
    "2": GroupSpec("kv", Placement.SHARDED, 70, 2),
    "132": GroupSpec("kv", Placement.SHARDED, 2, 132),
}


@senders
@receivers
@pytest.mark.parametrize("rows", SPECS)
@pytest.mark.parametrize("place", [0, -1])
def test_a_flipped_bit_in_a_landing_slot_reaches_no_page(
    sender: PoolPlacement,
    receiver: PoolPlacement,
    rows: str,
    place: int,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """In the first and in the last byte of a segment; the next transfer goes on."""
    is_flipping = [True]
    scatter_of_agent = DecodeAgent._scatter

    def scatter(agent: DecodeAgent, action: Scatter) -> None:
        if is_flipping:
            agent._sidecar.slots.view(action.slot)[: action.notice.num_bytes][place] ^= 0x20
        scatter_of_agent(agent, action)

    monkeypatch.setattr(DecodeAgent, "_scatter", scatter)
    split = Split(specs=(SPECS[rows],), dst=Geometry(4, pad_bytes=3 if rows == "577" else 0))
    with AgentWorld(tmp_path) as world:
        build(world, split, sender, receiver)
        request = world.begin(2, salt=1)
        world.submit_all(request, 2)
        event = world.wait(world.decode[0][1], request)
        assert (event.event, event.reason) == (EventKind.FAILED, Reason.CORRUPT)
        assert "chunk 0, landing slot" in event.detail
        world.verify()  # not a byte of any page
        is_flipping.clear()
        world.move(9, salt=2)


def test_a_stream_that_does_not_do_what_it_was_told_is_found_out(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Rows that a stream leaves out, of a gather: what was in the slot before does not pass for them."""
    monkeypatch.setattr("kvxfer.streams.host_stream.HostRowStream._execute", _skip_orders)
    with AgentWorld(tmp_path) as world:
        build(world, Split(), "worker", "agent")
        request = world.begin(20, salt=1)
        world.submit_all(request, 20)
        event = world.wait(world.decode[0][1], request)
        assert (event.event, event.reason) == (EventKind.FAILED, Reason.CORRUPT)
        world.verify()


def _skip_orders(stream: object, number: int) -> None:
    ring = stream._ring  # type: ignore[attr-defined]
    while ring.order_of(number) is None:
        time.sleep(1e-3)
