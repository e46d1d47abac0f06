"""An agent that does nothing by itself, for tests of what both agents share."""

from __future__ import annotations

import threading
import time
from collections import deque
from collections.abc import Callable
from pathlib import Path

from kvxfer.control.messages import Attached, Message, Ok, WorkerReply
from kvxfer.ops.config import OpsConfig, SlotConfig, TransportConfig
from kvxfer.sidecar import Sidecar

WAIT_S = 10.0
_SLOTS = SlotConfig(num_slots=2, slot_bytes=4096)


class IdleAgent:
    """Notes what it is told; serves requests as `answer` says. Runs on a thread once `start` was called."""

    def __init__(
        self,
        path: Path,
        transport: str = "loopback",
        slots: SlotConfig = _SLOTS,
    ) -> None:
        self.told: list[object] = []
        self.is_quiet = True
        self.has_drained = True
        self._jobs: deque[Callable[[], object]] = deque()
        self.answer: Callable[[Message], WorkerReply] = lambda _: Ok()
        self.sidecar = Sidecar(
            self,
            role="decode",
            socket_dir=str(path),
            host="127.0.0.1",
            transport=TransportConfig(name=transport),  # type: ignore[arg-type]
            slots=slots,
            ops=OpsConfig(),
            num_threads=1,
            drain_s=WAIT_S,
        )
        self._thread = threading.Thread(target=self.sidecar.run)

    def start(self) -> None:
        self._thread.start()

    def end(self) -> None:
        if self._thread.is_alive():
            self.sidecar.stop()
            self._thread.join(WAIT_S)
        assert not self._thread.is_alive()
        self.sidecar.close()

    def worker_attached(self, *_: object) -> WorkerReply:
        self.told.append("attached")
        return Attached(incarnation=self.sidecar.incarnation)

    def worker_lost(self, *_: object) -> None:
        self.told.append("lost")

    def worker_request(self, message: Message, *_: object) -> WorkerReply:
        self.told.append(message)
        return self.answer(message)

    def is_pool_quiet(self) -> bool:
        return self.is_quiet

    def share_slots_by_fd(self, _now: float) -> None:
        self.sidecar.renew_slots(has_fd=True)

    def begin_drain(self, *_: object) -> None:
        self.told.append("drain")

    def is_drained(self) -> bool:
        return self.has_drained

    def poll(self, *_: object) -> None:
        self.sidecar.poll_moves()

    def tick(self, *_: object) -> None:
        self.told.append("tick")

    def perform(self, *_: object) -> None:
        while self._jobs:
            self._jobs.popleft()()

    def do(self, job: Callable[[], object]) -> None:
        """Have `job` called in the agent's loop, and wait until that was done."""
        done = threading.Event()
        self._jobs += (job, done.set)
        assert done.wait(WAIT_S)

    def heard(self) -> list[object]:
        return [each for each in self.told if each != "tick"]


def until(condition: Callable[[], bool]) -> None:
    """Wait for what must come soon."""
    deadline_s = time.monotonic() + WAIT_S
    while not condition():
        assert time.monotonic() < deadline_s
        time.sleep(0.005)
