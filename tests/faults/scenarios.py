"""Scenarios beside the matrix: reused pages, aborts, waves of them, agents that return, agents that drain."""

from __future__ import annotations

import signal
import time
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial

from tests.faults.forked import FaultError, Message
from tests.faults.process_stage import Sent, Shape, Stage

SOON_S = 2.0
_ABORTED = ("aborted_by_worker", "aborted_by_peer")


@dataclass(frozen=True, slots=True)
class Script:
    """A scenario by name."""

    name: str
    play: Callable[[], str]

    def why_not(self) -> str:
        return ""

    def run(self) -> str:
        return self.play()


def _hold_writes(stage: Stage, sent: Sent, held_s: float) -> None:
    """Open `sent`; from its first write on, each is in flight for `held_s`. Later transfers are not delayed."""
    agent = stage.processes["pa"]
    agent.ask({"do": "delay", "delay_s": held_s})
    agent.ask({"do": "arm", "point": "write in flight"})
    stage.open(sent)
    agent.take(lambda each: each.get("point") == "write in flight", 2 * SOON_S)
    agent.send({"do": "go"})
    stage.listen(0.1)  # whatever else it writes is on its way, too
    agent.ask({"do": "delay", "delay_s": 0.0})


def reused_pages() -> str:
    """44 pages; A gets 31 and its writes are in flight when it is aborted; B needs 32 of them at once."""
    with Stage(Shape(num_pages=44, slot_bytes=1024, num_slots=16)) as stage:
        stage.move()
        before = stage.census((*stage.agents, *stage.workers))
        first = stage.send(31 * 4)
        _hold_writes(stage, first, 5.0)
        aborted_at = time.monotonic()
        stage.ask("dw0", do="abort", transfer=first.transfer)
        ended_s = float(stage.event("dw0", first, SOON_S)["at"]) - aborted_at
        stage.expect_end("pw", first, SOON_S, _ABORTED)
        stage.move(32 * 4)
        moved_s = time.monotonic() - aborted_at
        if moved_s > 4.5:
            raise FaultError(f"B took {moved_s:.1f} s: the writes of A had landed by then")
        stage.listen(5.1 - moved_s)
        stage.check()
        stage.expect_census(before)
        stage.close()
    return f"A ended after {ended_s * 1e3:.0f} ms, B after {moved_s:.2f} s, A's bytes after 5 s"


def two_ranks_abort() -> str:
    """Both decode ranks abort while writes are in flight; both are answered, though the sender has forgotten."""
    with Stage(Shape(num_decode=2)) as stage:
        stage.move()
        before = stage.census((*stage.agents, *stage.workers))
        sent = stage.send(40)
        _hold_writes(stage, sent, 1.5)
        stage.ask("dw0", do="abort", transfer=sent.transfer)
        stage.expect_end("dw0", sent, SOON_S, _ABORTED)
        stage.expect_end("pw", sent, SOON_S, _ABORTED)
        stage.ask("dw1", do="abort", transfer=sent.transfer)
        stage.expect_end("dw1", sent, SOON_S, _ABORTED)
        stage.expect_census(before)
        stage.move(48)
        stage.expect_census(before)
        stage.close()
    return "both answered"


def waves() -> str:
    """300 transfers cancelled in waves, and no new work after them."""
    num_waves, num_each = 10, 30
    with Stage(Shape(num_pages=128)) as stage:
        stage.move()
        before = stage.census((*stage.agents, *stage.workers))
        began_at = time.monotonic()
        for wave in range(num_waves):
            wave_sent = [stage.send(4 + idx % 9, submit_all=idx % 3 > 0) for idx in range(num_each)]
            for sent in wave_sent:
                stage.open(sent)
            for idx, sent in enumerate(wave_sent):
                stage.ask("pw" if (idx + wave) % 2 else "dw0", do="abort", transfer=sent.transfer)
            for sent in wave_sent:
                for name in stage.workers:
                    stage.event(name, sent, SOON_S)
        elapsed_s = time.monotonic() - began_at
        stage.expect_census(before)
        stage.check()
        stage.close()
    return f"{num_waves * num_each} transfers in {elapsed_s:.1f} s"


def three_of_four_return() -> str:
    """Three of four decode agents are restarted: their transfers fail, once; the fourth one's goes on."""
    with Stage(Shape(num_decode=4, is_group=False)) as stage:
        for name in stage.decode_workers:
            stage.move(20, [name])
        before = stage.census(("pa", "da3", "pw", "dw3"))
        under_way = {}
        for name in stage.decode_workers:
            under_way[name] = stage.send(16, submit_all=False)
            stage.open(under_way[name], [name])
            stage.submit(under_way[name], 0, 8)
        for rank in range(3):
            stage.processes[f"da{rank}"].signal(signal.SIGKILL)
        for rank in range(3):
            stage.restart(f"da{rank}")
            stage.expect_end(f"dw{rank}", under_way[f"dw{rank}"], SOON_S, ("agent_lost",))
            stage.expect_end("pw", under_way[f"dw{rank}"], 2 * SOON_S, ("peer_lost",))
        stage.submit(under_way["dw3"], 8, 16)
        stage.expect_good_end(under_way["dw3"], ["dw3"])
        for name in stage.decode_workers:
            stage.move(24, [name])
        stage.expect_census(before)
        stage.close()
    return "three failed once, one undisturbed"


def old_ticket() -> str:
    """A ticket of a run that has ended is refused by the next run at the same address; the next ticket serves."""
    with Stage(Shape()) as stage:
        stage.move()
        sent = stage.send(40)
        stage.processes["pa"].signal(signal.SIGKILL)
        stage.restart("pa")
        stage.expect_end("pw", sent, SOON_S, ("agent_lost",))
        began_at = time.monotonic()
        stage.open(sent)
        event = stage.event("dw0", sent, SOON_S)
        refused_s = float(event["at"]) - began_at
        if event["event"] != "failed":
            raise FaultError(f"got {event}, expected the ticket to be refused")
        stage.move(48)
        stage.close()
    return f"refused as {event['reason']} after {refused_s * 1e3:.0f} ms"


def _send_half(stage: Stage) -> Sent:
    """A transfer of 40 tokens whose first half is submitted and under way."""
    agent = stage.processes["pa"]
    agent.ask({"do": "arm", "point": "segment noticed"})
    sent = stage.send(40, submit_all=False)
    stage.open(sent)
    stage.submit(sent, 0, 20)
    agent.take(lambda each: each.get("point") == "segment noticed", 2 * SOON_S)
    agent.send({"do": "go"})
    return sent


def _refusal(stage: Stage, name: str, message: Message) -> str:
    try:
        stage.processes[name].ask(message)
    except FaultError as error:
        return str(error)
    raise FaultError(f"{name}: {message['do']} was taken by an agent that drains")


def drained(agent: str) -> str:
    """SIGTERM: what is open ends well, nothing new is taken, status 0."""
    worker = agent[0] + "w" + agent[2:]
    with Stage(Shape(drain_s=20.0)) as stage:
        sent = _send_half(stage)
        waiting = stage.send(4)  # nobody has asked for it yet
        began_at = time.monotonic()
        stage.processes[agent].signal(signal.SIGTERM)
        stage.listen(0.3)
        request: Message = {"do": "begin", "num_tokens": 4, "salt": 1, "deadline_s": 9.0, "submit_all": False}
        if agent != "pa":
            request = {"do": "open", "ticket": waiting.ticket, "num_tokens": 4, "salt": 1, "deadline_s": 9.0}
        if "shutdown" not in (refusal := _refusal(stage, worker, request)):
            raise FaultError(f"expected a refusal that says shutdown, got {refusal}")
        if agent == "pa":
            stage.expect_end("pw", waiting, SOON_S, ("shutdown",))
            stage.open(waiting)
            stage.expect_end("dw0", waiting, SOON_S, ("shutdown",))
        stage.submit(sent, 20, 40)
        stage.expect_good_end(sent)
        code = stage.processes[agent].wait(2 * SOON_S)
        if code:
            raise FaultError(f"{agent} ended with {code}, expected 0")
        return f"drained and ended after {time.monotonic() - began_at:.2f} s"


def drain_deadline(agent: str) -> str:
    """What does not end by itself is ended after `drain_s`, and both sides hear of it."""
    with Stage(Shape(drain_s=0.8)) as stage:
        sent = _send_half(stage)
        began_at = time.monotonic()
        stage.processes[agent].signal(signal.SIGTERM)
        for name in stage.workers:
            stage.expect_end(name, sent, 0.8 + SOON_S, ("shutdown", "aborted_by_peer", "peer_lost"))
        code, elapsed_s = stage.processes[agent].wait(SOON_S), time.monotonic() - began_at
        if code or elapsed_s < 0.8:
            raise FaultError(f"{agent} ended with {code} after {elapsed_s:.2f} s, expected 0 after 0.8 s")
        return f"ended after {elapsed_s:.2f} s"


def second_signal(agent: str) -> str:
    """A second SIGTERM ends at once what the first one would wait for."""
    with Stage(Shape(drain_s=30.0)) as stage:
        sent = _send_half(stage)
        stage.processes[agent].signal(signal.SIGTERM)
        stage.listen(0.3)
        if any(stage.num_events(name, sent) for name in stage.workers):
            raise FaultError("the first signal has ended the transfer")
        began_at = time.monotonic()
        stage.processes[agent].signal(signal.SIGTERM)
        for name in stage.workers:
            stage.expect_end(name, sent, SOON_S, ("shutdown", "aborted_by_peer", "peer_lost"))
        code, elapsed_s = stage.processes[agent].wait(SOON_S), time.monotonic() - began_at
        if code:
            raise FaultError(f"{agent} ended with {code}, expected 0")
        return f"ended {elapsed_s:.2f} s after the second"


SCENARIOS = [
    Script("44 pages, used again while writes are in flight", reused_pages),
    Script("two ranks abort one transfer", two_ranks_abort),
    Script("300 transfers cancelled in waves", waves),
    Script("three of four decode agents restarted", three_of_four_return),
    Script("a ticket of an earlier run", old_ticket),
    *(Script(f"drain: {agent} lets open transfers end", partial(drained, agent)) for agent in ("pa", "da0")),
    *(Script(f"drain: {agent} ends them in time", partial(drain_deadline, agent)) for agent in ("pa", "da0")),
    *(Script(f"drain: {agent} is told twice", partial(second_signal, agent)) for agent in ("pa", "da0")),
]
