"""How long tests wait: for a condition and not for a time, with limits that a busy machine keeps."""

from __future__ import annotations

import time
from collections.abc import Callable

WAIT_S = 20.0
SOON_S = 4.0
"""What comes "at once": long before a silent peer is given up (5 s), a deadline ends a transfer or a test gives up."""


def until(is_so: Callable[[], bool], what: str, timeout_s: float = WAIT_S) -> None:
    """Wait for a condition."""
    give_up_s = time.monotonic() + timeout_s
    while not is_so():
        assert time.monotonic() < give_up_s, f"not within {timeout_s} s: {what}"
        time.sleep(0.01)
