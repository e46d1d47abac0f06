"""Many transfers of mixed size through the same two agents, with aborts, and with peers that are killed and return.

`python -m tests.faults.soak --transfers 10000`. Every tenth repeats the same decisions, so that the first and the last
can be compared. Every byte of the pools is checked after every transfer that lands. One prefill agent and one decode
agent live through all of it: what they hold, and what a segment costs them, must stay flat.
"""

from __future__ import annotations

import argparse
import math
import random
import signal
import sys
import time
from collections import Counter, deque
from dataclasses import dataclass, field

from kvxfer.ops.config import TransportName
from kvxfer.transports._nixl_engine import MAX_UNREACHABLE_PEERS
from tests.faults.census import cpu_s, rss_bytes
from tests.faults.forked import FaultError, Message
from tests.faults.process_stage import Sent, Shape, Stage

NUM_PARTS = 10
WINDOW = 6
MAX_TOKENS = 120
ABORT_SHARE = 0.1
RESTARTS_PER_PART = 3
MAX_GROWTH_BYTES = 4 << 20
MAX_COST_GROWTH = 1.10
_LASTING = ("pa", "da0")
_RESTARTED = ("da1", "dw1", "pw")
_SETTLE_S = 30.0
_DEADLINE_S = 10.0  # also for a ticket whose decode agent is killed before it has asked for it


@dataclass(frozen=True, slots=True)
class Part:
    """One tenth. Processor time a segment, in seconds, and resident bytes are those of `_LASTING`, in this order.

    `yardstick_s` is the processor time of a fixed piece of work, done meanwhile: other work on the machine makes that
    and a segment slower alike.
    """

    ends: Counter[str]
    elapsed_s: float
    cost_s: tuple[float, ...]
    rss_bytes: tuple[int, ...]
    yardstick_s: float

    @property
    def costs(self) -> tuple[float, ...]:
        """Of a segment, in yardsticks."""
        return tuple(cost_s / self.yardstick_s for cost_s in self.cost_s)

    def as_text(self) -> str:
        costs = ", ".join(
            f"{cost * 1e6:.0f} us ({units:.3f})" for cost, units in zip(self.cost_s, self.costs, strict=True)
        )
        sizes = ", ".join(f"{num / (1 << 20):.2f}" for num in self.rss_bytes)
        ends = ", ".join(f"{num} {name}" for name, num in sorted(self.ends.items()))
        return f"{self.elapsed_s:6.1f} s  {costs} a segment  {sizes} MiB  {ends}\n"


@dataclass(slots=True)
class _Flight:
    """A transfer under way. `may_fail`: it was aborted, or one that serves it was restarted."""

    sent: Sent
    worker: str
    may_fail: bool = False
    deaf: set[str] = field(default_factory=set)  # workers that came new and know nothing of it


class Soak:
    """Keeps up to `WINDOW` transfers under way."""

    def __init__(self, stage: Stage) -> None:
        self._stage = stage
        self._flights: deque[_Flight] = deque()
        self._ends: Counter[str] = Counter()

    def play(self, num_transfers: int, seed: int, num_restarts: int) -> Part:
        """One part."""
        rng = random.Random(seed)
        restarts = {rng.randrange(num_transfers): rng.choice(_RESTARTED) for _ in range(num_restarts)}
        self._ends.clear()
        began_s, cpu_before, segments_before = time.monotonic(), _cpu(self._stage), self._num_segments()
        yardstick_s = 0.0
        for idx in range(num_transfers):
            self._begin(rng)
            yardstick_s += _yardstick()
            if idx in restarts:
                self._restart(restarts[idx])
            while len(self._flights) >= WINDOW:
                self._settle(self._flights.popleft())
        while self._flights:
            self._settle(self._flights.popleft())
        num_segments = self._num_segments() - segments_before
        cost_s = tuple((now - then) / num_segments for now, then in zip(_cpu(self._stage), cpu_before, strict=True))
        yardstick_s /= num_transfers
        sizes = tuple(rss_bytes(self._stage.processes[name].pid) for name in _LASTING)
        return Part(Counter(self._ends), time.monotonic() - began_s, cost_s, sizes, yardstick_s)

    def _num_segments(self) -> int:
        return int(self._stage.ask("pa", do="census")["num_segments"])

    def _begin(self, rng: random.Random) -> None:
        worker = rng.choice(self._stage.decode_workers)
        flight = _Flight(self._stage.send(rng.randint(1, MAX_TOKENS), _DEADLINE_S), worker)
        self._stage.open(flight.sent, [worker])
        self._flights.append(flight)
        if rng.random() < ABORT_SHARE:
            aborted = rng.choice(self._flights)
            aborted.may_fail = True
            self._stage.ask(rng.choice(("pw", aborted.worker)), do="abort", transfer=aborted.sent.transfer)

    def _restart(self, name: str) -> None:
        for flight in self._flights:
            if name == "pw" or flight.worker[2:] == name[2:]:
                flight.may_fail = True
                if name[1] == "w":
                    flight.deaf.add(name)
        self._stage.processes[name].signal(signal.SIGKILL)
        self._stage.restart(name)
        self._ends["restarts"] += 1

    def _settle(self, flight: _Flight) -> None:
        for name, good in (("pw", "sent"), (flight.worker, "landed")):
            if name in flight.deaf:
                continue
            event: Message = self._stage.event(name, flight.sent, _SETTLE_S)
            if event["problem"] or (event["event"] != good and not flight.may_fail):
                raise FaultError(f"{name}: {event}{self._stage.logs()}")
            if name != "pw":
                self._ends[event["event"]] += 1


def _yardstick() -> float:
    """Processor time of a fixed piece of work of this process, in seconds."""
    began_s = time.thread_time()
    table = {}
    for idx in range(2000):
        table[idx % 97] = str(idx)
    return time.thread_time() - began_s


def _cpu(stage: Stage) -> list[float]:
    return [cpu_s(stage.processes[name].pid) for name in _LASTING]


def soak(
    num_transfers: int, transport: TransportName, num_restarts: int = RESTARTS_PER_PART, limit_s: float = math.inf
) -> tuple[list[Part], str]:
    """The parts, and what is wrong; empty if nothing is. No part is begun after `limit_s` seconds."""
    until = time.monotonic() + limit_s
    shape = Shape(
        transport,
        num_decode=2,
        num_pages=256,
        slot_bytes=1024,
        num_slots=8,
        is_group=False,
        peer_timeout_s=5.0,  # a machine that is busy with other things must not count as a lost peer
    )
    with Stage(shape) as stage:
        run = Soak(stage)
        num_each = max(WINDOW, num_transfers // NUM_PARTS)
        run.play(num_each, seed=0, num_restarts=0)  # caches and queues have their size after it
        _meet(stage)
        before = stage.census(_LASTING)
        parts = []
        for _ in range(NUM_PARTS):
            parts.append(run.play(num_each, seed=1, num_restarts=num_restarts))
            sys.stdout.write(parts[-1].as_text())
            sys.stdout.flush()
            if time.monotonic() > until:
                break
        stage.check()
        _meet(stage)
        # UCX keeps a descriptor for each peer that was killed just before it was added.
        num_spare_fds = MAX_UNREACHABLE_PEERS if transport == "nixl" else 0
        stage.expect_census(before, num_spare_fds=num_spare_fds, may_quarantine=True)
        stage.close()
    return parts, judge(parts)


def _meet(stage: Stage) -> None:
    """All agents are paired."""
    for name in stage.decode_workers:
        stage.move(8, [name])


def judge(parts: list[Part]) -> str:
    """Whether the lasting agents stayed flat."""
    first, last = parts[0], parts[-1]
    growth = max(now - then for now, then in zip(last.rss_bytes, first.rss_bytes, strict=True))
    cost = max(now / then for now, then in zip(last.costs, first.costs, strict=True))
    problems = []
    if growth > MAX_GROWTH_BYTES:
        problems.append(f"memory has grown by {growth} bytes, expected at most {MAX_GROWTH_BYTES}")
    if cost > MAX_COST_GROWTH:
        problems.append(f"a segment costs {cost:.2f} times what it did, expected at most {MAX_COST_GROWTH}")
    return "; ".join(problems)


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m tests.faults.soak", description=__doc__)
    parser.add_argument("--transfers", type=int, default=10_000)
    parser.add_argument("--transport", choices=("loopback", "nixl"), default="loopback")
    parser.add_argument("--seconds", type=float, default=math.inf, help="begin no tenth after so long")
    arguments = parser.parse_args()
    sys.stdout.write("a tenth   prefill agent, decode agent\n")
    parts, problem = soak(arguments.transfers, arguments.transport, limit_s=arguments.seconds)
    ends = sum((part.ends for part in parts), Counter[str]())
    sys.stdout.write(f"{sum(part.elapsed_s for part in parts):.0f} s, {dict(ends)}: {problem or 'flat'}\n")
    sys.exit(1 if problem else 0)


if __name__ == "__main__":
    main()
