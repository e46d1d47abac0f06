"""One schedule: agents, requests and incidents, from the first request until nothing is left of any."""

from __future__ import annotations

from typing import Any

from tests.simulation.agent import PEER_TIMEOUT_S, TICK_S, SimAgent
from tests.simulation.choices import Choices, DelayShape
from tests.simulation.clock import Clock, Step
from tests.simulation.decode_agent import PING_EVERY_TICKS, SimDecode
from tests.simulation.engine import Engines
from tests.simulation.judge import Judge, check_at_rest
from tests.simulation.planted import Bug, plant_in_decode, plant_in_prefill
from tests.simulation.pool import WorkerPool
from tests.simulation.prefill_agent import SimPrefill
from tests.simulation.requests import Request
from tests.simulation.schedule import SETTLED_AT_S, draw_setup
from tests.simulation.violation import check

MAX_STEPS = 60_000
LOOK_S = 0.5


class World:
    """Everything there is in one schedule."""

    def __init__(self, choices: Choices, bug: Bug | None = None) -> None:
        self.choices = choices
        self.bug = bug
        self.setup = draw_setup(choices)
        self.faults = self.setup.faults
        self.clock = Clock()
        self.judge = Judge(self)
        self.engines = Engines(self.clock, self.faults, self.setup.wire)
        self.is_running = True
        self.requests: list[Request] = []
        self._num_pending = 0  # things that the router, workers or incidents will still do
        self._num_incarnations = 0
        self._all_decodes: dict[str, SimDecode] = {}
        topology = self.setup.topology
        self.prefills = [self._new_prefill(idx) for idx in range(len(topology.prefill))]
        self.decodes = [
            self._new_decode(group_idx, rank)
            for group_idx, ranks in enumerate(topology.decode)
            for rank in range(len(ranks))
        ]
        for agent in self.agents:
            self._attach_worker(agent)

    @property
    def agents(self) -> list[SimPrefill | SimDecode]:
        """The newest run of every agent."""
        return [*self.prefills, *self.decodes]

    # ---- the course of a schedule ----

    def run(self) -> None:
        """Run to the end. Raises `InvariantBroken`."""
        for number in range(self.setup.num_requests):
            self._begin_later(Request(self, number), self.choices.pick(12) * 0.25)
        for _ in range(self.setup.num_incidents):
            self.later(self.choices.pick(32) * 0.25, self._incident)
        self._run_until_quiet()
        self.faults.are_on = False
        self._run_for(PEER_TIMEOUT_S + 1.0)  # whoever was lost has noticed by now
        for agent in self.agents:
            check(agent.pool is not None and not agent.is_dead, "simulation", f"{agent.name} was not restored")
        probes = [Request(self, 100 + idx, is_probe=True) for idx in range(2)]
        for probe in probes:
            self._begin_later(probe, 0.0)
        self._run_until_quiet()
        self._run_for(2 * PING_EVERY_TICKS * TICK_S)  # floors have passed what has ended
        for probe in probes:
            check(not probe.is_tainted, "no recovery", f"{probe.transfer}: a fault after the last one")
        for request in self.requests:
            request.check_fair()
        check_at_rest(self)

    def _begin_later(self, request: Request, delay_s: float) -> None:
        self.requests.append(request)
        self.later(delay_s, request.begin)

    def _run_for(self, duration_s: float) -> None:
        end_at = self.clock.now + duration_s
        while self.clock.now < end_at:
            self._step()

    def _run_until_quiet(self) -> None:
        look_at = 0.0
        while True:
            if self.clock.now >= look_at and self.clock.is_instant_over:
                if self._is_quiet():
                    return
                look_at = self.clock.now + LOOK_S
            self._step()

    def _step(self) -> None:
        self.clock.step()
        if self.clock.now >= SETTLED_AT_S:
            self.faults.are_on = False
        if self.clock.num_steps > MAX_STEPS:
            busy = [each.name for each in self.agents if not each.is_quiet()]
            check(False, "no progress", f"{MAX_STEPS} steps, at {self.clock.now} s {busy} are not quiet")

    def _is_quiet(self) -> bool:
        if self._num_pending or self.clock.now < self.faults.late_until:
            return False
        if any(each.is_paused or not each.is_quiet() for each in self.agents):
            return False
        return all(not agent.sides for agent in self.agents)

    def later(self, delay_s: float, step: Step) -> None:
        """Do something that the schedule has to wait for."""
        self._num_pending += 1

        def due() -> None:
            self._num_pending -= 1
            step()

        self.clock.after(delay_s, due)

    def delay_s(self, shape: DelayShape) -> float:
        """A delay of this kind; a calm one when faults are over."""
        return self.faults.delay_s(shape)

    # ---- who is who ----

    def decode_of(self, incarnation: str) -> SimDecode:
        """A decode agent, also one that is gone."""
        return self._all_decodes[incarnation]

    def prefill_at(self, endpoint: str) -> SimPrefill:
        """The prefill agent that listens there now."""
        return self.prefills[int(endpoint)]

    def _new_incarnation(self) -> str:
        self._num_incarnations += 1
        return f"{self._num_incarnations:032x}"

    def _new_prefill(self, idx: int) -> SimPrefill:
        agent = SimPrefill(self, idx, self._new_incarnation())
        plant_in_prefill(self.bug, agent)
        return agent

    def _new_decode(self, group_idx: int, rank: int) -> SimDecode:
        agent = SimDecode(self, group_idx, rank, self._new_incarnation())
        self._all_decodes[agent.incarnation] = agent
        plant_in_decode(self.bug, agent)
        return agent

    # ---- faults ----

    def taint_transfer(self, transfer: str) -> None:
        """A fault has struck this transfer."""
        for request in self.requests:
            request.is_tainted |= request.transfer == transfer

    def taint_pair(self, prefill: str, decode: str) -> None:
        """A fault has struck what these two share."""
        for request in self.requests:
            request.is_tainted |= prefill in request.agents and decode in request.agents

    def taint_agent(self, incarnation: str) -> None:
        """A fault has struck all that this agent takes part in."""
        for request in self.requests:
            request.is_tainted |= incarnation in request.agents

    def kill(self, agent: SimAgent[Any]) -> None:
        """Kill an agent. Its worker's client library says so, and it is started again after a while."""
        if not agent.is_dead:
            agent.die()
            self._bury(agent)

    def _bury(self, agent: SimAgent[Any]) -> None:
        self.taint_agent(agent.incarnation)
        for side in list(agent.sides.values()):
            assert agent.pool is not None
            agent.pool.release(side)
            side.request.agent_lost()
        agent.sides.clear()
        self.later(0.5 + self.choices.pick(8) * 0.5, lambda: self._restart(agent))

    def _drain(self, agent: SimAgent[Any]) -> None:
        """An agent is told to stop: it lets what is open end, for a while, then ends in good order."""
        end_at = self.clock.now + 0.5 + self.choices.pick(10) * 0.5

        def told() -> None:
            self.taint_agent(agent.incarnation)
            agent.drain()

        if not (agent.is_dead or agent.is_draining):
            agent.post(told)
            self.later(LOOK_S, lambda: self._end_drained(agent, end_at))

    def _end_drained(self, agent: SimAgent[Any], end_at: float) -> None:
        if agent.is_dead:
            return
        if agent.is_draining and not agent.is_paused and (agent.is_drained() or self.clock.now >= end_at):
            agent.end()
            self._bury(agent)
        else:
            self.later(LOOK_S, lambda: self._end_drained(agent, end_at))

    def _restart(self, agent: SimAgent[Any]) -> None:
        fresh: SimPrefill | SimDecode
        if isinstance(agent, SimPrefill):
            fresh = self.prefills[agent.idx] = self._new_prefill(agent.idx)
        else:
            assert isinstance(agent, SimDecode)
            fresh = self._new_decode(agent.group_idx, agent.rank)
            self.decodes[self.decodes.index(agent)] = fresh
        self._attach_worker(fresh)

    def _attach_worker(self, agent: SimPrefill | SimDecode) -> None:
        """A worker hands its pool over, once nothing touches that of the last one."""
        if agent.is_dead:
            return
        if not agent.is_pool_quiet():
            self.later(0.5, lambda: self._attach_worker(agent))
            return
        topology = self.setup.topology
        if isinstance(agent, SimPrefill):
            layout = topology.prefill[agent.idx]
            agent.core.attach_worker(layout, fills_in_turn=self.setup.fills_in_turn)
        else:
            layout = topology.decode[agent.group_idx][agent.rank]
            agent.core.attach_worker(layout)
        agent.pool = WorkerPool(layout)

    def _lose_worker(self, agent: SimPrefill | SimDecode) -> None:
        self.taint_agent(agent.incarnation)

        def seen() -> None:
            if agent.pool is None:
                return
            for side in agent.sides.values():
                side.request.agent_lost()
            agent.sides.clear()
            agent.pool = None
            agent.lose_worker()
            self.later(0.5 + self.choices.pick(4) * 0.5, lambda: self._attach_worker(agent))

        if not agent.is_dead and agent.pool is not None:
            self.later(0.0, lambda: agent.post(seen))

    def _incident(self) -> None:
        """Something happens to one agent."""
        agent = self.choices.one_of(self.agents)
        match self.choices.pick(6):
            case 0:
                agent.pause(0.5 + self.choices.pick(16) * 0.5)
            case 1:
                for link in list(agent.links_of()):
                    link.reset(self.choices.pick(3))
            case 2:
                self._lose_worker(agent)
            case 3:
                self.kill(agent)
            case 4:
                self._drain(agent)
            case _:
                for link in list(agent.links_of()):
                    link.reset(0)
