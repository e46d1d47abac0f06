"""Rows that leave a pool on a GPU without packing: engines read the agent's mapping of it, and write landing slots.

Its part without a GPU: tests/test_agents_raw_gpu.py.
"""

from __future__ import annotations

import sys
from collections.abc import Iterator
from contextlib import ExitStack
from pathlib import Path

import pytest

from kvxfer.cli.bench_transfer import run_case
from kvxfer.cli.output import Steps
from kvxfer.cli.transfer_case import TransferCase
from kvxfer.control.client import DecodeClient, PrefillClient
from kvxfer.control.messages import TransferStats
from kvxfer.ops.config import PrefillConfig, SlotConfig, SlotKind, TransportConfig, TransportName
from kvxfer.prefill.agent import PrefillAgent
from kvxfer.transfer import EventKind
from tests.agent_world import AgentThread
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
from tests.test_agents_raw_gpu import FailingLaunch

pytestmark = [pytest.mark.gpu(limit_s=40.0), pytest.mark.usefixtures("kernels")]
HALF_A_SECOND = 900_000_000  # cycles, at 1.8 GHz


@pytest.fixture
def stack() -> Iterator[ExitStack]:
    with ExitStack() as made:
        yield made


def slots_of(kind: SlotKind) -> SlotConfig:
    return SlotConfig(kind=kind, num_slots=4, slot_bytes=1 << 20)


class Workers:
    """Of both sides, in this process; their agents run already. The prefill worker has a pool of `kind`."""

    def __init__(self, path: Path, kind: str, stack: ExitStack) -> None:
        self.src, self.dst = Side(kind, seed=1), Side("vmm", seed=2)
        for side in (self.src, self.dst):
            stack.callback(side.close)
        self.decode: DecodeClient = stack.enter_context(decode_client(path / "decode", self.dst))
        self.prefill: PrefillClient = stack.enter_context(prefill_client(path / "prefill", self.src))
        self._expected = contents(2)

    def move(self, seed: int, *, is_late: bool = False) -> TransferStats:
        """A transfer of rows that a stream writes, half a second after they were submitted if `is_late`."""
        self.src.write(contents(seed + 100))
        late, stream = Side("legacy", seed), cuda.Stream()
        ticket = self.prefill.ticket()
        self.decode.open(ticket, dst_pages())
        with cuda.stream(stream):
            if is_late:
                cuda._sleep(HALF_A_SECOND)
            self.src.tensor.copy_(late.tensor)
            ready = self.prefill.mark(stream)
        for first in range(0, NUM_PAGES, 10):
            chunk = {"kv": src_chunk(first, first + 10)}
            self.prefill.submit(ticket, chunk, last=first + 10 == NUM_PAGES, ready=ready)
        landed = self.decode.wait(ticket, WAIT_S)
        assert landed.event is EventKind.LANDED, landed
        sent = self.prefill.wait(ticket, WAIT_S)
        assert sent.event is EventKind.SENT, sent
        self._expected = moved(contents(seed), self._expected)
        assert_same(self.dst.read(), self._expected, "the decode worker's pool")
        late.close()
        return sent.stats


@pytest.mark.parametrize(
    ("transport", "slot_kind"),
    [
        ("loopback", "device"),
        pytest.param("nixl", "device", marks=pytest.mark.nixl),
    ],
)
def test_a_gather_that_cannot_be_launched_makes_its_legs_go_on_run_by_run(
    tmp_path: Path, stack: ExitStack, transport: TransportName, slot_kind: SlotKind
) -> None:
    """The agent whose stream fails is a thread of this process; the decode agent is a process of its own."""
    slots = slots_of(slot_kind)
    stack.enter_context(process(*agent("decode", tmp_path / "decode", transport, slots)))
    config = PrefillConfig(
        socket_dir=str(tmp_path / "prefill"),
        transport=TransportConfig(name=transport),
        slots=slots,
        mode="packed",
    )
    failing = PrefillAgent(config)
    stack.callback(AgentThread(failing).end)
    workers = Workers(tmp_path, "vmm", stack)
    packed = workers.move(5)
    assert packed.num_descriptors == packed.num_segments, "packing did not work to begin with"
    assert failing._core._life.may_send_raw, "the engine has refused the pool: see the log for its reason"
    FailingLaunch(failing, 2)
    stats = workers.move(6)
    assert failing._core._life.num_fallbacks > 0
    assert packed.num_segments < stats.num_descriptors <= stats.num_runs
    stats = workers.move(7)
    assert stats.num_descriptors == stats.num_runs


@pytest.mark.parametrize(
    ("transport", "slot_kind", "pool_kind"),
    [
        ("loopback", "device", "legacy"),
        pytest.param("nixl", "device", "vmm", marks=pytest.mark.nixl),
    ],
)
def test_mode_raw(
    tmp_path: Path, stack: ExitStack, transport: TransportName, slot_kind: SlotKind, pool_kind: str
) -> None:
    """Rows are read once the stream that writes them has come there: others were there before."""
    for role in ("prefill", "decode"):
        stack.enter_context(process(*agent(role, tmp_path / role, transport, slots_of(slot_kind), "raw")))
    workers = Workers(tmp_path, pool_kind, stack)
    for seed in (5, 6):
        stats = workers.move(seed, is_late=seed == 6)
        assert stats.num_descriptors == stats.num_runs > stats.num_segments


def test_the_bench_measures_it() -> None:
    case = TransferCase(
        transport="loopback",
        mode="raw",
        num_tokens=1024,
        num_layers=4,
        row_bytes=1152,
        page_tokens=64,
        pages="shuffled",
        num_ranks=2,
        interleave=1,
        chunk_tokens=512,
        num_repeats=1,
        num_slots=8,
        slot_bytes=256 << 10,
        device="cuda",
        placement="agent",
        slot_kind="device",
        deadline_s=20.0,
    )
    case.check()
    result = run_case(case, Steps())
    assert result.problems == ()
    facts = result.as_json()
    assert facts["descriptors_sent"] == facts["descriptors_raw"]
    sys.stdout.write(f"{facts['descriptors_sent']} descriptors in {facts['transfer_ms']:.2f} ms\n")
