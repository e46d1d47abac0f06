"""Several workers of a bench in one process, with a thread and a pair of pipes each.

Workers that share one GPU live in one process: the kernels of two processes take turns there, so that gathers of one
would never run beside scatters of the other, as they do where each has a GPU of its own.

`python -m kvxfer.cli.crew prefill=FD,FD decode=FD,FD ...`: descriptors of commands and of replies.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from io import FileIO

from kvxfer.cli.decode_worker import DecodeWorker
from kvxfer.cli.prefill_worker import PrefillWorker
from kvxfer.cli.protocol import HandOver
from kvxfer.cli.worker import Worker, WorkerPipe, serve_worker

_ROLES: dict[str, Callable[[HandOver], Worker]] = {"prefill": PrefillWorker, "decode": DecodeWorker}


def _serve(member: str) -> None:
    role, _, fds = member.partition("=")
    command_fd, reply_fd = (int(fd) for fd in fds.split(","))
    with os.fdopen(command_fd, "rb") as commands, FileIO(reply_fd, "w") as replies:
        serve_worker(WorkerPipe(commands, replies), HandOver, _ROLES[role])


def main(members: list[str]) -> None:
    """Serve all `members` until the parent is done with each; raises what one of them raised."""
    os.dup2(2, 1)  # whatever a library prints
    with ThreadPoolExecutor(len(members)) as threads:
        for served in [threads.submit(_serve, member) for member in members]:
            served.result()


if __name__ == "__main__":
    main(sys.argv[1:])
