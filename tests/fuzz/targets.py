"""What is fuzzed: each target takes any bytes and fails only where a promise is broken.

The promise of every parser: it returns something that reads back to the same, or raises the one error that its callers
handle. `SEEDS` has valid input of each target.
"""

from __future__ import annotations

import contextlib
import os
from collections.abc import Callable
from pathlib import Path

import msgspec

from kvxfer.control.auth import AllowList, read_secret_key
from kvxfer.control.codec import decode, decode_ticket, encode, encode_all, encode_ticket, split, unpack
from kvxfer.control.handoff_listener import _decode_offer
from kvxfer.control.handoff_messages import (
    HANDOFF_VERSION,
    LENGTH,
    PoolAccepted,
    PoolOffer,
    PoolRefused,
    SharedStream,
    SlotsMoved,
    decode_word,
    pack,
)
from kvxfer.control.messages import DecodeToPrefill, Hello, Open, PrefillToDecode, Submit
from kvxfer.control.peer_channel import new_keys
from kvxfer.control.pull_share import PullOffer, PullRefusal, PullRequest, _parse_answer, _request_decoder
from kvxfer.control.shared_memory import SharedMemory
from kvxfer.errors import ConfigError, HandoffError, KvxferError, ProtocolError, RefusedError
from kvxfer.layout import Group, LayerRange, PoolLayout, Shard
from kvxfer.ops.config import DecodeConfig, PrefillConfig, dump_config, load_decode_config, load_prefill_config
from kvxfer.prefill.pairing import check_hello
from kvxfer.transports._metadata import Metadata, PublishedRegion, decode_metadata, encode_metadata
from tests.control.examples import EXAMPLES, LAYOUT, POOL, PREFILLER, TICKET
from tests.decode.driver import DecodeDriver
from tests.prefill.driver import PrefillDriver

# In memory, so that nothing is left behind however a run ends.
_FILE = Path(f"/proc/self/fd/{os.memfd_create('fuzz')}")


def fuzz_frame(data: bytes) -> None:
    """Control frames, of one message and of several."""
    try:
        opened = [unpack(envelope) for envelope in split(data)]
    except ProtocolError:
        return
    for message, request_id in opened:
        assert decode(encode(message, request_id)) == (message, request_id)


def fuzz_ticket(data: bytes) -> None:
    """Tickets as text."""
    try:
        ticket = decode_ticket(data.decode("latin-1"))
    except ProtocolError:
        return
    assert decode_ticket(encode_ticket(ticket)) == ticket


def fuzz_handoff(data: bytes) -> None:
    """A worker's offer of its pool."""
    try:
        offer = _decode_offer(data)
    except HandoffError:
        return
    assert offer.version == HANDOFF_VERSION
    assert all(group.extent_bytes <= offer.num_bytes for group in offer.layout.groups)


def fuzz_handoff_answer(data: bytes) -> None:
    """What an agent says on the hand-off connection."""
    try:
        word = decode_word(data)
    except HandoffError:
        return
    assert decode_word(pack(word)[LENGTH.size :]) == word


def fuzz_metadata(data: bytes) -> None:
    """What a transport tells of itself."""
    try:
        metadata = decode_metadata(data, "loopback")
    except ProtocolError:
        return
    assert decode_metadata(encode_metadata(metadata), "loopback") == metadata


def fuzz_pull(data: bytes) -> None:
    """Both packets of the pull path."""
    with contextlib.suppress(msgspec.MsgspecError):
        _request_decoder.decode(data)
    try:
        _parse_answer(data, [], 0)
    except HandoffError:
        return
    raise AssertionError("an answer without descriptors was taken")


def fuzz_config(data: bytes) -> None:
    """Configuration files of both agents."""
    _FILE.write_bytes(data)
    for load in (load_prefill_config, load_decode_config):
        try:
            config: PrefillConfig | DecodeConfig = load(_FILE)
        except ConfigError:
            continue
        _FILE.write_text(dump_config(config), encoding="utf-8")
        assert load(_FILE) == config
        _FILE.write_bytes(data)


def fuzz_keys(data: bytes) -> None:
    """Allow-lists and key files."""
    _FILE.write_bytes(data)
    _FILE.chmod(0o600)
    for read in (AllowList, read_secret_key):
        try:
            read(_FILE)
        except ConfigError:
            continue


def fuzz_hello(data: bytes) -> None:
    """A hello that parses, up to the decision about it."""
    try:
        message, _ = decode(data)
    except ProtocolError:
        return
    if isinstance(message, Hello):
        try:
            info = check_hello(message, incarnation=PREFILLER, transport="nixl", layout=_SOURCE, slot_bytes=8 << 20)
        except RefusedError:
            return
        assert info.segment_bytes <= message.slot_bytes


def fuzz_prefill_core(data: bytes) -> None:
    """A message of a paired decode agent, while a transfer runs."""
    driver = PrefillDriver()
    peer = driver.pair()
    driver.core.new_ticket(TICKET.transfer, 60.0, driver.now)
    driver.grant(peer, TICKET.transfer, 24, generation=9)
    driver.submit(TICKET.transfer, 0, 16, last=False)
    try:
        message, _ = decode(data)
        if isinstance(message, Submit):
            driver.core.submit(message, driver.now)
        elif isinstance(message, DecodeToPrefill):
            driver.receive(peer, message)
    except KvxferError:
        return
    driver.core.tick(driver.now + 1)


def fuzz_decode_core(data: bytes) -> None:
    """A message of a paired prefill agent, while a transfer runs."""
    driver = DecodeDriver()
    source = driver.pair()
    driver.open((source,), 24)
    (transfer,) = driver.core.receives
    try:
        message, _ = decode(data)
        if isinstance(message, Open):
            driver.core.open(message, driver.now)
        elif isinstance(message, PrefillToDecode):
            known = getattr(message, "transfer", None) == TICKET.transfer
            renamed = msgspec.structs.replace(message, transfer=transfer, generation=1) if known else message
            driver.core.receive(source.incarnation, renamed, driver.now)
    except KvxferError:
        return
    driver.core.tick(driver.now + 1)


_SOURCE = PoolLayout(groups=LAYOUT.groups[:1], shard=Shard(), dtype_tag="bf16")
_DESTINATION = PoolLayout(groups=LAYOUT.groups[:1], shard=LAYOUT.shard, dtype_tag="bf16")
_HELLO = EXAMPLES["hello"]
assert isinstance(_HELLO, Hello)
_FITTING_HELLO = msgspec.structs.replace(_HELLO, layout=_DESTINATION, region_bytes=1 << 30)
_OFFER = PoolOffer(
    num_bytes=1 << 30,
    layout=PoolLayout(
        groups=(
            Group(
                name="kv",
                layers=LayerRange(0, 2),
                layer_stride_bytes=1 << 20,
                page_stride_bytes=4096,
                num_pages=16,
                page_tokens=4,
                row_stride_bytes=64,
                row_bytes=64,
            ),
        ),
        shard=Shard(),
        dtype_tag="bf16",
    ),
)
_METADATA = Metadata(
    "loopback", "tcp://127.0.0.1:1", [PublishedRegion(1, 1 << 20, 4096, 5, 6, 7)], pid=9, host="h", engine=b"blob"
)
_PREFILL_TOML = dump_config(PrefillConfig(socket_dir="/run/kvxfer")).encode()
_DECODE_TOML = (dump_config(DecodeConfig(socket_dir="/run/kvxfer")) + "\n[transport.options]\na = 1\n").encode()
_FRAMES = tuple(encode(message, 7) for message in EXAMPLES.values())
_CORE_FRAMES = tuple(encode(EXAMPLES[kind]) for kind in sorted(EXAMPLES) if kind not in ("hello", "welcome"))

TARGETS: dict[str, Callable[[bytes], None]] = {
    "frame": fuzz_frame,
    "ticket": fuzz_ticket,
    "handoff": fuzz_handoff,
    "handoff_answer": fuzz_handoff_answer,
    "metadata": fuzz_metadata,
    "pull": fuzz_pull,
    "config": fuzz_config,
    "keys": fuzz_keys,
    "hello": fuzz_hello,
    "prefill_core": fuzz_prefill_core,
    "decode_core": fuzz_decode_core,
}
_encode = msgspec.msgpack.encode
SEEDS: dict[str, tuple[bytes, ...]] = {
    "frame": (*_FRAMES, *encode_all(list(EXAMPLES.values()))),
    "ticket": (encode_ticket(TICKET).encode(),),
    "handoff": (_encode(_OFFER), _encode(msgspec.structs.replace(_OFFER, placement="worker"))),
    "handoff_answer": (
        _encode(PoolAccepted(pool=POOL)),
        _encode(
            PoolAccepted(
                pool=POOL, stream=SharedStream(ring_bytes=1 << 24, num_lanes=16, slots=SharedMemory(num_bytes=1 << 26))
            )
        ),
        _encode(SlotsMoved(move=3, slots=SharedMemory(num_bytes=1 << 26))),
        _encode(PoolRefused(detail="no")),
    ),
    "metadata": (encode_metadata(_METADATA),),
    "pull": (
        _encode(PullRequest(incarnation=PREFILLER, pool=POOL)),
        _encode(PullOffer(pool=SharedMemory(num_bytes=1 << 20), lease_bytes=1 << 15)),
        _encode(PullRefusal(detail="no")),
    ),
    "config": (_PREFILL_TOML, _DECODE_TOML),
    "keys": (f"# a\n{new_keys().public} decode-0\n".encode(), new_keys().secret.encode()),
    "hello": (encode(_HELLO), encode(_FITTING_HELLO)),
    "prefill_core": _CORE_FRAMES,
    "decode_core": _CORE_FRAMES,
}
assert SEEDS.keys() == TARGETS.keys()
