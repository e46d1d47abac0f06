"""Completions on their way from an engine's thread to the agent's loop."""

from __future__ import annotations

import os
import threading
from collections import deque

from kvxfer.transports.base import Completion


class CompletionQueue:
    """Many threads put, one loop drains; `fileno()` is readable while there is something to drain.

    Owns an eventfd, freed by `close()`. What was put before stays drainable after it.
    """

    def __init__(self) -> None:
        self._items: deque[Completion] = deque()
        self._lock = threading.Lock()  # guards the next
        self._is_told = False  # the event is set, or is just about to be
        self._event_fd = os.eventfd(0, os.EFD_NONBLOCK | os.EFD_CLOEXEC)

    def fileno(self) -> int:
        return self._event_fd

    def put(self, completion: Completion) -> None:
        self._items.append(completion)
        with self._lock:
            must_tell = not self._is_told
            self._is_told = True
        if must_tell:
            os.eventfd_write(self._event_fd, 1)

    def drain(self) -> list[Completion]:
        if self._event_fd >= 0:
            if not self._is_told:
                return []
            try:
                os.eventfd_read(self._event_fd)
            except BlockingIOError:
                return []  # who has put something is just about to set it
            with self._lock:
                self._is_told = False  # before the items are taken: one that comes in between sets the event once more
        return [self._items.popleft() for _ in range(len(self._items))]

    def close(self) -> None:
        """Free the eventfd; no `put` may follow. Calling it again does nothing."""
        if self._event_fd >= 0:
            os.close(self._event_fd)
            self._event_fd = -1
