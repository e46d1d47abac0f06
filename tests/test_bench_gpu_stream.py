"""The agent's process of the benchmark of row streams, with a thread in place of a GPU's stream."""

import os
import time

import numpy as np
import pytest

from benchmarks.gpu_stream_agent import ROW_BYTES, SEGMENT_BYTES, Agent, Task, Told, make_offsets, segment_rows
from kvxfer.memory import HostMemory
from kvxfer.row_sums import row_sum
from kvxfer.streams.host_stream import HostRowStream
from kvxfer.streams.ring import Ring

POOL_BYTES = 72 << 20  # pages for every eighth row of a segment


def until_told(agent: Agent) -> Told:
    deadline_s = time.monotonic() + 30
    while (told := agent.told(0.1)) is None:
        assert time.monotonic() < deadline_s
    return told


def test_one_agent_gives_the_orders_of_task_after_task() -> None:
    num_rows = segment_rows(1)
    with (
        HostMemory.create(POOL_BYTES, "pool") as pool,
        HostMemory.create(SEGMENT_BYTES, "slots") as slots,
        Agent() as agent,
    ):
        starts = make_offsets(num_rows, 0)
        rows = pool.array[: POOL_BYTES // ROW_BYTES * ROW_BYTES].reshape(-1, ROW_BYTES)
        rows[starts // ROW_BYTES, :8] = np.arange(num_rows)[:, None].astype(np.uint8)
        slot_rows = slots.array[: num_rows * ROW_BYTES].reshape(-1, ROW_BYTES)
        for way in "gather", "scatter", "skip":
            slot_rows[:, 0] += 1
            ring = Ring.create(1, num_rows)
            stream = HostRowStream(ring, pool, slots)
            for number in range(2):
                stream.enqueue(number)
            ring.set_num_enqueued(2)
            agent.start(ring, Task(way, 2))
            told = until_told(agent)
            stream.close()
            ring.close()
            assert (told == Told(0.0, 0.0)) == (way == "skip")
            # Of all threads of its process: the one that looks at words works beside the one that gives orders.
            assert told.cpu_s <= told.taken_s * (os.cpu_count() or 1)
            assert np.array_equal(slot_rows[:, :8], rows[starts // ROW_BYTES, :8]) == (way != "skip"), way


@pytest.mark.parametrize("way", ["gather", "scatter"])
@pytest.mark.parametrize("is_right", [True, False])
def test_the_agent_sees_to_sums(way: str, is_right: bool) -> None:
    num_rows = segment_rows(1)
    with (
        HostMemory.create(POOL_BYTES, "pool") as pool,
        HostMemory.create(SEGMENT_BYTES, "slots") as slots,
        Agent() as agent,
    ):
        slots.array[::999] = 7
        rows = pool.array[: POOL_BYTES // ROW_BYTES * ROW_BYTES].reshape(-1, ROW_BYTES)
        starts = make_offsets(num_rows, 0)
        rows[starts // ROW_BYTES, :8] = np.arange(num_rows)[:, None].astype(np.uint8)
        packed = rows[starts // ROW_BYTES].ravel() if way == "gather" else slots.array[: num_rows * ROW_BYTES]
        expected = row_sum(packed) if is_right else 5
        ring = Ring.create(1, num_rows, SEGMENT_BYTES)
        stream = HostRowStream(ring, pool, slots)
        stream.enqueue(0)
        ring.set_num_enqueued(1)
        agent.start(ring, Task(way, 1, sums=(expected,)))
        if is_right:
            assert until_told(agent).taken_s > 0
            assert np.array_equal(slots.array[: num_rows * ROW_BYTES], rows[starts // ROW_BYTES].ravel())
        else:
            with pytest.raises(SystemExit, match="has ended"):
                until_told(agent)
        stream.close()
        ring.close()


def test_an_agent_that_is_gone_is_noticed() -> None:
    ring = Ring.create(1, 1)
    with Agent() as agent, ring.memory:
        ring.num_lanes = 2  # it has room for one
        agent.start(ring, Task("skip", 1))
        with pytest.raises(SystemExit, match="has ended"):
            until_told(agent)
