"""Placement agent on a GPU: agents in processes of their own move rows of pools that workers share with them."""

from __future__ import annotations

import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import ExitStack
from pathlib import Path

import pytest

from kvxfer.control.client import DecodeClient, PrefillClient
from kvxfer.errors import AgentLostError
from kvxfer.ops.config import SlotConfig
from kvxfer.transfer import EventKind, Reason
from tests.gpu.orders import assert_same
from tests.gpu.shared_world import (
    NUM_PAGES,
    WAIT_S,
    Side,
    contents,
    cuda,
    decode_client,
    dst_pages,
    moved,
    prefill_client,
    src_chunk,
)
from tests.test_agents_processes import agent, process

pytestmark = [pytest.mark.gpu(limit_s=90.0), pytest.mark.usefixtures("kernels")]
ROOT = Path(__file__).parents[2]
HALF_A_SECOND = 900_000_000  # cycles, at 1.8 GHz


class World:
    """Two workers in this process, an agent in a process of its own for each."""

    def __init__(self, path: Path, kind: str, stack: ExitStack) -> None:
        slots = SlotConfig(num_slots=4, slot_bytes=1 << 20)
        self.agents = [
            stack.enter_context(process(*agent(role, path / role, slots=slots)))[0] for role in ("prefill", "decode")
        ]
        self.path, self.kind, self._stack = path, kind, stack
        self.dst = Side(kind, seed=2)
        stack.callback(self.dst.close)
        self.decode: DecodeClient = stack.enter_context(decode_client(path / "decode", self.dst))
        self.expected = contents(2)

    def join_prefill(self) -> PrefillClient:
        """The prefill worker, whose pool is `src`."""
        self.src = Side(self.kind, seed=1)
        self._stack.callback(self.src.close)
        return self._stack.enter_context(prefill_client(self.path / "prefill", self.src))

    def check(self) -> None:
        """Every byte of the decode worker's pool."""
        assert_same(self.dst.read(), self.expected, "the decode worker's pool")


@pytest.fixture(params=["vmm", "legacy"])
def world(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[World]:
    with ExitStack() as stack:
        yield World(tmp_path, request.param, stack)


def test_rows_of_shared_pools_arrive(world: World) -> None:
    prefill = world.join_prefill()
    for seed in range(5, 9):
        world.src.write(contents(seed))
        ticket = prefill.ticket()
        world.decode.open(ticket, dst_pages())
        for first in range(0, NUM_PAGES, 5):
            prefill.submit(ticket, {"kv": src_chunk(first, first + 5)}, last=first + 5 == NUM_PAGES)
        assert world.decode.wait(ticket, WAIT_S).event is EventKind.LANDED
        assert prefill.wait(ticket, WAIT_S).event is EventKind.SENT
        world.expected = moved(contents(seed), world.expected)
        world.check()


@pytest.mark.parametrize("is_marked", [True, False])
def test_rows_that_a_stream_writes_late_arrive_with_a_mark(world: World, is_marked: bool) -> None:
    """Without one, what was there before does: the wait for the timeline is what this depends on."""
    prefill = world.join_prefill()
    before, after = contents(5), contents(6)
    world.src.write(before)
    late, stream = Side("legacy", seed=6), cuda.Stream()
    ticket = prefill.ticket()
    world.decode.open(ticket, dst_pages())
    with cuda.stream(stream):
        world.src.tensor.copy_(late.tensor)  # whatever is loaded for that is there by now
        stream.synchronize()
        world.src.write(before)
        cuda._sleep(HALF_A_SECOND)
        world.src.tensor.copy_(late.tensor)
        ready = prefill.mark(stream) if is_marked else 0
    prefill.submit(ticket, {"kv": src_chunk(0, NUM_PAGES)}, last=True, ready=ready)
    assert world.decode.wait(ticket, WAIT_S).event is EventKind.LANDED
    stream.synchronize()
    world.expected = moved(after if is_marked else before, world.expected)
    world.check()
    late.close()


def test_a_worker_that_is_killed_leaves_an_agent_that_serves_the_next(world: World) -> None:
    with subprocess.Popen(
        [sys.executable, "-m", "tests.gpu.sharing_child", str(world.path / "prefill"), world.kind],
        cwd=ROOT,
        stdout=subprocess.PIPE,
        text=True,
    ) as child:
        assert child.stdout is not None
        lost_ticket = child.stdout.readline().strip()
        assert lost_ticket, "the worker did not come so far"
        world.decode.open(lost_ticket, dst_pages())
        time.sleep(0.01)
        child.kill()
        child.wait()
    event = world.decode.next_event(WAIT_S)
    assert event is not None
    assert event.event is EventKind.FAILED, event
    world.expected = world.dst.read()  # some rows may be there
    prefill = world.join_prefill()
    ticket = prefill.ticket()
    world.decode.open(ticket, dst_pages())
    prefill.submit(ticket, {"kv": src_chunk(0, NUM_PAGES)}, last=True)
    assert world.decode.wait(ticket, WAIT_S).event is EventKind.LANDED
    world.expected = moved(contents(1), world.expected)
    world.check()


def test_an_agent_that_is_killed_holds_up_no_stream(world: World) -> None:
    prefill, stream = world.join_prefill(), cuda.Stream()
    ticket = prefill.ticket()
    world.decode.open(ticket, dst_pages())
    with cuda.stream(stream):
        cuda._sleep(HALF_A_SECOND)
        ready = prefill.mark(stream)
    prefill.submit(ticket, {"kv": src_chunk(0, NUM_PAGES)}, last=True, ready=ready)
    world.agents[0].kill()
    event = prefill.wait(ticket, 5.0)
    assert (event.event, event.reason) == (EventKind.FAILED, Reason.AGENT_LOST)
    began_s = time.monotonic()
    cuda.synchronize()
    assert time.monotonic() - began_s < 5.0
    with pytest.raises(AgentLostError):
        prefill.mark(stream)
    assert world.decode.wait(ticket, WAIT_S).event is EventKind.FAILED
