"""Processes forked from one that has imported everything: each is there in milliseconds, and talks over a socket.

The forking process has no thread and no engine of its own, so that its children start clean.
"""

from __future__ import annotations

import ctypes
import gc
import os
import select
import signal
import socket
import sys
import time
import traceback
from collections import deque
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

import msgspec

_PR_SET_PDEATHSIG = 1  # linux/prctl.h
_MAX_MESSAGE_BYTES = 1 << 17
_libc = ctypes.CDLL(None, use_errno=True)

Message = dict[str, Any]


class FaultError(AssertionError):
    """A process did not do what the scenario expects of it."""


class Wire:
    """One end of a socket that carries messages whole."""

    def __init__(self, end: socket.socket) -> None:
        self._end = end

    def fileno(self) -> int:
        return self._end.fileno()

    def send(self, message: Message) -> None:
        self._end.send(msgspec.json.encode(message))

    def receive(self) -> Message | None:
        """The next message, waiting for it; None when the other end is gone."""
        try:
            frame = self._end.recv(_MAX_MESSAGE_BYTES)
        except ConnectionResetError:
            return None
        return msgspec.json.decode(frame) if frame else None

    def close(self) -> None:
        self._end.close()


class Forked:
    """A child process that runs `program`. `messages` holds what it said and nobody has taken yet."""

    def __init__(self, name: str, program: Callable[[Wire], None], log_path: Path) -> None:
        self.name = name
        self.log_path = log_path
        self.messages: deque[Message] = deque()
        self.exit_code: int | None = None
        self._num_asked = 0
        own, other = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        parent = os.getpid()
        self.pid = os.fork()
        if self.pid == 0:
            _run_child(parent, program, Wire(other), log_path)
        other.close()
        self.wire = Wire(own)
        self._is_heard = True

    def send(self, message: Message) -> None:
        try:
            self.wire.send(message)
        except (BrokenPipeError, ConnectionResetError) as error:
            raise FaultError(f"{self.name} is gone{self.log_tail()}") from error

    def ask(self, message: Message, timeout_s: float = 20.0) -> Message:
        """Send a request and wait for its reply."""
        self._num_asked += 1
        self.send({**message, "id": self._num_asked})
        reply = self.take(lambda each: each.get("re") == self._num_asked, timeout_s)
        if "error" in reply:
            raise FaultError(f"{self.name}: {message}: {reply['error']}")
        return reply

    def take(self, wanted: Callable[[Message], bool], timeout_s: float) -> Message:
        """The oldest message that is wanted, waiting for it."""
        deadline = time.monotonic() + timeout_s
        while (found := self.find(wanted)) is None:
            left_s = deadline - time.monotonic()
            if left_s <= 0 or not self._is_heard:
                raise FaultError(f"{self.name} did not answer in {timeout_s} s: {list(self.messages)}{self.log_tail()}")
            hear([self], left_s)
        self.messages.remove(found)
        return found

    def find(self, wanted: Callable[[Message], bool]) -> Message | None:
        """The oldest message that is wanted, of those that have come; it stays."""
        return next((each for each in self.messages if wanted(each)), None)

    def signal(self, number: signal.Signals) -> None:
        """Send a signal; returns when a process that it stops or kills has done so."""
        os.kill(self.pid, number)
        if number is signal.SIGKILL:
            self.wait(5.0)
        elif number is signal.SIGSTOP:
            os.waitid(os.P_PID, self.pid, os.WSTOPPED)

    def wait(self, timeout_s: float) -> int:
        """Its exit code; negative for a signal. Raises `FaultError` where it does not end."""
        deadline = time.monotonic() + timeout_s
        while self.exit_code is None:
            pid, status = os.waitpid(self.pid, os.WNOHANG)
            if pid:
                self.exit_code = os.waitstatus_to_exitcode(status)
            elif time.monotonic() > deadline:
                raise FaultError(f"{self.name} did not end within {timeout_s} s{self.log_tail()}")
            else:
                time.sleep(0.01)
        return self.exit_code

    def end(self) -> None:
        """Kill it if it lives; give its socket back."""
        if self.exit_code is None:
            os.kill(self.pid, signal.SIGKILL)
            self.wait(10.0)
        self.wire.close()

    def log_tail(self) -> str:
        lines = self.log_path.read_text(errors="replace").strip().splitlines()[-6:]
        return "".join(f"\n  | {line}" for line in lines)


def hear(children: Iterable[Forked], timeout_s: float) -> None:
    """Wait until one of the children has said something, then take in all that was said."""
    heard = {child.wire.fileno(): child for child in children if child._is_heard}
    ready, _, _ = select.select(list(heard), [], [], max(0.0, timeout_s))
    for fileno in ready:
        child = heard[fileno]
        message = child.wire.receive()
        if message is None:
            child._is_heard = False
        else:
            child.messages.append(message)


def _run_child(parent: int, program: Callable[[Wire], None], wire: Wire, log_path: Path) -> None:
    """Never returns."""
    code = 1
    try:
        _libc.prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
        if os.getppid() != parent:
            os._exit(1)
        gc.freeze()  # the parent's sockets must not be closed by their finalizers: their numbers go to others
        for name in os.listdir("/proc/self/fd"):
            if int(name) > 2 and int(name) != wire.fileno():
                _close_quietly(int(name))
        log = os.open(log_path, os.O_WRONLY | os.O_CREAT | os.O_APPEND | os.O_CLOEXEC, 0o600)
        os.dup2(log, 1)
        os.dup2(log, 2)
        os.close(log)
        program(wire)
        code = 0
    finally:
        if sys.exc_info()[0] is not None:
            traceback.print_exc()
        sys.stderr.flush()
        os._exit(code)


def _close_quietly(fileno: int) -> None:
    try:
        os.close(fileno)
    except OSError:
        return  # the listing's own descriptor
