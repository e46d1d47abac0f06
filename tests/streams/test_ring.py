"""What the kernels of a GPU rely on in a ring's memory."""

from __future__ import annotations

import os

import numpy as np
import pytest

from kvxfer.errors import HandoffError
from kvxfer.memory import HostMemory
from kvxfer.streams.ring import (
    LANES_OFFSET_BYTES,
    LINEAR,
    OFFSETS_WORD,
    SPAN_WORDS,
    OrderCode,
    Ring,
    Span,
    order_offset_bytes,
)

SPAN = Span(16, 3, 16, 0, 0, 0, 1, 0, LINEAR)
USED_WORD = order_offset_bytes(0) // 8 + 3


@pytest.mark.parametrize(
    ("num_spans", "num_offsets", "num_used"),
    [(1, 0, 8 + SPAN_WORDS), (3, 0, 8 + 3 * SPAN_WORDS), (1, 5, OFFSETS_WORD + 5), (64, 0, OFFSETS_WORD)],
)
def test_an_order_says_how_much_of_its_lane_is_in_use(num_spans: int, num_offsets: int, num_used: int) -> None:
    ring = Ring.create(2, 10)
    ring.fill_lane(0, [SPAN] * 64, np.arange(10))  # what another order has left
    ring.fill_lane(1, [SPAN] * num_spans, np.arange(num_offsets))
    ring.order(0, OrderCode.RUN, 1)
    words = ring.memory.array.view(np.int64)
    assert words[USED_WORD] == num_used
    ring.order(0, OrderCode.SKIP)
    assert words[USED_WORD] == num_used
    ring.close()


@pytest.mark.parametrize("surplus_bytes", [8, 16])
def test_lanes_begin_where_words_of_16_bytes_do(surplus_bytes: int) -> None:
    num_bytes = LANES_OFFSET_BYTES + OFFSETS_WORD * 8 + surplus_bytes
    with HostMemory.create(num_bytes, "ring") as memory:
        fd = os.dup(memory.fd)
        if surplus_bytes == 16:
            Ring.attach(fd, num_bytes, 1).close()
        else:
            with pytest.raises(HandoffError, match=f"got {num_bytes} bytes, expected .* a multiple of 16 above"):
                Ring.attach(fd, num_bytes, 1)
