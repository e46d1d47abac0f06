"""Real agents without packing: as the fallback of a gather that fails, in mid-transfer, and a chunk of 100,000 rows."""

from __future__ import annotations

import gc
import threading
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest

from kvxfer import row_mover as mover_module
from kvxfer.control.messages import TransferStats
from kvxfer.layout import Placement, Shard
from kvxfer.ownership import Int64Array
from kvxfer.prefill.agent import PrefillAgent
from kvxfer.rows_host import ByteArray, gather_segment
from kvxfer.segments import ChunkPlan
from kvxfer.transfer import EventKind, Reason
from kvxfer.transports._engine_transport import EngineTransport
from kvxfer.wire import BlockAddresses
from tests.agent_world import WAIT_S, AgentWorld
from tests.test_agents import DRAFT, KV, Split, build
from tests.wire_world import Geometry, GroupSpec, make_layout

ENGINES = [
    "loopback",
    pytest.param("nixl", marks=pytest.mark.nixl),
    pytest.param("mooncake", marks=pytest.mark.mooncake),
]


class _FailingGather:
    """Stands in for `gather_segment`: the calls numbered in `failing` raise, the first call is number 0."""

    def __init__(self, failing: Callable[[int], bool]) -> None:
        self._failing = failing
        self._lock = threading.Lock()
        self.num_calls = 0
        self.num_failed = 0

    def __call__(
        self, pool: ByteArray, plan: ChunkPlan, addresses: tuple[BlockAddresses, ...], segment_idx: int, slot: ByteArray
    ) -> int:
        with self._lock:
            number = self.num_calls
            self.num_calls += 1
            if self._failing(number):
                self.num_failed += 1
                raise MemoryError("injected: this gather fails")
        return gather_segment(pool, plan, addresses, segment_idx, slot)


def _prefill_agent(world: AgentWorld) -> PrefillAgent:
    agent = world.threads[world.path / "p0"].agent
    assert isinstance(agent, PrefillAgent)
    return agent


def _sent(world: AgentWorld, num_tokens: int, **fields: int) -> TransferStats:
    """The prefill side's figures of a transfer that went well and was verified."""
    return world.move(num_tokens, **fields).events[-1].stats


@pytest.mark.parametrize("transport", ENGINES)
@pytest.mark.parametrize("first_failing", [0, 3], ids=["the first gather", "in mid-transfer"])
def test_a_gather_that_fails_makes_its_leg_go_on_run_by_run(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, transport: str, first_failing: int
) -> None:
    """Exact, with the rows that were packed before and those of later chunks; the next transfer is packed again."""
    with AgentWorld(tmp_path, transport) as world:
        build(world, Split(dst_size=2, specs=(KV, DRAFT)))
        agent = _prefill_agent(world)
        gather = _FailingGather(lambda number: number == first_failing)
        monkeypatch.setattr(mover_module, "gather_segment", gather)
        stats = _sent(world, 40, chunk_tokens=25, salt=1)
        assert gather.num_failed == 1
        assert agent._core._life.num_fallbacks == 1
        assert stats.num_segments < stats.num_descriptors < stats.num_runs  # one leg went raw, the other packed on
        packed = _sent(world, 40, salt=2)
        assert packed.num_descriptors == packed.num_segments
        assert agent._core._life.num_fallbacks == 1


@pytest.mark.parametrize("transport", ENGINES)
def test_a_pool_that_no_gather_can_read_is_sent_without_packing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, transport: str
) -> None:
    """Several gathers of one leg fail at once: each of its segments goes once, and no row is left out."""
    with AgentWorld(tmp_path, transport) as world:
        build(world, Split(dst_size=2, world=4))  # the same shard twice: one gather serves two legs
        gather = _FailingGather(lambda _number: True)
        monkeypatch.setattr(mover_module, "gather_segment", gather)
        for salt in range(3):
            stats = _sent(world, 37, chunk_tokens=9, salt=salt)
            assert stats.num_descriptors == stats.num_runs
        assert gather.num_failed == gather.num_calls > 0
        assert _prefill_agent(world)._core._life.num_fallbacks == gather.num_failed


def test_what_must_be_verified_is_not_sent_without_packing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Rows that were never packed have no checksum: the transfer fails and says why."""
    with AgentWorld(tmp_path) as world:
        world.start_prefill("p0")
        world.join_prefill("p0", Split().sources()[0])
        world.start_decode("d0", verify="full")
        world.join_decode("d0", Split().target(0))
        gather = _FailingGather(lambda number: number == 2)
        monkeypatch.setattr(mover_module, "gather_segment", gather)
        request = world.begin(40)
        world.submit_all(request, 40)
        event = world.prefill[0][1].wait(request.ticket, WAIT_S)
        assert (event.event, event.reason) == (EventKind.FAILED, Reason.GATHER_FAILED)
        assert "injected: this gather fails" in event.detail
        assert world.decode[0][1].wait(request.ticket, WAIT_S).reason is Reason.GATHER_FAILED
        world.decode[0][0].expected[:] = world.decode[0][0].memory.array
        world.move(40, salt=1)


NUM_LAYERS, NUM_TOKENS = 50, 2000
ROW_BYTES, PAGE_STRIDE_BYTES = 8, 24
MAX_GROWN_BYTES = 96 << 20


def _watch_entries(agent: PrefillAgent, most: list[int]) -> None:
    """Note how many entries the engine has in flight to one peer after each post."""
    transport = agent._sidecar.transport
    assert isinstance(transport, EngineTransport)
    thread = transport._thread
    post_next = thread._post_next

    def noted(name, peer):  # type: ignore[no-untyped-def]  # noqa: ANN001, ANN202
        posted = post_next(name, peer)
        most[0] = max(most[0], peer.num_entries)
        return posted

    thread._post_next = noted  # type: ignore[method-assign]


def _peak_bytes() -> int:
    """The most memory this process ever held since `_forget_peak`."""
    for line in Path("/proc/self/status").read_text(encoding="ascii").splitlines():
        if line.startswith("VmHWM:"):
            return int(line.split()[1]) << 10
    raise AssertionError("/proc/self/status has no VmHWM")


def _forget_peak() -> None:
    gc.collect()
    Path("/proc/self/clear_refs").write_text("5", encoding="ascii")


@pytest.mark.parametrize("transport", ENGINES)
def test_a_chunk_of_100_000_descriptors(tmp_path: Path, transport: str) -> None:
    """Pages of one token in shuffled order, no two rows side by side: exact, within the engine's queue, in bounded
    memory. A segment of 64 KiB alone has 8,192 descriptors."""
    spec = (GroupSpec("kv", Placement.SHARDED, NUM_LAYERS, ROW_BYTES),)
    layout = make_layout(spec, Geometry(1, pad_bytes=8), NUM_TOKENS + 8, Shard())
    with AgentWorld(tmp_path, transport) as world:
        agent = world.start_prefill("p0", mode="raw", slot_bytes=64 << 10)
        world.join_prefill("p0", layout)
        world.start_decode("d0", slot_bytes=64 << 10)
        world.join_decode("d0", layout)
        most = [0]
        if transport != "loopback":
            _watch_entries(agent, most)
        request = world.begin(NUM_TOKENS)
        _forget_peak()
        before_bytes = _peak_bytes()
        world.submit_all(request, NUM_TOKENS)
        for _, client in (*world.decode, *world.prefill):
            event = client.wait(request.ticket, 60.0)
            assert event.event in (EventKind.LANDED, EventKind.SENT), event
        assert event.stats.num_descriptors == event.stats.num_runs == NUM_LAYERS * NUM_TOKENS
        assert _peak_bytes() - before_bytes < MAX_GROWN_BYTES
        assert most[0] <= agent._sidecar.transport.limits.max_entries_per_peer
        group = layout.groups[0]
        assert group.page_stride_bytes == PAGE_STRIDE_BYTES
        for layer in range(NUM_LAYERS):
            base_offset_bytes = group.base_offset_bytes + layer * group.layer_stride_bytes
            source = _rows(world.prefill[0][0].memory.array, base_offset_bytes, request.sources[0].pages[0])
            target = _rows(world.decode[0][0].memory.array, base_offset_bytes, request.targets[0].pages[0])
            np.testing.assert_array_equal(target, source)


def _rows(pool: ByteArray, base_offset_bytes: int, pages: Int64Array) -> ByteArray:
    """`[num_tokens, ROW_BYTES]` uint8: the rows of one layer in the order of the tokens."""
    offsets = base_offset_bytes + pages * PAGE_STRIDE_BYTES
    rows: ByteArray = pool[offsets[:, None] + np.arange(ROW_BYTES)]
    return rows
