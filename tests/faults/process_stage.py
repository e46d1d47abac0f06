"""A prefill worker and decode workers with their agents, each a process of its own, and what is asked of them."""

from __future__ import annotations

import shutil
import signal
import tempfile
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any, Self

from kvxfer.layout import Placement, PoolLayout, Shard
from kvxfer.ops.config import DecodeConfig, PrefillConfig, SlotConfig, TransportConfig, TransportName
from tests.faults.agent_child import run_agent
from tests.faults.forked import FaultError, Forked, Message, Wire, hear
from tests.faults.worker_child import run_worker
from tests.wire_world import Geometry, GroupSpec, make_layout

START_S = 30.0
SLOW_S = 20.0
NUM_SLOTS = 4
_SPEC = GroupSpec("kv", Placement.SHARDED, 3, 24)


@dataclass(frozen=True, slots=True)
class Shape:
    """What a stage is made of. `num_pages` are those of each pool, 4 tokens each."""

    transport: TransportName = "loopback"
    num_decode: int = 1
    num_pages: int = 64
    slot_bytes: int = 160
    write_delay_s: float = 0.0  # loopback alone: how long each write is in flight
    num_slots: int = NUM_SLOTS
    is_group: bool = True  # the decode agents share the rows; otherwise each is a group of its own
    drain_s: float = 0.5
    peer_timeout_s: float = 2.0


@dataclass(slots=True)
class Sent:
    """A transfer under way. `began_at` is a reading of the monotonic clock."""

    transfer: str
    ticket: str
    num_tokens: int
    salt: int
    deadline_s: float
    began_at: float


class Stage:
    """Agents are called `pa` and `da0`, `da1`, ..., workers `pw` and `dw0`, .... Leaving the block ends them all."""

    def __init__(self, shape: Shape) -> None:
        self.shape = shape
        self.directory = Path(tempfile.mkdtemp(prefix="faults-"))
        self.processes: dict[str, Forked] = {}
        self.decode = [str(rank) for rank in range(shape.num_decode)]
        self._num_sent = 0
        self._num_started = 0
        self._port = 0

    def __enter__(self) -> Self:
        try:
            for agent in self.agents:
                self.start(agent)
            for worker in self.workers:
                self.start(worker)
            for name in (*self.agents, *self.workers):
                self.await_ready(name)
        except BaseException:
            self._end()
            raise
        return self

    def __exit__(self, *_: object) -> None:
        self._end()

    def _end(self) -> None:
        for process in self.processes.values():
            process.end()
        shutil.rmtree(self.directory)

    @property
    def agents(self) -> list[str]:
        return ["pa", *(f"da{rank}" for rank in self.decode)]

    @property
    def workers(self) -> list[str]:
        return ["pw", *(f"dw{rank}" for rank in self.decode)]

    # ---- processes ----

    def start(self, name: str) -> None:
        """Start a process, or the next one in the place of one that has ended; `await_ready` follows."""
        known = self.processes.get(name)
        if known is not None:
            known.end()
        self._num_started += 1
        seat = self.directory / ("p" if name[0] == "p" else f"d{name[2:]}")
        self.processes[name] = Forked(name, self._program(name, seat), self.directory / f"{name}.log")

    def _program(self, name: str, seat: Path) -> Callable[[Wire], None]:
        if name[1] == "a":
            return partial(run_agent, self._config(name, seat))
        role = "prefill" if name[0] == "p" else "decode"
        return partial(run_worker, role, seat, self._layout(name), self._num_started)

    def await_ready(self, name: str) -> None:
        ready = self.processes[name].take(lambda each: "ready" in each, START_S)
        if name == "pa":
            self._port = int(ready["endpoint"].rpartition(":")[2])

    def restart(self, name: str) -> None:
        """Start anew what has ended, at the same address; the worker of an agent comes to it again."""
        self.start(name)
        self.await_ready(name)
        if name[1] == "a":
            worker = self.processes[name[0] + "w" + name[2:]]
            worker.take(lambda each: "lost" in each, SLOW_S)
            worker.ask({"do": "connect"})

    def _config(self, name: str, seat: Path) -> PrefillConfig | DecodeConfig:
        shape = self.shape
        delays = {"faults": {"delays_s": [shape.write_delay_s]}} if shape.write_delay_s else {}
        common: dict[str, Any] = {
            "socket_dir": str(seat),
            "transport": TransportConfig(name=shape.transport, options=delays),  # type: ignore[arg-type]
            "slots": SlotConfig(num_slots=shape.num_slots, slot_bytes=shape.slot_bytes),
            "num_threads": 1,
            "peer_timeout_s": shape.peer_timeout_s,
            "drain_s": shape.drain_s,
        }
        if name == "pa":
            return PrefillConfig(listen_port=self._port, mode="packed", **common)
        return DecodeConfig(dst_rank=self._rank(name), dst_world=self._world, **common)

    @property
    def _world(self) -> int:
        return self.shape.num_decode if self.shape.is_group else 1

    def _rank(self, name: str) -> int:
        return int(name[2:]) if self.shape.is_group else 0

    def _layout(self, name: str) -> PoolLayout:
        shard = Shard() if name == "pw" else Shard(self._rank(name), self._world, 1)
        return make_layout((_SPEC,), Geometry(4), self.shape.num_pages, shard)

    # ---- transfers ----

    def ask(self, name: str, **message: object) -> Message:
        return self.processes[name].ask(message)

    def send(self, num_tokens: int, deadline_s: float = SLOW_S, *, submit_all: bool = True) -> Sent:
        """A ticket; with `submit_all` all its chunks are submitted."""
        self._num_sent += 1
        salt = self._num_sent % 255 + 1
        began_at = time.monotonic()
        reply = self.ask(
            "pw", do="begin", num_tokens=num_tokens, salt=salt, deadline_s=deadline_s, submit_all=submit_all
        )
        return Sent(reply["transfer"], reply["ticket"], num_tokens, salt, deadline_s, began_at)

    def submit(self, sent: Sent, first: int, end: int) -> None:
        """One chunk of a transfer begun without `submit_all`."""
        self.ask(
            "pw",
            do="submit",
            transfer=sent.transfer,
            first=first,
            end=end,
            num_tokens=sent.num_tokens,
            deadline_s=sent.deadline_s,
        )

    def open(self, sent: Sent, workers: Sequence[str] | None = None) -> None:
        """Open the transfer at all decode workers, and wait for their agents' answers."""
        for name in self.decode_workers if workers is None else workers:
            self.processes[name].ask(self._open_request(sent))

    def open_unheard(self, sent: Sent) -> None:
        """Open the transfer at all decode workers, whose agents may not live to answer."""
        for name in self.decode_workers:
            self.processes[name].send({**self._open_request(sent), "id": -1})

    def _open_request(self, sent: Sent) -> Message:
        return {
            "do": "open",
            "ticket": sent.ticket,
            "num_tokens": sent.num_tokens,
            "salt": sent.salt,
            "deadline_s": sent.deadline_s,
        }

    @property
    def decode_workers(self) -> list[str]:
        return self.workers[1:]

    def event(self, worker: str, sent: Sent, timeout_s: float = SLOW_S) -> Message:
        """The terminal event of a transfer at a worker."""
        return self.processes[worker].take(
            lambda each: each.get("transfer") == sent.transfer and "event" in each, timeout_s
        )

    def expect_end(self, worker: str, sent: Sent, within_s: float, reasons: Sequence[str]) -> None:
        """The transfer fails, or was aborted, for one of these reasons, and soon."""
        event = self.event(worker, sent, within_s)
        if event["event"] not in ("failed", "aborted") or event["reason"] not in reasons or event["problem"]:
            raise FaultError(f"{worker}: expected an end for one of {reasons}, got {event}{self.logs()}")

    def num_events(self, worker: str, sent: Sent) -> int:
        """Terminal events of a transfer that have come from a worker and were not taken."""
        messages = self.processes[worker].messages
        return sum(1 for each in messages if each.get("transfer") == sent.transfer and "event" in each)

    def move(self, num_tokens: int = 40, workers: Sequence[str] | None = None) -> None:
        """A whole transfer that must be exact, to these decode workers (all of them)."""
        sent = self.send(num_tokens)
        self.open(sent, workers)
        self.expect_good_end(sent, workers)

    def expect_good_end(self, sent: Sent, workers: Sequence[str] | None = None) -> None:
        for name in ("pw", *(self.decode_workers if workers is None else workers)):
            event = self.event(name, sent)
            wanted = "sent" if name == "pw" else "landed"
            if event["event"] != wanted or event["problem"]:
                raise FaultError(f"{name}: expected {wanted}, got {event}{self.logs()}")

    def listen(self, seconds: float) -> None:
        """Take in what the processes say for so long."""
        until = time.monotonic() + seconds
        while (left_s := until - time.monotonic()) > 0:
            hear(self.processes.values(), left_s)

    def check(self) -> None:
        """Nothing but what was sent lies in the pools."""
        for name in self.decode_workers:
            problem = self.ask(name, do="check")["problem"]
            if problem:
                raise FaultError(f"{name}: {problem}")

    # ---- what is held ----

    def census(self, names: Sequence[str]) -> dict[str, dict[str, Any]]:
        return {name: self.ask(name, do="census")["census"] for name in names}

    def expect_census(
        self,
        wanted: dict[str, dict[str, Any]],
        timeout_s: float = 15.0,
        *,
        num_spare_fds: int = 0,
        may_quarantine: bool = False,
    ) -> None:
        """Wait until these processes hold what `wanted` says again, and up to `num_spare_fds` descriptors more. With
        `may_quarantine`, slots that are quarantined, but too few to move all slots for, count as free."""
        if may_quarantine:
            wanted = {name: held | {"slots": _with_few_freed(held["slots"])} for name, held in wanted.items()}
        deadline = time.monotonic() + timeout_s
        while True:
            found = self.census(list(wanted))
            for name, held in found.items():
                held["fds"] -= min(max(0, held["fds"] - wanted[name]["fds"]), num_spare_fds)
                if may_quarantine:
                    held["slots"] = _with_few_freed(held["slots"])
            if all(found[name] == wanted[name] for name in wanted):
                return
            if time.monotonic() > deadline:
                differences = {name: (wanted[name], found[name]) for name in wanted if wanted[name] != found[name]}
                raise FaultError(f"held before and after: {differences}")
            time.sleep(0.1)

    def close(self) -> None:
        """End every process as an operator does; each must end well and leave no file."""
        for worker in self.workers:
            self.processes[worker].wire.close()
        for worker in self.workers:
            self._expect_exit(worker)
        for agent in self.agents:
            self.processes[agent].signal(signal.SIGTERM)
        for agent in self.agents:
            self._expect_exit(agent)
        left = [path for agent in self.directory.iterdir() if agent.is_dir() for path in agent.iterdir()]
        if left:
            raise FaultError(f"files are left: {left}")

    def _expect_exit(self, name: str) -> None:
        code = self.processes[name].wait(10.0)
        if code:
            raise FaultError(f"{name} ended with {code}{self.processes[name].log_tail()}")

    def logs(self) -> str:
        return "".join(f"\n{name}:{process.log_tail()}" for name, process in self.processes.items())


def _with_few_freed(slots: dict[str, int]) -> dict[str, int]:
    num_quarantined = slots.get("quarantined", 0)
    if num_quarantined >= max(1, sum(slots.values()) // 4):
        return slots
    kept = {state: num for state, num in slots.items() if state != "quarantined"}
    return kept | {"free": slots.get("free", 0) + num_quarantined}
