"""Pulls on a GPU: the decode worker's stream copies rows out of the pool of a prefill worker in another process."""

from __future__ import annotations

import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path

import pytest

from kvxfer.control.client import DecodeClient
from kvxfer.ops.config import SlotConfig
from kvxfer.transfer import EventKind
from tests.gpu.orders import assert_same
from tests.gpu.shared_world import LAYOUT, WAIT_S, Side, contents, dst_pages, moved
from tests.test_agents_processes import agent, process

pytestmark = [pytest.mark.gpu(limit_s=90.0), pytest.mark.usefixtures("kernels")]
ROOT = Path(__file__).parents[2]


class Source:
    """The prefill worker's process."""

    def __init__(self, child: subprocess.Popen[str]) -> None:
        self.child = child
        assert self.hear() == "ready"

    def hear(self) -> str:
        assert self.child.stdout is not None
        return self.child.stdout.readline().strip()

    def say(self, line: str) -> None:
        assert self.child.stdin is not None
        self.child.stdin.write(line + "\n")
        self.child.stdin.flush()


class World:
    """The decode worker in this process, an agent in a process of its own for each side."""

    def __init__(self, path: Path, kind: str, stack: ExitStack) -> None:
        slots = SlotConfig(num_slots=4, slot_bytes=1 << 20)
        for role in ("prefill", "decode"):
            stack.enter_context(process(*agent(role, path / role, slots=slots, mode="p2p")))
        self.path, self.kind = path, kind
        self.dst = Side(kind, seed=2)
        stack.callback(self.dst.close)
        self.decode: DecodeClient = stack.enter_context(
            DecodeClient.connect(path / "decode", self.dst.memory, LAYOUT, placement="worker", timeout_s=WAIT_S)
        )
        self.expected = contents(2)

    @contextmanager
    def source(self) -> Iterator[Source]:
        """A prefill worker, which is killed at the end at the latest."""
        with subprocess.Popen(
            [sys.executable, "-m", "tests.gpu.pulled_child", str(self.path / "prefill"), self.kind],
            cwd=ROOT,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
        ) as child:
            try:
                yield Source(child)
            finally:
                child.kill()

    def move(self, source: Source, seed: int) -> None:
        """A whole transfer, every byte of the decode worker's pool compared."""
        source.say(f"{seed} 1")
        ticket = source.hear()
        self.decode.open(ticket, dst_pages())
        source.say("submit")
        event = self.decode.wait(ticket, WAIT_S)
        assert event.event is EventKind.LANDED, event
        assert source.hear() == "sent 0", "rows were pulled, not written"
        self.expected = moved(contents(seed), self.expected)
        assert_same(self.dst.read(), self.expected, "the decode worker's pool")

    @property
    def num_mapped(self) -> int:
        """Pools of peers that the decode worker has mapped."""
        stream = self.decode._link.stream
        assert stream is not None
        return len(stream._peers._mapped)


@pytest.fixture(params=["vmm", "legacy"])
def world(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[World]:
    with ExitStack() as stack:
        yield World(tmp_path, request.param, stack)


def test_rows_are_pulled_from_both_kinds_of_pools(world: World) -> None:
    with world.source() as source:
        for seed in range(5, 9):
            began_s = time.monotonic()
            world.move(source, seed)
            sys.stdout.write(f"{world.kind}: {(time.monotonic() - began_s) * 1e3:.1f} ms with all that is beside it\n")
        assert world.num_mapped == 1


def test_a_source_that_is_killed_harms_nothing_and_is_unmapped(world: World) -> None:
    """In the middle of a transfer. The next one's pool is mapped, and pulled from."""
    with world.source() as source:
        world.move(source, 5)
        source.say("6 0.5")
        ticket = source.hear()
        world.decode.open(ticket, dst_pages())
        source.say("submit")
        until_s = time.monotonic() + 0.05
        while time.monotonic() < until_s:
            assert world.decode.next_event(0.01) is None
        source.child.kill()
        source.child.wait()
        event = world.decode.next_event(WAIT_S)
    assert event is not None
    assert event.event is EventKind.FAILED, event
    world.expected = world.dst.read()  # some rows are there
    with world.source() as source:
        for seed in (7, 8):
            world.move(source, seed)
        deadline_s = time.monotonic() + WAIT_S
        while world.num_mapped > 1:
            assert world.decode.next_event(0.01) is None
            assert time.monotonic() < deadline_s, "the killed worker's pool stays mapped"
