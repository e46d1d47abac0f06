"""`kvxfer prefill` with two faults on demand: SIGUSR1 blocks the loop, SIGUSR2 ends the engine's thread by an error.

`python -m tests.ops.hooked_agent CONFIG_FILE BLOCK_SECONDS`
"""

from __future__ import annotations

import gc
import signal
import sys
import time
from pathlib import Path

from kvxfer.cli.agents import _run
from kvxfer.ops.config import load_prefill_config
from kvxfer.prefill.agent import PrefillAgent
from kvxfer.transports._engine_transport import EngineTransport


class _HookedAgent(PrefillAgent):
    def run(self) -> None:
        assert gc.get_freeze_count(), "what was imported is looked through again and again"
        # Handlers run in the main thread, which is the loop's.
        signal.signal(signal.SIGUSR1, lambda *_: time.sleep(float(sys.argv[2])))
        signal.signal(signal.SIGUSR2, lambda *_: self._end_engine_thread())
        super().run()

    def _end_engine_thread(self) -> None:
        transport = self._sidecar.transport
        assert isinstance(transport, EngineTransport)
        transport._thread._commands.put(_fail)


def _fail() -> None:
    raise RuntimeError("a bug")


if __name__ == "__main__":
    _run(Path(sys.argv[1]), load_prefill_config, _HookedAgent, as_json=True)
