"""A pool on a GPU that the agent is to map itself. That takes seconds the first time, so a thread does it: CUDA and the
compiler are imported, the pool is mapped, the kernels are compiled and loaded."""

from __future__ import annotations

import os
import threading
from collections.abc import Callable
from concurrent.futures import Future

from kvxfer.control.handoff_messages import PoolOffer
from kvxfer.control.shared_memory import HeldMemory, SharedMemory, attach
from kvxfer.errors import HandoffError, KvxferError
from kvxfer.streams.device import MappedPool

MAPPING_TIMEOUT_S = 120.0
"""The worker is told to wait for so long."""

CallInThread = Callable[[Callable[[], object]], Future[object]]


class DeviceMapping:
    """The mapping of one offered pool, under way or done. Owns the pool's descriptor, and the mapping until it is
    taken."""

    def __init__(self, offer: PoolOffer, fds: list[int], call: CallInThread, wake: Callable[[], None]) -> None:
        """Take over `fds`, the descriptor that came with `offer`, or none. `wake` is called, from a thread, when there
        is something to take; never after `close()`. Raises `HandoffError` where this process may open no more files."""
        assert offer.pool is not None
        try:
            own_fds = [os.dup(fd) for fd in fds]
        except OSError as error:
            for fd in fds:
                os.close(fd)
            raise HandoffError(f"pool: got memory of a GPU, which cannot be mapped: {error.strerror}") from error
        self.offer = offer
        self._shared: HeldMemory | None = HeldMemory(offer.pool, *fds)
        self._wake = wake
        self._lock = threading.Lock()  # of the next two: one of `close()` and the thread drops what nobody wants
        self._is_done = False
        self._is_closed = False
        self._future = call(lambda: _map(offer.pool, own_fds))
        self._future.add_done_callback(lambda _future: self._ended(own_fds))

    @property
    def is_done(self) -> bool:
        """Whether `take` has something."""
        return self._is_done

    def take(self) -> tuple[MappedPool, HeldMemory]:
        """The mapping, which is the caller's now, and what lets peers map the pool, too. Raises `HandoffError` where it
        cannot be mapped."""
        problem = self._future.exception()
        if problem is not None:
            raise HandoffError(str(problem)) from problem
        mapped, shared = self._future.result(), self._shared
        assert isinstance(mapped, MappedPool)
        assert shared is not None
        self._shared = None
        return mapped, shared

    def close(self) -> None:
        """Let go of what was not taken, also of a mapping that is still to come. Calling it again does nothing."""
        if self._shared is None:
            return
        self._shared.close()
        self._shared = None
        with self._lock:
            self._is_closed = True
            is_done = self._is_done
        if is_done:
            _drop(self._future)
        else:
            self._future.cancel()

    def _ended(self, own_fds: list[int]) -> None:
        """In the thread, or where it was cancelled."""
        for fd in own_fds:  # nobody has taken it over
            os.close(fd)
        with self._lock:
            self._is_done = True
            if not self._is_closed:
                self._wake()
                return
        _drop(self._future)


def _drop(future: Future[object]) -> None:
    if not future.cancelled() and future.exception() is None:
        mapped = future.result()
        assert isinstance(mapped, MappedPool)
        mapped.close()


def _map(shared: SharedMemory | None, fds: list[int]) -> MappedPool:
    """Map a pool and have the kernels for its GPU. Takes over `fds`. Raises `HandoffError`."""
    assert shared is not None
    mapped = attach(shared, fds, "pool")
    assert isinstance(mapped, MappedPool)
    try:
        from kvxfer.streams.cuda_track import load_kernels

        load_kernels(mapped.pool.device_index)
    except ModuleNotFoundError as error:
        mapped.close()
        raise HandoffError(
            f"pool: got one on a GPU, for which this agent needs {error.name}: pip install 'kvxfer[gpu]'"
        ) from error
    except KvxferError as error:
        mapped.close()
        raise HandoffError(f"pool: {error}") from error
    return mapped
