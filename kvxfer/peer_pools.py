"""Pools of prefill workers of this host, as a decode agent has them mapped for whoever moves its worker's rows."""

from __future__ import annotations

import contextlib
from collections import deque
from collections.abc import Callable
from typing import Protocol

from kvxfer.control.handoff_messages import PeerPool, PeerPoolDropped, PeerWord
from kvxfer.control.messages import PeerPoolMapped, PeerPoolUnmapped
from kvxfer.control.shared_memory import HeldMemory
from kvxfer.errors import HandoffError, TransportError
from kvxfer.memory import HostMemory
from kvxfer.row_mover import HostExecutor
from kvxfer.streams.device import MappedPool
from kvxfer.streams.own_mover import OwnStreamMover
from kvxfer.streams.ring import MemoryIndex
from kvxfer.streams.stream_mover import StreamMover

Answer = Callable[[str], None]
"""Hears once what became of a pool: nothing where rows may be pulled from it, otherwise why they may not."""
_TOO_MANY = f"the decode worker has {MemoryIndex.STAGING - MemoryIndex.FIRST_PEER} pools mapped already"


class PeerPools(Protocol):
    """Of the worker that is attached. Called from the agent's loop."""

    def map(self, memory: HeldMemory, answer: Answer) -> int:
        """Have `memory` mapped, which is this object's from now on; the index that stands for it. `answer` may be
        called at once; after a refusal the index stands for nothing."""
        ...

    def drop(self, index: int) -> None:
        """Nothing is pulled from `index` any more, beyond what was given; `answer` is not called any more."""
        ...

    def hear(self, word: PeerPoolMapped | PeerPoolUnmapped) -> None:
        """The worker has answered."""
        ...

    def advance(self) -> None:
        """Once a turn of the loop: let go of what was dropped and is in use no more."""
        ...

    def close(self) -> None:
        """Give back what is mapped in this process. Calling it again does nothing."""
        ...


class HostPeerPools:
    """Mapped in this process, for its threads."""

    def __init__(self, rows: HostExecutor) -> None:
        self._rows = rows
        self._mapped: dict[int, HostMemory] = {}
        self._num_mapped = 0

    def map(self, memory: HeldMemory, answer: Answer) -> int:
        """`PeerPools.map`."""
        self._num_mapped += 1
        index = self._num_mapped
        try:
            mapped = memory.attach(None)
        except HandoffError as error:
            answer(str(error))
            return index
        assert isinstance(mapped, HostMemory)
        self._mapped[index] = mapped
        self._rows.peers[index] = mapped.array
        answer("")
        return index

    def drop(self, index: int) -> None:
        """`PeerPools.drop`. A copy under way keeps its mapping until it ends."""
        memory = self._mapped.pop(index, None)
        if memory is not None:
            del self._rows.peers[index]
            memory.close()

    def hear(self, word: PeerPoolMapped | PeerPoolUnmapped) -> None:
        """Nobody was asked."""

    def advance(self) -> None:
        """Mappings go by themselves."""

    def close(self) -> None:
        """`PeerPools.close`."""
        for index in list(self._mapped):
            self.drop(index)


class StreamPeerPools:
    """Mapped by the worker, whose stream moves the rows.

    An index is asked for, then mapped or refused; when it was dropped and no order names it, the worker is told to
    unmap it, which it does when its stream is at rest, and only its answer makes the index free again.
    """

    def __init__(self, mover: StreamMover, tell: Callable[[PeerWord, HeldMemory | None], None]) -> None:
        """`tell` says a word to the worker, sooner or later and in order, and takes over the memory that goes along."""
        self._mover = mover
        self._tell = tell
        self._free = deque(range(MemoryIndex.FIRST_PEER, MemoryIndex.STAGING))
        self._asked: dict[int, Answer] = {}
        self._leaving: set[int] = set()  # dropped
        self._unmapping: set[int] = set()  # and the worker was told

    @property
    def num_free(self) -> int:
        """Indices that stand for nothing."""
        return len(self._free)

    def map(self, memory: HeldMemory, answer: Answer) -> int:
        """`PeerPools.map`."""
        if not self._free:
            memory.close()
            answer(_TOO_MANY)
            return -1
        index = self._free.popleft()
        self._asked[index] = answer
        self._tell(PeerPool(index=index, memory=memory.shared), memory)
        return index

    def drop(self, index: int) -> None:
        """`PeerPools.drop`."""
        if index not in self._free and index >= MemoryIndex.FIRST_PEER:
            self._asked.pop(index, None)
            self._leaving.add(index)

    def hear(self, word: PeerPoolMapped | PeerPoolUnmapped) -> None:
        """`PeerPools.hear`. What was not asked for proves nothing."""
        if isinstance(word, PeerPoolMapped):
            answer = self._asked.pop(word.index, None)
            if answer is not None:
                if word.detail:
                    self._free.append(word.index)
                answer(word.detail)
        elif word.index in self._unmapping:
            self._unmapping.remove(word.index)
            self._free.append(word.index)
            self._mover.let_rest(bool(self._unmapping))

    def advance(self) -> None:
        """`PeerPools.advance`."""
        for index in [index for index in self._leaving if not self._mover.uses_peer(index)]:
            self._leaving.remove(index)
            self._unmapping.add(index)
            self._tell(PeerPoolDropped(index=index), None)
            self._mover.let_rest(True)

    def close(self) -> None:
        """The worker unmaps by itself when its agent is gone."""


class OwnPeerPools:
    """Mapped in this process, for a stream of the agent's own on a GPU."""

    def __init__(self, rows: OwnStreamMover, device_index: int) -> None:
        """`device_index`: the GPU of the stream."""
        self._rows = rows
        self._device_index = device_index
        self._free = deque(range(MemoryIndex.FIRST_PEER, MemoryIndex.STAGING))
        self._mapped: dict[int, MappedPool] = {}
        self._leaving: set[int] = set()  # dropped

    def map(self, memory: HeldMemory, answer: Answer) -> int:
        """`PeerPools.map`."""
        if not self._free:
            memory.close()
            answer(_TOO_MANY)
            return -1
        try:
            mapped = memory.attach(self._device_index)
        except HandoffError as error:
            answer(str(error))
            return -1
        assert isinstance(mapped, MappedPool)
        index = self._free.popleft()
        self._mapped[index] = mapped
        self._rows.set_peer(index, mapped.pool)
        answer("")
        return index

    def drop(self, index: int) -> None:
        """`PeerPools.drop`."""
        if index in self._mapped:
            self._leaving.add(index)

    def hear(self, word: PeerPoolMapped | PeerPoolUnmapped) -> None:
        """Nobody was asked."""

    def advance(self) -> None:
        """`PeerPools.advance`."""
        for index in [index for index in self._leaving if not self._rows.uses_peer(index)]:
            self._leaving.remove(index)
            self._rows.set_peer(index, None)
            self._unmap(index)
            self._free.append(index)

    def close(self) -> None:
        """`PeerPools.close`. What was given ends first."""
        self._rows.drain()
        for index in list(self._mapped):
            self._unmap(index)
        self._leaving.clear()

    def _unmap(self, index: int) -> None:
        with contextlib.suppress(TransportError):  # a context that is broken maps nothing any more
            self._mapped.pop(index).close()
