"""A worker's requests as its engine writes them: token ranges and page ids, checked and turned into messages."""

from __future__ import annotations

import operator
import os
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import SupportsIndex

import numpy.typing as npt

from kvxfer.control.codec import decode_ticket
from kvxfer.control.message_base import MAX_DEADLINE_S, MAX_DECODE_GROUPS
from kvxfer.control.messages import (
    Attached,
    GroupPages,
    NewTicket,
    Open,
    RejectTicket,
    Source,
    Submit,
    Ticket,
    WorkerReply,
)
from kvxfer.control.pages import encode_pages
from kvxfer.errors import ContractError, PairingError
from kvxfer.layout import LayerRange, TokenRange

_ID = re.compile("[0-9a-f]{32}")


@dataclass(frozen=True, slots=True, eq=False)
class ChunkPages:
    """Where one chunk's rows of a group lie.

    `pages` `[num_pages]`, any integers in [0, 2^32): the pages that hold the local rows of tokens
    `[first_token, end_token)`, in order, from the page of the first such row to the page of the last. A state group
    has the range `[0, 1)` and one page, its slot.
    """

    first_token: int
    end_token: int
    pages: npt.ArrayLike


@dataclass(frozen=True, slots=True, eq=False)
class ReceivePages:
    """Where a group's rows shall go: `pages` as in `ChunkPages`.

    `have`: token ranges `[first, end)` inside whose rows are in the pages already and need not be sent.
    """

    first_token: int
    end_token: int
    pages: npt.ArrayLike
    have: tuple[tuple[int, int], ...] = ()


def transfer_id(transfer: Ticket | str) -> str:
    """The transfer that a ticket, a ticket's text or an id names. Raises `ProtocolError` for other text."""
    if isinstance(transfer, str) and _ID.fullmatch(transfer):
        return transfer
    return as_ticket(transfer).transfer


def as_ticket(ticket: Ticket | str) -> Ticket:
    """A ticket from itself or from its text. Raises `ProtocolError` for text that is no ticket, `ContractError` for
    what is neither."""
    found = decode_ticket(ticket) if isinstance(ticket, str) else ticket
    if not isinstance(found, Ticket):
        raise ContractError(f"ticket: got {type(found).__name__}, expected a Ticket or its text")
    return found


def ticket_request(sources: Sequence[Source], num_decode_groups: int, deadline_s: float) -> NewTicket:
    """Ask for a ticket that names `sources` besides the agent itself. Raises `ContractError`."""
    if not 1 <= num_decode_groups <= MAX_DECODE_GROUPS:
        raise ContractError(f"num_decode_groups: got {num_decode_groups}, expected 1 to {MAX_DECODE_GROUPS}")
    return NewTicket(sources=tuple(sources), num_decode_groups=num_decode_groups, deadline_s=_deadline(deadline_s))


def reject_request(ticket: Ticket | str) -> RejectTicket:
    """Tell the sources of `ticket` that nobody will open it. Raises `ProtocolError` for text that is no ticket."""
    return RejectTicket(ticket=as_ticket(ticket))


def submit_request(
    transfer: Ticket | str,
    groups: Mapping[str, ChunkPages],
    layers: tuple[int, int] | None,
    last: bool,
    aux: bytes,
    deadline_s: float,
    ready: int = 0,
) -> Submit:
    """Hand one chunk to the agent; it is complete once the timeline has reached `ready`.

    Raises `ContractError` naming the group and what is wrong with it."""
    return Submit(
        transfer=transfer_id(transfer),
        groups=_groups(groups, ChunkPages),
        layers=None if layers is None else LayerRange(*_pair(layers, "layers")),
        last=last,
        aux=aux,
        deadline_s=_deadline(deadline_s),
        ready=ready,
    )


def open_request(ticket: Ticket | str, groups: Mapping[str, ReceivePages], deadline_s: float) -> Open:
    """Receive a transfer. Raises `ContractError` naming the group and what is wrong with it."""
    return Open(
        ticket=as_ticket(ticket),
        groups=_groups(groups, ReceivePages),
        deadline_s=_deadline(deadline_s),
    )


def _groups(
    groups: Mapping[str, ChunkPages] | Mapping[str, ReceivePages], kind: type[ChunkPages | ReceivePages]
) -> tuple[GroupPages, ...]:
    if not isinstance(groups, Mapping):
        raise ContractError(
            f"groups: got {type(groups).__name__}, expected a mapping of group names to {kind.__name__}"
        )
    return tuple(_group(name, given, kind) for name, given in groups.items())


def _group(name: str, given: ChunkPages | ReceivePages, kind: type[ChunkPages | ReceivePages]) -> GroupPages:
    where = f"group {name!r}"
    if not isinstance(given, kind):
        raise ContractError(f"{where}: got {type(given).__name__}, expected {kind.__name__}")
    have = given.have if isinstance(given, ReceivePages) else ()
    first, end = _pair((given.first_token, given.end_token), f"{where}: tokens")
    return GroupPages(
        name=name,
        tokens=TokenRange(first, end),
        pages=encode_pages(given.pages, where),
        have=tuple(TokenRange(*_pair(tokens, f"{where}: have")) for tokens in have),
    )


def _deadline(deadline_s: float) -> float:
    try:
        seconds = float(deadline_s)
    except (TypeError, ValueError) as error:
        raise ContractError(f"deadline_s: got {deadline_s!r}, expected a number of seconds") from error
    if not 0.0 <= seconds <= MAX_DEADLINE_S:
        raise ContractError(f"deadline_s: got {seconds}, expected 0 to {MAX_DEADLINE_S:.0f} seconds")
    return seconds


def _pair(values: Sequence[SupportsIndex], where: str) -> tuple[int, int]:
    """Two plain ints (numpy's integers are welcome)."""
    try:
        first, end = (operator.index(value) for value in values)
    except (TypeError, ValueError) as error:
        raise ContractError(f"{where}: got {values!r}, expected two integers (first, end)") from error
    return first, end


def check_role(reply: WorkerReply, is_prefill: bool, socket_dir: str | os.PathLike[str]) -> Attached:
    """The agent's answer to `AttachWorker`. Raises `PairingError` where it is an agent of the other role."""
    assert isinstance(reply, Attached)
    if (reply.source is not None) != is_prefill:
        got, expected = ("decode", "prefill") if is_prefill else ("prefill", "decode")
        raise PairingError(f"role: the agent at {socket_dir} is a {got} agent, expected a {expected} agent")
    return reply
