"""Which way the rows of one leg take: pulled by the peer, packed, or run by run.

A wire that pays `c` seconds a descriptor and moves `B` bytes a second takes `max(n * c, bytes / B)` for `n`
descriptors: posting and moving overlap. Packing turns `n` runs into a few segments, for one more pass over the bytes
of which only the first segment's is not hidden behind the wire, and for a fixed delay.
"""

from __future__ import annotations

from dataclasses import dataclass

from kvxfer.control.messages import PathFigures
from kvxfer.prefill.leg import Mode

PACKING_DELAY_S = 100e-6
GATHER_BYTES_PER_S = 4e9
"""Host rows of about a kilobyte, one thread; measured by `python -m benchmarks.rows_host`."""


@dataclass(frozen=True, slots=True)
class Choice:
    """A mode and, for the log, why."""

    mode: Mode
    why: str


def choose_mode(
    *, can_pull: bool, why_not_raw: str, figures: PathFigures, num_runs: int, num_bytes: int, segment_bytes: int
) -> Choice:
    """The fastest way for a chunk of `num_bytes` in `num_runs` source runs, by the path's measured figures.
    `why_not_raw` says why mode raw cannot be taken; empty where it can."""
    if can_pull:
        return Choice(Mode.P2P, "the peer has this pool mapped")
    if why_not_raw:
        return Choice(Mode.PACKED, why_not_raw)
    if figures.bytes_per_s <= 0 or num_bytes == 0:
        return Choice(Mode.PACKED, "the path was not measured")
    wire_s = num_bytes / figures.bytes_per_s
    num_segments = -(-num_bytes // segment_bytes)
    raw_s = max(num_runs * figures.descriptor_s, wire_s)
    first_segment_s = min(num_bytes, segment_bytes) / GATHER_BYTES_PER_S
    packed_s = PACKING_DELAY_S + first_segment_s + max(num_segments * figures.descriptor_s, wire_s)
    mode = Mode.RAW if raw_s < packed_s else Mode.PACKED
    return Choice(mode, f"expected {raw_s * 1e3:.3f} ms raw, {packed_s * 1e3:.3f} ms packed")
