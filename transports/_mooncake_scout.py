"""Asks Mooncake peers whether they answer, before the engine itself has to wait for them.

The first call that concerns a session shakes hands with the peer inside Mooncake, and blocks for 60 seconds where the
peer is stopped. On the posting thread that would hold up every other peer and `rotate()`. So the question goes out
first, from a thread of its own and an engine object that owns no memory and is never rotated.
"""

from __future__ import annotations

import functools
import threading
import time
from types import ModuleType
from typing import Any


class Question:
    """Whether a session answers. `code` is None while nothing has come, else 0 for yes or Mooncake's error."""

    def __init__(self, engine: Any, session: str) -> None:  # noqa: ANN401 - the engine's own untyped class
        self.code: int | None = None
        self.asked_at_s = time.monotonic()
        self._engine = engine
        self._session = session
        # Ends with the answer, within a minute; it holds no memory that anyone waits for.
        threading.Thread(target=self._ask, name="mooncake-ask", daemon=True).start()

    def _ask(self) -> None:
        self.code = self._engine.send_probe(self._session)


@functools.cache
def _asking_engine(module: ModuleType, host: str) -> Any:  # noqa: ANN401 - the engine's own untyped class
    engine = module.TransferEngine()
    engine.initialize(host, "P2PHANDSHAKE", "tcp", "")
    return engine


def ask(module: ModuleType, host: str, session: str) -> Question:
    """Ask the peer behind `session` for a sign of life; returns at once. The engine that asks lives on for ever."""
    return Question(_asking_engine(module, host), session)
