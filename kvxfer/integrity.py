"""Checksums of segments, so that bytes which changed on their way never reach a page.

The digest covers a segment's bytes. What travels is bound to the transfer, the generation and the segment's position
as well: right bytes in the wrong place do not pass.
"""

from __future__ import annotations

import xxhash

from kvxfer.control.messages import Segment
from kvxfer.errors import IntegrityError
from kvxfer.rows_host import ByteArray


def digest(data: ByteArray) -> bytes:
    """xxh3-64 of `data` (`[num_bytes]` uint8, contiguous): 8 bytes."""
    return xxhash.xxh3_64_digest(data.data)


def bind(segment_digest: bytes, transfer: str, generation: int, chunk: int, segment: int) -> bytes:
    """The checksum that goes with a segment's notice: 8 bytes."""
    return xxhash.xxh3_64_digest(segment_digest + f"{transfer}:{generation}:{chunk}:{segment}".encode())


def check_segment(notice: Segment, slot: ByteArray) -> None:
    """Raise `IntegrityError`, naming the place, unless `slot` holds what `notice` announces."""
    found = bind(digest(slot[: notice.num_bytes]), notice.transfer, notice.generation, notice.chunk, notice.segment)
    if found != notice.checksum:
        raise IntegrityError(
            f"chunk {notice.chunk}, landing slot {notice.slot}, {notice.num_bytes} bytes: got checksum "
            f"{found.hex()}, expected {notice.checksum.hex() or 'one, but the source sent none'}"
        )
