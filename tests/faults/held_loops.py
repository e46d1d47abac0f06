"""Scenarios of agents whose loop is held for three times `peer_timeout_s`: they lose no peer and no transfer."""

from __future__ import annotations

from functools import partial

from tests.faults.forked import FaultError
from tests.faults.process_stage import Sent, Shape, Stage
from tests.faults.scenarios import SOON_S, Script

TIMEOUT_S = 1.0
HELD_S = 3 * TIMEOUT_S
NUM_WAITING = 80  # more messages than the prefill agent's socket takes unread
SHAPE = Shape(num_pages=128, peer_timeout_s=TIMEOUT_S)


def _hold(stage: Stage, agent: str, point: str, transfers: list[Sent]) -> None:
    """Open the transfers, the first of which brings `agent` to `point`, where it stays for long."""
    stage.ask(agent, do="arm", point=point)
    for sent in transfers:
        stage.open_unheard(sent)
    held = stage.processes[agent]
    held.take(lambda each: each.get("point") == point, SOON_S)
    stage.listen(HELD_S)
    held.send({"do": "go"})


def _expect_good_ends(stage: Stage, transfers: list[Sent]) -> None:
    for sent in transfers:
        stage.expect_good_end(sent)
    stage.check()
    num_pairings = stage.logs().count("paired with prefill agent")
    if num_pairings != 1:
        raise FaultError(f"the agents have paired {num_pairings} times, expected once{stage.logs()}")
    stage.close()


def prefill_loop() -> str:
    """The prefill agent handles no message, and more come than its socket takes."""
    with Stage(SHAPE) as stage:
        transfers = [stage.send(1) for _ in range(NUM_WAITING)]
        _hold(stage, "pa", "before grant", transfers)
        _expect_good_ends(stage, transfers)
    return f"{NUM_WAITING} transfers came after {HELD_S} s"


def decode_loop() -> str:
    """The decode agent handles no message."""
    with Stage(SHAPE) as stage:
        stage.move()
        transfers = [stage.send(20) for _ in range(3)]
        stage.listen(TIMEOUT_S / 2)  # until a message has proven that heartbeats have begun
        _hold(stage, "da0", "finished", transfers)
        _expect_good_ends(stage, transfers)
    return f"{len(transfers)} transfers came after {HELD_S} s"


def interpreter(agent: str) -> str:
    """No thread of the agent runs Python, as when an engine is replaced or memory is registered."""
    with Stage(SHAPE) as stage:
        sent = stage.send(20, submit_all=False)
        stage.open(sent)
        stage.listen(TIMEOUT_S / 2)
        stage.ask(agent, do="seize", seconds=HELD_S)
        stage.listen(TIMEOUT_S)  # those who would have given it up have done so
        stage.submit(sent, 0, 20)
        _expect_good_ends(stage, [sent])
    return f"it came after {HELD_S} s"


HELD_LOOPS = [
    Script("held: the loop of pa", prefill_loop),
    Script("held: the loop of da0", decode_loop),
    *(Script(f"held: the interpreter of {agent}", partial(interpreter, agent)) for agent in ("pa", "da0")),
]
