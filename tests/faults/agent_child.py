"""An agent as a forked process that holds still at a named point of a transfer until it is told to go on."""

from __future__ import annotations

import ctypes
import logging
import os
import signal
import sys
import threading
from collections.abc import Callable
from functools import partial

from kvxfer.control.messages import DecodeToPrefill, Finished, Grant, PrefillToDecode, Segment, TransferEvent
from kvxfer.decode.agent import DecodeAgent
from kvxfer.operations import CancelFlag
from kvxfer.ops.config import DecodeConfig, PrefillConfig
from kvxfer.prefill.agent import PrefillAgent
from kvxfer.slots import SlotState
from kvxfer.transfer import EventKind
from kvxfer.transports import exit_process
from kvxfer.transports.base import ContiguousWrite, WriteBatch
from kvxfer.transports.loopback import LoopbackTransport
from kvxfer.transports.loopback_options import LoopbackFaults
from tests.faults.census import census
from tests.faults.forked import Message, Wire

_HOLD_S = 60.0
_c_with_interpreter_lock = ctypes.PyDLL(None)  # unlike `CDLL`, it does not let other threads run Python

POINTS = (
    "before grant",
    "granted",
    "first gather",
    "write in flight",
    "segment noticed",
    "last segment written",
    "finished",
    "landed",
)
"""In the order of a transfer. All are points of the prefill agent but `finished`, which is one of the decode agent:
it has heard the end and has not landed yet. At `landed` the prefill agent is about to say `sent`."""


ABOUT_TO_WRITE = "about to write"
"""One more of the prefill agent: a cut network then keeps the engine from ending the write."""


class Holds:
    """Where the agent holds still. `reach` is called at every point, from the loop or a thread that moves rows."""

    def __init__(self, wire: Wire) -> None:
        self._wire = wire
        self._armed = ""
        self._go = threading.Event()

    def arm(self, point: str) -> None:
        """Hold at the next `point`, once."""
        self._go.clear()
        self._armed = point

    def go(self) -> None:
        self._armed = ""
        self._go.set()

    def reach(self, point: str) -> None:
        if self._armed == point:
            self._armed = ""
            self._wire.send({"point": point})
            self._go.wait(_HOLD_S)


def hold_prefill(agent: PrefillAgent, holds: Holds) -> None:
    """Put the points of a prefill agent in its way."""
    core, links, sidecar = agent._core, agent._links, agent._sidecar
    receive, send, notify = core.receive, links.send, sidecar.notify
    submit_write, submit_move = sidecar.transport.submit_write, sidecar.mover.submit

    def held_receive(incarnation: str, message: DecodeToPrefill, now: float) -> None:
        if isinstance(message, Grant):
            holds.reach("before grant")
        receive(incarnation, message, now)
        if isinstance(message, Grant):
            holds.reach("granted")

    def held_send(peer: str, message: PrefillToDecode) -> None:
        if isinstance(message, Finished):
            holds.reach("last segment written")
        send(peer, message)
        if isinstance(message, Segment):
            links.flush()
            holds.reach("segment noticed")

    def held_notify(event: TransferEvent) -> None:
        if event.event is EventKind.SENT:
            holds.reach("landed")
        notify(event)

    def held_write(peer: str, write: WriteBatch | ContiguousWrite) -> int:
        holds.reach(ABOUT_TO_WRITE)
        write_id = submit_write(peer, write)
        holds.reach("write in flight")
        return write_id

    def held_move(operation: int, segment: int, cancel: CancelFlag, move: Callable[[], object]) -> None:
        submit_move(operation, segment, cancel, partial(begin_move, move))

    def begin_move(move: Callable[[], object]) -> object:
        holds.reach("first gather")
        return move()

    core.receive = held_receive  # type: ignore[method-assign]
    links.send = held_send  # type: ignore[method-assign]
    sidecar.notify = held_notify  # type: ignore[method-assign]
    sidecar.transport.submit_write = held_write  # type: ignore[method-assign]
    sidecar.mover.submit = held_move  # type: ignore[method-assign]


def hold_decode(agent: DecodeAgent, holds: Holds) -> None:
    """Put the points of a decode agent in its way."""
    core = agent._core
    receive = core.receive

    def held_receive(incarnation: str, message: PrefillToDecode, now: float) -> None:
        if isinstance(message, Finished):
            holds.reach("finished")
        receive(incarnation, message, now)

    core.receive = held_receive  # type: ignore[method-assign]


def run_agent(config: PrefillConfig | DecodeConfig, wire: Wire) -> None:
    """Serve until SIGTERM. Says once that it is ready; answers `census`, takes `arm`, `go`, `delay` and `seize`."""
    logging.basicConfig(level=logging.INFO, format="%(asctime)s %(name)s %(message)s", stream=sys.stderr)
    holds = Holds(wire)
    agent: PrefillAgent | DecodeAgent
    if isinstance(config, PrefillConfig):
        agent = PrefillAgent(config)
        hold_prefill(agent, holds)
        slots = agent._core._life.sender.slots
    else:
        agent = DecodeAgent(config)
        hold_decode(agent, holds)
        slots = agent._core._life.lender.slots

    def answer(message: Message) -> None:
        match message["do"]:
            case "arm":
                holds.arm(message["point"])
                wire.send({"re": message["id"]})
            case "go":
                holds.go()
            case "seize":
                _c_with_interpreter_lock.usleep(int(message["seconds"] * 1e6))
                wire.send({"re": message["id"]})
            case "delay":
                transport = agent._sidecar.transport
                assert isinstance(transport, LoopbackTransport)
                transport._faults = LoopbackFaults(delays_s=(message["delay_s"],))
                wire.send({"re": message["id"]})
            case "census":
                open_transfers = getattr(agent._core, "transfers", None) or getattr(agent._core, "receives", {})
                counts = {state.value: slots.count(state) for state in SlotState if slots.count(state)}
                refused = dict(agent._core.refused)
                facts = {**census(), "slots": counts, "num_open": len(open_transfers)}
                num_segments = agent._sidecar.transport.counters.num_writes
                wire.send({"re": message["id"], "census": facts, "refused": refused, "num_segments": num_segments})

    def serve() -> None:
        while (message := wire.receive()) is not None:
            answer(message)

    threading.Thread(target=serve, daemon=True).start()
    signal.signal(signal.SIGTERM, lambda *_: agent.stop())
    wire.send({"ready": True, "endpoint": agent.endpoint, "incarnation": agent.incarnation, "pid": os.getpid()})
    agent.run()
    agent.close()
    exit_process(0)
