"""The worker's end of the pipes of a demo or bench."""

from __future__ import annotations

import os
import sys
from collections.abc import Callable, Iterable
from io import RawIOBase
from typing import Protocol, Self, TypeVar

from kvxfer.cli.protocol import Command, Done, Failed, LetGo, Reply, decode_command, encode_line
from kvxfer.errors import KvxferError

_Command = TypeVar("_Command", bound=Command)


class WorkerPipe:
    """The worker's end: commands come in, replies go out, a line each."""

    def __init__(self, commands: Iterable[bytes], replies: RawIOBase) -> None:
        self._commands = commands
        self._replies = replies

    @classmethod
    def standard(cls) -> Self:
        """The standard streams. Whatever a library prints on standard output goes to standard error from now on."""
        replies = os.fdopen(os.dup(1), "wb", buffering=0)
        os.dup2(2, 1)
        return cls(sys.stdin.buffer, replies)

    def serve(self, perform: Callable[[Command, WorkerPipe], Reply]) -> None:
        """Answer commands until the parent closes its end. A `KvxferError` or `OSError` fails its command only."""
        for line in self._commands:
            try:
                reply = perform(decode_command(line), self)
            except (KvxferError, OSError) as error:
                reply = Failed(error=str(error))
            self.send(reply)

    def send(self, reply: Reply) -> None:
        """Write one line."""
        self._replies.write(encode_line(reply))


class Worker(Protocol):
    """What `serve_worker` runs. `opened` answers the command that it was made from."""

    def opened(self) -> Reply: ...

    def perform(self, command: Command, pipe: WorkerPipe) -> Reply: ...

    def close(self) -> None: ...


def run_worker(first_command: type[_Command], create: Callable[[_Command], Worker]) -> None:
    """The life of a worker process."""
    serve_worker(WorkerPipe.standard(), first_command, create)


def serve_worker(pipe: WorkerPipe, first_command: type[_Command], create: Callable[[_Command], Worker]) -> None:
    """The life of a worker: made by its first command, obeys the others, closes when the parent is done.

    After `LetGo` the next first command makes another one.
    """
    workers: list[Worker] = []

    def perform(command: Command, pipe: WorkerPipe) -> Reply:
        if isinstance(command, LetGo):
            while workers:
                workers.pop().close()
            return Done()
        if workers:
            return workers[0].perform(command, pipe)
        assert isinstance(command, first_command), command
        workers.append(create(command))
        return workers[0].opened()

    try:
        pipe.serve(perform)
    finally:
        for worker in workers:
            worker.close()
