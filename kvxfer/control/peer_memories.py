"""Pools of prefill workers of this host, mapped so that a stream of a decode worker can pull rows out of them."""

from __future__ import annotations

import logging

from kvxfer.control.shared_memory import HeldMemory, as_device_pool
from kvxfer.errors import KvxferError
from kvxfer.memory import HostMemory
from kvxfer.streams.device import MappedPool
from kvxfer.streams.row_stream import RowStream

_log = logging.getLogger("kvxfer.worker")


class PeerMemories:
    """What each index of a stream stands for. Owns the mappings; close it after the stream."""

    def __init__(self, stream: RowStream, device_index: int | None) -> None:
        """`device_index`: the GPU of the stream, None for one of host memory."""
        self._stream = stream
        self._device_index = device_index
        self._mapped: dict[int, HostMemory | MappedPool] = {}
        self._leaving: list[int] = []

    @property
    def must_rest(self) -> bool:
        """Whether something waits for the stream to come to rest, to be unmapped."""
        return bool(self._leaving)

    def map(self, index: int, memory: HeldMemory) -> str:
        """Let `index` stand for `memory`, which is let go of; why that cannot be, or nothing."""
        mapped: HostMemory | MappedPool | None = None
        try:
            mapped = memory.attach(self._device_index)
            self._stream.set_memory(index, as_device_pool(mapped))
        except KvxferError as error:
            if mapped is not None:
                mapped.close()
            return f"the decode worker cannot map it: {error}"[:2000]
        self._mapped[index] = mapped
        return ""

    def drop(self, index: int) -> None:
        """Nothing names `index` any more."""
        self._leaving.append(index)

    def unmap(self) -> list[int]:
        """The stream is at rest: unmap what was dropped. Returns the indices."""
        unmapped, self._leaving = self._leaving, []
        for index in unmapped:
            memory = self._mapped.pop(index, None)
            if memory is not None:
                self._stream.clear_memory(index)
                _close(memory)
        return unmapped

    def close(self) -> None:
        """Unmap everything; the stream is closed. Calling it again does nothing."""
        for memory in self._mapped.values():
            _close(memory)
        self._mapped.clear()
        self._leaving.clear()


def _close(memory: HostMemory | MappedPool) -> None:
    """Unmap; a GPU that refuses has broken its context, and keeps no memory for long."""
    try:
        memory.close()
    except KvxferError as error:
        _log.warning("a peer's pool stays mapped: %s", error)
