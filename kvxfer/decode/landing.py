"""The last step into the worker's pages: out of a landing slot, or straight out of a source's pool."""

from __future__ import annotations

from kvxfer.addresses import BlockAddresses
from kvxfer.control.messages import Segment
from kvxfer.control.pull_share import SharedPool
from kvxfer.errors import HandoffError
from kvxfer.integrity import check_segment
from kvxfer.operations import SegmentSource
from kvxfer.rows_copy import copy_part
from kvxfer.rows_host import ByteArray, scatter_segment
from kvxfer.segments import ChunkPlan


def land_segment(pool: ByteArray, source: SegmentSource, notice: Segment, slot: ByteArray, must_verify: bool) -> None:
    """Scatter a landed segment. With `must_verify`, `IntegrityError` where it is not what its source packed; no byte
    has moved then."""
    if must_verify:
        check_segment(notice, slot)
    scatter_segment(pool, source.plan, source.addresses, notice.segment, slot)


def pull_segment(
    shared: SharedPool,
    src_addresses: tuple[BlockAddresses, ...],
    dst_pool: ByteArray,
    dst_addresses: tuple[BlockAddresses, ...],
    plan: ChunkPlan,
    part_idx: int,
    lease: tuple[int, int],
) -> None:
    """Copy one of `plan.num_segments` parts of a chunk, then look at the lease (word, value).

    Raises `HandoffError` where the source has revoked it: what was copied may be rows of another request then.
    """
    copy_part(shared.array, src_addresses, dst_pool, dst_addresses, plan, part_idx, plan.num_segments)
    if not shared.is_leased(*lease):
        raise HandoffError("the source has revoked the lease on its rows")
