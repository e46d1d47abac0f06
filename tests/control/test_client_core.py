"""The clients' core, without I/O: answers, events, and one terminal event for each transfer whatever happens."""

from __future__ import annotations

import pytest

from kvxfer.control.client_requests import submit_request
from kvxfer.control.codec import encode
from kvxfer.control.messages import (
    AbortTransfer,
    Attached,
    AttachWorker,
    Credits,
    NewTicket,
    Ok,
    Open,
    Refused,
    Submit,
    TicketMade,
    TransferEvent,
)
from kvxfer.errors import AgentLostError, ContractError, RefusedError
from kvxfer.transfer import EventKind, Reason
from tests.control.core_agent import A, Agent, B, C, event, open_, submit, ticket

TERMINAL = sorted(set(EventKind) - {EventKind.SOURCE_FREE}, key=lambda kind: kind.value)


def test_a_request_and_its_answer(agent: Agent) -> None:
    core = agent.core
    first = core.request(AttachWorker(pool=A))
    second = core.request(NewTicket(deadline_s=1.0))
    assert agent.asked() == [(AttachWorker(pool=A), first), (NewTicket(deadline_s=1.0), second)]
    assert core.take_reply(first) is None
    agent.say(TicketMade(ticket=ticket(A)), second)
    agent.say(Attached(incarnation=B), first)
    assert core.take_reply(first) == Attached(incarnation=B)
    assert core.take_reply(second) == TicketMade(ticket=ticket(A))
    assert core.take_reply(second) is None
    assert core.open_transfers == {A}


def test_a_refusal_opens_nothing(agent: Agent) -> None:
    request_id = agent.core.request(open_(A))
    agent.say(Refused(reason=Reason.STALE, detail="no such run", field="incarnation"), request_id)
    with pytest.raises(RefusedError, match=r"stale \(incarnation\): no such run") as caught:
        agent.core.take_reply(request_id)
    assert (caught.value.reason, caught.value.detail) == (Reason.STALE, "no such run")
    assert agent.core.open_transfers == frozenset()


@pytest.mark.parametrize("request_", [submit(A), open_(A)], ids=["submit", "open"])
def test_the_first_accepted_request_opens(agent: Agent, request_: Submit | Open) -> None:
    request_id = agent.core.request(request_)
    assert agent.core.open_transfers == frozenset()
    agent.say(Ok(), request_id)
    assert agent.core.open_transfers == {A}


@pytest.mark.parametrize("kind", TERMINAL)
def test_one_terminal_event_ends_a_transfer(agent: Agent, kind: EventKind) -> None:
    agent.opened(A)
    agent.say(event(A, kind))
    assert agent.core.open_transfers == frozenset()
    for late in EventKind:
        agent.say(event(A, late))
    assert agent.core.dropped == len(EventKind)
    assert agent.core.take_event() == event(A, kind)
    assert agent.core.take_event() is None


def test_events_of_others_wait_for_their_own_callers(agent: Agent) -> None:
    agent.opened(A)
    agent.opened(B)
    agent.say(event(A, EventKind.SOURCE_FREE))
    agent.say(event(B, EventKind.FAILED, Reason.DEADLINE))
    assert agent.core.take_terminal(A) is None
    agent.say(event(A))
    assert agent.core.take_terminal(A) == event(A)
    assert agent.core.take_event() == event(B, EventKind.FAILED, Reason.DEADLINE)
    assert agent.core.take_event() is None, "the source_free of A went with its terminal event"


def test_next_event_keeps_the_order_of_each_transfer(agent: Agent) -> None:
    agent.opened(A)
    agent.say(event(A, EventKind.SOURCE_FREE))
    agent.say(event(A))
    assert agent.core.take_event() == event(A, EventKind.SOURCE_FREE)
    assert agent.core.take_event() == event(A)


def test_waiting_for_what_is_not_open_is_the_callers_error(agent: Agent) -> None:
    with pytest.raises(ContractError, match="not open here"):
        agent.core.take_terminal(A)
    agent.opened(A)
    agent.say(event(A))
    assert agent.core.take_terminal(A) == event(A)
    with pytest.raises(ContractError, match="not open here"):
        agent.core.take_terminal(A)


def test_what_means_nothing_is_dropped_and_counted(agent: Agent) -> None:
    request_id = agent.core.request(open_(A))
    for frame in [
        b"",
        b"\xc1",
        encode(Ok(), request_id + 1),
        encode(Ok(), 0),
        encode(Attached(incarnation=A), request_id),
        encode(event(B)),
        encode(Credits(transfer=A, generation=1, region_id=0, first=0, slots=())),
        encode(open_(A), request_id),
    ]:
        agent.core.receive(frame)
    assert agent.core.dropped == 8
    assert agent.core.take_reply(request_id) is None
    agent.say(Ok(), request_id)
    agent.say(Ok(), request_id)
    assert agent.core.take_reply(request_id) == Ok()
    assert agent.core.dropped == 9


def test_a_lost_agent_fails_each_open_transfer_once(agent: Agent) -> None:
    for transfer in (A, B, C):
        agent.opened(transfer)
    agent.say(event(B))
    pending = agent.core.request(open_("d" * 32))
    agent.core.agent_lost("it died")
    agent.core.agent_lost("it died twice")
    agent.say(event(A, EventKind.LANDED))  # a late word
    assert agent.core.dropped == 1
    assert agent.core.open_transfers == frozenset()
    assert agent.asked() == []
    lost = {
        transfer: TransferEvent(transfer=transfer, event=EventKind.FAILED, reason=Reason.AGENT_LOST, detail="it died")
        for transfer in (A, C)
    }
    assert agent.core.take_terminal(C) == lost[C]
    assert [agent.core.take_event(), agent.core.take_event()] == [event(B), lost[A]]
    for call in (
        agent.core.take_event,
        lambda: agent.core.take_reply(pending),
        lambda: agent.core.request(open_(A)),
    ):
        with pytest.raises(AgentLostError, match="it died"):
            call()
    agent.core.give_up(pending)
    assert agent.core.open_transfers == frozenset()


def test_an_answer_that_came_before_the_loss_still_counts(agent: Agent) -> None:
    request_id = agent.core.request(NewTicket(deadline_s=1.0))
    agent.say(TicketMade(ticket=ticket(A)), request_id)
    agent.core.agent_lost("it died")
    assert agent.core.take_reply(request_id) == TicketMade(ticket=ticket(A))
    failed = agent.core.take_terminal(A)
    assert failed is not None
    assert failed.reason is Reason.AGENT_LOST


def test_a_closed_client_invents_no_end(agent: Agent) -> None:
    """The agent may still touch the pages: nothing here can say that they are quiet."""
    agent.opened(A)
    agent.core.close()
    agent.core.agent_lost("too late")
    assert agent.core.open_transfers == {A}
    with pytest.raises(AgentLostError, match="this client was closed"):
        agent.core.take_terminal(A)
    with pytest.raises(AgentLostError, match="this client was closed"):
        agent.core.take_event()


def test_an_abort_of_what_has_just_ended_is_no_error(agent: Agent) -> None:
    agent.opened(A)
    request_id = agent.core.request(AbortTransfer(transfer=A))
    agent.say(event(A))
    agent.say(Refused(reason=Reason.UNKNOWN_TRANSFER, detail="ended"), request_id)
    assert agent.core.take_reply(request_id) == Ok()
    assert agent.core.take_terminal(A) == event(A)


@pytest.mark.parametrize(
    "request_",
    [
        NewTicket(deadline_s=-1.0),
        NewTicket(deadline_s=float("nan")),
        AttachWorker(pool="short"),
        submit_request(A, {}, None, False, bytes(65537), 60.0),
        submit_request(A, {}, (0, 1 << 21), False, b"", 60.0),
        submit_request(A, {}, None, "yes", b"", 60.0),  # type: ignore[arg-type]
        submit_request(A, {}, None, False, object(), 60.0),  # type: ignore[arg-type]
    ],
    ids=["negative", "nan", "pool", "aux", "layers", "last", "type"],
)
def test_what_the_agent_could_not_read_is_refused_here(
    agent: Agent, request_: NewTicket | AttachWorker | Submit
) -> None:
    with pytest.raises(ContractError, match=r"^request: "):
        agent.core.request(request_)
    assert agent.asked() == []
