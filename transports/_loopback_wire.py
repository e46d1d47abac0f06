"""The emulated wire: when what was sent has passed it, and a descriptor that is readable from then on."""

from __future__ import annotations

import ctypes
import os
import struct
import time

from kvxfer.transports.loopback_options import LoopbackOptions

_TIMER_ABSTIME = 1  # linux/time.h
_TIMER_SPEC = struct.Struct("=qqqq")
"""`struct itimerspec`: seconds and nanoseconds, of the interval and of the first time."""
_libc = ctypes.CDLL(None, use_errno=True)
_set_time = ctypes.PyDLL(None).timerfd_settime  # it returns at once: the interpreter's lock is kept
_set_time.argtypes = (ctypes.c_int, ctypes.c_int, ctypes.c_void_p, ctypes.c_void_p)


class Wire:
    """One for all writes of a transport, which pass it one after another. Of the thread that submits them."""

    def __init__(self, options: LoopbackOptions) -> None:
        self._descriptor_s = options.descriptor_s
        self._byte_s = 1.0 / options.wire_bytes_per_s
        self._free_at_s = 0.0

    def take(self, num_descriptors: int, num_bytes: int) -> float:
        """Put a write behind those before it; when it will have passed, on the monotonic clock."""
        now_s = time.monotonic()
        held_s = max(num_descriptors * self._descriptor_s, num_bytes * self._byte_s)
        self._free_at_s = (self._free_at_s if self._free_at_s > now_s else now_s) + held_s
        return self._free_at_s


class WireTimer:
    """Tells when the next write has passed its wire. Owns `fd`, which `close()` frees."""

    def __init__(self) -> None:
        """Raises `OSError`."""
        self.fd: int = _libc.timerfd_create(time.CLOCK_MONOTONIC, os.O_CLOEXEC | os.O_NONBLOCK)
        if self.fd < 0:
            raise OSError(ctypes.get_errno(), "the timer of a wire could not be made")
        self._due_s = 0.0
        self._spec = ctypes.create_string_buffer(_TIMER_SPEC.size)
        self._address = ctypes.addressof(self._spec)

    def set(self, due_s: float) -> None:
        """Let `fd` be readable from `due_s` on, by the monotonic clock; never with 0."""
        if due_s == self._due_s:
            return
        self._due_s = due_s
        seconds = int(due_s)
        _TIMER_SPEC.pack_into(self._spec, 0, 0, 0, seconds, int((due_s - seconds) * 1e9))
        _set_time(self.fd, _TIMER_ABSTIME, self._address, None)

    def close(self) -> None:
        """Calling it again does nothing."""
        if self.fd >= 0:
            os.close(self.fd)
            self.fd = -1
