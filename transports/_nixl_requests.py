"""The transfer requests of one NIXL agent, from posting to their ends."""

from __future__ import annotations

import contextlib
import logging
from collections.abc import Iterator
from types import ModuleType
from typing import Any

import numpy as np

from kvxfer.transports._engine_thread import EngineError
from kvxfer.transports._engine_transport import UnreachablePeerError
from kvxfer.transports._regions import CheckedWrite, OneEntry
from kvxfer.transports.base import Outcome

MAX_IDLE_REQUESTS = 1024
_logger = logging.getLogger(__name__)


class NixlErrors:
    """NIXL's exceptions, and what becomes of them."""

    def __init__(self, bindings: ModuleType) -> None:
        self._unreachable: type[Exception] = bindings.nixlBackendError
        self.mapped: tuple[type[Exception], ...] = (
            bindings.nixlBackendError,
            bindings.nixlCancelledError,
            bindings.nixlInvalidParamError,
            bindings.nixlMismatchError,
            bindings.nixlNotAllowedError,
            bindings.nixlNotFoundError,
            bindings.nixlNotPostedError,
            bindings.nixlNotSupportedError,
            bindings.nixlRemoteDisconnectError,
            bindings.nixlRepostActiveError,
            bindings.nixlUnknownError,
        )

    def as_engine_error(self, error: Exception, outcome: Outcome, doing: str) -> EngineError:
        """What the engine's thread is told of `error`."""
        if isinstance(error, self._unreachable):
            return UnreachablePeerError(outcome, f"NIXL {doing}: {error}")
        return EngineError(outcome, f"NIXL {doing}: {type(error).__name__} {error}")

    @contextlib.contextmanager
    def mapping(self, outcome: Outcome, doing: str) -> Iterator[None]:
        """Turn NIXL's exceptions into an `EngineError` with `outcome`."""
        try:
            yield
        except self.mapped as error:
            raise self.as_engine_error(error, outcome, doing) from error


class NixlRequests:
    """Requests by their handles. One of a single entry rests once it is done, and is posted again for the next write
    between the same places, as slots see them all the time: to make one costs more than to post it.

    A request that rests names memory of both sides: `drop_idle` where either may be another afterwards.
    """

    def __init__(self, bindings: ModuleType, agent: Any, backend: int, errors: NixlErrors) -> None:  # noqa: ANN401
        self._nixl = bindings
        self._agent = agent
        self._backends = [backend]
        self._errors = errors
        self._posted: dict[int, tuple[str, CheckedWrite]] = {}  # by handle, with the peer's endpoint
        self._idle: dict[tuple[str, CheckedWrite], int] = {}  # the one that has rested longest comes first
        self.faulty: set[str] = set()
        """Endpoints that a write has failed to, or may still be under way to."""

    def post(self, endpoint: str, entries: CheckedWrite) -> int | None:
        """Start a write; its handle, or None where it is done already. Raises `EngineError`."""
        request = endpoint, entries
        handle = self._idle.pop(request, None) if isinstance(entries, OneEntry) else None
        if handle is None:
            handle = self._make(endpoint, entries)
        self._posted[handle] = request
        try:
            status = self._agent.postXferReq(handle, "")
        except self._errors.mapped as error:
            raise self._fault(handle, error, "posting a write") from error
        return None if self._is_done(handle, status) else handle

    def _make(self, endpoint: str, entries: CheckedWrite) -> int:
        src, dst, lengths = entries.table.T
        with self._errors.mapping(Outcome.FAILED, "preparing a write"):
            return int(
                self._agent.createXferReq(
                    self._nixl.NIXL_WRITE,
                    self._descriptors(src, lengths, entries.src_gpu),
                    self._descriptors(dst, lengths, entries.dst_gpu),
                    endpoint,
                    "",
                    self._backends,
                )
            )

    def place(self, gpu_index: int) -> tuple[Any, int]:
        """NIXL's kind of memory, and the device."""
        return (self._nixl.DRAM_SEG, 0) if gpu_index < 0 else (self._nixl.VRAM_SEG, gpu_index)

    def _descriptors(
        self, addresses: np.ndarray[Any, np.dtype[np.uint64]], lengths: np.ndarray[Any, np.dtype[np.uint64]], gpu: int
    ) -> object:
        kind, device = self.place(gpu)
        return self._nixl.nixlXferDList(kind, np.column_stack((addresses, lengths, np.full_like(lengths, device))))

    def check(self, handle: int) -> bool:
        """Whether the write is done. Raises `EngineError`."""
        try:
            status = self._agent.getXferStatus(handle)
        except self._errors.mapped as error:
            raise self._fault(handle, error, "watching a write") from error
        return self._is_done(handle, status)

    def _is_done(self, handle: int, status: object) -> bool:
        if status == self._nixl.NIXL_IN_PROG:
            return False
        if status != self._nixl.NIXL_SUCCESS:
            self.abandon(handle)
            raise EngineError(Outcome.UNKNOWN, f"NIXL reported status {status}")
        request = self._posted.pop(handle)
        if not isinstance(request[1], OneEntry) or request in self._idle:
            self._release(handle)
            return True
        self._idle[request] = handle
        if len(self._idle) > MAX_IDLE_REQUESTS:
            self._drop_oldest()
        return True

    def _drop_oldest(self) -> None:
        """Another thread may drop all meanwhile."""
        with contextlib.suppress(StopIteration, RuntimeError, KeyError):
            self._release(self._idle.pop(next(iter(self._idle))))

    def _fault(self, handle: int, error: Exception, doing: str) -> EngineError:
        self.abandon(handle)
        return self._errors.as_engine_error(error, Outcome.UNKNOWN, doing)

    def abandon(self, handle: int) -> None:
        """Give a request up. This frees the handle only: a write that is under way goes on, which its outcome says."""
        self.faulty.add(self._posted.pop(handle)[0])
        self._release(handle)

    def drop_idle(self) -> None:
        """Free all that rest. Another thread may post meanwhile."""
        while self._idle:
            with contextlib.suppress(KeyError):  # the last one was just taken
                self._release(self._idle.popitem()[1])

    def close(self) -> None:
        """Free what rests, and let go of the agent."""
        self.drop_idle()
        self._agent = None

    def _release(self, handle: int) -> None:
        try:
            self._agent.releaseXferReq(handle)
        except self._errors.mapped as error:
            _logger.warning("NIXL kept the handle of an ended write: %s", error)
