"""The matrix: which process is killed or stopped at which point, and what must hold afterwards."""

from __future__ import annotations

import signal
import time
from dataclasses import dataclass
from typing import Literal

from kvxfer.ops.config import TransportName
from tests.faults.agent_child import POINTS
from tests.faults.forked import FaultError, hear
from tests.faults.process_stage import Sent, Shape, Stage

DEADLINE_S = 3.0  # later than a silent peer is given up: most ends come by that
MARGIN_S = 1.0
_RESUME_S = 2.0  # after which a process that goes on must have heard
NUM_TOKENS = 40
VICTIMS = ("pw", "pa", "dw0", "da0")
_NAMES = {"pw": "prefill worker", "pa": "prefill agent", "dw0": "decode worker", "da0": "decode agent"}


@dataclass(frozen=True, slots=True)
class Case:
    """One cell of the matrix."""

    transport: TransportName
    victim: str
    fault: Literal["kill", "stop"]
    point: str

    @property
    def name(self) -> str:
        return f"{self.transport}: {self.fault} {_NAMES[self.victim]} at {self.point}"

    def why_not(self) -> str:
        return ""

    def run(self) -> str:
        """Returns what was measured. Raises `FaultError`."""
        return run_case(self)


ALL = [
    Case(transport, victim, fault, point)
    for transport in ("loopback", "nixl")
    for point in POINTS
    for victim in VICTIMS
    for fault in ("kill", "stop")
]


def run_case(case: Case) -> str:
    """Strike once, wait for the ends, bring the victim back, move again, count what is held."""
    shape = Shape(case.transport, write_delay_s=0.02 if case.transport == "loopback" else 0.0)
    with Stage(shape) as stage:
        stage.move()
        before = stage.census((*stage.agents, *stage.workers))
        sent = _strike(stage, case)
        survivors = [name for name in before if name != case.victim]
        late_s = _ends(stage, case, sent)
        if case.fault == "kill":
            stage.restart(case.victim)
        stage.listen(0.4)
        _expect_one_event_each(stage, sent)
        stage.check()
        stage.move(NUM_TOKENS + 7)
        again = survivors if case.fault == "kill" else list(before)
        # UCX keeps a descriptor for each connection that a killed peer refused, while the engine object lives.
        num_spare_fds = 2 if case.transport == "nixl" and case.fault == "kill" else 0
        stage.expect_census({name: before[name] for name in again}, num_spare_fds=num_spare_fds)
        stage.close()
    return f"last event {late_s:+.2f} s from the deadline"


def _strike(stage: Stage, case: Case) -> Sent:
    """Begin a transfer; signal the victim while the agent that has reached the point holds still."""
    observer = stage.processes["da0" if case.point == "finished" else "pa"]
    observer.ask({"do": "arm", "point": case.point})
    sent = stage.send(NUM_TOKENS, DEADLINE_S)
    stage.open_unheard(sent)
    observer.take(lambda each: each.get("point") == case.point, DEADLINE_S)
    if case.point == "landed":
        await_event(stage, "dw0", sent, time.monotonic() + DEADLINE_S)
    victim = stage.processes[case.victim]
    victim.signal(signal.SIGKILL if case.fault == "kill" else signal.SIGSTOP)
    if observer is not victim or case.fault == "stop":
        observer.send({"do": "go"})
    return sent


def _ends(stage: Stage, case: Case, sent: Sent) -> float:
    """Every live side hears of the end in time; a stopped one as soon as it goes on. Seconds after the deadline at
    which the last live side heard."""
    side = case.victim[0]
    own, other = ("pw", "dw0") if side == "p" else ("dw0", "pw")
    hears_on_own_side = case.fault == "kill" and case.victim[1] == "a"
    live = [other, own] if hears_on_own_side else [other]
    limit = sent.began_at + DEADLINE_S + MARGIN_S
    late_s = max(await_event(stage, name, sent, limit) for name in live) - (sent.began_at + DEADLINE_S)
    if case.fault == "stop":
        stage.listen(max(0.0, limit - 0.4 - time.monotonic()))
        stage.processes[case.victim].signal(signal.SIGCONT)
        await_event(stage, own, sent, time.monotonic() + _RESUME_S)
    return late_s


def await_event(stage: Stage, worker: str, sent: Sent, until: float) -> float:
    """When the worker heard of the end, which stays to be counted."""
    while True:
        found = stage.processes[worker].find(lambda each: each.get("transfer") == sent.transfer and "event" in each)
        if found is not None:
            if found["problem"]:
                raise FaultError(f"{worker}: {found}")
            return float(found["at"])
        left_s = until - time.monotonic()
        if left_s <= 0:
            raise FaultError(f"{worker} has heard of no end in time{stage.logs()}")
        hear(stage.processes.values(), left_s)


def _expect_one_event_each(stage: Stage, sent: Sent) -> None:
    """A worker that was restarted has never heard of the transfer."""
    for name in stage.workers:
        num = stage.num_events(name, sent)
        is_new = stage.processes[name].find(lambda each: "event" in each) is None
        if num != 1 and not is_new:
            raise FaultError(f"{name}: got {num} terminal events, expected one: {list(stage.processes[name].messages)}")
