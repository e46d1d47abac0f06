"""Checksums of segments, so that bytes which changed on their way never reach a page.

A digest covers a segment's bytes and is of one of two kinds: xxh3, where a thread of an agent reads them anyway, or
the sum of `kvxfer.row_sums`, which a stream makes while it moves them. What travels is bound to the transfer, the
generation and the segment's position as well: right bytes in the wrong place do not pass. Either way the first byte
tells the kind, which is the sender's choice, and eight follow.
"""

from __future__ import annotations

from typing import Final

import xxhash

from kvxfer.control.messages import Segment
from kvxfer.errors import IntegrityError
from kvxfer.row_sums import MODULUS, row_sum
from kvxfer.rows_host import ByteArray

_XXH3: Final = b"x"
_SUM: Final = b"s"


def digest(data: ByteArray) -> bytes:
    """The digest of kind xxh3 of `data`, `[num_bytes]` uint8, contiguous."""
    return _XXH3 + xxhash.xxh3_64_digest(data.data)


def sum_digest(total: int) -> bytes:
    """The digest of bytes whose sum is `total`."""
    return _SUM + total.to_bytes(8)


def bind(segment_digest: bytes, transfer: str, generation: int, chunk: int, segment: int) -> bytes:
    """The checksum that goes with a segment's notice; none for bytes without a digest.

    A sum is moved by a number that the place gives, so that the receiver can tell a stream which one to expect.
    """
    if not segment_digest:
        return b""
    kind, value = segment_digest[:1], segment_digest[1:]
    place = f"{transfer}:{generation}:{chunk}:{segment}".encode()
    if kind == _SUM:
        return _SUM + ((int.from_bytes(value) + xxhash.xxh3_64_intdigest(place)) % MODULUS).to_bytes(8)
    return _XXH3 + xxhash.xxh3_64_digest(value + place)


def expected_sum(notice: Segment) -> int | None:
    """The sum that the announced segment must have; None where its checksum is none or of another kind."""
    if notice.checksum[:1] != _SUM:
        return None
    moved_by = int.from_bytes(_bound(notice, sum_digest(0))[1:])
    return (int.from_bytes(notice.checksum[1:]) - moved_by) % MODULUS


def check_sum(notice: Segment, total: int) -> None:
    """Raise `IntegrityError`, naming the place, unless `total` is the sum that `notice` announces."""
    _check(notice, sum_digest(total))


def check_segment(notice: Segment, slot: ByteArray) -> None:
    """Raise `IntegrityError`, naming the place, unless `slot` holds what `notice` announces."""
    data = slot[: notice.num_bytes]
    _check(notice, sum_digest(row_sum(data)) if notice.checksum[:1] == _SUM else digest(data))


def _bound(notice: Segment, segment_digest: bytes) -> bytes:
    return bind(segment_digest, notice.transfer, notice.generation, notice.chunk, notice.segment)


def _check(notice: Segment, segment_digest: bytes) -> None:
    found = _bound(notice, segment_digest)
    if found != notice.checksum:
        raise IntegrityError(
            f"chunk {notice.chunk}, landing slot {notice.slot}, {notice.num_bytes} bytes: got checksum "
            f"{found.hex()}, expected {notice.checksum.hex() or 'one, but the source sent none'}"
        )
