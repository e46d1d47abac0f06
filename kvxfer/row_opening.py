"""Who moves the rows of a worker's pool, by where the pool lies and who has it mapped."""

from __future__ import annotations

from collections.abc import Callable

from kvxfer.control.handoff_listener import ReceivedPool
from kvxfer.control.shared_memory import as_device_pool
from kvxfer.errors import HandoffError
from kvxfer.operations import RowExecutor
from kvxfer.peer_pools import HostPeerPools, OwnPeerPools, PeerPools, StreamPeerPools
from kvxfer.row_mover import HostExecutor, RowMover
from kvxfer.slot_memory import SlotMemory
from kvxfer.streams.device import DevicePool, MappedPool
from kvxfer.streams.own_mover import OwnStreamMover
from kvxfer.streams.ring import Ring
from kvxfer.streams.stream_mover import StreamMover
from kvxfer.worker_desk import WorkerDesk


def open_rows(
    pool: ReceivedPool, mover: RowMover, slots: Callable[[], SlotMemory], desk: WorkerDesk
) -> tuple[RowExecutor, PeerPools]:
    """The executor of `pool`, and the pools that rows can be pulled from into it: threads of `mover`, a stream of the
    agent, or one of the worker behind `desk`. `slots` tells where the agent's slots are now.

    Raises `HandoffError` for a pool on another GPU than the slots, `TransportError` where the GPU refuses.
    """
    if pool.ring is None:
        assert pool.memory is not None
        threads = HostExecutor(mover, pool.memory.array, lambda slot: slots().view(slot))
        return threads, HostPeerPools(threads)
    if pool.device is not None:
        own = _open_own_stream(pool.ring, pool.device, mover, slots())
        return own, OwnPeerPools(own, pool.device.pool.device_index)
    stream = StreamMover(
        pool.ring,
        mover,
        pool_bytes=pool.num_bytes,
        slot_bytes=slots().slot_bytes,
        want_entries=desk.want_entries,
    )
    return stream, StreamPeerPools(stream, desk.tell_of_peer)


def _open_own_stream(ring: Ring, pool: MappedPool, mover: RowMover, slots: SlotMemory) -> OwnStreamMover:
    from kvxfer.streams.staged_stream import StagedRowStream  # CUDA: only where a pool lies on a GPU

    memory = as_device_pool(slots.memory)
    if isinstance(memory, DevicePool) and memory.device_index != pool.pool.device_index:
        raise HandoffError(
            f"pool: got one on GPU {pool.pool.device_index}, expected GPU {memory.device_index}, where the slots of "
            "this agent lie: set slots.gpu in its configuration"
        )
    stream = StagedRowStream(ring, pool.pool, memory)
    return OwnStreamMover(ring, stream, mover, pool_bytes=pool.num_bytes, slot_bytes=slots.slot_bytes)
