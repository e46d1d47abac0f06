"""What the simulated agents of both sides share: a loop that may be stopped or killed between any two actions."""

from __future__ import annotations

from abc import abstractmethod
from collections import deque
from collections.abc import Iterable
from typing import TYPE_CHECKING, Generic, TypeVar

from kvxfer.slots import SlotState, SlotTable
from tests.simulation.choices import HEAVY
from tests.simulation.clock import Process, Step
from tests.simulation.network import Link
from tests.simulation.pool import Side, WorkerPool
from tests.simulation.topology import SLOT_BYTES

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping

    from tests.simulation.world import World

A = TypeVar("A")

TICK_S = 0.5
PEER_TIMEOUT_S = 3.0


class WatchedSlots(SlotTable):
    """A slot table that lets `on_move(slot, state)` see every move."""

    def __init__(
        self,
        num_slots: int,
        moves: Mapping[SlotState, frozenset[SlotState]],
        on_move: Callable[[int, SlotState], None],
    ) -> None:
        super().__init__(num_slots, moves)
        self._on_move = on_move
        self.num_moves = 0

    def move(self, slot: int, state: SlotState) -> None:
        super().move(slot, state)
        self._on_move(slot, state)
        self.num_moves += 1


class SimAgent(Process, Generic[A]):
    """A loop thread: it drains its inbox, then performs what the core has asked for."""

    slots: WatchedSlots

    def __init__(self, world: World, name: str, incarnation: str, num_slots: int) -> None:
        super().__init__(world.clock, name)
        self.world = world
        self.incarnation = incarnation
        self.pool: WorkerPool | None = None
        self.sides: dict[str, Side] = {}  # by transfer; those that the worker waits for
        self.memory = [bytearray(SLOT_BYTES) for _ in range(num_slots)]
        self.heard_at: dict[str, float] = {}
        self.is_draining = False
        self._actions: deque[A] = deque()
        self._unfinished: Step | None = None
        self._num_moves_checked = 0
        self.after(TICK_S, self._tick_is_due)

    # ---- what the sides add ----

    @abstractmethod
    def new_actions(self) -> list[A]:
        """Actions that the core has emitted since, observed."""

    @abstractmethod
    def perform(self, action: A) -> None:
        """Perform one action."""

    @abstractmethod
    def check(self) -> None:
        """Check what has to hold after every step of the core."""

    @abstractmethod
    def tick(self) -> None:
        """The agent's own clock."""

    @abstractmethod
    def is_quiet(self) -> bool:
        """Whether nothing is open, held or under way."""

    @abstractmethod
    def is_touching(self, transfer: str) -> bool:
        """Whether an operation of ours may touch the pages of `transfer`."""

    @abstractmethod
    def is_pool_quiet(self) -> bool:
        """Whether no operation touches the worker's pool."""

    @abstractmethod
    def links_of(self) -> Iterable[Link]:
        """Connections to peers."""

    @abstractmethod
    def lose_worker(self) -> None:
        """The worker's end was seen."""

    @abstractmethod
    def begin_drain(self) -> None:
        """Take on nothing new."""

    @abstractmethod
    def is_drained(self) -> bool:
        """Whether nothing is open."""

    @abstractmethod
    def fail_all(self) -> None:
        """End every transfer without success, because this run ends."""

    @abstractmethod
    def say_goodbye(self) -> None:
        """Tell every peer that this run ends."""

    # ---- the loop ----

    def turn(self) -> None:
        """Drain the inbox, then perform; a pause or the end may come before any action."""
        while self._unfinished is not None or self._actions or self._inbox:
            if self._unfinished is not None:
                step, self._unfinished = self._unfinished, None
                step()
                self.collect()
            if not self._actions:
                while self._inbox:
                    self._inbox.popleft()()
                    self.collect()
            while self._actions:
                if self._is_interrupted() or self._unfinished is not None:
                    self.wake()
                    return
                self.perform(self._actions.popleft())
                self.collect()

    def collect(self) -> None:
        """Take what the core has emitted, and look whether all is well."""
        self._actions.extend(self.new_actions())
        if self.slots.num_moves != self._num_moves_checked:
            self._num_moves_checked = self.slots.num_moves
            self.check()

    def stop_before(self, step: Step, pause_s: float) -> None:
        """Pause in the middle of an action; `step` is the rest of it."""
        self.pause(pause_s)
        self._unfinished = step

    def drain(self) -> None:
        """The agent was told to stop."""
        self.is_draining = True
        self.begin_drain()
        self.collect()

    def end(self) -> None:
        """What is still open fails, the peers hear goodbye, the process is gone."""
        if self._unfinished is not None:
            step, self._unfinished = self._unfinished, None
            step()
        self.fail_all()
        self._perform_all()
        self.say_goodbye()
        self._perform_all()
        self.die()

    def _perform_all(self) -> None:
        self.collect()
        while self._actions:
            self.perform(self._actions.popleft())
            self.collect()

    def die(self) -> None:
        """The process is killed: its threads and its memory's owner are gone, its posted writes are not."""
        self.is_dead = True
        self._inbox.clear()
        self._actions.clear()
        self._unfinished = None

    @property
    def has_work(self) -> bool:
        return bool(self._inbox or self._actions or self._unfinished)

    def is_silent(self, peer: str, is_heard: bool) -> bool:
        """Whether a peer was not heard for too long. Heartbeats have a thread of their own: they are not simulated
        one by one, `is_heard` says whether they come through."""
        if is_heard:
            self.heard_at[peer] = self.clock.now
        return self.clock.now - self.heard_at[peer] > PEER_TIMEOUT_S

    def _is_interrupted(self) -> bool:
        world = self.world
        if not world.faults.is_due(world.faults.interrupt):
            return False
        if world.choices.chance(150):
            world.kill(self)
        else:
            self.pause(world.choices.delay_s(HEAVY))
        return self.is_dead or self.is_paused

    def _tick_is_due(self) -> None:
        if self.has_work:
            self.post(self._tick)
        else:
            self._tick()
            self.turn()
        if self.world.is_running:
            self.after(TICK_S, self._tick_is_due)

    def _tick(self) -> None:
        self.tick()
        self.collect()
        self.world.judge.deadlines(self)
