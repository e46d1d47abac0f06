"""What an order in a lane moves, for whoever copies lanes elsewhere instead of reading them where they lie."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from kvxfer.streams.ring import LANES_OFFSET_BYTES, MAX_SPANS, OFFSETS_WORD, SPAN_WORDS, Ring

_SPANS_WORD = OFFSETS_WORD - MAX_SPANS * SPAN_WORDS


@dataclass(frozen=True, slots=True, eq=False)
class LaneView:
    """A lane that begins at byte `offset_bytes` of its ring's memory. Its order uses the first `used_bytes`; `spans`,
    `[num_spans, SPAN_WORDS]` int64, are a view of it."""

    offset_bytes: int
    used_bytes: int
    spans: npt.NDArray[np.int64]

    @classmethod
    def of(cls, ring: Ring, lane: int) -> LaneView:
        """Lane `lane` as it is now."""
        offset_bytes = LANES_OFFSET_BYTES + lane * ring.lane_bytes
        words = ring.memory.array[offset_bytes : offset_bytes + ring.lane_bytes].view(np.int64)
        num_spans, num_used = int(words[0]), int(words[1])
        spans = words[_SPANS_WORD : _SPANS_WORD + num_spans * SPAN_WORDS].reshape(num_spans, SPAN_WORDS)
        return cls(offset_bytes, num_used * 8, spans)

    def extent(self, column: int) -> tuple[int, int]:
        """First byte and number of bytes of what the spans name in one memory, where their rows lie one behind the
        other: an order has one part of one slot. `column` of the spans has the first bytes."""
        begins = self.spans[:, column]
        first = int(begins.min())
        return first, int((begins + self.spans[:, 0] * self.spans[:, 1]).max()) - first
