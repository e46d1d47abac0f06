"""Marks of a worker whose pool on a GPU its agent has mapped: all that this worker does for the moves of its rows."""

from __future__ import annotations

import os

from kvxfer.errors import AgentLostError
from kvxfer.streams.ring import Ring


class WorkerMarks:
    """Owns the agent's ring, of which it uses the timeline alone; `close()` gives it back."""

    def __init__(self, ring: Ring, device_index: int) -> None:
        """Take over `ring`. Raises `RegistrationError` where this process cannot lock it in memory, and
        `TransportError`; the ring is closed then."""
        from kvxfer.streams.cuda_marks import CudaMarks  # CUDA: only where a pool lies on a GPU
        from kvxfer.streams.cuda_stream import STREAM_PRIORITY, check_abilities
        from kvxfer.streams.driver import gpu

        self._ring = ring
        self._pid = os.getpid()
        self._is_closed = False
        try:
            self._gpu = gpu(device_index)
            check_abilities(self._gpu)
            address = self._gpu.register(ring.memory)
            try:
                self._marks = CudaMarks(self._gpu, ring, address, STREAM_PRIORITY)
            except BaseException:
                self._gpu.unregister(ring.memory)
                raise
        except BaseException:
            ring.close()
            raise

    def mark(self, stream: object | None) -> int:
        """`CudaMarks.mark`. Raises `AgentLostError` in a forked child, whose context on the GPU is its parent's."""
        if self._pid != os.getpid():
            raise AgentLostError("a forked child has no stream: connect anew")
        return self._marks.mark(stream)

    def close(self) -> None:
        """Give back what was made. Waits for marks that were given, and so for the streams that they are on. Calling it
        again does nothing."""
        if self._is_closed or self._pid != os.getpid():
            return
        self._is_closed = True
        self._marks.close()
        self._gpu.unregister(self._ring.memory)
        self._ring.close()
