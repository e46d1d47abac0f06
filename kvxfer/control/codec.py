"""Frames: the envelope `{v, kind, id, body}` around every message, in msgpack maps with string keys.

A frame is one envelope, or a list of them: what an agent has to say to a peer within one turn of its loop goes out
together, because each frame costs the processor as much as many messages do.
"""

from __future__ import annotations

import base64
from collections.abc import Sequence
from typing import Annotated, cast, get_args

import msgspec

from kvxfer.control.messages import PROTOCOL_VERSION, Counter, Message, MessageBase, Ticket
from kvxfer.errors import LayoutError, ProtocolError

MAX_FRAME_BYTES = 64 << 20
MAX_MESSAGES_PER_FRAME = 64
_MAX_SHARED_FRAME_BYTES = 64 << 10
"""Of messages that go out together: a long one fills a frame by itself."""
MAX_TICKET_CHARS = 1 << 20
"""More than a ticket of the most sources has."""


def _kind_of(struct: type[MessageBase]) -> str:
    return "".join(f"_{char.lower()}" if char.isupper() else char for char in struct.__name__).lstrip("_")


KINDS: dict[str, type[MessageBase]] = {_kind_of(struct): struct for struct in get_args(Message)}
_KIND_OF: dict[type[MessageBase], str] = {struct: kind for kind, struct in KINDS.items()}


class Envelope(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """A message that was not looked at yet."""

    v: Counter
    kind: Annotated[str, msgspec.Meta(max_length=32)]
    id: Counter
    body: msgspec.Raw


class _Outgoing(msgspec.Struct, frozen=True):
    """An `Envelope` around a message that is to be encoded with it."""

    v: int
    kind: str
    id: int
    body: MessageBase


_Envelopes = Annotated[list[Envelope], msgspec.Meta(min_length=1, max_length=MAX_MESSAGES_PER_FRAME)]
_encoder = msgspec.msgpack.Encoder()
_frame_decoder: msgspec.msgpack.Decoder[Envelope | list[Envelope]] = msgspec.msgpack.Decoder(Envelope | _Envelopes)
_body_decoders = {kind: msgspec.msgpack.Decoder(struct) for kind, struct in KINDS.items()}


def encode(message: Message, request_id: int = 0) -> bytes:
    """One frame. `request_id` ties a reply to its request; 0 for messages that have none."""
    return _encoder.encode(_wrap(message, request_id))


def _wrap(message: Message, request_id: int = 0) -> _Outgoing:
    return _Outgoing(PROTOCOL_VERSION, _KIND_OF[type(message)], request_id, message)


def encode_all(messages: Sequence[Message]) -> list[bytes]:
    """As few frames as can be, in order; messages between agents have no request id."""
    if len(messages) == 1:
        return [encode(messages[0])]
    if 0 < len(messages) <= MAX_MESSAGES_PER_FRAME:
        frame = _encoder.encode([_wrap(message) for message in messages])
        if len(frame) <= _MAX_SHARED_FRAME_BYTES:
            return [frame]
    return _share_frames(messages)


def _share_frames(messages: Sequence[Message]) -> list[bytes]:
    """`encode_all` for what may be too much for one frame."""
    frames: list[bytes] = []
    together: list[bytes] = []
    num_bytes = 0
    for frame in map(encode, messages):
        if together and (len(together) == MAX_MESSAGES_PER_FRAME or num_bytes + len(frame) > _MAX_SHARED_FRAME_BYTES):
            frames.append(_join(together))
            together, num_bytes = [], 0
        together.append(frame)
        num_bytes += len(frame)
    return [*frames, _join(together)] if together else frames


def _join(frames: list[bytes]) -> bytes:
    return frames[0] if len(frames) == 1 else _encoder.encode([msgspec.Raw(frame) for frame in frames])


def split(frame: bytes | memoryview) -> list[Envelope]:
    """The messages of a frame, to be opened one by one: what is wrong with one is nothing to the others. Raises
    `ProtocolError` for what is no frame."""
    if len(frame) > MAX_FRAME_BYTES:
        raise ProtocolError(f"frame: got {len(frame)} bytes, expected at most {MAX_FRAME_BYTES}")
    try:
        found = _frame_decoder.decode(frame)
    except (msgspec.MsgspecError, RecursionError) as error:
        raise ProtocolError(f"envelope: {error}") from error
    return found if isinstance(found, list) else [found]


def unpack(envelope: Envelope) -> tuple[Message, int]:
    """The message and its request id. Raises `ProtocolError` for anything else, saying where."""
    if envelope.v != PROTOCOL_VERSION:
        raise ProtocolError(f"envelope: v: got {envelope.v}, expected {PROTOCOL_VERSION}")
    decoder = _body_decoders.get(envelope.kind)
    if decoder is None:
        raise ProtocolError(f"envelope: kind: got {envelope.kind!r}, expected one of {sorted(KINDS)}")
    try:
        return cast("Message", decoder.decode(envelope.body)), envelope.id
    except (msgspec.MsgspecError, LayoutError, RecursionError) as error:
        raise ProtocolError(f"{envelope.kind}: {error}") from error


def decode(frame: bytes | memoryview) -> tuple[Message, int]:
    """The message in a frame of one, and its request id. Raises `ProtocolError` for anything else, saying where."""
    envelopes = split(frame)
    if len(envelopes) != 1:
        raise ProtocolError(f"frame: got {len(envelopes)} messages, expected one")
    return unpack(envelopes[0])


_ticket_decoder = msgspec.msgpack.Decoder(Ticket)


def encode_ticket(ticket: Ticket) -> str:
    """A ticket as printable text that any router can carry (vLLM: inside `kv_transfer_params`)."""
    return base64.urlsafe_b64encode(_encoder.encode(ticket)).decode("ascii")


def decode_ticket(text: str) -> Ticket:
    """Inverse of `encode_ticket`. Raises `ProtocolError` for text that is no ticket."""
    if len(text) > MAX_TICKET_CHARS:
        raise ProtocolError(f"ticket: got {len(text)} characters, expected at most {MAX_TICKET_CHARS}")
    try:
        return _ticket_decoder.decode(base64.urlsafe_b64decode(text.encode("ascii")))
    except (ValueError, RecursionError) as error:  # msgspec's and base64's errors are ValueErrors
        raise ProtocolError(
            f"ticket: got {len(text)} characters that are no ticket ({error}), expected the whole text that "
            "encode_ticket made of what PrefillClient.ticket returned"
        ) from error
