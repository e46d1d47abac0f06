"""Copies between memories of one GPU, or of peers, for loopback writes."""

from __future__ import annotations

import contextlib
import time
from collections import deque
from collections.abc import Collection
from typing import Any

from kvxfer.errors import TransportError
from kvxfer.streams.driver import check, cuda, gpu
from kvxfer.transports._loopback_paced import PacedWrite
from kvxfer.transports._loopback_peer import LoopbackPeer
from kvxfer.transports._loopback_wire import WireTimer
from kvxfer.transports._regions import CheckedWrite

_NAP_S = 50e-6
"""Between two looks at a copy that has not ended when its write is due."""


class GpuCopies:
    """The `Copier` of writes in memory of a GPU, by a stream of its own: the GPU's copy engine works beside kernels,
    and takes no thread.

    What the GPU has begun cannot be called back; whoever must know that nothing moves waits for it, which takes no
    longer than the copies do. Owns the stream, its events and a timer.
    """

    end_fds: Collection[int] = ()

    def __init__(self, gpu_index: int) -> None:
        """Raises `EngineMissingError`, `TransportError`."""
        self._driver = cuda()
        self._gpu = gpu(gpu_index)
        self._events: list[Any] = []
        self._free_events: list[Any] = []
        self._begun: deque[tuple[int, float, Any]] = deque()  # writes, when they are due, events behind their copies
        self._stream: Any = self._gpu.create_stream(0)
        self._timer = WireTimer()

    @property
    def news_fd(self) -> int:
        """`Copier.news_fd`."""
        return self._timer.fd

    def takes(self, entries: CheckedWrite, peer: LoopbackPeer, dst_region: int) -> bool:  # noqa: ARG002
        """`Copier.takes`: every write is the GPU's."""
        return True

    def begin(self, write: PacedWrite) -> None:
        """`Copier.begin`."""
        driver, stream = self._driver, self._stream
        with self._gpu:
            for src, dst, num_bytes in write.entries.rows():
                check("cuMemcpyDtoDAsync", driver.cuMemcpyDtoDAsync(dst, src, num_bytes, stream))
            event = self._free_events.pop() if self._free_events else self._new_event()
            check("cuEventRecord", driver.cuEventRecord(event, stream))
        self._begun.append((write.write_id, write.due_s, event))
        if len(self._begun) == 1:
            self._timer.set(write.due_s)

    def look(self) -> tuple[list[int], float]:
        """`Copier.look`; the GPU's time is nobody's."""
        now_s = time.monotonic()
        ended = []
        with self._gpu:
            while self._begun and self._begun[0][1] <= now_s and self._is_reached(self._begun[0][2]):
                write_id, _, event = self._begun.popleft()
                self._free_events.append(event)
                ended.append(write_id)
        due_s = self._begun[0][1] if self._begun else 0.0
        self._timer.set(due_s if due_s > now_s or not self._begun else now_s + _NAP_S)
        return ended, 0.0

    def drop_peer(self, peer: LoopbackPeer) -> None:  # noqa: ARG002 - all share one stream
        """`Copier.drop_peer`."""
        self._drain()

    def drop_sources(self, region_ids: Collection[int]) -> None:  # noqa: ARG002
        """`Copier.drop_sources`."""
        self._drain()

    def give_up(self) -> None:
        """`Copier.give_up`. What follows is tried anew: a GPU that is lost refuses it."""
        self._drain()
        self._free_events += [event for _, _, event in self._begun]
        self._begun.clear()
        self._timer.set(0.0)

    def close(self) -> None:
        """`Copier.close`."""
        self.give_up()
        with self._gpu:
            for event in self._events:
                self._driver.cuEventDestroy(event)
            self._driver.cuStreamDestroy(self._stream)
        self._timer.close()

    def _new_event(self) -> Any:  # noqa: ANN401 - cuda-bindings has no types
        flags = int(self._driver.CUevent_flags.CU_EVENT_DISABLE_TIMING)
        self._events.append(check("cuEventCreate", self._driver.cuEventCreate(flags)))
        return self._events[-1]

    def _is_reached(self, event: Any) -> bool:  # noqa: ANN401
        result = self._driver.cuEventQuery(event)
        if result[0] == self._driver.CUresult.CUDA_ERROR_NOT_READY:
            return False
        check("cuEventQuery", result)
        return True

    def _drain(self) -> None:
        """Return when nothing is copied any more; a context that is broken copies nothing."""
        with contextlib.suppress(TransportError), self._gpu:
            check("cuStreamSynchronize", self._driver.cuStreamSynchronize(self._stream))
