"""The benchmark of gathers beside a busy worker, as far as it goes without a GPU."""

from __future__ import annotations

import threading
from pathlib import Path

import numpy as np
import pytest

from benchmarks import gpu_turns
from benchmarks.gpu_stream_agent import ROW_BYTES, SEGMENT_BYTES, make_offsets, segment_rows
from benchmarks.gpu_turns_agent import Gathers, take_pool
from kvxfer.control import shared_memory
from kvxfer.control.channel import WorkerListener
from kvxfer.control.handoff import hand_over_device
from kvxfer.control.handoff_listener import HandoffListener, ReceivedPool
from kvxfer.layout import PoolLayout
from kvxfer.memory import HostMemory
from kvxfer.streams.device import DevicePool
from kvxfer.streams.staged_stream import StagedRowStream
from tests.streams.fake_cuda import FakeCuda
from tests.streams.installed_cuda import installed
from tests.test_agents_own_streams import Gpu

POOL_BYTES = 96 << 20


def test_an_agent_gathers_from_a_pool_that_was_handed_over(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(gpu_turns, "POOL_BYTES", POOL_BYTES)
    layout: PoolLayout = gpu_turns._layout()
    memory, slots = HostMemory.create(POOL_BYTES, "pool"), HostMemory.create(2 * SEGMENT_BYTES, "slots")
    rows = memory.array[: POOL_BYTES // ROW_BYTES * ROW_BYTES].reshape(-1, ROW_BYTES)
    rows[:] = np.arange(len(rows))[:, None] % 251
    with installed(FakeCuda(), monkeypatch) as cuda:
        gpu = Gpu(cuda)
        monkeypatch.setattr(shared_memory, "share_legacy", gpu.share)
        monkeypatch.setattr(shared_memory, "map_pool", gpu.map)
        taken: list[tuple[HandoffListener, ReceivedPool]] = []
        workers = WorkerListener(tmp_path)
        agent = threading.Thread(target=lambda: taken.append(take_pool(str(tmp_path), 2, slots)))
        agent.start()
        connection, ring = hand_over_device(tmp_path, DevicePool(memory.address, POOL_BYTES, 0), layout, 20.0)
        agent.join()
        ((listener, pool),) = taken
        assert pool.ring is not None
        assert pool.device is not None
        stream = StagedRowStream(pool.ring, pool.device.pool, slots)
        facts = Gathers(pool, stream, 2).run(0.05)
        assert facts["gb_s"]
        assert facts["turn_ms"]
        for lane in range(2):
            wanted = make_offsets(segment_rows(1), lane) // ROW_BYTES % 251
            got = slots.array[lane * SEGMENT_BYTES :][: segment_rows(1) * ROW_BYTES].reshape(-1, ROW_BYTES)
            np.testing.assert_array_equal(got, np.broadcast_to(wanted[:, None], got.shape))
        stream.close()
        pool.close()
        ring.close()
        connection.close()
        listener.close()
        workers.close()
    memory.close()
    slots.close()


def test_goals_are_those_of_a_worker_with_long_kernels(capsys: pytest.CaptureFixture[str]) -> None:
    long = gpu_turns.Turns(24, "pinned_host", "vmm", "long", 51.0, 2.4, 30.0, 0.93)
    short = gpu_turns.Turns(24, "pinned_host", "vmm", "short", 99.0, 0.4, 30.0, 0.5)
    gpu_turns.print_goals([long, short])
    printed = capsys.readouterr().out
    assert "| GB/s of gathers, 192 MiB of pinned_host slots | 51.0 | at least 50 |" in printed
    assert "| worker keeps, pinned_host slots | 0.930 | at least 0.92 |" in printed
    assert "99.0" not in printed
