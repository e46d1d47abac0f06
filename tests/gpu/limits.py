"""A time limit for each test on a GPU, so that one that hangs does not take the time of all others.

What hangs is most likely a call that waits for the whole GPU, and so for a row stream whose order has not come: after
the limit every waiting entry is skipped, which frees the call and fails the test. Where that does not help, the process
ends.
"""

from __future__ import annotations

import faulthandler
import sys
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager

import pytest

LIMIT_S = 12.0
_GRACE_S = 12.0

skippers: set[Callable[[], None]] = set()
"""Each skips what waits on one row stream."""


@contextmanager
def limit(limit_s: float, stderr_fd: int | None = None) -> Iterator[None]:
    """Fail what takes longer than `limit_s`, and say on `stderr_fd` where it was; None is the process's own."""
    is_late = threading.Event()
    told = sys.stderr.fileno() if stderr_fd is None else stderr_fd

    def rescue() -> None:
        is_late.set()
        faulthandler.dump_traceback(told, all_threads=True)
        for skip in list(skippers):
            skip()

    timer = threading.Timer(limit_s, rescue)
    timer.daemon = True
    timer.start()
    faulthandler.dump_traceback_later(limit_s + _GRACE_S, file=told, exit=True)
    try:
        yield
    finally:
        faulthandler.cancel_dump_traceback_later()
        timer.cancel()
        timer.join()
    if is_late.is_set():
        pytest.fail(f"took longer than {limit_s} s; entries that were waiting have been skipped")
