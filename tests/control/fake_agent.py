"""An agent that only talks: takes a pool, then answers a worker's requests as a test tells it."""

from __future__ import annotations

import os
import threading
import time
from collections import deque
from collections.abc import Callable
from pathlib import Path
from types import TracebackType
from typing import Self

from kvxfer.control.channel import Selector, WorkerListener
from kvxfer.control.codec import decode, encode
from kvxfer.control.handoff_listener import HandoffListener, LostPool, ReceivedPool
from kvxfer.control.handoff_messages import MoreEntries
from kvxfer.control.ids import new_id
from kvxfer.control.messages import Attached, AttachWorker, Message, NewTicket, Ok, Source, Ticket, TicketMade
from kvxfer.layout import PoolLayout
from kvxfer.memory import HostMemory
from kvxfer.streams.ring import Ring

SLOTS_BYTES = 4096

Answer = Callable[[Message], list[Message]]
"""What to send for a request; the first message of the list is the reply."""


class FakeAgent:
    """Runs on a thread until the block ends. `requests` are all it was asked, oldest first.

    A worker whose own stream moves the rows gets `slots` and a ring, `rings[-1]`.
    """

    def __init__(self, socket_dir: Path, answer: Answer, *, is_prefill: bool = True) -> None:
        self.incarnation = new_id()
        self.requests: list[Message] = []
        self.lost_pools: list[str] = []
        self._answer = answer
        self._source = Source(endpoint="tcp://127.0.0.1:1", incarnation=self.incarnation) if is_prefill else None
        self.slots = HostMemory.create(SLOTS_BYTES, "test-slots")
        self.rings: list[Ring] = []
        self._workers = WorkerListener(socket_dir)
        self._handoffs = HandoffListener(socket_dir, self._share_stream)
        self._wake = os.eventfd(0)
        self._stopping = False
        self._jobs: deque[Callable[[], None]] = deque()
        self._pools: list[ReceivedPool] = []
        self._worker = b""
        self._thread = threading.Thread(target=self._run)

    def __enter__(self) -> Self:
        self._thread.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.die()

    def die(self) -> None:
        """Stop and hang up. Calling it again does nothing."""
        if self._stopping:
            return
        self._stopping = True
        os.eventfd_write(self._wake, 1)
        self._thread.join()
        self._handoffs.close()
        self._workers.close()
        for pool in self._pools:
            pool.close()
        self.slots.close()
        os.close(self._wake)

    def say(self, *messages: Message) -> None:
        """Send to the worker that spoke last."""

        def send() -> None:
            for message in messages:
                assert self._workers.send(self._worker, encode(message))

        self._do(send)

    def want(self, num_entries: int) -> None:
        """Want so many entries of the stream of the worker that has handed over last."""

        def tell() -> None:
            assert self._handoffs.tell(self._pools[-1].pool, MoreEntries(num_entries=num_entries), [])

        self._do(tell)

    def _do(self, job: Callable[[], None]) -> None:
        """Call `job` in the agent's thread, which alone may use its channels, and wait for that."""
        if threading.current_thread() is self._thread:
            job()
            return
        done = threading.Event()
        self._jobs += (job, done.set)
        os.eventfd_write(self._wake, 1)
        assert done.wait(5)

    def move_slots(self, move: int) -> HostMemory:
        """Move the slots to memory that is the caller's."""
        moved = HostMemory.create(SLOTS_BYTES, "test-slots")
        self._do(lambda: self._handoffs.move_slots(self._pools[-1].pool, move, moved))
        return moved

    def _share_stream(self, _layout: PoolLayout, _pid: int) -> tuple[Ring, HostMemory, int]:
        self.rings.append(Ring.create(4, 64))
        return self.rings[-1], self.slots, 0

    def _run(self) -> None:
        selector = Selector([self._workers, self._handoffs, self._wake])
        while not self._stopping:
            if self._wake in selector.wait(1.0):
                os.eventfd_read(self._wake)
            while self._jobs:
                self._jobs.popleft()()
            for event in self._handoffs.poll(time.monotonic()):
                if isinstance(event, ReceivedPool):
                    self._pools.append(event)
                elif isinstance(event, LostPool):
                    self.lost_pools.append(event.pool)
            while (received := self._workers.receive()) is not None:
                self._worker, frame = received
                self._serve(*decode(frame))

    def _serve(self, message: Message, request_id: int) -> None:
        self.requests.append(message)
        if isinstance(message, AttachWorker):
            assert message.pool in [pool.pool for pool in self._pools]
            answers: list[Message] = [Attached(incarnation=self.incarnation, source=self._source)]
        else:
            answers = self._answer(message)
        for index, answer in enumerate(answers):
            assert self._workers.send(self._worker, encode(answer, request_id if index == 0 else 0))


def accept_all(message: Message) -> list[Message]:
    """Accepts whatever it is asked."""
    if isinstance(message, NewTicket):
        source = Source(endpoint="tcp://127.0.0.1:1", incarnation="a" * 32)
        return [TicketMade(ticket=Ticket(transfer=new_id(), sources=(source, *message.sources)))]
    return [Ok()]
