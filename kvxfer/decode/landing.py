"""The last step into the worker's pages of rows that come straight out of a source's pool."""

from __future__ import annotations

from kvxfer.addresses import BlockAddresses
from kvxfer.control.pull_share import SharedPool
from kvxfer.errors import HandoffError
from kvxfer.rows_copy import copy_part
from kvxfer.rows_host import ByteArray
from kvxfer.segments import ChunkPlan


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
