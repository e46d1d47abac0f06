"""The blocking and the asyncio client against an agent that only talks. Every test runs on both."""

from __future__ import annotations

import time
from pathlib import Path

import pytest

from kvxfer.control.client import (
    AsyncDecodeClient,
    AsyncPrefillClient,
    ChunkPages,
    DecodeClient,
    PrefillClient,
    ReceivePages,
)
from kvxfer.control.codec import encode_ticket
from kvxfer.control.messages import (
    AbortTransfer,
    Message,
    NewTicket,
    Ok,
    Open,
    Refused,
    Submit,
    TransferEvent,
)
from kvxfer.errors import (
    AgentLostError,
    ContractError,
    ControlTimeoutError,
    LayoutError,
    PairingError,
    ProtocolError,
    RefusedError,
)
from kvxfer.layout import LayerRange, TokenRange
from kvxfer.memory import HostMemory
from kvxfer.transfer import EventKind, Reason
from tests.control.blocking import Connect, connect_async
from tests.control.core_agent import A, B, landed, ticket
from tests.control.fake_agent import FakeAgent, accept_all
from tests.control.pools import layout

pytestmark = pytest.mark.usefixtures("nothing_left")


@pytest.fixture(params=["blocking", "asyncio"])
def connect_prefill(request: pytest.FixtureRequest) -> Connect:
    return PrefillClient.connect if request.param == "blocking" else connect_async(AsyncPrefillClient)


@pytest.fixture(params=["blocking", "asyncio"])
def connect_decode(request: pytest.FixtureRequest) -> Connect:
    return DecodeClient.connect if request.param == "blocking" else connect_async(AsyncDecodeClient)


def test_a_prefill_worker(connect_prefill: Connect, tmp_path: Path, memory: HostMemory) -> None:
    def answer(message: Message) -> list[Message]:
        if not isinstance(message, Submit):
            return accept_all(message)
        ends = EventKind.SENT if message.last else EventKind.SOURCE_FREE
        return [Ok(), TransferEvent(transfer=message.transfer, event=ends)]

    with FakeAgent(tmp_path, answer) as agent, connect_prefill(tmp_path, memory, layout()) as client:
        assert client.incarnation == agent.incarnation == client.source.incarnation
        sibling = client.source
        made = client.ticket(sources=[sibling], deadline_s=5)
        assert made.sources[1] == sibling
        assert client.open_transfers == {made.transfer}
        client.submit(made, {"kv": ChunkPages(0, 8, [3, 1])}, layers=(0, 1))
        client.submit(encode_ticket(made), {"kv": ChunkPages(8, 9, [7])}, last=True, aux=b"token", deadline_s=2)
        assert client.wait(made.transfer, 5) == TransferEvent(transfer=made.transfer, event=EventKind.SENT)
        assert client.open_transfers == frozenset()
        assert client.next_event(0) is None
        client.abort(made)  # It has ended: nothing to do, nothing is asked.
        (_, asked, first, second) = agent.requests
    assert asked == NewTicket(sources=(sibling,), deadline_s=5.0)
    assert isinstance(first, Submit)
    assert isinstance(second, Submit)
    assert first.groups[0].tokens == TokenRange(0, 8)
    assert first.groups[0].pages == bytes.fromhex("0300000001000000")
    assert (first.layers, first.last, first.aux, first.deadline_s) == (LayerRange(0, 1), False, b"", 60.0)
    assert (second.layers, second.last, second.aux, second.deadline_s) == (None, True, b"token", 2.0)


def test_a_decode_worker(connect_decode: Connect, tmp_path: Path, memory: HostMemory) -> None:
    def answer(message: Message) -> list[Message]:
        return [Ok(), landed(message.ticket.transfer)] if isinstance(message, Open) else accept_all(message)

    with (
        FakeAgent(tmp_path, answer, is_prefill=False) as agent,
        connect_decode(tmp_path, memory, layout()) as client,
    ):
        client.open(ticket(A), {"kv": ReceivePages(0, 8, [3, 1], have=((0, 4),))}, deadline_s=3)
        client.open(encode_ticket(ticket(B)), {})
        assert client.wait(B, 5) == landed(B)
        assert client.next_event(5) == landed(A)
        asked = agent.requests[1]
    assert isinstance(asked, Open)
    assert asked.ticket == ticket(A)
    assert asked.groups[0].have == (TokenRange(0, 4),)
    assert asked.deadline_s == 3.0


def test_a_refusal_carries_its_reason(connect_prefill: Connect, tmp_path: Path, memory: HostMemory) -> None:
    def answer(_: Message) -> list[Message]:
        return [Refused(reason=Reason.STALE, detail="got x, expected y", field="kv.tokens")]

    with FakeAgent(tmp_path, answer), connect_prefill(tmp_path, memory, layout()) as client:
        with pytest.raises(RefusedError, match="got x, expected y") as caught:
            client.submit(A, {})
        assert (caught.value.reason, caught.value.field) == (Reason.STALE, "kv.tokens")
        assert client.open_transfers == frozenset()


def test_the_agent_dies(connect_decode: Connect, tmp_path: Path, memory: HostMemory) -> None:
    with (
        FakeAgent(tmp_path, accept_all, is_prefill=False) as agent,
        connect_decode(tmp_path, memory, layout()) as client,
    ):
        client.open(ticket(A), {})
        client.open(ticket(B), {})
        agent.die()
        failed = client.wait(B, 5)
        assert (failed.event, failed.reason) == (EventKind.FAILED, Reason.AGENT_LOST)
        assert client.next_event(5).transfer == A
        assert client.open_transfers == frozenset()
        with pytest.raises(AgentLostError, match="ended or hung up"):
            client.next_event()
        with pytest.raises(AgentLostError, match="ended or hung up"):
            client.open(ticket(A), {})


def test_the_agent_does_not_answer(connect_decode: Connect, tmp_path: Path, memory: HostMemory) -> None:
    """The transfer counts as open and is aborted; its event comes later."""

    def answer(message: Message) -> list[Message]:
        if isinstance(message, Open):
            time.sleep(0.3)
            return [Ok()]
        assert message == AbortTransfer(transfer=A)
        return [Ok(), TransferEvent(transfer=A, event=EventKind.ABORTED, reason=Reason.ABORTED_BY_WORKER)]

    with FakeAgent(tmp_path, answer, is_prefill=False), connect_decode(tmp_path, memory, layout()) as client:
        with pytest.raises(ControlTimeoutError, match=r"Open: the agent gave no answer within 0\.05 s"):
            client.open(ticket(A), {}, timeout_s=0.05)
        assert client.open_transfers == {A}
        with pytest.raises(ControlTimeoutError, match=r"no terminal event within 0\.05 s"):
            client.wait(A, 0.05)
        assert client.wait(A, 5).event is EventKind.ABORTED


def test_nothing_happens_for_a_while(connect_decode: Connect, tmp_path: Path, memory: HostMemory) -> None:
    with (
        FakeAgent(tmp_path, accept_all, is_prefill=False),
        connect_decode(tmp_path, memory, layout()) as client,
    ):
        start_s = time.monotonic()
        assert client.next_event(0.1) is None
        assert 0.09 < time.monotonic() - start_s < 3
        assert client.next_event(0) is None


def test_the_other_role_is_refused(connect_decode: Connect, tmp_path: Path, memory: HostMemory) -> None:
    with (
        FakeAgent(tmp_path, accept_all),
        pytest.raises(PairingError, match="is a prefill agent, expected a decode agent"),
    ):
        connect_decode(tmp_path, memory, layout())


def test_no_agent(connect_prefill: Connect, tmp_path: Path, memory: HostMemory) -> None:
    with pytest.raises(AgentLostError, match="no agent listens"):
        connect_prefill(tmp_path, memory, layout(), timeout_s=0.1)
    with pytest.raises(LayoutError, match="ends at byte"):
        connect_prefill(tmp_path, memory, layout(17))


def test_leaving_tells_the_agent(connect_prefill: Connect, tmp_path: Path, memory: HostMemory) -> None:
    with FakeAgent(tmp_path, accept_all) as agent:
        with connect_prefill(tmp_path, memory, layout()) as client:
            made = client.ticket()
        deadline_s = time.monotonic() + 5
        while not agent.lost_pools:
            assert time.monotonic() < deadline_s
            time.sleep(0.01)
        client.close()
    assert client.open_transfers == {made.transfer}


def test_a_closed_client_says_so(tmp_path: Path, memory: HostMemory) -> None:
    with FakeAgent(tmp_path, accept_all):
        client = PrefillClient.connect(tmp_path, memory, layout())
        client.close()
        client.close()
        with pytest.raises(AgentLostError, match="this client was closed"):
            client.ticket()


@pytest.mark.parametrize(
    ("groups", "told"),
    [
        ({"kv": ReceivePages(0, 1, [-1])}, "group 'kv': pages: got ids from -1 to -1"),
        ({"kv": ReceivePages(0, 1, [1 << 32])}, "group 'kv': pages: got ids from 4294967296"),
        ({"kv": ReceivePages(0, 1, [0.5])}, "group 'kv': pages: .*float64"),
        ({"kv": ReceivePages(0, 1, [[1]])}, "group 'kv': pages: got 2 dimensions"),
        ({"kv": ReceivePages(0, 1, [True])}, "group 'kv': pages: .*bool"),
        ({"kv": ReceivePages(0, 1, [1 << 70])}, "group 'kv': pages: .*object"),
        ({"kv": ReceivePages(2, 1, [1])}, r"token range \[2, 1\)"),
        ({"kv": ReceivePages(-1, 1, [1])}, "request: "),
        ({"kv": ReceivePages(0, 1 << 40, [1])}, "request: "),
        ({"kv": ReceivePages(0, "1", [1])}, "group 'kv': tokens"),  # type: ignore[arg-type]
        ({"kv": ReceivePages(0, 1, [1], have=((0,),))}, "group 'kv': have"),  # type: ignore[arg-type]
        ({"": ReceivePages(0, 1, [1])}, "request: "),
    ],
)
def test_pages_that_cannot_be_are_the_callers_error(
    tmp_path: Path, memory: HostMemory, groups: dict[str, ReceivePages], told: str
) -> None:
    with (
        FakeAgent(tmp_path, accept_all, is_prefill=False) as agent,
        DecodeClient.connect(tmp_path, memory, layout()) as client,
    ):
        with pytest.raises(ContractError, match=told):
            client.open(ticket(A), groups)
        assert len(agent.requests) == 1, "nothing was sent after AttachWorker"


def test_text_that_is_no_ticket(tmp_path: Path, memory: HostMemory) -> None:
    with (
        FakeAgent(tmp_path, accept_all, is_prefill=False),
        DecodeClient.connect(tmp_path, memory, layout()) as client,
        pytest.raises(ProtocolError, match=r"^ticket: "),
    ):
        client.open("not a ticket", {})
