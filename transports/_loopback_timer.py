"""A descriptor that is readable from a given time on."""

from __future__ import annotations

import ctypes
import os
import time

_TIMER_ABSTIME = 1  # linux/time.h
_libc = ctypes.CDLL(None, use_errno=True)


class _TimerSpec(ctypes.Structure):
    """`struct itimerspec`."""

    _fields_ = (
        ("interval_s", ctypes.c_int64),
        ("interval_ns", ctypes.c_int64),
        ("value_s", ctypes.c_int64),
        ("value_ns", ctypes.c_int64),
    )


class WireTimer:
    """Tells when the next write has passed its wire. Owns `fd`, which `close()` frees."""

    def __init__(self) -> None:
        """Raises `OSError`."""
        self.fd = _libc.timerfd_create(time.CLOCK_MONOTONIC, os.O_CLOEXEC | os.O_NONBLOCK)
        if self.fd < 0:
            raise OSError(ctypes.get_errno(), "the timer of a wire could not be made")
        self._due_s = 0.0
        self._spec = _TimerSpec()
        self._reference = ctypes.byref(self._spec)

    def set(self, due_s: float) -> None:
        """Let `fd` be readable from `due_s` on, by the monotonic clock; never with 0."""
        if due_s == self._due_s:
            return
        self._due_s = due_s
        self._spec.value_s = seconds = int(due_s)
        self._spec.value_ns = int((due_s - seconds) * 1e9)
        _libc.timerfd_settime(self.fd, _TIMER_ABSTIME, self._reference, None)

    def close(self) -> None:
        """Calling it again does nothing."""
        if self.fd >= 0:
            os.close(self.fd)
            self.fd = -1
