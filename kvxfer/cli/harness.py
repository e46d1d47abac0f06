"""Processes of a demo or bench: agents and workers, started, talked to over pipes, and stopped by their ids.

Every process is a session of its own, so that a Ctrl-C at the terminal reaches the parent alone, and is told by the
kernel when the parent dies. What they write to standard error goes to files in the run's directory.
"""

from __future__ import annotations

import os
import select
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from types import FrameType, TracebackType
from typing import IO, Self, TypeVar

import msgspec

from kvxfer.cli import protocol
from kvxfer.errors import KvxferError
from kvxfer.ops.config import DecodeConfig, PrefillConfig, dump_config

START_TIMEOUT_S = 60.0
STOP_TIMEOUT_S = 15.0

ReplyType = TypeVar("ReplyType", bound=protocol.Reply)
OnProgress = Callable[[protocol.Progress], None]


class ChildError(KvxferError):
    """A process of the run died, went silent or refused a command."""


@dataclass(frozen=True, slots=True)
class ThreadsTime:
    """Processor time of a process, in seconds: of its main thread, and of all its others together. 0 where the kernel
    does not count (`/proc/PID/task/TID/schedstat`)."""

    main_s: float
    others_s: float

    @property
    def all_s(self) -> float:
        return self.main_s + self.others_s

    def since(self, before: ThreadsTime) -> ThreadsTime:
        """What was used after `before`."""
        return ThreadsTime(self.main_s - before.main_s, self.others_s - before.others_s)


class Line:
    """The parent's end of the pipes to one agent or worker."""

    def __init__(self, name: str, sink: IO[bytes], source: IO[bytes], log_path: Path) -> None:
        """Commands go into `sink`, replies come out of `source`; both are closed here."""
        self.name = name
        self._sink = sink
        self._source = source
        self._log_path = log_path
        self._received = b""

    def read_line(self, timeout_s: float) -> bytes:
        """The next line that the other end wrote. Raises `ChildError` where none comes."""
        deadline = time.monotonic() + timeout_s
        while b"\n" not in self._received:
            left_s = deadline - time.monotonic()
            if left_s <= 0 or not select.select([self._source], [], [], left_s)[0]:
                raise ChildError(f"{self.name}: got no answer, expected one within {timeout_s:.0f} s{self._log_tail()}")
            data = os.read(self._source.fileno(), 1 << 16)
            if not data:
                raise ChildError(f"{self.name}: {self._how_ended()}{self._log_tail()}")
            self._received += data
        line, self._received = self._received.split(b"\n", 1)
        return line

    def send(self, command: protocol.Command) -> None:
        """Hand a command to a worker. Raises `ChildError` where it is gone."""
        try:
            self._sink.write(protocol.encode_line(command))
            self._sink.flush()
        except BrokenPipeError as error:
            raise ChildError(f"{self.name}: is gone{self._log_tail()}") from error

    def receive(self, kind: type[ReplyType], timeout_s: float, on_progress: OnProgress | None = None) -> ReplyType:
        """The worker's answer to the oldest command that has none yet. Raises `ChildError` for any other."""
        while True:
            reply = protocol.decode_reply(self.read_line(timeout_s))
            if isinstance(reply, protocol.Progress):
                if on_progress is not None:
                    on_progress(reply)
            elif isinstance(reply, protocol.Failed):
                raise ChildError(f"{self.name}: {reply.error}")
            else:
                assert isinstance(reply, kind), (reply, kind)
                return reply

    def ask(
        self, command: protocol.Command, kind: type[ReplyType], timeout_s: float, on_progress: OnProgress | None = None
    ) -> ReplyType:
        """`send`, then `receive`."""
        self.send(command)
        return self.receive(kind, timeout_s, on_progress)

    def say_end(self) -> None:
        """No command follows."""
        try:
            self._sink.close()
        except BrokenPipeError:
            return  # it was gone already; its process's exit status says so

    def close(self) -> None:
        """Give back what is left of the pipes, once the other end has ended."""
        self._source.close()

    def _how_ended(self) -> str:
        return "ended early"

    def _log_tail(self) -> str:
        tail = self._log_path.read_text(errors="replace").strip().splitlines()[-8:]
        return "".join(f"\n  | {line}" for line in tail)


class Child(Line):
    """One process, talked to over its standard streams. `request_stop` and `wait` end it."""

    def __init__(
        self,
        name: str,
        arguments: Sequence[str],
        directory: Path,
        environment: Mapping[str, str] | None = None,
        pass_fds: Sequence[int] = (),
    ) -> None:
        """Start `python -m ARGUMENTS`, with `environment` on top of this process's own, and `pass_fds` open."""
        log_path = directory / f"{name}.log"
        with log_path.open("wb") as log:
            self._process = subprocess.Popen(
                [sys.executable, "-m", *arguments],
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=log,
                env=os.environ | (environment or {}),
                pass_fds=pass_fds,
                start_new_session=True,
            )
        assert self._process.stdin is not None
        assert self._process.stdout is not None
        super().__init__(name, self._process.stdin, self._process.stdout, log_path)

    @property
    def pid(self) -> int:
        """Its process id."""
        return self._process.pid

    def processor_s(self) -> ThreadsTime:
        """Processor time of its threads so far."""
        main_s = others_s = 0.0
        for task in Path(f"/proc/{self.pid}/task").iterdir():
            try:
                used_s = int((task / "schedstat").read_text().split()[0]) / 1e9
            except (FileNotFoundError, ProcessLookupError):
                continue  # a thread that has just ended
            if task.name == str(self.pid):
                main_s = used_s
            else:
                others_s += used_s
        return ThreadsTime(main_s, others_s)

    def request_stop(self, *, by_signal: bool) -> None:
        """Agents end on SIGTERM, workers when their standard input ends."""
        if by_signal and self._process.poll() is None:
            self._process.send_signal(signal.SIGTERM)
        self.say_end()

    def wait(self) -> str:
        """Wait for the end of a process that was asked to stop; what was wrong with it, empty if nothing was."""
        try:
            code = self._process.wait(STOP_TIMEOUT_S)
        except subprocess.TimeoutExpired:
            self._process.kill()
            self._process.wait()
            return f"{self.name}: did not stop within {STOP_TIMEOUT_S:.0f} s and was killed{self._log_tail()}"
        finally:
            self.close()
        return f"{self.name}: ended with exit status {code}, expected 0{self._log_tail()}" if code else ""

    def _how_ended(self) -> str:
        return f"ended early with exit status {self._process.wait(STOP_TIMEOUT_S)}"


class Crew(Child):
    """One process with several workers, `members`, each of which has pipes of its own."""

    def __init__(
        self, name: str, roles: Mapping[str, str], directory: Path, environment: Mapping[str, str] | None = None
    ) -> None:
        """Start a worker of each role (`prefill` or `decode`) under its name."""
        self.members: list[Line] = []
        log_path = directory / f"{name}.log"
        theirs: list[int] = []
        arguments = ["kvxfer.cli.crew"]
        for member, role in roles.items():
            command_fd, sink_fd = os.pipe()
            source_fd, reply_fd = os.pipe()
            theirs += [command_fd, reply_fd]
            arguments.append(f"{role}={command_fd},{reply_fd}")
            sink, source = os.fdopen(sink_fd, "wb"), os.fdopen(source_fd, "rb")
            self.members.append(Line(f"{name}, {member}", sink, source, log_path))
        try:
            super().__init__(name, arguments, directory, environment, theirs)
        finally:
            for fd in theirs:
                os.close(fd)

    def say_end(self) -> None:
        """No command follows, to any member."""
        super().say_end()
        for member in self.members:
            member.say_end()

    def close(self) -> None:
        """Give back all pipes."""
        super().close()
        for member in self.members:
            member.close()


class Cast:
    """All processes of one run and the directory that they share. Leaving the context ends and removes everything."""

    def __init__(self) -> None:
        self.directory = Path(tempfile.mkdtemp(prefix="kvxfer-"))
        self._agents: list[Child] = []
        self._workers: list[Child] = []
        self._old_handler: Callable[[int, FrameType | None], object] | int | None = None

    def start_agent(self, name: str, config: PrefillConfig | DecodeConfig) -> Child:
        """Start an agent; `wait_ready` before its worker connects. Its `socket_dir` is `socket_dir(name)`."""
        role = "prefill" if isinstance(config, PrefillConfig) else "decode"
        config_path = self.directory / f"{name}.toml"
        config_path.write_text(dump_config(config), encoding="utf-8")
        arguments = ["kvxfer.cli.child", role, "--config", str(config_path), "--json"]
        self._agents.append(Child(name, arguments, self.directory))
        return self._agents[-1]

    def start_worker(self, name: str, module: str) -> Child:
        """Start a worker process: one of the modules that call `run_worker`."""
        self._workers.append(Child(name, [module], self.directory))
        return self._workers[-1]

    def start_crew(self, name: str, roles: Mapping[str, str], environment: Mapping[str, str]) -> Crew:
        """Start one process with a worker of each role, by its name; `environment` adds to this process's."""
        crew = Crew(name, roles, self.directory, environment)
        self._workers.append(crew)
        return crew

    def socket_dir(self, agent: str) -> str:
        """Where the sockets of an agent lie."""
        return str(self.directory / agent)

    def log_tails(self) -> str:
        """The last lines that each process wrote to standard error."""
        return "".join(
            f"\n  {path.name} | {line}"
            for path in sorted(self.directory.glob("*.log"))
            for line in path.read_text(errors="replace").strip().splitlines()[-4:]
        )

    def stop_agents(self) -> None:
        """End the agents. Raises `ChildError` where one did not end well."""
        _raise_any(_stop(self._agents, by_signal=True))

    def stop(self) -> None:
        """End the workers, then the agents. Raises `ChildError` where one did not end well."""
        _raise_any(_stop(self._workers, by_signal=False) + _stop(self._agents, by_signal=True))

    def __enter__(self) -> Self:
        self._old_handler = signal.signal(signal.SIGTERM, _leave)
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        try:
            self.stop()
        except ChildError:
            # An error under way says more than what its children made of it.
            if error is None:
                raise
        finally:
            signal.signal(signal.SIGTERM, self._old_handler)
            shutil.rmtree(self.directory)


def wait_ready(agents: Sequence[Child]) -> None:
    """Wait for the ready line of each agent. Raises `ChildError` where one does not come up."""
    for agent in agents:
        line = msgspec.json.decode(agent.read_line(START_TIMEOUT_S))
        assert line["ready"] is True, line


def _stop(children: list[Child], *, by_signal: bool) -> list[str]:
    """End all, then forget them; what was wrong with them."""
    for child in children:
        child.request_stop(by_signal=by_signal)
    problems = [problem for child in children if (problem := child.wait())]
    children.clear()
    return problems


def _raise_any(problems: list[str]) -> None:
    if problems:
        raise ChildError("\n".join(problems))


def _leave(_signal: int, _frame: FrameType | None) -> None:
    raise SystemExit(128 + signal.SIGTERM)
