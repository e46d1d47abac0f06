"""The timeline word of a ring, raised by the streams of a GPU that write a pool."""

from __future__ import annotations

from typing import Any

from kvxfer.errors import ContractError
from kvxfer.streams.cuda_track import WAIT_GEQ, WRITE_DEFAULT
from kvxfer.streams.driver import Gpu, check, cuda
from kvxfer.streams.ring import TIMELINE_OFFSET_BYTES, Ring


class CudaMarks:
    """Marks of one timeline; their values rise, whatever streams they are put on. To be used by one thread at a time.

    `ring` and its registration stay the caller's and must outlive `close()`, and every mark that was given.
    """

    def __init__(self, device: Gpu, ring: Ring, ring_address: int, priority: int) -> None:
        """`ring_address`: where the GPU sees the ring's memory. `priority` is that of a stream on which marks wait for
        earlier ones, as CUDA counts. Raises `TransportError`."""
        self._gpu = device
        self._driver = driver = cuda()
        self._ring = ring
        self._address = ring_address + TIMELINE_OFFSET_BYTES
        self._last_mark = ring.timeline
        self._marked_on = 0  # the stream of the last mark
        self._stream: Any = device.create_stream(priority)
        try:
            with device:
                flags = int(driver.CUevent_flags.CU_EVENT_DISABLE_TIMING)
                self._event = check("cuEventCreate", driver.cuEventCreate(flags))
        except BaseException:
            driver.cuStreamDestroy(self._stream)
            raise

    def mark(self, stream: object | None = None) -> int:
        """`RowStream.mark`. `stream`: of torch, or a raw handle; None is torch's current stream.

        Raises `ContractError` for what is no stream of this GPU, and `TransportError`.
        """
        handle = _stream_handle(stream, self._gpu.device_index)
        value = self._last_mark + 1
        with self._gpu:
            if handle != self._marked_on and self._ring.timeline < self._last_mark:
                handle = self._behind_last_mark(handle)
            writing = self._driver.cuStreamWriteValue64(handle, self._address, value, WRITE_DEFAULT)
            check("cuStreamWriteValue64", writing)
        self._marked_on, self._last_mark = handle, value
        return value

    def close(self) -> None:
        """Give back what was made. A context that is broken refuses, and has nothing left to give back."""
        with self._gpu:
            self._driver.cuStreamDestroy(self._stream)
            self._driver.cuEventDestroy(self._event)

    def _behind_last_mark(self, handle: int) -> int:
        """The stream for a mark that must not overtake one that is pending on another: it waits in the worker's place
        until both streams have come there."""
        driver = self._driver
        check("cuEventRecord", driver.cuEventRecord(self._event, handle))
        check("cuStreamWaitEvent", driver.cuStreamWaitEvent(self._stream, self._event, 0))
        result = driver.cuStreamWaitValue64(self._stream, self._address, self._last_mark, WAIT_GEQ)
        check("cuStreamWaitValue64", result)
        return int(self._stream)


def _stream_handle(stream: object | None, device_index: int) -> int:
    """The raw handle of a stream, as `CudaMarks.mark` takes it."""
    if isinstance(stream, int):
        return stream
    if stream is None:
        import torch

        return int(torch.cuda.current_stream(device_index).cuda_stream)
    handle, device = getattr(stream, "cuda_stream", None), getattr(stream, "device_index", device_index)
    if not isinstance(handle, int) or device != device_index:
        raise ContractError(
            f"stream: got {stream!r}, expected a torch.cuda.Stream of cuda:{device_index}, a raw handle, or None"
        )
    return handle
