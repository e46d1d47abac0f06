"""Checksums: bound to bytes, transfer, generation and position; a corrupt segment touches no page."""

from __future__ import annotations

import select
from functools import partial

import numpy as np
import pytest

from kvxfer.control.messages import Segment
from kvxfer.errors import IntegrityError
from kvxfer.integrity import bind, check_segment, digest
from kvxfer.operations import CancelFlag, Move, SegmentSource
from kvxfer.row_mover import HostExecutor, RowMover
from kvxfer.segments import ChunkPlan

TRANSFER = "ab" * 16
PLACE = (TRANSFER, 3, 1, 2)


def _notice(checksum: bytes, num_bytes: int = 96) -> Segment:
    transfer, generation, chunk, segment = PLACE
    return Segment(
        transfer=transfer,
        generation=generation,
        chunk=chunk,
        segment=segment,
        slot=5,
        num_bytes=num_bytes,
        checksum=checksum,
    )


def test_a_segment_that_came_as_it_was_packed_passes() -> None:
    slot = np.arange(128, dtype=np.uint8)
    check_segment(_notice(bind(digest(slot[:96]), *PLACE)), slot)


@pytest.mark.parametrize("place", [("cd" * 16, 3, 1, 2), (TRANSFER, 4, 1, 2), (TRANSFER, 3, 0, 2), (TRANSFER, 3, 1, 1)])
def test_right_bytes_in_the_wrong_place_do_not_pass(place: tuple[str, int, int, int]) -> None:
    slot = np.arange(128, dtype=np.uint8)
    with pytest.raises(IntegrityError, match="chunk 1, landing slot 5, 96 bytes"):
        check_segment(_notice(bind(digest(slot[:96]), *place)), slot)


@pytest.mark.parametrize("position", [0, 50, 95])
def test_one_flipped_bit_is_found_and_no_page_is_touched(position: int) -> None:
    slot = np.arange(128, dtype=np.uint8)
    notice = _notice(bind(digest(slot[:96]), *PLACE))
    slot[position] ^= 1
    pool = np.full(64, 7, dtype=np.uint8)
    source = SegmentSource(ChunkPlan((), (), 0, 0, 0), ())
    mover = RowMover(1, "test-mover")
    executor = HostExecutor(mover, pool, lambda _slot: slot)
    executor.scatter(Move(1, source, 0, CancelFlag()), 5, partial(check_segment, notice, slot))
    assert select.select([mover.fileno()], [], [], 10.0)[0]
    (moved,) = mover.poll()
    mover.close()
    assert moved.is_corrupt
    assert (pool == 7).all()


def test_a_source_that_sends_no_checksum_is_refused_where_one_is_required() -> None:
    with pytest.raises(IntegrityError, match="the source sent none"):
        check_segment(_notice(b""), np.zeros(128, dtype=np.uint8))
