"""Whether an agent lives and whether it takes on work, for the probes of an orchestrator."""

from __future__ import annotations

import logging
import time
from collections.abc import Callable
from dataclasses import dataclass

from kvxfer.ops.config import OpsConfig
from kvxfer.ops.figures import AgentFigures
from kvxfer.ops.server import Page, PageServer, listen

_log = logging.getLogger("kvxfer.ops")

MAX_SILENCE_S = 5.0
"""An agent whose loop has not turned for so long is stuck: nothing that it does takes longer."""


@dataclass(slots=True)
class Pulse:
    """What the loop shows of itself: it sets these as it goes, the server's thread looks.

    `turned_at` is the monotonic clock when the loop turned last, None before it first did; `fault` says what has
    broken for good, and is empty while nothing has.
    """

    turned_at: float | None = None
    is_draining: bool = False
    fault: str = ""

    def trouble(self) -> str:
        """Why the agent should be restarted; empty while all is well."""
        if self.fault:
            return self.fault
        turned_at = self.turned_at
        silent_s = 0.0 if turned_at is None else time.monotonic() - turned_at
        return f"the loop has not turned for {silent_s:.1f} s" if silent_s > MAX_SILENCE_S else ""

    def unreadiness(self) -> str:
        """Why the agent should get no new work; empty while it may."""
        if self.is_draining:
            return "shutting down"
        return "starting" if self.turned_at is None else self.trouble()


class Ops:
    """The pages `/healthz`, `/readyz` and `/metrics` of one agent. `endpoint` is empty where they are not served."""

    def __init__(self, config: OpsConfig, pulse: Pulse) -> None:
        """Bind the address. Raises `ConfigError`."""
        self._pulse = pulse
        self._listener = listen(config) if config.listen_host else None
        self._server: PageServer | None = None
        self.endpoint = ""

    def serve(self, figures: Callable[[], AgentFigures]) -> None:
        """Serve until `close()`; `figures` is called from the server's thread."""
        if self._listener is None:
            return
        # Only here: an agent without metrics starts faster without their library.
        from kvxfer.ops.metrics import MetricsPage

        pages: dict[str, Callable[[], Page]] = {
            "/healthz": lambda: _page(self._pulse.trouble()),
            "/readyz": lambda: _page(self._pulse.unreadiness()),
            "/metrics": MetricsPage(figures),
        }
        self._server = PageServer(self._listener, pages)
        self.endpoint = self._server.endpoint
        _log.info("health, readiness and metrics at http://%s", self.endpoint)

    def lost_thread(self, what: str) -> None:
        """A thread of this process has ended by an error: from now on the agent counts as broken."""
        self._pulse.fault = what

    def close(self) -> None:
        """Stop serving. Calling it again does nothing."""
        if self._server is not None:
            self._server.close()
        elif self._listener is not None:
            self._listener.close()


def _page(problem: str) -> Page:
    return Page(503, f"{problem}\n".encode()) if problem else Page(200, b"ok\n")
