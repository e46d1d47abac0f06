"""The network between the agents is cut in the middle of a transfer: packets vanish and nobody is told."""

from __future__ import annotations

import time
from dataclasses import dataclass

from kvxfer.ops.config import TransportName
from tests.faults import namespaces
from tests.faults.agent_child import ABOUT_TO_WRITE
from tests.faults.cut_stage import CutStage
from tests.faults.forked import FaultError
from tests.faults.matrix import DEADLINE_S, MARGIN_S, NUM_TOKENS, await_event
from tests.faults.process_stage import Shape


@dataclass(frozen=True, slots=True)
class Cut:
    """One cut, from the moment at which an agent has reached `point` until both sides have heard of the end."""

    transport: TransportName
    point: str

    @property
    def name(self) -> str:
        return f"{self.transport}: network cut at {self.point}"

    def why_not(self) -> str:
        return namespaces.why_not()

    def run(self) -> str:
        """Returns what was measured. Raises `FaultError`."""
        with CutStage(Shape(self.transport)) as stage:
            stage.move()
            before = stage.census((*stage.agents, *stage.workers))
            observer = stage.processes["da0" if self.point == "finished" else "pa"]
            observer.ask({"do": "arm", "point": self.point})
            sent = stage.send(NUM_TOKENS, DEADLINE_S)
            stage.open_unheard(sent)
            observer.take(lambda each: each.get("point") == self.point, DEADLINE_S)
            namespaces.cut()
            observer.send({"do": "go"})
            limit = sent.began_at + DEADLINE_S + MARGIN_S
            ended_at = max(await_event(stage, name, sent, limit) for name in stage.workers)
            namespaces.mend()
            mended_at = time.monotonic()
            stage.move(NUM_TOKENS + 7)
            moved_s = time.monotonic() - mended_at
            if any(stage.num_events(name, sent) != 1 for name in stage.workers):
                raise FaultError(f"expected one event a side{stage.logs()}")
            stage.check()
            stage.expect_census(before)
            stage.close()
        late_s = ended_at - sent.began_at - DEADLINE_S
        return f"last event {late_s:+.2f} s from the deadline, next transfer {moved_s:.1f} s after the cut"


CUTS = [
    Cut("loopback", "granted"),
    Cut("loopback", "segment noticed"),
    Cut("loopback", "finished"),
    Cut("nixl", "before grant"),
    Cut("nixl", ABOUT_TO_WRITE),
    Cut("nixl", "last segment written"),
]
