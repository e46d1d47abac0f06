"""Requests that nobody waits for any more: whatever the agent made of them ends, and exactly once."""

from __future__ import annotations

import pytest

from kvxfer.control.messages import (
    AbortTransfer,
    Message,
    NewTicket,
    Ok,
    Open,
    Refused,
    Submit,
    TicketMade,
    TransferEvent,
)
from kvxfer.transfer import EventKind, Reason
from tests.control.core_agent import A, Agent, B, event, open_, submit, ticket


@pytest.mark.parametrize("request_", [submit(A), open_(A)], ids=["submit", "open"])
def test_giving_up_leaves_the_transfer_open_and_aborts_it(agent: Agent, request_: Submit | Open) -> None:
    core = agent.core
    request_id = core.request(request_)
    core.give_up(request_id)
    (_, (abort, abort_id)) = agent.asked()
    assert abort == AbortTransfer(transfer=A)
    assert core.open_transfers == {A}
    agent.say(Ok(), request_id)
    agent.say(Ok(), abort_id)
    assert core.take_event() is None
    agent.say(event(A, EventKind.ABORTED, Reason.ABORTED_BY_WORKER))
    assert core.take_event() == event(A, EventKind.ABORTED, Reason.ABORTED_BY_WORKER)
    assert core.open_transfers == frozenset()


def test_a_refusal_that_comes_too_late_ends_the_transfer(agent: Agent) -> None:
    core = agent.core
    request_id = core.request(open_(A))
    core.give_up(request_id)
    (_, (_, abort_id)) = agent.asked()
    agent.say(Refused(reason=Reason.STALE, detail="no"), request_id)
    agent.say(Refused(reason=Reason.UNKNOWN_TRANSFER, detail="never heard"), abort_id)
    assert core.take_event() == TransferEvent(transfer=A, event=EventKind.FAILED, reason=Reason.STALE, detail="no")
    assert core.take_event() is None


def test_a_late_refusal_does_not_end_what_is_open_for_other_reasons(agent: Agent) -> None:
    """Its pages are still the agent's."""
    core = agent.core
    agent.opened(A)
    request_id = core.request(submit(A))
    core.give_up(request_id)
    agent.say(Refused(reason=Reason.STALE, detail="no"), request_id)
    assert core.open_transfers == {A}
    assert core.take_event() is None


def test_a_late_acceptance_ends_the_doubt(agent: Agent) -> None:
    core = agent.core
    first = core.request(submit(A))
    core.give_up(first)
    agent.say(Ok(), first)
    second = core.request(submit(A))
    agent.say(Refused(reason=Reason.STALE, detail="no"), second)
    assert core.open_transfers == {A}
    assert core.take_event() is None


@pytest.mark.parametrize("second_answer", [Ok(), Refused(reason=Reason.STALE, detail="no")], ids=["ok", "refused"])
def test_two_doubtful_requests_of_one_transfer(agent: Agent, second_answer: Message) -> None:
    core = agent.core
    first, second = core.request(submit(A)), core.request(submit(A))
    core.give_up(first)
    core.give_up(second)
    agent.say(Refused(reason=Reason.STALE, detail="no"), first)
    assert core.take_event() is None, "the second may have been accepted"
    agent.say(second_answer, second)
    if isinstance(second_answer, Ok):
        assert core.open_transfers == {A}
        assert core.take_event() is None
    else:
        assert core.open_transfers == frozenset()
        assert core.take_event() is not None
        assert core.take_event() is None


def test_a_ticket_that_nobody_waits_for_is_aborted(agent: Agent) -> None:
    core = agent.core
    request_id = core.request(NewTicket(deadline_s=1.0))
    core.give_up(request_id)
    agent.asked()
    agent.say(TicketMade(ticket=ticket(A)), request_id)
    ((abort, _),) = agent.asked()
    assert abort == AbortTransfer(transfer=A)
    agent.say(event(A, EventKind.ABORTED))
    assert core.open_transfers == frozenset()
    assert core.take_event() is None


def test_a_caller_that_is_cancelled_after_the_answer_came(agent: Agent) -> None:
    core = agent.core
    made, opened = core.request(NewTicket(deadline_s=1.0)), core.request(open_(B))
    agent.say(TicketMade(ticket=ticket(A)), made)
    agent.say(Ok(), opened)
    agent.asked()
    core.give_up(made)
    core.give_up(opened)
    assert [request for request, _ in agent.asked()] == [AbortTransfer(transfer=A), AbortTransfer(transfer=B)]
    assert core.open_transfers == {B}, "nobody has seen the ticket of A"
