"""Checksums: bound to bytes, transfer, generation and position; a corrupt segment touches no page."""

from __future__ import annotations

import select
from collections.abc import Callable
from functools import partial

import numpy as np
import pytest

from kvxfer.control.messages import Segment
from kvxfer.errors import IntegrityError
from kvxfer.integrity import bind, check_segment, check_sum, digest, expected_sum, sum_digest
from kvxfer.operations import CancelFlag, Move, SegmentSource
from kvxfer.row_mover import HostExecutor, RowMover
from kvxfer.row_sums import row_sum
from kvxfer.rows_host import ByteArray
from kvxfer.segments import ChunkPlan

TRANSFER = "ab" * 16
PLACE = (TRANSFER, 3, 1, 2)


def sum_of(data: ByteArray) -> bytes:
    """As a stream finds it."""
    return sum_digest(row_sum(data))


Kind = Callable[[ByteArray], bytes]
both_kinds = pytest.mark.parametrize("kind", [digest, sum_of])


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


@both_kinds
def test_a_segment_that_came_as_it_was_packed_passes(kind: Kind) -> None:
    slot = np.arange(128, dtype=np.uint8)
    check_segment(_notice(bind(kind(slot[:96]), *PLACE)), slot)


def test_a_stream_is_told_which_sum_to_expect() -> None:
    slot = np.arange(96, dtype=np.uint8)
    for total in (row_sum(slot), 0, (1 << 64) - 1):
        notice = _notice(bind(sum_digest(total), *PLACE))
        assert expected_sum(notice) == total
        check_sum(notice, total)
        with pytest.raises(IntegrityError, match="chunk 1, landing slot 5, 96 bytes"):
            check_sum(notice, (total + 1) % (1 << 64))
    assert expected_sum(_notice(bind(digest(slot), *PLACE))) is None
    assert expected_sum(_notice(b"")) is None


def test_kinds_are_not_taken_for_each_other() -> None:
    slot = np.arange(96, dtype=np.uint8)
    for kind, other in ((b"x", sum_of(slot)), (b"s", digest(slot)), (b"?", digest(slot))):
        with pytest.raises(IntegrityError):
            check_segment(_notice(kind + bind(other, *PLACE)[1:]), slot)


@both_kinds
@pytest.mark.parametrize("place", [("cd" * 16, 3, 1, 2), (TRANSFER, 4, 1, 2), (TRANSFER, 3, 0, 2), (TRANSFER, 3, 1, 1)])
def test_right_bytes_in_the_wrong_place_do_not_pass(place: tuple[str, int, int, int], kind: Kind) -> None:
    slot = np.arange(128, dtype=np.uint8)
    notice = _notice(bind(kind(slot[:96]), *place))
    with pytest.raises(IntegrityError, match="chunk 1, landing slot 5, 96 bytes"):
        check_segment(notice, slot)
    assert expected_sum(notice) != row_sum(slot[:96])


@both_kinds
@pytest.mark.parametrize("position", [0, 50, 95])
def test_one_flipped_bit_is_found_and_no_page_is_touched(position: int, kind: Kind) -> None:
    slot = np.arange(128, dtype=np.uint8)
    notice = _notice(bind(kind(slot[:96]), *PLACE))
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
