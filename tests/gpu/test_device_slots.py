"""Slots on a GPU: written by engines between processes, gathered into and scattered out of by streams of workers."""

from __future__ import annotations

import subprocess
import sys
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from benchmarks.gpu_nixl import slots as whole_slots
from benchmarks.gpu_peer import Entries, Peer, PeerError, digest, random_bytes
from kvxfer.cli.bench_transfer import run_case
from kvxfer.cli.output import Steps
from kvxfer.cli.transfer_case import TransferCase
from kvxfer.ops.config import SlotConfig
from kvxfer.slot_memory import PROBE_BYTES, SlotMemory
from tests.gpu.orders import MEMORY_BYTES

pytestmark = pytest.mark.gpu(limit_s=75.0)
ROOT = Path(__file__).parents[2]
NUM_SLOTS, SLOT_BYTES = 8, 8 << 20
NUM_BYTES = NUM_SLOTS * SLOT_BYTES + PROBE_BYTES
MIB = 1 << 20
ODD: Entries = [
    [1, 7, 1],
    [100_001, 5, 2],
    [200_003, 1000, 577],
    [300_000, 5000, 1152],
    [400_000, 10_000, 70_001],
    [SLOT_BYTES, 2 * SLOT_BYTES, SLOT_BYTES],
    [NUM_BYTES - 3, NUM_BYTES - 3, 3],
]
TRANSPORTS = [pytest.param("loopback"), pytest.param("nixl", marks=pytest.mark.nixl)]
_CASE = TransferCase(
    transport="loopback",
    mode="packed",
    num_tokens=2048,
    num_layers=8,
    row_bytes=1152,
    page_tokens=64,
    pages="shuffled",
    num_ranks=2,
    interleave=1,
    chunk_tokens=1024,
    num_repeats=2,
    num_slots=8,
    slot_bytes=256 << 10,
    device="cuda",
    placement="worker",
    slot_kind="device",
    deadline_s=20.0,
)


def say(text: str) -> None:
    sys.stdout.write(f"{text}\n")


@pytest.fixture(params=TRANSPORTS)
def pair(request: pytest.FixtureRequest) -> Iterator[tuple[Peer, Peer]]:
    """A writer and a target that it does not know yet."""
    with (
        Peer(request.param, "device", NUM_SLOTS, SLOT_BYTES) as writer,
        Peer(request.param, "device", NUM_SLOTS, SLOT_BYTES) as target,
    ):
        yield writer, target


def assert_exact(writer: Peer, target: Peer, entries: Entries = ODD) -> str:
    """A write moves what it should and nothing else; the path that it took."""
    writer.call("fill", seed=1)
    target.call("fill", seed=2)
    written = writer.write(target, [entries])
    assert written.outcomes == ["done"], written.detail
    source, expected = random_bytes(1, NUM_BYTES), random_bytes(2, NUM_BYTES)
    for src, dst, length in entries:
        expected[dst : dst + length] = source[src : src + length]
    assert target.call("digest") == digest(expected), "bytes differ"
    return written.path


def test_slots_take_little_more_than_their_bytes() -> None:
    torch.cuda.synchronize()
    before, _ = torch.cuda.mem_get_info()
    slots = SlotMemory.at_start(SlotConfig(kind="device", num_slots=NUM_SLOTS, slot_bytes=SLOT_BYTES))
    taken = before - torch.cuda.mem_get_info()[0]
    slots.close()
    given_back = torch.cuda.mem_get_info()[0]
    say(f"{NUM_SLOTS * SLOT_BYTES / MIB:.0f} MiB of slots take {taken / MIB:.1f} MiB of the GPU")
    assert taken <= NUM_SLOTS * SLOT_BYTES + 16 * MIB
    assert given_back == before


def test_writes_between_slots_are_exact(pair: tuple[Peer, Peer]) -> None:
    writer, target = pair
    writer.knows(target)
    path = assert_exact(writer, target)
    assert_exact(writer, target, [entry for entries in whole_slots(NUM_SLOTS, SLOT_BYTES) for entry in entries])
    written = writer.write(target, whole_slots(32, SLOT_BYTES), NUM_SLOTS, 3)
    say(f"path {path}: {32 * SLOT_BYTES / written.seconds / 1e9:.1f} GB/s in writes of 8 MiB")
    assert path in ("shared memory", "cuda_ipc"), "UCX has not found a way within the GPU"


def test_slots_that_move_leave_their_memory(pair: tuple[Peer, Peer]) -> None:
    writer, target = pair
    before = target.call("free_bytes")
    for _ in range(3):
        target.call("move")
    assert abs(before - target.call("free_bytes")) <= 4 * MIB
    writer.knows(target)
    assert_exact(writer, target)
    target.call("move")
    with pytest.raises(PeerError, match="BoundsError"):
        writer.write(target, [ODD])
    writer.knows(target)
    assert_exact(writer, target)
    say(f"after a move away from a writer: {(before - target.call('free_bytes')) / MIB:.0f} MiB more are taken")


def test_what_is_written_late_hits_nothing() -> None:
    """Memory that the slots have left stays what it is for whoever still has it mapped."""
    with (
        Peer("loopback", "device", NUM_SLOTS, SLOT_BYTES) as writer,
        Peer("loopback", "device", NUM_SLOTS, SLOT_BYTES) as target,
    ):
        writer.knows(target)
        assert_exact(writer, target)
        old_region = target.call("region")
        for _ in range(2):  # the second takes what the first has given back, if that can be taken
            target.call("move")
        target.call("fill", seed=5)
        late = writer.call("write", peer=target.name, region=old_region, writes=[ODD], in_flight=1, repeats=1)
        say(f"a late write into memory that its owner has freed: {late['outcomes']} {late['detail']}")
        assert target.call("digest") == digest(random_bytes(5, NUM_BYTES))
        writer.knows(target)
        assert_exact(writer, target)


def test_engines_can_be_replaced(pair: tuple[Peer, Peer]) -> None:
    writer, target = pair
    writer.knows(target)
    assert_exact(writer, target)
    writer.call("rotate")
    assert_exact(writer, target)
    target.call("rotate")
    writer.knows(target)
    assert_exact(writer, target)


@pytest.mark.parametrize("transport", TRANSPORTS)
def test_kinds_are_not_mixed(transport: str) -> None:
    with (
        Peer(transport, "device", NUM_SLOTS, 1 << 20) as on_gpu,
        Peer(transport, "host", NUM_SLOTS, 1 << 20) as on_host,
    ):
        for writer, target in ((on_gpu, on_host), (on_host, on_gpu)):
            with pytest.raises(PeerError, match=r"slots\.kind: got slots in"):
                writer.knows(target)


def test_a_target_that_is_killed_harms_nobody_else(pair: tuple[Peer, Peer]) -> None:
    writer, other = pair
    with Peer(other.transport, "device", NUM_SLOTS, SLOT_BYTES) as victim:
        writer.knows(victim)
        writer.knows(other)
        assert_exact(writer, victim)
        region = victim.call("region")
        writes = whole_slots(64, SLOT_BYTES)
        with ThreadPoolExecutor(1) as threads:
            told = threads.submit(
                writer.call, "write", peer=victim.name, region=region, writes=writes, in_flight=4, repeats=20
            )
            time.sleep(0.05)
            victim.kill()
            try:
                outcomes = told.result()["outcomes"]
                say(f"writes to a target that is killed: { {each: outcomes.count(each) for each in set(outcomes)} }")
            except PeerError as error:  # an engine that never ends them is the agent's to replace
                say(f"writes to a target that is killed: {error}")
                writer.call("rotate")
    assert_exact(writer, other)


def test_a_worker_whose_agent_is_killed_goes_on() -> None:
    with (
        Peer("loopback", "device", 8, MEMORY_BYTES // 8) as agent,
        subprocess.Popen(
            [sys.executable, "-m", "tests.gpu.orphaned_child", agent.call("handle")],
            cwd=ROOT,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
        ) as worker,
    ):
        assert worker.stdin is not None
        assert worker.stdout is not None
        assert worker.stdout.readline() == "ready\n"
        agent.kill()
        worker.stdin.write("killed\n")
        worker.stdin.flush()
        told = worker.stdout.readline()
        say(told)
        assert told.startswith("survived"), f"the worker ended with {worker.wait(10)}"
        assert worker.wait(20) == 0


@pytest.mark.parametrize("verify", ["off", "full"])
@pytest.mark.parametrize("transport", TRANSPORTS)
def test_transfers_through_slots_on_the_gpu_are_exact(transport: str, verify: str) -> None:
    result = run_case(replace(_CASE, transport=transport, verify=verify), Steps())  # type: ignore[arg-type]
    assert result.problems == ()
    facts = result.as_json()
    say(f"{transport}, verify {verify}: {facts['transfer_ms']:.2f} ms, {facts['segments']} segments")
