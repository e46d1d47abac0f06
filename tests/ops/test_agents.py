"""Health, readiness and metrics of real agents in processes of their own."""

from __future__ import annotations

import os
import signal
import time
from collections.abc import Iterator
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import msgspec
import pytest

from kvxfer.cli.harness import Child
from kvxfer.control.auth import KeyPair
from kvxfer.control.peer_channel import new_keys
from kvxfer.ops.config import (
    DecodeConfig,
    OpsConfig,
    PrefillConfig,
    SecurityConfig,
    SlotConfig,
    TransportConfig,
    TransportName,
    dump_config,
)
from kvxfer.ops.health import MAX_SILENCE_S
from kvxfer.transfer import EventKind, Reason
from tests.agent_world import WAIT_S, AgentWorld
from tests.ops.http_get import Scrape, get
from tests.patience import until
from tests.test_agents import Split

LAYOUT = Split().target(0)
TRANSFER_BYTES = 20 * 3 * 24  # tokens, layers, bytes a row


class _Agents:
    """Starts agents as processes; leaving the block ends those that live."""

    def __init__(self, path: Path) -> None:
        self._path = path
        self._stack = ExitStack()

    def start(
        self, name: str, *module: str, transport: TransportName = "loopback", **fields: object
    ) -> tuple[Child, str]:
        """Agent `name`, which begins with its side's letter; with the endpoint of its pages."""
        kind: Any = PrefillConfig if name[0] == "p" else DecodeConfig
        if kind is PrefillConfig:
            fields = {"mode": "packed"} | fields
        config = kind(
            socket_dir=str(self._path / name),
            transport=TransportConfig(name=transport),
            slots=SlotConfig(num_slots=4, slot_bytes=4096),
            ops=OpsConfig(listen_host="127.0.0.1"),
            **fields,
        )
        config_path = self._path / f"{name}.toml"
        config_path.write_text(dump_config(config), encoding="utf-8")
        role = "prefill" if name[0] == "p" else "decode"
        arguments = module or ("kvxfer.cli.child", role, "--json", "--config")
        first, last = (arguments[:1], arguments[1:]) if module else (arguments, ())
        child = Child(name, [*first, str(config_path), *last], self._path)
        self._stack.callback(self._end, child)
        return child, msgspec.json.decode(child.read_line(WAIT_S))["ops"]

    def _end(self, child: Child) -> None:
        child.request_stop(by_signal=True)
        assert child.wait() == ""

    def close(self) -> None:
        self._stack.close()


@pytest.fixture
def agents(tmp_path: Path) -> Iterator[_Agents]:
    started = _Agents(tmp_path)
    try:
        yield started
    finally:
        started.close()


def test_readiness_ends_with_sigterm_while_a_transfer_drains(tmp_path: Path, agents: _Agents) -> None:
    child, pages = agents.start("p0", drain_s=WAIT_S)
    _, decode_pages = agents.start("d0", drain_s=WAIT_S)
    until(lambda: get(pages, "/readyz")[0] == 200 and get(decode_pages, "/readyz")[0] == 200, "both are ready")
    with AgentWorld(tmp_path) as world:
        world.join_prefill("p0", LAYOUT)
        world.join_decode("d0", LAYOUT)
        world.move(8)
        request = world.begin(40)
        world.submit(request, 0, 20)
        seat, _ = world.decode[0]
        until(lambda: bool((seat.memory.array != seat.expected).any()), "rows of the first chunk come")
        os.kill(child.pid, signal.SIGTERM)
        until(lambda: get(pages, "/readyz") == (503, "shutting down\n"), "it says so")
        assert get(pages, "/healthz") == (200, "ok\n")
        assert get(decode_pages, "/readyz")[0] == 200
        assert Scrape(pages)("kvxfer_transfers_open", "prefill") == 1
        world.submit(request, 20, 40)
        world.finish(request)
        world.verify()


def test_a_loop_that_hangs_is_seen_and_one_that_goes_on_too(agents: _Agents) -> None:
    child, pages = agents.start("p0", "tests.ops.hooked_agent", f"{MAX_SILENCE_S + 4.0}")
    until(lambda: get(pages, "/readyz")[0] == 200, "it is ready")
    os.kill(child.pid, signal.SIGUSR1)
    hung_at = time.monotonic()
    until(lambda: get(pages, "/healthz")[0] == 503, "it is found to hang", MAX_SILENCE_S + 3.9)
    assert time.monotonic() - hung_at > MAX_SILENCE_S - 0.2
    assert get(pages, "/readyz")[1].startswith("the loop has not turned for ")
    until(lambda: get(pages, "/healthz") == (200, "ok\n"), "it goes on")
    assert get(pages, "/readyz")[0] == 200


@pytest.mark.nixl
def test_a_thread_that_ends_by_an_error_is_seen(tmp_path: Path, agents: _Agents) -> None:
    child, pages = agents.start("p0", "tests.ops.hooked_agent", "0", transport="nixl")
    until(lambda: get(pages, "/readyz")[0] == 200, "it is ready")
    os.kill(child.pid, signal.SIGUSR2)
    until(lambda: get(pages, "/healthz")[0] == 503, "the end is found")
    for path in ("/healthz", "/readyz"):
        assert get(pages, path) == (503, "thread nixl-post has ended by an error: RuntimeError\n")
    assert '"level":"error"' in (tmp_path / "p0.log").read_text()


def _keys(path: Path, name: str) -> tuple[KeyPair, SecurityConfig]:
    pair = new_keys()
    key_file = path / f"{name}.key"
    key_file.touch(mode=0o600)
    key_file.write_text(pair.secret + "\n", encoding="utf-8")
    return pair, SecurityConfig(key_file=str(key_file))


def test_metrics_after_a_success_an_abort_and_a_peer_that_was_not_let_in(tmp_path: Path, agents: _Agents) -> None:
    admitted, own_security = _keys(tmp_path, "admitted")
    _, foreign_security = _keys(tmp_path, "foreign")
    allowed = tmp_path / "allowed"
    allowed.write_text(admitted.public + "\n", encoding="utf-8")
    _, pages = agents.start("p0", security=SecurityConfig(allowed_keys_file=str(allowed)))
    _, decode_pages = agents.start("d0", security=own_security)
    _, foreign_pages = agents.start("d1", security=foreign_security)
    with AgentWorld(tmp_path) as world:
        _, prefill = world.join_prefill("p0", LAYOUT)
        _, decode = world.join_decode("d0", LAYOUT)
        world.move(20)
        request = world.begin(20)
        decode.abort(request.ticket)
        for client in (decode, prefill):
            client.wait(request.ticket, WAIT_S)
        _, foreign = world.join_decode("d1", LAYOUT)
        world.decode = world.decode[1:]
        request = world.begin(20)
        event = foreign.wait(request.ticket, WAIT_S)
        assert (event.event, event.reason) == (EventKind.FAILED, Reason.PEER_REFUSED)
        until(lambda: Scrape(decode_pages)("kvxfer_transfers_open", "decode") == 0, "every leg is closed")
        sent, landed, refused = Scrape(pages), Scrape(decode_pages), Scrape(foreign_pages)
    for scrape, side, good, bad in ((sent, "prefill", "sent", "failed"), (landed, "decode", "landed", "aborted")):
        assert scrape("kvxfer_transfers_ended_total", side, end=good, reason="") == 1
        reason = "aborted_by_peer" if side == "prefill" else "aborted_by_worker"
        assert scrape("kvxfer_transfers_ended_total", side, end=bad, reason=reason) == 1
        assert scrape("kvxfer_moved_bytes_total", side) == TRANSFER_BYTES
        assert scrape("kvxfer_slots", side, state="free") == 4
        assert scrape("kvxfer_slots", side, state="quarantined") == 0
        assert scrape("kvxfer_peers", side) == scrape("kvxfer_worker_attached", side) == 1
        assert scrape("kvxfer_stage_seconds_total", side, stage="pack" if side == "prefill" else "scatter") > 0
    assert sent("kvxfer_engine_writes_total", "prefill", outcome="failed") == 0
    assert sent("kvxfer_engine_bytes_total", "prefill") > TRANSFER_BYTES  # probes count as well
    assert sent("kvxfer_transfers_open", "prefill") == 1  # the ticket that nobody could use
    assert sent("kvxfer_connections_total", "prefill", result="admitted") >= 1
    assert sent("kvxfer_connections_total", "prefill", result="refused") >= 1
    assert refused("kvxfer_transfers_ended_total", "decode", end="failed", reason="peer_refused") == 1
    assert refused("kvxfer_peers", "decode") == 0
