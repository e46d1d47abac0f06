"""Agents and workers as processes: what they cost, and what the others see when one is killed."""

from __future__ import annotations

import json
import os
import re
import select
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import pytest

from kvxfer.control.client import DecodeClient, PrefillClient
from kvxfer.control.heartbeat import return_s
from kvxfer.control.messages import Ticket
from kvxfer.errors import AgentLostError
from kvxfer.ops.config import (
    DecodeConfig,
    PrefillConfig,
    SlotConfig,
    TransferMode,
    TransportConfig,
    TransportName,
)
from kvxfer.transfer import EventKind, Reason
from tests.agent_world import WAIT_S, AgentWorld, Seat, receive_pages
from tests.patience import SOON_S
from tests.test_agents import ENGINES, Split

_PROGRAM = Path(__file__).with_name("agent_process.py")
_NUM_STARTS = 3
_MAX_AGE_RATIO = 4.0  # of the start of an agent to that of its libraries and engine alone, in the same minute
_MAX_RSS_BYTES = 200 << 20
TIMEOUT_S = 2.0  # after which a silent peer is gone
LAYOUT = Split().target(0)


@contextmanager
def process(*arguments: str) -> Iterator[tuple[subprocess.Popen[bytes], dict[str, Any]]]:
    """A process of `agent_process.py` and what it said once it was ready; killed at the end at the latest."""
    path = os.pathsep.join(filter(None, [str(_PROGRAM.parent.parent), os.environ.get("PYTHONPATH")]))
    environment = {**os.environ, "UCX_MODULES": "^ib", "PYTHONPATH": path}
    with subprocess.Popen(
        [sys.executable, str(_PROGRAM), *arguments], stdout=subprocess.PIPE, env=environment
    ) as child:
        try:
            assert child.stdout is not None
            assert select.select([child.stdout], [], [], WAIT_S)[0], "the process did not get ready"
            yield child, json.loads(child.stdout.readline())
        finally:
            child.kill()


def agent(
    role: str,
    socket_dir: Path,
    transport: TransportName = "loopback",
    slots: SlotConfig | None = None,
    mode: TransferMode = "packed",
) -> tuple[str, ...]:
    """The arguments of an agent's process; `mode` counts for a prefill agent."""
    kind = PrefillConfig if role == "prefill" else DecodeConfig
    config = kind(
        socket_dir=str(socket_dir),
        transport=TransportConfig(name=transport),
        slots=slots or SlotConfig(num_slots=4, slot_bytes=4096),
        peer_timeout_s=TIMEOUT_S,
    )
    if isinstance(config, PrefillConfig):
        config = msgspec.structs.replace(config, mode=mode)
    return "agent", role, msgspec.json.encode(config).decode()


def worker(role: str, socket_dir: Path, ticket: str = "") -> tuple[str, ...]:
    """The arguments of a worker's process."""
    return "worker", role, str(socket_dir), msgspec.json.encode(LAYOUT).decode(), ticket


@pytest.mark.parametrize("transport", ENGINES)
@pytest.mark.parametrize("role", ["prefill", "decode"])
def test_an_agent_starts_fast_stays_small_and_ends_well(tmp_path: Path, role: str, transport: TransportName) -> None:
    """Little later than its engine alone, 200 MiB beyond its slots, without torch; SIGTERM: status 0, no file left."""
    slots = SlotConfig()
    ages_s = []
    engine_ages_s = []
    for _ in range(_NUM_STARTS):  # other work on the machine can only make a start slower: the fastest one counts
        with process("engine", transport) as (_, facts):
            engine_ages_s.append(facts["age_s"])
        with process(*agent(role, tmp_path / "agent", transport, slots)) as (child, facts):
            ages_s.append(facts["age_s"])
            child.send_signal(signal.SIGTERM)
            assert child.wait(WAIT_S) == 0
    assert min(ages_s) < _MAX_AGE_RATIO * min(engine_ages_s)
    with process(*agent(role, tmp_path / "agent", transport, slots)) as (child, facts):
        assert facts["rss_bytes"] - slots.num_slots * slots.slot_bytes < _MAX_RSS_BYTES
        assert not facts["has_torch"]
        child.send_signal(signal.SIGTERM)
        assert child.wait(WAIT_S) == 0
    assert list((tmp_path / "agent").iterdir()) == []


@pytest.mark.parametrize("dying", ["prefill", "decode"])
def test_a_killed_agent_ends_every_open_transfer_of_its_worker_once(tmp_path: Path, dying: str) -> None:
    """`agent_lost` from the client library; the other side's agent notices by silence. A new agent serves at once."""
    with AgentWorld(tmp_path) as world, ExitStack() as stack:
        for role in ("prefill", "decode"):
            child, _ = stack.enter_context(process(*agent(role, tmp_path / role)))
            if role == dying:
                victim = child
        world.join_prefill("prefill", LAYOUT)
        world.join_decode("decode", LAYOUT)
        world.move(20)
        requests = [world.begin(20), world.begin(20)]
        for request in requests:
            world.submit(request, 0, 12)
        _wait_for_rows(world.decode[0][0], 2 * 12)
        victim.kill()
        own = world.prefill[0][1] if dying == "prefill" else world.decode[0][1]
        other = world.decode[0][1] if dying == "prefill" else world.prefill[0][1]
        assert sorted(_drain_until_lost(own)) == sorted((each.ticket.transfer, "agent_lost") for each in requests)
        for request in requests:
            event = other.wait(request.ticket, TIMEOUT_S + 2.0)
            assert (event.event, event.reason) == (EventKind.FAILED, Reason.PEER_LOST)
            if dying == "prefill":  # its connection ended at once, so only the time to come back was waited for
                found = re.search(r"it has not come back within ([\d.]+) s", event.detail)
                assert found is not None
                assert return_s(TIMEOUT_S) <= float(found[1]) < TIMEOUT_S
            else:
                assert "127.0.0.1 (dst_rank 0 of 1) is gone" in event.detail
        assert other.next_event(0.1) is None
        seats = world.prefill if dying == "prefill" else world.decode
        seats.pop()
        stack.enter_context(process(*agent(dying, tmp_path / dying)))
        (world.join_prefill if dying == "prefill" else world.join_decode)(dying, LAYOUT)
        world.decode[0][0].expected[:] = world.decode[0][0].memory.array  # rows of the failed ones may be there
        world.move(20, salt=1)


def _drain_until_lost(client: PrefillClient | DecodeClient) -> list[tuple[str, str]]:
    """Terminal events, as (transfer, reason), until the client says that its agent is gone and none will follow."""
    found: list[tuple[str, str]] = []
    while True:
        try:
            event = client.next_event(WAIT_S)
        except AgentLostError:
            return found
        assert event is not None
        if event.event is not EventKind.SOURCE_FREE:
            assert event.reason is not None
            found.append((event.transfer, event.reason.value))


def test_a_killed_prefill_worker_fails_its_transfers_and_is_replaced(tmp_path: Path) -> None:
    with AgentWorld(tmp_path) as world:
        world.start_prefill("prefill")
        world.start_decode("decode")
        seat, client = world.join_decode("decode", LAYOUT)
        with process(*worker("prefill", tmp_path / "prefill")) as (child, facts):
            ticket = msgspec.json.decode(facts["ticket"], type=Ticket)
            client.open(ticket, receive_pages(seat.take_pages(world.ranges(LAYOUT, 0, 8))))
            _wait_for_rows(seat, 1)
            child.kill()
            began_s = time.monotonic()
            event = client.wait(ticket, WAIT_S)
            assert (event.event, event.reason) == (EventKind.FAILED, Reason.WORKER_LOST)
            assert time.monotonic() - began_s < SOON_S
        seat.expected[:] = seat.memory.array
        world.join_prefill("prefill", LAYOUT)
        world.move(20)


def _wait_for_rows(seat: Seat, num_tokens: int) -> None:
    """Until most bytes of so many tokens have been scattered, in all layers."""
    group = seat.layout.groups[0]
    num_bytes = num_tokens * group.layers.num_layers * group.row_bytes
    deadline_s = time.monotonic() + WAIT_S
    while np.count_nonzero(seat.memory.array != seat.expected) < 0.9 * num_bytes:
        assert time.monotonic() < deadline_s
        time.sleep(0.01)


def test_a_killed_decode_worker_ends_the_transfer_at_the_prefill_side(tmp_path: Path) -> None:
    with AgentWorld(tmp_path) as world:
        world.start_prefill("prefill")
        world.start_decode("decode")
        _, client = world.join_prefill("prefill", LAYOUT)
        ticket = client.ticket()
        with process(*worker("decode", tmp_path / "decode", msgspec.json.encode(ticket).decode())) as (child, _):
            child.kill()
            event = client.wait(ticket, WAIT_S)
            assert event.event is EventKind.FAILED
            assert event.reason in (Reason.ABORTED_BY_PEER, Reason.PEER_LOST)
        world.join_decode("decode", LAYOUT)
        world.move(20)
