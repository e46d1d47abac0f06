"""Starts, drives, stops and judges the processes of `peer_process.py`."""

from __future__ import annotations

import json
import os
import pathlib
import select
import signal
import subprocess
import sys
import uuid
from dataclasses import dataclass
from typing import Any, Self

import numpy as np
import numpy.typing as npt

from kvxfer.memory import HostMemory

_PROGRAM = pathlib.Path(__file__).with_name("peer_process.py")
_REPLY_S = 60.0
POISON = 0xEE


class PeerError(Exception):
    """The process raised `kind`, one of kvxfer's errors."""

    def __init__(self, kind: str, detail: str) -> None:
        super().__init__(f"{kind}: {detail}")
        self.kind = kind
        self.detail = detail


@dataclass(frozen=True)
class Engine:
    """A transport as a test runs it: its name, the environment that chooses its path, and its options."""

    transport: str
    environment: tuple[tuple[str, str], ...] = ()
    options: tuple[tuple[str, int], ...] = ()


class PeerProcess:
    """A process with `num_bytes` of memory that this test shares, filled with `POISON`. Owns both; `kill()` or
    `finish()` ends the process, leaving the `with` block does so by all means and frees the memory."""

    def __init__(
        self,
        engine: Engine,
        num_bytes: int = 1 << 22,
        options: dict[str, object] | None = None,
        environment: dict[str, str] | None = None,
    ) -> None:
        self.engine = engine
        self.memory = HostMemory.create(num_bytes, "peer")
        self.memory.array[:] = POISON
        self.incarnation = uuid.uuid4().hex
        arguments = {
            "transport": engine.transport,
            "incarnation": self.incarnation,
            "options": dict(engine.options) | (options or {}),
            "fd": self.memory.fd,
            "num_bytes": num_bytes,
        }
        self.process = subprocess.Popen(
            [sys.executable, str(_PROGRAM), json.dumps(arguments)],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            pass_fds=(self.memory.fd,),
            env={**os.environ, **dict(engine.environment), **(environment or {})},
        )

    @property
    def bytes(self) -> npt.NDArray[np.uint8]:
        return self.memory.array

    def send(self, do: str, **arguments: object) -> None:
        assert self.process.stdin is not None
        self.process.stdin.write(json.dumps({"do": do, **arguments}).encode() + b"\n")
        self.process.stdin.flush()

    def reply(self, timeout_s: float = _REPLY_S) -> Any:  # noqa: ANN401 - whatever JSON says
        assert self.process.stdout is not None
        assert select.select([self.process.stdout], [], [], timeout_s)[0], f"no reply within {timeout_s} s"
        line = self.process.stdout.readline()
        assert line, f"the process ended with {self.process.wait(10)} instead of a reply"
        reply = json.loads(line)
        if "error" in reply:
            raise PeerError(reply["error"], reply["detail"])
        return reply["result"]

    def call(self, do: str, **arguments: object) -> Any:  # noqa: ANN401 - whatever JSON says
        self.send(do, **arguments)
        return self.reply()

    def knows(self, peer: PeerProcess, name: str = "") -> Self:
        self.call("add_peer", peer=name or peer.incarnation, metadata=peer.call("metadata"))
        return self

    def outcomes(self, count: int, timeout_s: float = 30.0) -> dict[int, str]:
        ended = self.call("wait", count=count, timeout_s=timeout_s)
        assert len({write_id for write_id, _, _ in ended}) == len(ended), f"a write ended twice: {ended}"
        return {write_id: outcome for write_id, outcome, _ in ended}

    def stop(self) -> None:
        os.kill(self.process.pid, signal.SIGSTOP)
        os.waitpid(self.process.pid, os.WUNTRACED)

    def go_on(self) -> None:
        os.kill(self.process.pid, signal.SIGCONT)

    def kill(self) -> None:
        self.process.kill()
        self.process.wait(10)

    def finish(self) -> int:
        """Close the transport, let the process end by itself, give its exit status."""
        self.call("close")
        return self.process.wait(20)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        if self.process.returncode is None:
            self.kill()
        for stream in (self.process.stdin, self.process.stdout):
            assert stream is not None
            stream.close()
        self.memory.close()


def copied(source: PeerProcess, target: PeerProcess, entries: list[list[int]]) -> npt.NDArray[np.uint8]:
    """What `target`'s memory must be after `entries` alone were written: every other byte is what it was."""
    expected = target.bytes.copy()
    for src, dst, length in entries:
        expected[dst : dst + length] = source.bytes[src : src + length]
    return expected


def assert_same_bytes(actual: npt.NDArray[np.uint8], expected: npt.NDArray[np.uint8]) -> None:
    differing = np.flatnonzero(actual != expected)
    assert differing.size == 0, (
        f"{differing.size} bytes differ, the first at {differing[0]}: "
        f"got {actual[differing[0]]:#x}, expected {expected[differing[0]]:#x}"
    )


def fill_random(peer: PeerProcess, seed: int) -> None:
    peer.bytes[:] = np.random.default_rng(seed).integers(0, 256, peer.bytes.size, dtype=np.uint8)
