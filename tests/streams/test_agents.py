"""Real agents whose workers move the rows by streams of their own: every byte, every end, no stream left waiting."""

from __future__ import annotations

import os
import random
import threading
import time
from collections.abc import Callable
from contextlib import ExitStack
from pathlib import Path

import pytest

from kvxfer.control import client_link
from kvxfer.control.client import DecodeClient, PrefillClient
from kvxfer.control.handoff import StreamMemory
from kvxfer.control.worker_stream import WorkerStream
from kvxfer.errors import ControlTimeoutError, RefusedError
from kvxfer.layout import Placement
from kvxfer.memory import HostMemory
from kvxfer.ops.config import TransferMode
from kvxfer.prefill.core import PrefillCore
from kvxfer.slots import SlotState
from kvxfer.transfer import EventKind, Reason
from tests.agent_world import WAIT_S, AgentWorld, Request, Seat, chunk_pages, write_rows
from tests.streams.bound_host_stream import BoundHostStream
from tests.test_agents import BLOB, DRAFT, ENGINES, KV, SPLITS, STATE, Split
from tests.test_agents_processes import LAYOUT, _drain_until_lost, agent, process
from tests.wire_world import Geometry, GroupSpec, Worker

Client = PrefillClient | DecodeClient


@pytest.fixture(params=["free", "bound"])
def entries(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    """Entries of prefill workers' streams, bound to slots or not."""

    def open_stream(memory: HostMemory, shared: StreamMemory, *, is_prefill: bool) -> BoundHostStream:
        assert isinstance(shared.slots, HostMemory)
        return BoundHostStream(shared.ring, memory, shared.slots, may_bind=is_prefill)

    if request.param == "bound":
        monkeypatch.setattr(client_link, "_open_stream", open_stream)


def build(world: AgentWorld, split: Split, num_slots: int = 4, *, verify: str = "off", **fields: object) -> None:
    """Agents of both sides and workers whose streams move their rows."""
    for idx, layout in enumerate(split.sources()):
        world.start_prefill(f"p{idx}", num_slots, **{"mode": "packed", **fields})
        world.join_prefill(f"p{idx}", layout)
    fields.pop("mode", None)
    for rank in range(split.num_ranks):
        world.start_decode(f"d{rank}", rank, split.num_ranks, num_slots, verify=verify, **fields)
        world.join_decode(f"d{rank}", split.target(rank))


def stream_of(client: Client) -> WorkerStream:
    stream = client._link.stream
    assert stream is not None
    return stream


def clients_of(world: AgentWorld) -> list[Client]:
    return [*(client for _, client in world.prefill), *(client for _, client in world.decode)]


def until(world: AgentWorld, condition: Callable[[], bool], what: str) -> None:
    """Wait, while every worker looks in now and then."""
    deadline_s = time.monotonic() + WAIT_S
    while not condition():
        assert time.monotonic() < deadline_s, what
        for client in clients_of(world):
            client._link.drain()
        time.sleep(0.002)


def assert_at_rest(world: AgentWorld) -> None:
    """Nothing is enqueued that has not ended, no slot is held, no lane is in use."""
    until(world, lambda: all(stream_of(each).is_quiet() for each in clients_of(world)), "a stream is left waiting")
    for thread in world.threads.values():
        slots = (
            thread.agent._core._life.sender.slots
            if isinstance(thread.agent._core, PrefillCore)
            else thread.agent._core._life.lender.slots
        )
        until(world, lambda slots=slots: slots.count(SlotState.FREE) == slots.num_slots, "a slot is held")  # type: ignore[misc]
        mover = thread.agent._sidecar.rows
        assert len(mover._entries._lanes) == mover._ring.num_lanes  # type: ignore[attr-defined]


def take_as_it_is(world: AgentWorld) -> None:
    """Rows of transfers that failed may be anywhere in their pages."""
    for seat, _ in world.decode:
        seat.expected[:] = seat.memory.array


@pytest.mark.usefixtures("entries")
@pytest.mark.parametrize("verify", ["off", "full"])
@pytest.mark.parametrize(
    "split",
    [
        SPLITS["one to one"],
        SPLITS["one to three, interleaved"],
        SPLITS["one to four, interleave is the page"],
        SPLITS["three to two"],
        SPLITS["the same shard twice"],
        SPLITS["no token"],
        Split(dst_size=2, specs=(KV, DRAFT, STATE), src=Geometry(5), dst=Geometry(3, "page_major", 7)),
        Split(src_size=2, dst_size=3, specs=(KV, DRAFT, BLOB)),
        Split(dst_size=2, specs=(GroupSpec("kv", Placement.SHARDED, 70, 2),), num_tokens=9),
    ],
    ids=["1:1", "1:3", "1:4", "3:2", "shared", "nothing", "state", "blob", "more layers than spans"],
)
def test_every_split_is_exact(tmp_path: Path, split: Split, verify: str) -> None:
    with AgentWorld(tmp_path, placement="worker") as world:
        build(world, split, verify=verify)
        for salt, chunk_tokens in ((0, 1 << 20), (0x3C, 9)):
            world.move(split.num_tokens, chunk_tokens=chunk_tokens, salt=salt)
        assert_at_rest(world)


@pytest.mark.usefixtures("entries")
@pytest.mark.parametrize("transport", ENGINES)
@pytest.mark.parametrize("mode", ["packed", "serial"])
def test_slots_that_are_starved_delay_and_harm_nothing(tmp_path: Path, transport: str, mode: TransferMode) -> None:
    for num_slots in (1, 2):
        with AgentWorld(tmp_path / str(num_slots), transport, placement="worker") as world:
            build(world, Split(dst_size=2), num_slots, mode=mode)
            world.move_two_at_once()
            assert_at_rest(world)


def test_a_chunk_is_enqueued_by_the_call_that_submits_it_and_no_entry_is_wasted(tmp_path: Path) -> None:
    with AgentWorld(tmp_path, placement="worker") as world:
        build(world, Split(dst_size=2), num_slots=2)
        world.move(5)
        stream = stream_of(world.prefill[0][1])
        request = world.begin(60, salt=1)
        agent_of_source = world.threads[tmp_path / "p0"].agent
        until(world, lambda: _num_granted(agent_of_source._core, request) == 2, "a grant has not come")
        before = stream._num_enqueued
        world.submit(request, 0, 60)
        num_enqueued = stream._num_enqueued - before
        world.finish(request)
        (sent,) = [event for event in request.events if event.event is EventKind.SENT]
        assert sent.stats is not None
        assert sent.stats.num_segments > 4
        assert num_enqueued == sent.stats.num_segments
        assert stream._num_enqueued - before == num_enqueued
        assert_at_rest(world)


def _num_granted(core: object, request: Request) -> int:
    assert isinstance(core, PrefillCore)
    transfer = core.transfers.get(request.ticket.transfer)
    return 0 if transfer is None else len(transfer.legs)


# ---- the timeline ----


class _LateStream:
    """Holds back the timeline of a worker: its stream has been given the rows' computation, but has not done it yet."""

    def __init__(self, client: PrefillClient) -> None:
        stream = stream_of(client)
        self.marked = stream._ring.timeline
        self._ring = stream._ring
        stream._stream.mark = self._mark  # type: ignore[method-assign]

    def _mark(self, stream: object | None = None) -> int:  # noqa: ARG002
        self.marked += 1
        return self.marked

    def reach(self, value: int) -> None:
        self._ring.set_timeline(value)


def _begin_unwritten(world: AgentWorld, num_tokens: int, salt: int, deadline_s: float = 60.0) -> Request:
    """A transfer whose source rows are not what they will be."""
    request = world.begin(num_tokens, salt=salt ^ 0xFF, deadline_s=deadline_s)
    request.salt = salt
    return request


def _write(world: AgentWorld, request: Request) -> None:
    for (seat, _), source in zip(world.prefill, request.sources, strict=True):
        write_rows(seat.memory.array, source, request.salt)


@pytest.mark.usefixtures("entries")
@pytest.mark.parametrize("mode", ["packed", "serial", "auto"])
def test_rows_that_are_written_before_the_mark_always_arrive(tmp_path: Path, mode: TransferMode) -> None:
    """The agent sees the chunk long before: without the wait for the timeline it would send what was there then."""
    with AgentWorld(tmp_path, placement="worker") as world:
        build(world, Split(dst_size=2), mode=mode)
        late = _LateStream(world.prefill[0][1])
        for salt in range(1, 4):
            request = _begin_unwritten(world, 40, salt)
            world.submit(request, 0, 25)
            world.submit(request, 25, 40)
            time.sleep(0.02)
            with pytest.raises(ControlTimeoutError):
                world.decode[0][1].wait(request.ticket, 0.02)
            _write(world, request)
            late.reach(late.marked - 1)
            late.reach(late.marked)
            world.finish(request)
            world.verify()
        assert_at_rest(world)


def test_a_chunk_goes_when_its_own_value_is_reached(tmp_path: Path) -> None:
    with AgentWorld(tmp_path, placement="worker") as world:
        build(world, Split())
        late = _LateStream(world.prefill[0][1])
        request = _begin_unwritten(world, 40, 3)
        world.submit(request, 0, 20)
        world.submit(request, 20, 40)
        _write(world, request)
        landed = world.threads[tmp_path / "d0"].agent._core
        late.reach(late.marked - 1)
        receive = landed.receives[request.ticket.transfer]  # type: ignore[union-attr]
        chunks = receive.legs[0].chunks
        until(world, lambda: len(chunks) == 2 and chunks[0].num_missing == 0, "the first chunk has not come")
        assert chunks[1].num_missing == chunks[1].source.plan.num_segments
        late.reach(late.marked)
        world.finish(request)
        world.verify()


def test_a_value_that_is_never_reached_ends_its_own_transfer_alone(tmp_path: Path) -> None:
    """R14: at its deadline, and no stream is left waiting."""
    with AgentWorld(tmp_path, placement="worker") as world:
        build(world, Split(dst_size=2))
        source_client = world.prefill[0][1]
        doomed = world.begin(40, salt=1)
        groups = chunk_pages(doomed.sources[0], 0, 40)
        source_client.submit(doomed.ticket, groups, last=True, ready=1 << 40, deadline_s=1.0)
        world.move(40, salt=2, chunk_tokens=11)
        event = world.wait(source_client, doomed)
        assert (event.event, event.reason) == (EventKind.FAILED, Reason.DEADLINE)
        for _, client in world.decode:
            assert world.wait(client, doomed).event is EventKind.FAILED
        assert_at_rest(world)
        world.move(40, salt=3)


def test_a_mapped_pool_has_no_timeline(tmp_path: Path) -> None:
    with AgentWorld(tmp_path) as world:
        build(world, Split())
        request = world.begin(10)
        with pytest.raises(RefusedError, match="ready: got 1, expected 0"):
            world.prefill[0][1].submit(request.ticket, chunk_pages(request.sources[0], 0, 10), last=True, ready=1)
        world.submit_all(request, 10)
        world.finish(request)


# ---- ends ----


@pytest.mark.usefixtures("entries")
@pytest.mark.parametrize("side", ["prefill", "decode"])
def test_aborts_at_any_moment_leave_nothing(tmp_path: Path, side: str) -> None:
    """Two slots a side, a random abort in most of them; what is not aborted in time is exact."""
    rng = random.Random(7)
    with AgentWorld(tmp_path, placement="worker") as world:
        build(world, Split(dst_size=2), num_slots=2)
        world.move(30)
        during = _held()
        num_landed = num_aborted = 0
        for salt in range(100):
            request = world.begin(30, salt=salt, deadline_s=WAIT_S)
            aborting = world.prefill[0][1] if side == "prefill" else world.decode[rng.randrange(2)][1]
            bounds = [0, 12, 30]
            abort_at = rng.choice([0, 1, 2, 3])
            for step in range(2):
                if abort_at == step:
                    aborting.abort(request.ticket)
                try:
                    world.submit(request, bounds[step], bounds[step + 1])
                except RefusedError:
                    break  # it is ending already
            if abort_at == 2:
                time.sleep(rng.choice([0.0, 0.001, 0.004]))
                aborting.abort(request.ticket)
            events = [world.wait(client, request) for _, client in world.decode]
            source_event = world.wait(world.prefill[0][1], request)
            for (seat, _), target, event in zip(world.decode, request.targets, events, strict=True):
                if event.event is EventKind.LANDED:
                    write_rows(seat.expected, target, request.salt)
                else:
                    _forget_pages(seat, target)
            num_landed += sum(event.event is EventKind.LANDED for event in events)
            num_aborted += source_event.event is not EventKind.SENT
            world.verify()
            _free_pages(world, request)
        assert num_landed > 20
        assert num_aborted > 20
        assert_at_rest(world)
        world.move(30, salt=101)
        assert _held() == during


def _forget_pages(seat: Seat, target: Worker) -> None:
    """Pages of a failed transfer hold whatever has come; no others were touched."""
    for idx, group in enumerate(seat.layout.groups):
        for layer in range(group.layers.first, group.layers.end):
            for address in target.row_addresses(idx, layer).values():
                rows = slice(address, address + group.row_bytes)
                seat.expected[rows] = seat.memory.array[rows]


def _free_pages(world: AgentWorld, request: Request) -> None:
    for (seat, _), worker in zip((*world.prefill, *world.decode), (*request.sources, *request.targets), strict=True):
        for free, pages in zip(seat._free, worker.pages, strict=True):
            free.update(pages.tolist())


def _held() -> tuple[int, int, int]:
    """Threads, descriptors and mappings of pools, rings and slots of this process."""
    maps = Path("/proc/self/maps").read_text(encoding="utf-8")
    return threading.active_count(), len(os.listdir("/proc/self/fd")), maps.count("/memfd:")


@pytest.mark.usefixtures("entries")
@pytest.mark.parametrize("side", ["prefill", "decode"])
def test_a_worker_that_goes_in_the_middle_is_replaced(tmp_path: Path, side: str) -> None:
    with AgentWorld(tmp_path, placement="worker") as world:
        build(world, Split(dst_size=2), num_slots=2)
        world.move(20)
        request = world.begin(60, salt=1)
        world.submit(request, 0, 40)
        seat, leaving = (world.prefill if side == "prefill" else world.decode).pop()
        leaving.close()
        for client in clients_of(world):
            assert world.wait(client, request).event is EventKind.FAILED
        if side == "prefill":
            world.join_prefill("p0", seat.layout)
        else:
            world.join_decode("d1", seat.layout)
        take_as_it_is(world)
        world.move(60, salt=2, chunk_tokens=20)
        assert_at_rest(world)


@pytest.mark.parametrize("dying", ["prefill", "decode"])
def test_an_agent_that_is_killed_while_streams_wait_holds_up_nobody(tmp_path: Path, dying: str) -> None:
    """R18: the client library ends its stream's waiting, and says of each open transfer that the agent is lost."""
    with AgentWorld(tmp_path, placement="worker") as world, ExitStack() as stack:
        for role in ("prefill", "decode"):
            child, _ = stack.enter_context(process(*agent(role, tmp_path / role)))
            if role == dying:
                victim = child
        world.join_prefill("prefill", LAYOUT)
        world.join_decode("decode", LAYOUT)
        world.move(20)
        late = _LateStream(world.prefill[0][1])
        request = world.begin(20)
        world.submit(request, 0, 20)
        waiting = stream_of(world.prefill[0][1] if dying == "prefill" else world.decode[0][1])
        until(world, lambda: not waiting.is_quiet(), "nothing is enqueued")
        assert late.marked > 0
        victim.kill()
        own, other = clients_of(world) if dying == "prefill" else reversed(clients_of(world))
        assert _drain_until_lost(own) == [(request.ticket.transfer, "agent_lost")]
        assert waiting.is_quiet() or waiting.drain(WAIT_S)
        event = world.wait(other, request)
        assert (event.event, event.reason) == (EventKind.FAILED, Reason.PEER_LOST)
        assert stream_of(other).drain(WAIT_S)
