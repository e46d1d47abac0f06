"""Loopback writes between memories of one GPU, or of peers, each reported at the pace of the emulated wire."""

from __future__ import annotations

import contextlib
import select
import time
from collections import deque
from collections.abc import Mapping
from typing import Any

from kvxfer.errors import TransportError
from kvxfer.streams.driver import check, cuda, gpu
from kvxfer.transports._loopback_peer import LoopbackPeer
from kvxfer.transports._loopback_timer import WireTimer
from kvxfer.transports._regions import Entries
from kvxfer.transports.base import Region

_NAP_S = 50e-6
"""Between two looks at a copy that has not ended when its write is due."""


class GpuWrites:
    """What `PacedWrites` does, by a stream of its own: the GPU's copy engine works beside kernels, and takes no thread.

    What the GPU has begun cannot be called back; whoever must know that nothing moves waits for it, which takes no
    longer than the copies do. Owns the stream, its events, an epoll and a timer.
    """

    def __init__(self, gpu_index: int, other_fd: int) -> None:
        """`fileno()` is readable while `other_fd` is, too. Raises `EngineMissingError`, `TransportError`."""
        self._driver = cuda()
        self._gpu = gpu(gpu_index)
        self._events: list[Any] = []
        self._free_events: list[Any] = []
        self._event_of: dict[int, Any] = {}  # of each write that has not ended, behind its copies
        self._due: deque[tuple[float, int]] = deque()  # one wire: whoever came first is due first
        self._late: list[int] = []  # due, and still being copied
        self._stream: Any = self._gpu.create_stream(0)
        self._timer = WireTimer()
        self._epoll = select.epoll()
        self._epoll.register(self._timer.fd, select.EPOLLIN)
        self._epoll.register(other_fd, select.EPOLLIN)

    def fileno(self) -> int:
        """`PacedWrites.fileno`."""
        return self._epoll.fileno()

    def pieces(
        self,
        entries: Entries,
        peer: LoopbackPeer,  # noqa: ARG002 - its memory is mapped here
        dst_region: int,  # noqa: ARG002
        local: Mapping[int, Region],  # noqa: ARG002
    ) -> Entries | None:
        """`PacedWrites.pieces`: every write is the GPU's."""
        return entries

    def submit(self, write_id: int, pieces: Entries, due_s: float) -> None:
        """`PacedWrites.submit`."""
        driver = self._driver
        with self._gpu:
            for src, dst, num_bytes in zip(
                pieces.src.tolist(), pieces.dst.tolist(), pieces.lengths.tolist(), strict=True
            ):
                check("cuMemcpyDtoDAsync", driver.cuMemcpyDtoDAsync(dst, src, num_bytes, self._stream))
            event = self._free_events.pop() if self._free_events else self._new_event()
            check("cuEventRecord", driver.cuEventRecord(event, self._stream))
        self._event_of[write_id] = event
        self._due.append((due_s, write_id))
        if len(self._due) == 1 and not self._late:
            self._timer.set(due_s)

    def collect(self) -> tuple[list[int], float]:
        """`PacedWrites.collect`; the GPU's time is nobody's."""
        now_s = time.monotonic()
        while self._due and self._due[0][0] <= now_s:
            self._late.append(self._due.popleft()[1])
        ended = []
        # A write that was forgotten is behind none; the others end in the order of their copies.
        while self._late and self._is_copied(self._late[0]):
            write_id = self._late.pop(0)
            if self._event_of.get(write_id) is not None:
                ended.append(write_id)
                self._forget([write_id])
        if self._late:
            self._timer.set(now_s + _NAP_S)
        else:
            self._timer.set(self._due[0][0] if self._due else 0.0)
        return ended, 0.0

    def drop_peer(self, peer: LoopbackPeer, write_ids: list[int]) -> None:  # noqa: ARG002 - all share one stream
        """`PacedWrites.drop_peer`."""
        self._drain()
        self._forget(write_ids)

    def drop_sources(self, region_ids: list[int]) -> None:  # noqa: ARG002
        """`PacedWrites.drop_sources`."""
        self._drain()

    def give_up(self) -> list[int]:
        """`PacedWrites.give_up`. What follows is tried anew: a GPU that is lost refuses it."""
        self._drain()
        lost = list(self._event_of)
        self._forget(lost)
        return lost

    def close(self) -> None:
        """`PacedWrites.close`."""
        self._drain()
        with self._gpu:
            for event in self._events:
                self._driver.cuEventDestroy(event)
            self._driver.cuStreamDestroy(self._stream)
        self._epoll.close()
        self._timer.close()

    def _new_event(self) -> Any:  # noqa: ANN401 - cuda-bindings has no types
        flags = int(self._driver.CUevent_flags.CU_EVENT_DISABLE_TIMING)
        self._events.append(check("cuEventCreate", self._driver.cuEventCreate(flags)))
        return self._events[-1]

    def _is_copied(self, write_id: int) -> bool:
        event = self._event_of.get(write_id)
        if event is None:
            return True
        with self._gpu:
            result = self._driver.cuEventQuery(event)
        if result[0] == self._driver.CUresult.CUDA_ERROR_NOT_READY:
            return False
        check("cuEventQuery", result)
        return True

    def _forget(self, write_ids: list[int]) -> None:
        for write_id in write_ids:
            event = self._event_of.pop(write_id, None)
            if event is not None:
                self._free_events.append(event)

    def _drain(self) -> None:
        """Return when nothing is copied any more; a context that is broken copies nothing."""
        with contextlib.suppress(TransportError), self._gpu:
            check("cuStreamSynchronize", self._driver.cuStreamSynchronize(self._stream))
