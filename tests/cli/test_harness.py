"""Processes of a run: their errors reach the parent, and nothing of them stays."""

import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from kvxfer.cli import protocol
from kvxfer.cli.harness import Cast, ChildError, wait_ready
from kvxfer.ops.config import PrefillConfig, TransportConfig

_MODULE = "kvxfer.cli.decode_worker"


def _is_alive(pid: int) -> bool:
    try:
        state = Path(f"/proc/{pid}/stat").read_text(encoding="utf-8").rpartition(") ")[2][0]
    except FileNotFoundError:
        return False
    return state != "Z"


def _wait_gone(pids: list[int], timeout_s: float = 20.0) -> bool:
    deadline = time.monotonic() + timeout_s
    while any(_is_alive(pid) for pid in pids):
        if time.monotonic() > deadline:
            return False
        time.sleep(0.05)
    return True


def test_workers_end_with_the_context() -> None:
    with Cast() as cast:
        worker = cast.start_worker("worker", _MODULE)
        pid, directory = worker.pid, cast.directory
        assert _is_alive(pid)
    assert not _is_alive(pid)
    assert not directory.exists()


def test_a_failed_command_names_the_worker() -> None:
    with Cast() as cast:
        worker = cast.start_worker("worker", "kvxfer.cli.yardstick")
        command = protocol.OpenEngine(transport="loopback", num_bytes=4096, fill=1)
        assert worker.ask(command, protocol.EngineOpen, 60.0).num_bytes == 4096
        assert worker.ask(protocol.CheckFill(fill=1), protocol.Verified, 60.0).problem == ""
        assert worker.ask(protocol.CheckFill(fill=2), protocol.Verified, 60.0).problem != ""
        with pytest.raises(ChildError, match="worker: a yardstick process cannot do Refill"):
            worker.ask(protocol.Refill(fill=1), protocol.Done, 60.0)


def test_a_dead_worker_is_reported_with_its_last_words() -> None:
    with Cast() as cast:
        worker = cast.start_worker("worker", _MODULE)
        with pytest.raises(ChildError, match=r"worker: ended early with exit status 1(.|\n)*AssertionError"):
            worker.ask(protocol.Refill(fill=1), protocol.Done, 60.0)  # before it has a pool
        with pytest.raises(ChildError, match="worker: ended with exit status 1, expected 0"):
            cast.stop()


def test_a_silent_worker_is_not_waited_for() -> None:
    with Cast() as cast, pytest.raises(ChildError, match="worker: got no answer"):
        cast.start_worker("worker", _MODULE).read_line(0.1)


def test_a_killed_worker_spoils_the_run() -> None:
    with Cast() as cast:
        worker = cast.start_worker("worker", _MODULE)
        os.kill(worker.pid, signal.SIGKILL)
        assert _wait_gone([worker.pid])
        with pytest.raises(ChildError, match="worker: ended with exit status -9, expected 0"):
            cast.stop()


def test_an_agent_that_cannot_start_says_why() -> None:
    with Cast() as cast:
        config = PrefillConfig(
            socket_dir=cast.socket_dir("a"), listen_host="192.0.2.1", transport=TransportConfig(name="loopback")
        )
        agent = cast.start_agent("a", config)
        with pytest.raises(ChildError, match=r"a: ended early with exit status [12](.|\n)*192\.0\.2\.1"):
            wait_ready([agent])
        with pytest.raises(ChildError):
            cast.stop()


_PARENT = """
import signal, sys, time
from kvxfer.cli.harness import Cast, wait_ready
from kvxfer.ops.config import PrefillConfig, SlotConfig, TransportConfig
signal.signal(signal.SIGINT, signal.default_int_handler)  # it is ignored where the tests run in the background
with Cast() as cast:
    slots = SlotConfig(num_slots=1, slot_bytes=4096)
    transport = TransportConfig(name="loopback")
    agent = cast.start_agent("a", PrefillConfig(socket_dir=cast.socket_dir("a"), transport=transport, slots=slots))
    worker = cast.start_worker("w", "kvxfer.cli.decode_worker")
    wait_ready([agent])
    print(agent.pid, worker.pid, cast.directory, flush=True)
    time.sleep(60)
"""


@pytest.mark.parametrize("how", [signal.SIGTERM, signal.SIGINT, signal.SIGKILL])
def test_children_go_with_their_parent(how: signal.Signals, tmp_path: Path) -> None:
    environment = os.environ | {"TMPDIR": str(tmp_path)}
    with subprocess.Popen(
        [sys.executable, "-c", _PARENT], stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, env=environment, text=True
    ) as parent:
        assert parent.stdout is not None
        words = parent.stdout.readline().split()
        pids = [int(word) for word in words[:2]]
        parent.send_signal(how)
        parent.wait(30)
    assert _wait_gone(pids)
    if how is not signal.SIGKILL:  # nobody can tidy up after that one
        assert not Path(words[2]).exists()
