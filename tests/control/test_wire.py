"""The wire: every message has the bytes it always had, and nothing but messages is understood."""

from __future__ import annotations

import struct

import msgpack
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from kvxfer.control.codec import (
    KINDS,
    MAX_FRAME_BYTES,
    MAX_MESSAGES_PER_FRAME,
    decode,
    decode_ticket,
    encode,
    encode_all,
    encode_ticket,
    split,
    unpack,
)
from kvxfer.control.handoff_messages import pack
from kvxfer.control.messages import MAX_AUX_BYTES, PROTOCOL_VERSION, Credits, Finished, Ok
from kvxfer.errors import ProtocolError
from tests.control.examples import EXAMPLES, HANDOFF_EXAMPLES, TICKET, TRANSFER
from tests.control.golden import HANDOFF_HEX, REQUEST_ID, TICKET_TEXT, WIRE_HEX

FRAMES = {kind: bytes.fromhex(text) for kind, text in WIRE_HEX.items()}


def test_every_kind_has_golden_bytes() -> None:
    assert set(WIRE_HEX) == set(EXAMPLES) == set(KINDS)


@pytest.mark.parametrize("kind", sorted(EXAMPLES))
def test_golden_bytes(kind: str) -> None:
    assert encode(EXAMPLES[kind], REQUEST_ID).hex() == WIRE_HEX[kind]
    assert decode(FRAMES[kind]) == (EXAMPLES[kind], REQUEST_ID)


@pytest.mark.parametrize("kind", sorted(EXAMPLES))
def test_a_plain_msgpack_library_reads_maps_with_string_keys(kind: str) -> None:
    envelope = msgpack.unpackb(FRAMES[kind], strict_map_key=True)
    assert list(envelope) == ["v", "kind", "id", "body"]
    assert (envelope["v"], envelope["kind"], envelope["id"]) == (PROTOCOL_VERSION, kind, REQUEST_ID)
    assert list(envelope["body"]) == list(EXAMPLES[kind].__struct_fields__)
    # And what such a library writes is understood.
    assert decode(msgpack.packb(envelope)) == (EXAMPLES[kind], REQUEST_ID)


@pytest.mark.parametrize("name", sorted(HANDOFF_EXAMPLES))
def test_handoff_golden_bytes(name: str) -> None:
    assert pack(HANDOFF_EXAMPLES[name]).hex() == HANDOFF_HEX[name]
    frame = bytes.fromhex(HANDOFF_HEX[name])
    assert struct.unpack("!I", frame[:4]) == (len(frame) - 4,)
    assert all(isinstance(key, str) for key in msgpack.unpackb(frame[4:]))


def test_messages_that_leave_together_are_a_list_of_what_each_would_be_alone() -> None:
    messages = list(EXAMPLES.values())
    (frame,) = encode_all(messages)
    assert msgpack.unpackb(frame) == [msgpack.unpackb(encode(message)) for message in messages]
    assert [unpack(envelope) for envelope in split(frame)] == [(message, 0) for message in messages]
    assert encode_all([]) == []
    assert encode_all(messages[:1]) == [encode(messages[0])]
    with pytest.raises(ProtocolError, match=f"frame: got {len(messages)} messages, expected one"):
        decode(frame)


def test_frames_that_are_shared_stay_short() -> None:
    aux = Finished(transfer=TRANSFER, generation=1, num_chunks=1, num_segments=1, num_bytes=1, aux=bytes(40_000))
    frames = encode_all([*[Ok()] * 70, aux, Ok(), aux])
    assert [[type(unpack(each)[0]) for each in split(frame)] for frame in frames] == [
        [Ok] * MAX_MESSAGES_PER_FRAME,
        [Ok] * (70 - MAX_MESSAGES_PER_FRAME) + [Finished, Ok],
        [Finished],
    ]


@pytest.mark.parametrize("num_messages", [0, MAX_MESSAGES_PER_FRAME + 1])
def test_a_list_of_none_or_of_too_many_is_refused(num_messages: int) -> None:
    frame = msgpack.packb([msgpack.unpackb(encode(Ok()))] * num_messages)
    with pytest.raises(ProtocolError, match=r"^envelope: "):
        split(frame)


def test_one_bad_message_of_a_frame_is_nothing_to_the_others() -> None:
    good, envelope = msgpack.unpackb(encode(Ok())), {"v": PROTOCOL_VERSION, "kind": "nonsense", "id": 0, "body": 7}
    found = split(msgpack.packb([good, envelope, good]))
    assert unpack(found[0]) == unpack(found[2]) == (Ok(), 0)
    with pytest.raises(ProtocolError, match="kind: got 'nonsense'"):
        unpack(found[1])


def test_ticket_text() -> None:
    assert encode_ticket(TICKET) == TICKET_TEXT
    assert decode_ticket(TICKET_TEXT) == TICKET
    assert TICKET_TEXT.isascii()


@pytest.mark.parametrize(
    ("kind", "field", "value"),
    [
        ("credits", "generation", -1),
        ("credits", "generation", 1 << 63),
        ("credits", "generation", "9"),
        ("credits", "generation", 9.5),
        ("credits", "generation", None),
        ("credits", "transfer", TRANSFER.upper()),
        ("credits", "transfer", TRANSFER[:-1]),
        ("credits", "slots", [1 << 16]),
        ("credits", "slots", [0] * 4097),
        ("credits", "slots", {"0": 1}),
        ("segment", "chunk", 1 << 40),
        ("segment", "segment", -(1 << 31)),
        ("chunk", "ranges", [[5, 4]]),
        ("chunk", "ranges", [[0, 1, 2]]),
        ("chunk", "ranges", [[0, 1]] * 65),
        ("grant", "remaining_s", float("nan")),
        ("grant", "remaining_s", float("inf")),
        ("grant", "remaining_s", -0.5),
        ("abort_leg", "reason", "because"),
        ("finished", "aux", bytes(MAX_AUX_BYTES + 1)),
        ("finished", "aux", "text"),
        ("hello", "slot_bytes", 0),
        ("hello", "layout", {}),
        ("submit", "groups", [[]]),
        ("ok", "surplus", 1),
    ],
)
def test_a_bad_field_is_refused_by_name(kind: str, field: str, value: object) -> None:
    envelope = msgpack.unpackb(FRAMES[kind])
    envelope["body"][field] = value
    with pytest.raises(ProtocolError, match=rf"^{kind}: .*{field}|^{kind}: .*TokenRange|^{kind}: token range"):
        decode(msgpack.packb(envelope))


@pytest.mark.parametrize("field", ["transfer", "generation", "slots"])
def test_a_missing_field_is_refused_by_name(field: str) -> None:
    envelope = msgpack.unpackb(FRAMES["credits"])
    del envelope["body"][field]
    with pytest.raises(ProtocolError, match=field):
        decode(msgpack.packb(envelope))


@pytest.mark.parametrize(
    ("change", "told"),
    [
        ({"v": PROTOCOL_VERSION + 1}, f"got {PROTOCOL_VERSION + 1}, expected {PROTOCOL_VERSION}"),
        ({"v": "1"}, r"\$\.v"),
        ({"kind": "helo"}, "got 'helo', expected one of"),
        ({"kind": "x" * 33}, r"\$\.kind"),
        ({"id": -1}, r"\$\.id"),
        ({"id": 1 << 54}, r"\$\.id"),
        ({"body": []}, "^ok: "),
        ({"trailer": 1}, "trailer"),
    ],
)
def test_a_bad_envelope_is_refused(change: dict[str, object], told: str) -> None:
    envelope = {"v": PROTOCOL_VERSION, "kind": "ok", "id": 0, "body": {}} | change
    with pytest.raises(ProtocolError, match=told):
        decode(msgpack.packb(envelope))


@pytest.mark.parametrize(
    "frame",
    [
        b"",
        b"GET / HTTP/1.1\r\n\r\n",
        b"\x91" * 1_000_000,
        b"\x81\xa1v" * 300_000,
        b"\xdd\xff\xff\xff\xff",
        b"\xdf\xff\xff\xff\xff",
        b"\xc6\xff\xff\xff\xff",
        FRAMES["ok"] + b"\x00",
        FRAMES["credits"].replace(b"\xa5slots\x92", b"\xa5slots\xdd\x7f\xff\xff\xff"),
        bytes(MAX_FRAME_BYTES + 1),
    ],
    ids=[
        "empty",
        "http",
        "deep lists",
        "deep maps",
        "list of 2^32",
        "map of 2^32",
        "4 GiB",
        "tail",
        "2^31",
        "too long",
    ],
)
def test_a_hostile_frame_is_refused(frame: bytes) -> None:
    with pytest.raises(ProtocolError):
        decode(frame)


def _decode_or_refuse(frame: bytes) -> None:
    """Any outcome but a message or `ProtocolError` fails the test; a message must survive a round trip."""
    try:
        message, request_id = decode(frame)
    except ProtocolError:
        return
    again = encode(message, request_id)
    assert encode(*decode(again)) == again  # as bytes: a float may be NaN


@settings(max_examples=200, deadline=None)
@given(st.binary(max_size=200))
def test_random_bytes(data: bytes) -> None:
    _decode_or_refuse(data)


@settings(max_examples=250, deadline=None)
@given(st.sampled_from(sorted(FRAMES)), st.data())
def test_spoiled_bytes(kind: str, data: st.DataObject) -> None:
    frame = bytearray(FRAMES[kind])
    for position in data.draw(st.lists(st.integers(0, len(frame) - 1), min_size=1, max_size=4)):
        frame[position] = data.draw(st.integers(0, 255))
    _decode_or_refuse(bytes(frame))


@pytest.mark.parametrize("kind", sorted(FRAMES))
def test_every_truncation_is_refused(kind: str) -> None:
    for length in range(len(FRAMES[kind])):
        with pytest.raises(ProtocolError):
            decode(FRAMES[kind][:length])


JSON_LIKE = st.recursive(
    st.none()
    | st.booleans()
    | st.integers(-(1 << 63), (1 << 64) - 1)
    | st.floats()
    | st.text(max_size=8)
    | st.binary(max_size=8),
    lambda inner: st.lists(inner, max_size=4) | st.dictionaries(st.text(max_size=8), inner, max_size=4),
    max_leaves=8,
)


@settings(max_examples=250, deadline=None)
@given(st.sampled_from(sorted(FRAMES)), st.data())
def test_wrong_types_anywhere(kind: str, data: st.DataObject) -> None:
    """One place of a good frame, at any depth, gets another value."""
    node = envelope = msgpack.unpackb(FRAMES[kind])
    while True:
        keys = list(node) if isinstance(node, dict) else list(range(len(node)))
        if not keys:
            return
        key = data.draw(st.sampled_from(keys))
        if not isinstance(node[key], dict | list) or data.draw(st.booleans()):
            break
        node = node[key]
    node[key] = data.draw(JSON_LIKE)
    _decode_or_refuse(msgpack.packb(envelope))


@settings(max_examples=100, deadline=None)
@given(st.text(max_size=60) | st.binary(max_size=60).map(lambda raw: raw.decode("latin-1")))
def test_text_that_is_no_ticket(text: str) -> None:
    with pytest.raises(ProtocolError, match=r"^ticket: "):
        decode_ticket(text)


def test_bounds_are_inclusive() -> None:
    """The largest list and byte string that are allowed do pass."""
    slots = tuple(range(4096))
    credit = Credits(transfer=TRANSFER, generation=1 << 53, region_id=0, first=0, slots=slots)
    assert decode(encode(credit))[0] == credit
    finished = Finished(transfer=TRANSFER, generation=0, num_chunks=0, num_segments=0, num_bytes=0, aux=bytes(65536))
    assert decode(encode(finished))[0] == finished
    assert decode(encode(Ok(), 1 << 53)) == (Ok(), 1 << 53)
