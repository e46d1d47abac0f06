"""Several workers of a bench in one process, with a thread and a pair of pipes each.

Workers that share one GPU live in one process: the kernels of two processes take turns there, so that gathers of one
would never run beside scatters of the other, as they do where each has a GPU of its own.

`python -m kvxfer.cli.crew prefill=FD,FD decode=FD,FD ...`: descriptors of commands and of replies.
"""

from __future__ import annotations

import itertools
import os
import sys
import threading
from collections.abc import Callable
from io import FileIO

from kvxfer.cli.decode_worker import DecodeWorker
from kvxfer.cli.prefill_worker import PrefillWorker
from kvxfer.cli.protocol import HandOver
from kvxfer.cli.worker import Worker, WorkerPipe, serve_worker

_ROLES: dict[str, Callable[[HandOver], Worker]] = {"prefill": PrefillWorker, "decode": DecodeWorker}


def main(members: list[str]) -> int:
    """Serve all `members` until the parent is done with each; 1 where one of them raised something."""
    os.dup2(2, 1)  # whatever a library prints
    num_failed = itertools.count()
    threads: dict[threading.Thread, FileIO] = {}

    def say(failure: threading.ExceptHookArgs) -> None:
        next(num_failed)
        threading.__excepthook__(failure)
        assert failure.thread is not None
        threads[failure.thread].close()  # the parent hears of it when all is said; the others may go on for long

    threading.excepthook = say
    for member in members:
        role, _, fds = member.partition("=")
        command_fd, reply_fd = (int(fd) for fd in fds.split(","))
        replies = FileIO(reply_fd, "w")
        threads[threading.Thread(target=_serve, args=(role, command_fd, replies), name=member)] = replies
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    return min(next(num_failed), 1)


def _serve(role: str, command_fd: int, replies: FileIO) -> None:
    with os.fdopen(command_fd, "rb") as commands:
        serve_worker(WorkerPipe(commands, replies), HandOver, _ROLES[role])
    replies.close()


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
