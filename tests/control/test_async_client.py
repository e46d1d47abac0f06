"""What only asyncio clients have: tasks that share one, and are cancelled."""

from __future__ import annotations

import asyncio
import time
from pathlib import Path

import pytest

from kvxfer.control.client import (
    AsyncDecodeClient,
    ReceivePages,
)
from kvxfer.control.handoff_listener import HandoffListener, LostPool, ReceivedPool
from kvxfer.control.messages import (
    Message,
    Ok,
    Open,
    Ticket,
    TransferEvent,
)
from kvxfer.errors import (
    AgentLostError,
)
from kvxfer.memory import HostMemory
from kvxfer.transfer import EventKind
from tests.control.core_agent import A, landed, ticket
from tests.control.fake_agent import FakeAgent, accept_all
from tests.control.pools import layout, next_events

pytestmark = pytest.mark.usefixtures("nothing_left")


def test_many_tasks_share_an_asyncio_client(tmp_path: Path, memory: HostMemory) -> None:
    def answer(message: Message) -> list[Message]:
        return [Ok(), landed(message.ticket.transfer)] if isinstance(message, Open) else accept_all(message)

    async def one(client: AsyncDecodeClient, index: int) -> Ticket:
        mine = ticket(f"{index:032x}")
        await client.open(mine, {"kv": ReceivePages(0, 4, [index])})
        assert (await client.wait(mine, 5)).transfer == mine.transfer
        return mine

    async def main() -> None:
        async with await AsyncDecodeClient.connect(tmp_path, memory, layout()) as client:
            done = await asyncio.gather(*(one(client, index) for index in range(200)))
            assert len({mine.transfer for mine in done}) == 200
            assert client.open_transfers == frozenset()

    with FakeAgent(tmp_path, answer, is_prefill=False):
        asyncio.run(main())


def test_a_cancelled_task_aborts_what_it_asked_for(tmp_path: Path, memory: HostMemory) -> None:
    def answer(message: Message) -> list[Message]:
        if isinstance(message, Open):
            time.sleep(0.5)
            return [Ok()]
        return [Ok(), TransferEvent(transfer=A, event=EventKind.ABORTED)]

    async def main() -> None:
        async with await AsyncDecodeClient.connect(tmp_path, memory, layout()) as client:
            task = asyncio.create_task(client.open(ticket(A), {}))
            await asyncio.sleep(0.02)
            task.cancel()
            with pytest.raises(asyncio.CancelledError):
                await task
            assert (await client.wait(A, 5)).event is EventKind.ABORTED

    with FakeAgent(tmp_path, answer, is_prefill=False):
        asyncio.run(main())


def test_a_cancelled_connect_takes_its_hand_over_back(
    listener: HandoffListener, tmp_path: Path, memory: HostMemory
) -> None:
    async def main() -> None:
        task = asyncio.create_task(AsyncDecodeClient.connect(tmp_path, memory, layout(), timeout_s=5))
        await asyncio.sleep(0.1)
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task

    asyncio.run(main())
    (received,) = next_events(listener)
    assert isinstance(received, ReceivedPool)
    received.close()
    assert next_events(listener) == [LostPool(received.pool)]


def test_closing_wakes_the_tasks_that_wait(tmp_path: Path, memory: HostMemory) -> None:
    async def main() -> None:
        client = await AsyncDecodeClient.connect(tmp_path, memory, layout())
        await client.open(ticket(A), {})
        tasks = [asyncio.create_task(client.next_event()), asyncio.create_task(client.wait(A, None))]
        await asyncio.sleep(0.02)
        client.close()
        for task in tasks:
            with pytest.raises(AgentLostError, match="this client was closed"):
                await task

    with FakeAgent(tmp_path, accept_all, is_prefill=False):
        asyncio.run(main())
