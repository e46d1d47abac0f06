"""A ring with both of its ends in one process: the owner of a host stream, and what an agent keeps beside a mover."""

from __future__ import annotations

import select
import time
from types import TracebackType
from typing import Self

import numpy as np

from kvxfer.layout import Placement, Shard, TokenRange
from kvxfer.memory import HostMemory
from kvxfer.operations import CancelFlag, Move, Moved, RowSum, SegmentSource
from kvxfer.row_mover import RowMover
from kvxfer.streams.ring import Ring
from kvxfer.streams.slot_binding import offer_slots
from kvxfer.streams.stream_mover import StreamMover
from kvxfer.wire import PageTable, match_layouts, plan_chunk, resolve
from tests.streams.bound_host_stream import BoundHostStream
from tests.wire_world import Geometry, GroupSpec, make_layout

SLOT_BYTES = 256
NUM_SLOTS = 4
ROW_BYTES = 16
POOL_BYTES = 1 << 16
WAIT_S = 10.0


def chunk_of(num_tokens: int, *, first_page: int = 0) -> SegmentSource:
    """Every other page of a pool of one layer, `ROW_BYTES` a row, cut for slots of `SLOT_BYTES`."""
    layout = make_layout((GroupSpec("kv", Placement.SHARDED, 1, ROW_BYTES),), Geometry(4), 500, Shard())
    ranges = (TokenRange(0, num_tokens),)
    route = match_layouts(layout, layout, 0, 1)
    plan = plan_chunk(route, ranges, ranges, ((),), None, SLOT_BYTES)
    pages = np.arange(first_page, first_page + 2 * -(-num_tokens // 4), 2, dtype=np.int64)
    return SegmentSource(plan, resolve(plan, route, "src", layout, (PageTable(ranges[0], pages),)))


class Owner:
    """The stream's owner and the agent. Entries are enqueued by `feed()`, or at once with `is_eager`; they are bound
    to slots with `is_bound`."""

    def __init__(
        self, num_lanes: int = 2, *, is_eager: bool = True, max_offsets: int = 1000, is_bound: bool = False
    ) -> None:
        self.agent_ring = Ring.create(num_lanes, max_offsets, SLOT_BYTES)
        self.pool = HostMemory.create(POOL_BYTES, "pool")
        self.slots = HostMemory.create(NUM_SLOTS * SLOT_BYTES, "slots")
        self.pool.array[:] = np.random.default_rng(0).integers(0, 256, POOL_BYTES)
        if is_bound:
            offer_slots(self.agent_ring, NUM_SLOTS, SLOT_BYTES)
        self.stream = BoundHostStream(self.agent_ring, self.pool, self.slots)
        self.threads = RowMover(2, "test-mover")
        self.is_eager = is_eager
        self.num_wanted = 0
        self.num_enqueued = 0
        self.mover = StreamMover(
            self.agent_ring,
            self.threads,
            pool_bytes=POOL_BYTES,
            slot_bytes=SLOT_BYTES,
            want_entries=self._want,
        )

    def _want(self, total: int) -> None:
        assert total > self.num_wanted, "asked for what is there already"
        self.num_wanted = total
        if self.is_eager:
            self.feed()

    def feed(self) -> None:
        """Enqueue all that was asked for."""
        while self.num_enqueued < self.num_wanted:
            self.stream.enqueue(self.num_enqueued)
            self.num_enqueued += 1
        self.agent_ring.set_num_enqueued(self.num_enqueued)

    def move(
        self,
        operation: int,
        source: SegmentSource,
        segment: int = 0,
        cancel: CancelFlag | None = None,
        row_sum: RowSum | None = None,
    ) -> Move:
        return Move(operation, source, segment, cancel or CancelFlag(), row_sum)

    def poll(self) -> list[Moved]:
        """What a turn of the agent's loop finds."""
        moved = self.mover.look() + self.threads.poll()
        self.mover.hold(False)  # goes on like the end of a turn, and expects what was expected
        return moved

    def wait(self, num_moves: int) -> list[Moved]:
        """The next ends."""
        moved: list[Moved] = []
        deadline_s = time.monotonic() + WAIT_S
        while len(moved) < num_moves:
            assert time.monotonic() < deadline_s, f"only {moved} of {num_moves} moves have ended"
            moved += self.poll()
            if len(moved) < num_moves:
                select.select([self.threads.fileno()], [], [], 0.01)
        return moved

    def wait_until_drained(self) -> None:
        """Every entry that is enqueued has ended."""
        deadline_s = time.monotonic() + WAIT_S
        while self.num_enqueued and not self.agent_ring.is_done(self.num_enqueued - 1):
            assert time.monotonic() < deadline_s, "the stream is left waiting"
            assert not self.poll(), "a move has ended, and nobody waits for it"
            time.sleep(0.001)

    def slot(self, slot: int) -> np.ndarray:
        return self.slots.array[slot * SLOT_BYTES : (slot + 1) * SLOT_BYTES]

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.mover.close()
        self.threads.close()
        self.stream.close()
        for memory in (self.pool, self.slots):
            memory.close()
        self.agent_ring.close()
