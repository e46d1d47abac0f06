"""What a schedule is made of: the world's size and habits, and how often which fault strikes."""

from __future__ import annotations

from dataclasses import dataclass

from kvxfer.prefill.leg import Mode
from tests.simulation.choices import CALM, SHAPES, Choices, DelayShape
from tests.simulation.topology import TOPOLOGIES, Topology

SETTLED_AT_S = 12.0
"""No fault strikes after this instant; what has begun before (pauses, slow writes) still has to end."""


@dataclass(slots=True, eq=False)
class Faults:
    """Chances per mille: a write fails or changes a byte of a segment that has a checksum, a gather or scatter fails, a
    message overtakes others, comes twice or is lost, a loop is stopped between two actions."""

    choices: Choices
    engine: int = 0
    executor: int = 0
    overtake: int = 0
    repeat: int = 0
    lose: int = 0
    corrupt: int = 0
    interrupt: int = 0
    are_on: bool = True
    late_until: float = 0.0  # a message that takes longer than a second is under way until then

    def is_due(self, per_mille: int) -> bool:
        """Whether a fault of this chance strikes now."""
        return self.are_on and self.choices.chance(per_mille)

    def delay_s(self, shape: DelayShape) -> float:
        """A delay of this shape; a calm one once faults are over."""
        return self.choices.delay_s(shape if self.are_on else CALM)


@dataclass(frozen=True, slots=True)
class Setup:
    """One world."""

    topology: Topology
    mode: Mode
    verify: bool
    num_sender_slots: int
    num_landing_slots: int
    credits_per_leg: int
    num_threads: int
    posts_in_loop: bool
    control: DelayShape
    wire: DelayShape
    rows: DelayShape
    has_timeline: bool
    num_requests: int
    num_incidents: int
    fills_in_turn: bool  # streams of prefill workers have their entries bound to slots
    faults: Faults


def draw_setup(choices: Choices) -> Setup:
    """The first decisions of a schedule."""
    topology = choices.one_of(TOPOLOGIES)
    faults = Faults(
        choices,
        engine=choices.one_of((0, 0, 30, 150)),
        executor=choices.one_of((0, 0, 0, 20)),
        overtake=choices.one_of((0, 0, 500)),
        repeat=choices.one_of((0, 0, 0, 30)),
        lose=choices.one_of((0, 0, 30, 200)),
        corrupt=choices.one_of((0, 0, 50)),
        interrupt=choices.one_of((0, 0, 5, 20)),
    )
    mode = choices.one_of((Mode.PACKED, Mode.PACKED, Mode.RAW, Mode.AUTO, Mode.SERIAL))
    return Setup(
        topology=topology,
        mode=mode,
        verify=mode is not Mode.RAW and choices.pick(3) == 2,
        num_sender_slots=choices.one_of((4, 1, 2)),
        num_landing_slots=choices.one_of((4, 1, 2)),
        credits_per_leg=choices.one_of((2, 1)),
        num_threads=choices.one_of((2, 1)),
        posts_in_loop=choices.pick(3) < 2,
        control=choices.one_of(SHAPES),
        wire=choices.one_of(SHAPES),
        rows=choices.one_of(SHAPES),
        has_timeline=choices.pick(3) == 2,
        num_requests=1 + choices.pick(4),
        num_incidents=choices.one_of((0, 1, 2, 4)),
        fills_in_turn=choices.pick(3) == 2,
        faults=faults,
    )
