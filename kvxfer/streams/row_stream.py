"""What a stream that moves rows has to do, whether a GPU runs it or a thread."""

from __future__ import annotations

from typing import Protocol

from kvxfer.memory import HostMemory
from kvxfer.streams.device import DevicePool

__all__ = ["RowStream"]


class RowStream(Protocol):
    """Executes the entries of one ring in order of their numbers. Its owner alone touches the pool through it.

    Orders that are wrong are the agent's fault, and an agent that is not trusted with a pool is given none: a stream
    does not check what spans say.
    """

    def enqueue(self, number: int, num_entries: int = 1) -> None:
        """Enqueue `num_entries` entries from `number` on: each waits for its order, moves what that says and writes its
        done word. Called once for each number, from 0 on. Never blocks: its owner keeps at most 128 entries
        unfinished."""
        ...

    def mark(self, stream: object | None) -> int:
        """Let the timeline word rise when `stream`, which writes the pool, has done what it was given so far.

        Returns the value that the word has reached then; values rise. None is the current stream of a device, and on
        hosts, where writing is over when it returns, the only choice.
        """
        ...

    def set_memory(self, index: int, memory: HostMemory | DevicePool) -> None:
        """From now on spans that name `index` mean `memory`: slots that have moved, or a peer's pool (index 2 and up).
        No order that names it is under way. `memory` stays the caller's and must outlive the stream, or `forget`."""
        ...

    def forget(self, memory: HostMemory | DevicePool) -> None:
        """No index means `memory` any more, and nothing is enqueued: after this it may be closed."""
        ...

    def clear_memory(self, index: int) -> None:
        """Spans that name `index` move nothing any more. No order that names it is under way."""
        ...

    def close(self) -> None:
        """Wait for what is enqueued, then give everything back. Every enqueued entry must have its order by now.
        Calling it again does nothing."""
        ...
