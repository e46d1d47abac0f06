"""Loopback inside one process: its faults, its pace, and what it refuses."""

from __future__ import annotations

import gc
import os
import pathlib
import select
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterable, Iterator

import numpy as np
import numpy.typing as npt
import pytest

from kvxfer.errors import BoundsError, PeerLostError, RegistrationError
from kvxfer.memory import HostMemory
from kvxfer.transports import Outcome, Region, RegionDescriptor, WriteBatch
from kvxfer.transports._loopback_programs import ANSWER, END, Pacer
from kvxfer.transports.loopback import LoopbackTransport
from kvxfer.transports.loopback_options import LoopbackFaults, LoopbackOptions
from tests.patience import until

_BYTES = 1 << 20


class Lane:
    """A transport that writes from `source` to `target`, both in this process."""

    def __init__(self, options: LoopbackOptions, num_bytes: int = _BYTES) -> None:
        self.source = HostMemory.create(num_bytes, "source")
        self.target = HostMemory.create(num_bytes, "target")
        self.source.array[:] = 1
        self.transport = LoopbackTransport(options)
        self.transport.register(Region(self.source.address, num_bytes, self.source.fd))
        self.region = self.transport.register(Region(self.target.address, num_bytes, self.target.fd))
        self.transport.add_peer("self", self.transport.metadata())

    def write(self, first: int = 0, count: int = 1, length: int = _BYTES) -> int:
        offsets = _words(first + length * i for i in range(count))
        batch = WriteBatch(self.region, self.source.address + offsets, offsets, _words([length] * count))
        return self.transport.submit_write("self", batch)

    def ends(self, count: int, timeout_s: float = 5.0) -> dict[int, Outcome]:
        found: dict[int, Outcome] = {}
        give_up_s = time.monotonic() + timeout_s
        while len(found) < count and (left_s := give_up_s - time.monotonic()) > 0:
            select.select([self.transport.fileno()], [], [], left_s)
            found |= {end.write_id: end.outcome for end in self.transport.poll()}
        return found

    def close(self) -> None:
        self.transport.close()
        self.source.close()
        self.target.close()


MakeLane = Callable[..., Lane]


def _words(values: Iterable[int]) -> npt.NDArray[np.uint64]:
    return np.array(list(values), dtype=np.uint64)


@pytest.fixture
def make_lane() -> Iterator[MakeLane]:
    lanes: list[Lane] = []

    def make(options: LoopbackOptions, num_bytes: int = _BYTES) -> Lane:
        lanes.append(Lane(options, num_bytes))
        return lanes[-1]

    yield make
    for lane in lanes:
        lane.close()


def _faulty(faults: LoopbackFaults) -> LoopbackOptions:
    return LoopbackOptions(faults=faults)


def test_a_dropped_write_ends_as_unknown_by_rotate_alone(make_lane: MakeLane) -> None:
    lane = make_lane(_faulty(LoopbackFaults(drop=1.0)))
    write_id = lane.write()
    assert lane.ends(1, timeout_s=0.05) == {}
    lane.transport.rotate()
    assert lane.ends(1) == {write_id: Outcome.UNKNOWN}
    assert not lane.target.array.any()


def test_a_failed_write_moves_nothing(make_lane: MakeLane) -> None:
    lane = make_lane(_faulty(LoopbackFaults(fail=1.0)))
    write_id = lane.write()
    assert lane.ends(1) == {write_id: Outcome.FAILED}
    assert not lane.target.array.any()


def test_a_truncated_write_moves_its_first_half_and_fails(make_lane: MakeLane) -> None:
    lane = make_lane(_faulty(LoopbackFaults(truncate=1.0)))
    write_id = lane.write(count=4, length=1000)
    assert lane.ends(1) == {write_id: Outcome.FAILED}
    assert lane.target.array[:2000].all()
    assert not lane.target.array[2000:].any()


def test_a_duplicated_write_lands_twice_and_ends_once(make_lane: MakeLane) -> None:
    lane = make_lane(_faulty(LoopbackFaults(duplicate=1.0, delays_s=(1.0,))))
    write_id = lane.write()
    until(lambda: bool(lane.target.array.all()), "it lands for the first time", 0.9)
    lane.target.array[:] = 0
    assert lane.ends(1) == {write_id: Outcome.DONE}
    assert lane.target.array.all()
    assert lane.ends(1, timeout_s=0.02) == {}


def test_a_late_write_reads_what_its_source_holds_when_it_moves(make_lane: MakeLane) -> None:
    lane = make_lane(_faulty(LoopbackFaults(late=1.0, late_s=0.5)))
    write_id = lane.write()
    assert lane.ends(1) == {write_id: Outcome.UNKNOWN}
    lane.source.array[:] = 2
    until(lambda: bool(lane.target.array.all()), "it moves")
    assert (lane.target.array == 2).all()
    assert lane.ends(1, timeout_s=0.02) == {}


def test_rotate_stops_a_late_write(make_lane: MakeLane) -> None:
    lane = make_lane(_faulty(LoopbackFaults(late=1.0, late_s=0.3)))
    lane.write()
    lane.transport.rotate()
    time.sleep(0.5)
    assert not lane.target.array.any()


def test_delays_reorder_ends_and_rotate_ends_what_is_delayed(make_lane: MakeLane) -> None:
    lane = make_lane(_faulty(LoopbackFaults(seed=1, delays_s=(0.0, 0.03, 60.0))))
    write_ids = [lane.write(first=i * 100, length=100) for i in range(30)]
    ended = lane.ends(30, timeout_s=0.3)
    assert list(ended) != sorted(ended)
    assert set(ended.values()) == {Outcome.DONE}
    lane.transport.rotate()
    held = lane.ends(30 - len(ended))
    assert set(held.values()) == {Outcome.UNKNOWN}
    assert set(ended) | set(held) == set(write_ids)


def test_the_same_seed_draws_the_same_fates(make_lane: MakeLane) -> None:
    faults = LoopbackFaults(seed=7, fail=0.3, truncate=0.2)
    fates = []
    for _ in range(2):
        lane = make_lane(_faulty(faults))
        fates.append([next(iter(lane.ends(1).values())) for _ in range(20) if lane.write()])
    assert fates[0] == fates[1]
    assert set(fates[0]) == {Outcome.DONE, Outcome.FAILED}


@pytest.mark.parametrize(
    ("options", "count", "length", "expected_s"),
    [
        (LoopbackOptions(wire_bytes_per_s=10e6), 1, 1_000_000, 0.1),
        (LoopbackOptions(descriptor_s=0.001), 100, 10, 0.1),
        (LoopbackOptions(descriptor_s=0.001, wire_bytes_per_s=1e9), 100, 10_000, 0.1),
    ],
)
def test_a_paced_write_takes_the_longer_of_its_descriptors_and_its_bytes(
    make_lane: MakeLane, options: LoopbackOptions, count: int, length: int, expected_s: float
) -> None:
    lane = make_lane(options)
    started_s = time.monotonic()
    lane.write(count=count, length=length)
    assert set(lane.ends(1).values()) == {Outcome.DONE}
    assert expected_s <= time.monotonic() - started_s < expected_s + 3.0


def test_paced_writes_hold_the_wire_one_after_another(make_lane: MakeLane) -> None:
    lane = make_lane(LoopbackOptions(wire_bytes_per_s=20e6))
    started_s = time.monotonic()
    write_ids = [lane.write() for _ in range(3)]
    assert list(lane.ends(3)) == write_ids
    assert time.monotonic() - started_s >= 3 * _BYTES / 20e6
    lane.write()
    lane.transport.rotate()
    assert set(lane.ends(1).values()) == {Outcome.DONE}


def test_processes_copy_large_writes_and_a_thread_small_ones(make_lane: MakeLane) -> None:
    lane = make_lane(LoopbackOptions(num_copy_processes=3), 24 << 20)
    lane.source.array[:] = np.random.default_rng(1).integers(1, 256, lane.source.num_bytes, dtype=np.uint8)
    # Each is cut up another way, or not at all; those below 64 KiB are the thread's.
    sizes = [(11 << 20) + 7, (4 << 20) - 1, 1 << 20, 3, 2 << 20, 60_000]
    firsts = np.cumsum([0, *(size + 1 for size in sizes)])[:-1].tolist()
    write_ids = {lane.write(first=first, length=size) for first, size in zip(firsts, sizes, strict=True)}
    write_ids.add(lane.write(first=20 << 20, count=3, length=(1 << 20) + 5))
    firsts.append(20 << 20)
    sizes.append((3 << 20) + 15)
    assert lane.ends(len(sizes)) == dict.fromkeys(write_ids, Outcome.DONE)
    expected = np.zeros(lane.source.num_bytes, dtype=np.uint8)
    for first, size in zip(firsts, sizes, strict=True):
        expected[first : first + size] = lane.source.array[first : first + size]
    assert np.array_equal(lane.target.array, expected)
    assert lane.transport.counters.num_bytes == sum(sizes)
    assert lane.transport.counters.post_s > 0.0


def test_a_write_that_processes_copy_is_reported_no_earlier_than_the_wire_lets_it(make_lane: MakeLane) -> None:
    lane = make_lane(LoopbackOptions(wire_bytes_per_s=20e6, num_copy_processes=1))
    started_s = time.monotonic()
    write_ids = [lane.write() for _ in range(3)]
    assert list(lane.ends(1)) == write_ids[:1]
    assert time.monotonic() - started_s >= _BYTES / 20e6
    assert list(lane.ends(2)) == write_ids[1:]
    assert time.monotonic() - started_s >= 3 * _BYTES / 20e6
    assert select.select([lane.transport.fileno()], [], [], 0.05)[0] == []


def test_the_pacer_holds_ends_back_until_all_parts_are_copied_and_the_wire_lets_them_pass() -> None:
    def answer(job: int, due_s: float, num_parts: int) -> bytes:
        return ANSWER.pack(job, due_s, num_parts, 1000)

    def ended(pacer: Pacer) -> list[tuple[int, int]]:
        return list(END.iter_unpack(pacer.ends()))

    now_s = time.monotonic()
    pacer = Pacer()
    pacer.hear(answer(3, now_s + 0.3, 1) + answer(2, now_s, 2) + answer(1, now_s, 1))
    assert ended(pacer) == [(1, 1000)]
    pacer.hear(answer(2, now_s, 2))
    assert ended(pacer) == [(2, 2000)]
    pacer.hear(answer(5, now_s + 0.1, 1) + answer(4, now_s + 0.05, 1))
    assert ended(pacer) == []
    time.sleep(0.15)
    assert ended(pacer) == [(4, 1000), (5, 1000)]
    time.sleep(0.2)
    assert ended(pacer) == [(3, 1000)]


def test_more_writes_than_processes_take_at_a_time_all_arrive_also_across_a_rotation(make_lane: MakeLane) -> None:
    lane = make_lane(LoopbackOptions(num_copy_processes=2, wire_bytes_per_s=1e9), 4 << 20)
    write_ids = {lane.write(first=i % 8 * 300_000, count=1, length=300_000) for i in range(1100)}
    lane.transport.rotate()
    write_ids |= {lane.write(length=4 << 20)}
    assert lane.ends(1101, timeout_s=20.0) == dict.fromkeys(write_ids, Outcome.DONE)
    assert lane.target.array.all()


@pytest.mark.parametrize("num_copy_processes", [0, 2])
def test_a_peer_that_is_dropped_while_bytes_move_is_written_to_no_more(
    make_lane: MakeLane, num_copy_processes: int
) -> None:
    lane = make_lane(LoopbackOptions(num_copy_processes=num_copy_processes), 16 << 20)
    write_ids = {lane.write(length=16 << 20) for _ in range(8)}
    lane.transport.drop_peer("self")
    found = lane.target.array.copy()
    lane.source.array[:] = 3
    ended = lane.ends(8)
    assert set(ended) == write_ids
    assert set(ended.values()) <= {Outcome.DONE, Outcome.FAILED}
    assert Outcome.FAILED in ended.values()
    time.sleep(0.05)
    assert np.array_equal(lane.target.array, found)
    lane.transport.add_peer("self", lane.transport.metadata())
    lane.write(length=16 << 20)
    assert set(lane.ends(1).values()) == {Outcome.DONE}
    assert (lane.target.array == 3).all()


def _children() -> list[int]:
    return [int(pid) for pid in pathlib.Path(f"/proc/self/task/{os.getpid()}/children").read_text().split()]


@pytest.mark.parametrize("which", [0, 2], ids=["copies", "paces"])
def test_writes_fail_once_a_process_of_the_wire_has_been_killed(make_lane: MakeLane, which: int) -> None:
    before = set(_children())
    lane = make_lane(LoopbackOptions(num_copy_processes=2, wire_bytes_per_s=1e6))
    pids = sorted(set(_children()) - before)
    assert len(pids) == 3
    under_way = [lane.write() for _ in range(2)]
    os.kill(pids[which], signal.SIGKILL)
    assert lane.ends(2) == dict.fromkeys(under_way, Outcome.FAILED)
    assert set(_children()) == before
    late = [lane.write(), lane.write(length=100)]
    assert lane.ends(2) == dict.fromkeys(late, Outcome.FAILED)
    lane.transport.rotate()
    lane.transport.drop_peer("self")


def test_processes_of_the_wire_end_with_the_one_that_was_killed() -> None:
    program = (
        "import os, sys, time\n"
        "from kvxfer.transports.loopback import LoopbackTransport\n"
        "from kvxfer.transports.loopback_options import LoopbackOptions\n"
        "transport = LoopbackTransport(LoopbackOptions(num_copy_processes=2))\n"
        "children = open(f'/proc/self/task/{os.getpid()}/children').read()\n"
        "print(children, flush=True)\n"
        "time.sleep(60)\n"
    )
    with subprocess.Popen([sys.executable, "-c", program], stdout=subprocess.PIPE) as process:
        assert process.stdout is not None
        pids = [int(pid) for pid in process.stdout.readline().split()]
        assert len(pids) == 3
        ends = [os.pidfd_open(pid) for pid in pids]
        time.sleep(0.3)  # they have asked to be killed
        process.kill()
        try:
            assert all(select.select([end], [], [], 5.0)[0] for end in ends)
        finally:
            for end in ends:
                os.close(end)


def test_a_region_that_is_not_the_whole_memfd_is_refused(make_lane: MakeLane) -> None:
    transport = make_lane(LoopbackOptions()).transport
    with HostMemory.create(8192, "part") as memory, pytest.raises(RegistrationError, match="whole memfd"):
        transport.register(Region(memory.address, 4096, memory.fd))


def test_memory_without_a_descriptor_is_a_source_only(make_lane: MakeLane) -> None:
    lane = make_lane(LoopbackOptions())
    private = np.full(100, 9, dtype=np.uint8)
    own = lane.transport.register(Region(private.ctypes.data, 100))
    lane.transport.add_peer("self", lane.transport.metadata())
    batch = WriteBatch(lane.region, _words([private.ctypes.data]), _words([50]), _words([100]))
    lane.transport.submit_write("self", batch)
    assert set(lane.ends(1).values()) == {Outcome.DONE}
    assert (lane.target.array[50:150] == 9).all()
    with pytest.raises(BoundsError, match=f"got region {own.region_id}"):
        lane.transport.submit_write("self", WriteBatch(RegionDescriptor(own.region_id, 100), *[_words([0])] * 3))


def test_a_process_whose_descriptor_is_another_file_now_is_refused(make_lane: MakeLane) -> None:
    lane = make_lane(LoopbackOptions())
    metadata = lane.transport.metadata()
    with HostMemory.create(_BYTES, "other") as other:
        os.dup2(other.fd, lane.target.fd)
        with pytest.raises(PeerLostError, match=r"got inode .* the process has been replaced"):
            lane.transport.add_peer("late", metadata)


@pytest.mark.parametrize("num_copy_processes", [0, 2])
def test_closing_gives_back_every_descriptor_mapping_thread_and_process(num_copy_processes: int) -> None:
    def held() -> tuple[int, int, int, int]:
        gc.collect()
        maps = pathlib.Path("/proc/self/maps").read_text()
        num_maps = maps.count("memfd:target") + maps.count("memfd:source")
        return len(os.listdir("/proc/self/fd")), len(os.listdir("/proc/self/task")), num_maps, len(_children())

    before = held()
    for _ in range(3):
        lane = Lane(LoopbackOptions(num_copy_processes=num_copy_processes))
        lane.write()
        lane.ends(1)
        lane.close()
        lane.transport.close()
        del lane
    assert held() == before
