"""The worker's end of the pipes of a demo or bench."""

from __future__ import annotations

import os
import sys
from collections.abc import Callable
from typing import Protocol, TypeVar

from kvxfer.cli.protocol import Command, Failed, Reply, decode_command, encode_line
from kvxfer.errors import KvxferError

_Command = TypeVar("_Command", bound=Command)


class WorkerPipe:
    """The worker's end. Owns standard output: whatever a library prints there goes to standard error instead."""

    def __init__(self) -> None:
        self._out = os.fdopen(os.dup(1), "wb", buffering=0)
        os.dup2(2, 1)

    def serve(self, perform: Callable[[Command, WorkerPipe], Reply]) -> None:
        """Answer commands until the parent closes its end. A `KvxferError` or `OSError` fails its command only."""
        for line in sys.stdin.buffer:
            try:
                reply = perform(decode_command(line), self)
            except (KvxferError, OSError) as error:
                reply = Failed(error=str(error))
            self.send(reply)

    def send(self, reply: Reply) -> None:
        """Write one line."""
        self._out.write(encode_line(reply))


class Worker(Protocol):
    """What `run_worker` runs. `opened` answers the command that it was made from."""

    def opened(self) -> Reply: ...

    def perform(self, command: Command, pipe: WorkerPipe) -> Reply: ...

    def close(self) -> None: ...


def run_worker(first_command: type[_Command], create: Callable[[_Command], Worker]) -> None:
    """The life of a worker process: made by its first command, obeys the others, closes when the parent is done."""
    pipe = WorkerPipe()
    workers: list[Worker] = []

    def perform(command: Command, pipe: WorkerPipe) -> Reply:
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
