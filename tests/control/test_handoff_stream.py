"""Hand-off with placement worker: the ring and the slots come to the worker, checked before they are mapped."""

from __future__ import annotations

import fcntl
import os
import socket
import threading
from collections.abc import Callable, Iterator
from pathlib import Path

import numpy as np
import pytest

from kvxfer.control.handoff import HandoffConnection, OfferedPeer, StreamMemory, hand_over, share_stream
from kvxfer.control.handoff_listener import HandoffEvent, HandoffListener, LostPool, ReceivedPool
from kvxfer.control.handoff_messages import PeerPool, PoolAccepted, PoolOffer, SharedStream, SlotsMoved, pack
from kvxfer.control.shared_memory import SharedMemory, attach
from kvxfer.errors import HandoffError, LayoutError
from kvxfer.layout import PoolLayout
from kvxfer.memory import HostMemory
from kvxfer.streams.ring import LANES_OFFSET_BYTES, OFFSETS_WORD, MemoryIndex, Ring
from tests.control.pools import POOL_BYTES, client_of, expect_refusal, layout, memfd, next_events
from tests.control.waiting import no_more_descriptors, num_descriptors

SIZE_SEALS = fcntl.F_SEAL_GROW | fcntl.F_SEAL_SHRINK
OFFER = pack(PoolOffer(num_bytes=POOL_BYTES, layout=layout(), placement="worker"))
SMALLEST_RING_BYTES = LANES_OFFSET_BYTES + (OFFSETS_WORD + 1) * 8


class _Sharing:
    """Slots of an agent, and the rings that it has made."""

    def __init__(self) -> None:
        self.slots = HostMemory.create(12288, "test-slots")
        self.rings: list[Ring] = []
        self.error: Exception | None = None

    def __call__(self, of: PoolLayout, pid: int) -> tuple[Ring, HostMemory, int]:
        assert (of, pid) in ((layout(), os.getpid()), (layout(), 0))
        if self.error is not None:
            raise self.error
        self.rings.append(Ring.create(3, 100))
        return self.rings[-1], self.slots, 5


@pytest.fixture
def sharing() -> Iterator[_Sharing]:
    sharing = _Sharing()
    yield sharing
    sharing.slots.close()


@pytest.fixture
def listener(tmp_path: Path, sharing: _Sharing) -> Iterator[HandoffListener]:
    """A listener that shares; the test fails where a descriptor is left after it."""
    before = num_descriptors()
    listener = HandoffListener(tmp_path, sharing)
    yield listener
    listener.close()
    assert num_descriptors() == before


def _shared(
    listener: HandoffListener, tmp_path: Path
) -> tuple[HandoffConnection, StreamMemory, ReceivedPool, list[HandoffEvent]]:
    results: list[tuple[HandoffConnection, StreamMemory]] = []
    worker = threading.Thread(target=lambda: results.append(share_stream(tmp_path, POOL_BYTES, layout(), 5.0)))
    worker.start()
    received, *others = next_events(listener)
    worker.join()
    assert isinstance(received, ReceivedPool)
    return *results[0], received, others


def test_a_worker_gets_the_ring_and_the_slots_and_keeps_its_pool(
    listener: HandoffListener, sharing: _Sharing, tmp_path: Path
) -> None:
    connection, memory, received, others = _shared(listener, tmp_path)
    assert others == []
    assert (received.pool, received.num_bytes, received.layout) == (connection.pool, POOL_BYTES, layout())
    assert received.memory is None
    assert received.ring is sharing.rings[0]
    assert received.move == 5
    assert isinstance(memory.slots, HostMemory)
    assert memory.ring.num_lanes == 3
    assert memory.ring.max_offsets == received.ring.max_offsets >= 100
    memory.ring.set_num_enqueued(9)
    assert received.ring.num_enqueued == 9
    sharing.slots.array[-1] = 3
    assert memory.slots.array[-1] == 3
    assert all(fcntl.fcntl(fd, fcntl.F_GETFD) & fcntl.FD_CLOEXEC for fd in (memory.ring.memory.fd, memory.slots.fd))
    connection.close()
    assert next_events(listener) == [LostPool(received.pool)]
    received.close()
    received.close()
    memory.close()


def test_a_descriptor_of_nothing_is_refused(listener: HandoffListener, tmp_path: Path, memory: HostMemory) -> None:
    with client_of(tmp_path) as client:
        socket.send_fds(client, [OFFER], [memory.fd])
        expect_refusal(listener, client, "expected one, of the pool that is offered")


def test_a_pool_that_peers_may_map_is_held_as_it_came(
    listener: HandoffListener, tmp_path: Path, memory: HostMemory
) -> None:
    offer = PoolOffer(
        num_bytes=POOL_BYTES, layout=layout(), placement="worker", pool=SharedMemory(num_bytes=POOL_BYTES)
    )
    with client_of(tmp_path) as client:
        socket.send_fds(client, [pack(offer)], [memory.fd])
        (received,) = next_events(listener)
        assert isinstance(received, ReceivedPool)
        assert received.memory is None
        assert received.shared is not None
        assert os.fstat(received.shared.fd).st_ino == os.fstat(memory.fd).st_ino
        received.close()


def test_an_unknown_placement_is_refused(listener: HandoffListener, tmp_path: Path) -> None:
    with client_of(tmp_path) as client:
        client.sendall(OFFER.replace(b"\xa6worker", b"\xa6walker"))
        expect_refusal(listener, client, "placement")


def test_an_agent_without_memory_refuses_and_lives(
    listener: HandoffListener, sharing: _Sharing, tmp_path: Path
) -> None:
    sharing.error = OSError(12, "Cannot allocate memory")
    with client_of(tmp_path) as client:
        client.sendall(OFFER)
        expect_refusal(listener, client, "no memory for a ring (Cannot allocate memory)")
    sharing.error = None
    connection, memory, received, _ = _shared(listener, tmp_path)
    connection.close()
    received.close()
    memory.close()


def test_an_agent_that_orders_no_streams_says_so(tmp_path: Path) -> None:
    listener = HandoffListener(tmp_path)
    with client_of(tmp_path) as client:
        client.sendall(OFFER)
        expect_refusal(listener, client, "orders no streams")
    listener.close()


def test_the_worker_checks_its_layout_before_it_connects(tmp_path: Path) -> None:
    with pytest.raises(LayoutError, match="ends at byte 8448"):
        share_stream(tmp_path, POOL_BYTES, layout(17), 5.0)


def _against(tmp_path: Path, answer: Callable[[socket.socket], None], ask: Callable[[], object]) -> None:
    """Call `ask` against an agent that reads an offer and then does what `answer` says. Nothing may be left open."""
    before = num_descriptors()

    def serve() -> None:
        with server.accept()[0] as connection:
            connection.recv(1 << 16)
            answer(connection)

    with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as server:
        server.bind(str(tmp_path / "handoff.sock"))
        server.listen()
        agent = threading.Thread(target=serve)
        agent.start()
        try:
            ask()
        finally:
            agent.join()
    assert num_descriptors() == before


@pytest.mark.parametrize(
    ("ring", "slots", "sizes", "told"),
    [
        ((8192, SIZE_SEALS), None, (8192, 1, 4096), "got 1 descriptors, expected two"),
        ((90_000, 0), (4096, SIZE_SEALS), (90_000, 1, 4096), "ring descriptor: got seals 0x0"),
        ((90_000, SIZE_SEALS), (4096, SIZE_SEALS), (90_008, 1, 4096), "ring descriptor: got 90000 bytes"),
        (
            (SMALLEST_RING_BYTES - 8, SIZE_SEALS),
            (4096, SIZE_SEALS),
            (SMALLEST_RING_BYTES - 8, 1, 4096),
            "ring: got .* bytes, expected .* and then 1 lanes",
        ),
        ((90_001, SIZE_SEALS), (4096, SIZE_SEALS), (90_001, 2, 4096), "ring: got 90001 bytes"),
        ((8192, SIZE_SEALS), (4096, SIZE_SEALS), (8192, 1, 4096), "ring: got 8192 bytes"),
        ((90_000, SIZE_SEALS), (4096, 0), (90_000, 1, 4096), "slots descriptor: got seals 0x0"),
        ((90_000, SIZE_SEALS), (4096, SIZE_SEALS), (90_000, 1, 0), "slots descriptor: got 4096 bytes"),
        (
            (90_000, SIZE_SEALS),
            (4096, SIZE_SEALS | fcntl.F_SEAL_WRITE),
            (90_000, 1, 4096),
            "slots descriptor: cannot be mapped",
        ),
    ],
)
def test_a_ring_or_slots_that_do_not_fit_are_not_mapped(
    tmp_path: Path,
    ring: tuple[int, int],
    slots: tuple[int, int] | None,
    sizes: tuple[int, int, int],
    told: str,
) -> None:
    stream = SharedStream(ring_bytes=sizes[0], num_lanes=sizes[1], slots=SharedMemory(num_bytes=sizes[2]))

    def answer(connection: socket.socket) -> None:
        fds = [memfd(*each) for each in (ring, slots) if each is not None]
        socket.send_fds(connection, [pack(PoolAccepted(pool="a" * 32, stream=stream))], fds)
        for fd in fds:
            os.close(fd)

    with pytest.raises(HandoffError, match=told):
        _against(tmp_path, answer, lambda: share_stream(tmp_path, POOL_BYTES, layout(), 5.0))


def test_an_answer_to_another_offer_is_refused(tmp_path: Path, memory: HostMemory) -> None:
    plain = pack(PoolAccepted(pool="a" * 32))
    shared = pack(
        PoolAccepted(pool="a" * 32, stream=SharedStream(ring_bytes=8, num_lanes=1, slots=SharedMemory(num_bytes=8)))
    )
    for answer, ask in (
        (plain, lambda: share_stream(tmp_path, POOL_BYTES, layout(), 5.0)),
        (shared, lambda: hand_over(tmp_path, memory, layout(), 5.0)),
        (pack(SlotsMoved(move=1, slots=SharedMemory(num_bytes=8))), lambda: hand_over(tmp_path, memory, layout(), 5.0)),
    ):
        with pytest.raises(HandoffError, match="expected an answer to an offer with placement"):
            _against(tmp_path, lambda connection, answer=answer: connection.sendall(answer), ask)  # type: ignore[misc]
        (tmp_path / "handoff.sock").unlink()


def test_more_descriptors_than_anybody_sends_are_refused(tmp_path: Path, memory: HostMemory) -> None:
    def answer(connection: socket.socket) -> None:
        socket.send_fds(connection, [pack(PoolAccepted(pool="a" * 32))], [memory.fd] * 5)

    with pytest.raises(HandoffError, match="more than 4 at once"):
        _against(tmp_path, answer, lambda: hand_over(tmp_path, memory, layout(), 5.0))


def test_slots_that_move_come_mapped(listener: HandoffListener, tmp_path: Path) -> None:
    connection, memory, received, _ = _shared(listener, tmp_path)
    with HostMemory.create(8192, "moved") as first, HostMemory.create(4096, "moved") as second:
        second.array[:] = 9
        for move, slots in ((1, first), (2, second)):
            listener.move_slots(received.pool, move, slots)
        assert not connection.lost()
        moved = [connection.take_moved(), connection.take_moved()]
    assert connection.take_moved() is None
    arrays = []
    for each, expected in zip(moved, ((1, 8192), (2, 4096)), strict=True):
        assert each is not None
        assert isinstance(each.memory, HostMemory)
        assert (each.move, each.memory.num_bytes) == expected
        arrays.append(each.memory.array.copy())
        each.memory.close()
    assert np.all(arrays[1] == 9)
    assert isinstance(memory.slots, HostMemory)
    listener.move_slots(received.pool, 3, memory.slots)
    assert not connection.lost()
    connection.close()  # with what nobody took
    assert next_events(listener) == [LostPool(received.pool)]
    listener.move_slots(received.pool, 4, memory.slots)  # nobody is there any more
    received.close()
    memory.close()


def test_moved_slots_that_cannot_be_mapped_are_an_error_and_the_end_is_seen_all_the_same(
    listener: HandoffListener, tmp_path: Path
) -> None:
    connection, memory, received, _ = _shared(listener, tmp_path)
    assert isinstance(memory.slots, HostMemory)
    agent = next(each for each in listener._connections.values() if each.pool == received.pool)
    agent.say(SlotsMoved(move=1, slots=SharedMemory(num_bytes=4096)))
    with pytest.raises(HandoffError, match="slots descriptor: got none"):
        connection.lost()
    unsealed = memfd(4096, 0)
    agent.say(SlotsMoved(move=1, slots=SharedMemory(num_bytes=4096)), [unsealed])
    os.close(unsealed)
    with pytest.raises(HandoffError, match="slots descriptor: got seals 0x0"):
        connection.lost()
    assert not connection.lost()
    listener.release(received.pool)
    assert connection.lost()
    connection.close()
    received.close()
    memory.close()


def test_moved_slots_that_a_worker_has_no_descriptor_for_are_an_error(
    listener: HandoffListener, tmp_path: Path
) -> None:
    """Ignored, they would leave the agent waiting for ever, with rows that are all here and in no page."""
    connection, memory, received, _ = _shared(listener, tmp_path)
    assert isinstance(memory.slots, HostMemory)
    listener.move_slots(received.pool, 1, memory.slots)
    with no_more_descriptors(), pytest.raises(HandoffError, match=r"slots descriptor: got none, .*ulimit"):
        connection.lost()
    assert not connection.lost()
    connection.close()
    received.close()
    memory.close()


def test_a_peers_pool_that_a_worker_has_no_descriptor_for_costs_nothing_else(
    listener: HandoffListener, tmp_path: Path
) -> None:
    """Rows come over the wire then, and what the agent says later is heard."""
    connection, memory, received, _ = _shared(listener, tmp_path)
    assert isinstance(memory.slots, HostMemory)
    word = PeerPool(index=MemoryIndex.FIRST_PEER, memory=SharedMemory(num_bytes=memory.slots.num_bytes))
    assert listener.tell(received.pool, word, [memory.slots.fd])
    with no_more_descriptors():
        assert not connection.lost()
    offered = connection.take_peer_word()
    assert isinstance(offered, OfferedPeer)
    assert offered.memory.fds() == []
    with pytest.raises(HandoffError, match="pool descriptor: got none, expected one"):
        attach(offered.memory.shared, offered.memory.fds(), "pool")
    listener.move_slots(received.pool, 1, memory.slots)
    assert not connection.lost()
    moved = connection.take_moved()
    assert moved is not None
    moved.memory.close()
    connection.close()
    received.close()
    memory.close()


def test_what_the_worker_does_not_understand_is_ignored(listener: HandoffListener, tmp_path: Path) -> None:
    connection, memory, received, _ = _shared(listener, tmp_path)
    assert isinstance(memory.slots, HostMemory)
    agent = next(each for each in listener._connections.values() if each.pool == received.pool)
    agent.socket.sendall(pack(PoolAccepted(pool="a" * 32)))  # understood, and without a meaning here
    agent.socket.sendall(bytes(8) + b"\xff" * 100)
    agent.say(SlotsMoved(move=1, slots=SharedMemory(num_bytes=4096)), [memory.slots.fd])
    assert not connection.lost()
    assert not connection.lost()
    assert connection.take_moved() is None
    listener.release(received.pool)
    assert connection.lost()
    connection.close()
    received.close()
    memory.close()
