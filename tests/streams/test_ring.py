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
    SumKind,
    SumOrder,
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


def test_what_is_added_is_added_to_every_span() -> None:
    ring = Ring.create(2, 10)
    words = np.zeros((2, SPAN_WORDS), dtype=np.int64)
    words[:, :9] = SPAN, SPAN._replace(row_bytes=32, dst_first_byte=16)
    summed = SumOrder(SumKind.CHECKED, 64, 48, (1 << 64) - 5)
    ring.write_lane(1, words.reshape(-1).data, np.arange(3), summed, (7, 4096))
    ring.order(5, OrderCode.RUN, 1)
    assert ring.spans_of(5) == [SPAN._replace(dst_first_byte=4096), SPAN._replace(row_bytes=32, dst_first_byte=4112)]
    assert words[:, 7].tolist() == [0, 16]
    assert ring.summed_by(5) == summed
    assert ring.sum_of(5) == 4, "a wrong one until the stream writes it"
    assert ring.offsets_of(5)[:3].tolist() == [0, 1, 2]
    assert not ring.is_done(5)
    ring.set_done(5)
    assert ring.is_done(5)
    ring.write_lane(1, words.reshape(-1).data, np.arange(4), has_offsets=True)
    assert ring.summed_by(5).kind is SumKind.NONE
    assert ring.offsets_of(5)[:4].tolist() == [0, 1, 2, 0], "they are said to be there"
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
