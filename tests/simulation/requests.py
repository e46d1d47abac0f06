"""Requests: what workers and the router between them do with one transfer."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

import msgspec

from kvxfer.control.messages import Open, Source, Submit, Ticket, TransferEvent
from kvxfer.errors import LayoutError, RefusedError
from kvxfer.layout import LayerRange, TokenRange
from kvxfer.transfer import EventKind
from tests.simulation.pool import Side, WorkerPool
from tests.simulation.topology import MAX_TOKENS
from tests.simulation.violation import check

if TYPE_CHECKING:
    from tests.simulation.decode_agent import SimDecode
    from tests.simulation.prefill_agent import SimPrefill
    from tests.simulation.world import World

PATIENT_S = 500.0
MAX_REOPENS = 2
_NEVER = 1 << 40


@dataclass(frozen=True, slots=True)
class ChunkSpec:
    """What one submit covers."""

    tokens: TokenRange
    layers: LayerRange | None


class Request:
    """One request of one decode group. It is tainted once a fault has struck somebody who takes part."""

    def __init__(self, world: World, number: int, *, is_probe: bool = False) -> None:
        choices = world.choices
        self.world = world
        self.number = number
        self.transfer = f"{number:032x}"
        self.group_idx = choices.pick(len(world.setup.topology.decode))
        self.num_tokens = (MAX_TOKENS - choices.pick(MAX_TOKENS + 1)) if not is_probe else MAX_TOKENS
        self.first_token = min(self.num_tokens, choices.one_of((0, 0, 0, 1, 3)))
        held = min(self.num_tokens, self.first_token + choices.one_of((0, 0, 2)))
        self.have = (TokenRange(self.first_token, held),) if held > self.first_token else ()
        self.chunks = self._chunks()
        is_patient = is_probe or choices.chance(500)
        self.deadline_s = PATIENT_S if is_patient else 2.0 + choices.pick(8)
        self.is_tainted = not is_patient
        self.agents: set[str] = set()
        self.num_ended = dict.fromkeys(EventKind, 0)
        self._ticket: Ticket | None = None
        self._reached: set[str] = set()  # prefill agents that were given a chunk
        self._num_reopens = 0
        self._is_aborting = False
        self._has_given_up = False

    def _chunks(self) -> list[ChunkSpec]:
        whole = TokenRange(0, self.num_tokens)
        match self.world.choices.pick(3):
            case 0:
                return [ChunkSpec(whole, None)]
            case 1:
                middle = self.world.choices.pick(self.num_tokens + 1)
                return [ChunkSpec(TokenRange(0, middle), None), ChunkSpec(TokenRange(middle, self.num_tokens), None)]
            case _:
                return [ChunkSpec(whole, LayerRange(0, 1)), ChunkSpec(whole, LayerRange(1, 2))]

    # ---- the prefill side ----

    def begin(self) -> None:
        """The prefill worker asks for a ticket."""
        home = self.world.prefills[0]
        if home.pool is None or home.is_dead:
            self.is_tainted = True
            return
        home.post(lambda: self._make_ticket(home))

    def _make_ticket(self, home: SimPrefill) -> None:
        world = self.world
        prefills = world.prefills
        decodes = [each for each in world.decodes if each.group_idx == self.group_idx]
        if home.pool is None or prefills[0] is not home:
            self.is_tainted = True
            return
        involved: list[SimPrefill | SimDecode] = [*decodes, *prefills]
        self.is_tainted |= any(each.is_dead or each.is_draining or each.pool is None for each in involved)
        self.agents = {each.incarnation for each in involved}
        sources = tuple(Source(endpoint=str(each.idx), incarnation=each.incarnation) for each in prefills)
        self._ticket = Ticket(transfer=self.transfer, sources=sources)
        try:
            home.core.new_ticket(self.transfer, self.deadline_s, world.clock.now)
        except RefusedError:
            check(home.is_draining, "ticket refused", f"{home.name}: {self.transfer}")
            self._ticket = None
            return
        self._new_prefill_side(home)
        shape = world.setup.control
        for prefill in prefills:
            world.later(world.delay_s(shape), lambda each=prefill: self._submit_next(each, 0))  # type: ignore[misc]
        for decode in decodes:
            if world.faults.is_due(20):
                self.give_up()  # the router drops the request
            else:
                world.later(world.delay_s(shape), lambda each=decode: self._open(each.group_idx, each.rank))  # type: ignore[misc]
        if world.faults.is_due(150):
            self._abort_one(world.choices.one_of(involved))

    def _abort_one(self, agent: SimPrefill | SimDecode) -> None:
        self.is_tainted = True
        delay_s = self.world.delay_s(self.world.setup.rows) + self.world.delay_s(self.world.setup.control)
        self.world.later(delay_s, lambda: self._abort(agent))

    def _abort(self, agent: SimPrefill | SimDecode) -> None:
        agent.post(lambda: agent.core.abort(self.transfer, self.world.clock.now))

    def _new_prefill_side(self, agent: SimPrefill) -> Side:
        assert agent.pool is not None
        side = Side(self, agent.incarnation, self.world.clock.now + self.deadline_s)
        agent.pool.take_pages(side, 0, self.num_tokens)
        agent.sides[self.transfer] = side
        return side

    def _submit_next(self, agent: SimPrefill, chunk_idx: int) -> None:
        agent.post(lambda: self._submit(agent, chunk_idx))

    def _submit(self, agent: SimPrefill, chunk_idx: int) -> None:
        world, spec = self.world, self.chunks[chunk_idx]
        is_new = agent.incarnation not in self._reached and agent.idx != 0
        side = agent.sides.get(self.transfer)
        if agent.pool is None or (side is None and not is_new) or (side is not None and side.end is not None):
            self.give_up()  # the worker was told that the transfer has ended, or is another one
            return
        self._reached.add(agent.incarnation)
        side = side or self._new_prefill_side(agent)
        is_late = world.setup.has_timeline and world.choices.chance(600)
        layers = agent.pool.held_layers(spec.layers)
        offsets = agent.pool.hold(side, spec.tokens, layers, 0, fill=not is_late)
        submit = Submit(
            transfer=self.transfer,
            groups=agent.pool.pages_of(side, spec.tokens, 0),
            layers=layers,
            last=chunk_idx == len(self.chunks) - 1,
            deadline_s=self.deadline_s,
            ready=self._compute(agent, agent.pool, side, offsets) if is_late else 0,
        )
        try:
            agent.core.submit(submit, world.clock.now)
        except RefusedError:
            # It is ending, or has ended before this worker had said a word of it.
            if is_new:
                agent.pool.release(side)
                del agent.sides[self.transfer]
            self._failed("a submit was refused")
            return
        side.deadline = world.clock.now + self.deadline_s  # a submit that is refused changes nothing
        if chunk_idx + 1 < len(self.chunks):
            world.later(world.delay_s(world.setup.control), lambda: self._submit_next(agent, chunk_idx + 1))
        if self._has_given_up:
            self.give_up()

    def _compute(self, agent: SimPrefill, pool: WorkerPool, side: Side, offsets: list[int]) -> int:
        """The worker's stream has been given the computation of these rows, and a mark behind it. Returns the value
        that the timeline has reached then; now and then a wrong one, which it never reaches."""
        world = self.world
        pool.num_marked += 1
        value = pool.num_marked
        done_at = max(pool.stream_until, world.clock.now + world.delay_s(world.setup.rows))
        pool.stream_until = done_at

        def look() -> None:
            if agent.pool is pool:
                agent.core.timeline_reached(pool.timeline, world.clock.now)

        def done() -> None:
            pool.fill(side, offsets)
            pool.timeline = value
            agent.post(look)

        world.later(done_at - world.clock.now, done)
        if world.faults.is_due(30):
            self.is_tainted = True
            return _NEVER
        return value

    # ---- the decode side ----

    def _open(self, group_idx: int, rank: int) -> None:
        agent = next(each for each in self.world.decodes if (each.group_idx, each.rank) == (group_idx, rank))
        self.is_tainted |= agent.incarnation not in self.agents
        if agent.is_dead:
            self.give_up()
        else:
            agent.post(lambda: self._open_at(agent))

    def _open_at(self, agent: SimDecode) -> None:
        if agent.pool is None or self.transfer in agent.sides:
            self.give_up()
            return
        assert self._ticket is not None
        deadline_s = self.deadline_s if not self._num_reopens else 3.0
        side = Side(self, agent.incarnation, self.world.clock.now + deadline_s)
        tokens = TokenRange(self.first_token, self.num_tokens)
        agent.pool.take_pages(side, self.first_token, self.num_tokens)
        wanted = TokenRange(self.have[0].end, self.num_tokens) if self.have else tokens
        agent.pool.hold(side, wanted, None, self.first_token, fill=False)
        groups = tuple(
            msgspec.structs.replace(entry, have=self.have)
            for entry in agent.pool.pages_of(side, tokens, self.first_token)
        )
        agent.sides[self.transfer] = side
        try:
            agent.core.open(Open(ticket=self._ticket, groups=groups, deadline_s=deadline_s), self.world.clock.now)
        except (RefusedError, LayoutError):
            # Legs of an earlier attempt are still being closed.
            del agent.sides[self.transfer]
            agent.pool.release(side)
            check(self._num_reopens > 0 or agent.is_draining, "open refused", f"{agent.name}: {self.transfer}")
            self._reopen(agent)
        if self.world.faults.is_due(80):
            self.is_tainted = True  # the client is gone before the grant has arrived
            self._abort(agent)
        if self._has_given_up:
            self.give_up()

    def _reopen(self, agent: SimDecode) -> None:
        if self._num_reopens < MAX_REOPENS:
            self._num_reopens += 1
            delay_s = self.world.delay_s(self.world.setup.control)
            self.world.later(delay_s, lambda: self._open(agent.group_idx, agent.rank))
        else:
            self.give_up()

    # ---- ends ----

    def ended(self, side: Side, event: TransferEvent) -> None:
        """A worker has got its terminal event."""
        self.num_ended[event.event] += 1
        if event.event in (EventKind.SENT, EventKind.LANDED):
            return
        self._failed(f"{event.event.value}: {event.reason}: {event.detail}")
        decode = next((each for each in self.world.decodes if each.incarnation == side.agent), None)
        if decode is not None and self.world.choices.chance(500):
            self._reopen(decode)
        else:
            self.give_up()

    def agent_lost(self) -> None:
        """A worker's client library has seen the agent's end."""
        self.is_tainted = True
        self.give_up()

    def give_up(self) -> None:
        """The router aborts what is left, soon."""
        self.is_tainted = True
        if self._is_aborting:
            return
        self._is_aborting = self._has_given_up = True
        self.world.later(1.0 + self.world.delay_s(self.world.setup.control), self._abort_everywhere)

    def _abort_everywhere(self) -> None:
        self._is_aborting = False
        for agent in self.world.agents:
            if self.transfer in agent.sides:
                self._abort(agent)

    def _failed(self, detail: str) -> None:
        check(self.is_tainted, "fair transfer failed", f"{self.transfer}: {detail}")

    def check_fair(self) -> None:
        """Invariants 8 and 9: nobody else's fault has touched it, so it has arrived."""
        if self.is_tainted or self._ticket is None:
            return  # no ticket: its agent was lost before it could make one
        num_ranks = len(self.world.setup.topology.decode[self.group_idx])
        arrived = self.num_ended[EventKind.LANDED] == num_ranks
        sent = self.num_ended[EventKind.SENT] == len(self.world.prefills)
        check(arrived and sent, "fair transfer lost", f"{self.transfer}: {self.num_ended}")
