"""Orders that a process without a GPU gives, and what must come of them; both make the same from a seed."""

from __future__ import annotations

import random
import time
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from kvxfer.streams.ring import LINEAR, Ring, Span

Bytes = npt.NDArray[np.uint8]

POOL, SLOTS, PEER = 0, 1, 2
MEMORY_BYTES = 1 << 20
SEGMENT_BYTES = 64 << 10
NUM_LANES, NUM_OFFSETS = 4, 2000
WAIT_S = 20.0


@dataclass(frozen=True, slots=True)
class Segment:
    spans: list[Span]
    offsets: list[int]


def contents(seed: int) -> list[Bytes]:
    """`[MEMORY_BYTES]` uint8 each: what pool, slots and the peer's pool hold at first."""
    return [np.random.default_rng([seed, memory]).integers(0, 256, MEMORY_BYTES, dtype=np.uint8) for memory in range(3)]


def make_segments(seed: int, num_segments: int) -> list[Segment]:
    """Gathers, scatters and pulls in turn, of rows of any size and alignment, each from what earlier ones left."""
    rng = random.Random(seed)
    directions = [(POOL, SLOTS), (SLOTS, POOL), (PEER, POOL)]
    return [_make_segment(rng, *directions[idx % 3]) for idx in range(num_segments)]


def _make_segment(rng: random.Random, src: int, dst: int) -> Segment:
    spans: list[Span] = []
    offsets: list[int] = []
    firsts = [rng.randrange(0, (MEMORY_BYTES - 2 * SEGMENT_BYTES) // 16) * 16 for _ in range(2)]
    for _ in range(rng.choice((1, 3))):
        word_bytes = rng.choice((16, 16, 8, 4, 2, 1))
        row_bytes = word_bytes * rng.randint(1, 2000 // word_bytes)
        num_rows = rng.randint(1, max(1, min(300, SEGMENT_BYTES // 3 // row_bytes)))
        sides = []
        for side, memory in enumerate((src, dst)):
            stride = row_bytes if memory == SLOTS else row_bytes + word_bytes * rng.randint(0, 1)
            if memory == SLOTS:
                sides.append((firsts[side], LINEAR))
            else:
                sides.append((firsts[side], len(offsets)))
                offsets += rng.sample(range(0, num_rows * stride, stride), num_rows)
            firsts[side] += -(-num_rows * stride // 16) * 16
        (src_first, src_table), (dst_first, dst_table) = sides
        spans.append(Span(row_bytes, num_rows, word_bytes, src, src_first, src_table, dst, dst_first, dst_table))
    return Segment(spans, offsets)


def apply(segment: Segment, memories: list[Bytes]) -> None:
    """Move a segment's rows, row by row."""
    for span in segment.spans:
        for row in range(span.num_rows):
            src, dst = (
                first + (row * span.row_bytes if table == LINEAR else segment.offsets[table + row])
                for first, table in ((span.src_first_byte, span.src_table), (span.dst_first_byte, span.dst_table))
            )
            memories[span.dst_memory][dst : dst + span.row_bytes] = memories[span.src_memory][
                src : src + span.row_bytes
            ]


def fill(ring: Ring, lane: int, segment: Segment) -> None:
    ring.fill_lane(lane, segment.spans, np.array(segment.offsets, dtype=np.int64))


def wait_done(ring: Ring, number: int) -> None:
    """Look at the done word now and then, as an agent does."""
    deadline_s = time.monotonic() + WAIT_S
    while not ring.is_done(number):
        assert time.monotonic() < deadline_s, f"entry {number} is not done after {WAIT_S} s"
        time.sleep(50e-6)


def assert_same(got: Bytes, expected: Bytes, what: str) -> None:
    wrong = np.flatnonzero(got != expected)
    assert wrong.size == 0, (
        f"{what}: {wrong.size} bytes differ, the first at {wrong[0]}: {got[wrong[0]]}, not {expected[wrong[0]]}"
    )
