"""What the parent of a demo or bench and its worker processes say to each other: JSON lines over pipes.

A worker answers each command with exactly one reply, in order, `Progress` lines aside. The end of its standard input
ends it.
"""

from __future__ import annotations

import msgspec

from kvxfer.control.messages import TransferEvent
from kvxfer.layout import PoolLayout


class _Tagged(msgspec.Struct, frozen=True, tag_field="kind", tag=True, kw_only=True):
    pass


class PageList(msgspec.Struct, frozen=True, kw_only=True):
    """Pages of one group that hold the local rows of tokens `[first_token, end_token)`."""

    first_token: int
    end_token: int
    pages: list[int]


class PatternRows(_Tagged, frozen=True, kw_only=True):
    """Rows made by `kvxfer.cli.rows.pattern_rows`."""

    seed: int
    num_layers: int
    num_tokens: int
    row_bytes: int


class FileRows(_Tagged, frozen=True, kw_only=True):
    """Rows in a file: `[num_layers, num_tokens, row_bytes]` uint8."""

    path: str
    num_layers: int
    num_tokens: int
    row_bytes: int


RowSource = PatternRows | FileRows


class Chunk(msgspec.Struct, frozen=True, kw_only=True):
    """One submit of a prefill worker."""

    groups: dict[str, PageList]
    last: bool


# ---- commands ----


class HandOver(_Tagged, frozen=True, kw_only=True):
    """Create a pool whose every byte is `fill`, and hand it to the agent. Answered by `Done`."""

    socket_dir: str
    layout: PoolLayout
    pool_bytes: int
    fill: int


class FillRows(_Tagged, frozen=True, kw_only=True):
    """Prefill worker: write these rows into the pages of a group. Answered by `Done`."""

    group: str
    rows: RowSource
    pages: list[int]


class Prefill(_Tagged, frozen=True, kw_only=True):
    """Prefill worker: run the model over a prompt and keep its KV in the pool. Answered by `Prefilled`."""

    prompt_path: str
    directory: str
    num_layers: int
    num_draft_layers: int
    num_heads: int
    state_bytes: int
    chunk_tokens: int
    pages: list[int]
    state_page: int


class DecodeAlone(_Tagged, frozen=True, kw_only=True):
    """Prefill worker, after `Prefill`: greedily decode over its own pool, which holds everything. `Decoded`."""

    num_tokens: int
    num_steps: int


class DecodeShared(_Tagged, frozen=True, kw_only=True):
    """Decode worker, after `Receive`: greedily decode together with the other ranks, each over its own rows.

    The first token is the transfer's `aux`. `pages` also have room for the new rows. Answered by `Decoded`.
    """

    store_path: str
    rank: int
    num_ranks: int
    interleave: int
    num_layers: int
    num_draft_layers: int
    num_heads: int
    num_tokens: int
    num_steps: int
    pages: list[int]


class MakeTicket(_Tagged, frozen=True, kw_only=True):
    """Prefill worker. Answered by `TicketText`."""

    deadline_s: float


class SendChunks(_Tagged, frozen=True, kw_only=True):
    """Prefill worker: submit the chunks and wait for the end. Answered by `Ended`."""

    ticket: str
    chunks: list[Chunk]
    aux: bytes
    deadline_s: float


class Receive(_Tagged, frozen=True, kw_only=True):
    """Decode worker: open the transfer and wait for the end. Answered by `Ended`."""

    ticket: str
    groups: dict[str, PageList]
    deadline_s: float


class Expected(msgspec.Struct, frozen=True, kw_only=True):
    """What a group of a decode pool must hold: rows of `source`, or, for state, the bytes in `source.path`."""

    pages: PageList
    source: RowSource


class Verify(_Tagged, frozen=True, kw_only=True):
    """Decode worker: compare every byte of the pool; all but the expected rows must be as filled. `Verified`."""

    groups: dict[str, Expected]


class Refill(_Tagged, frozen=True, kw_only=True):
    """Decode worker: overwrite the whole pool with the byte `fill`. Answered by `Done`."""

    fill: int


class OpenEngine(_Tagged, frozen=True, kw_only=True):
    """Yardstick: register `num_bytes` with the engine. Answered by `EngineOpen`."""

    transport: str
    num_bytes: int
    fill: int


class WriteOnce(_Tagged, frozen=True, kw_only=True):
    """Yardstick: write all bytes to the target with one descriptor. Answered by `Written`."""

    target: EngineOpen


class CheckFill(_Tagged, frozen=True, kw_only=True):
    """Yardstick: does every byte equal `fill`? Answered by `Verified`."""

    fill: int


# ---- replies ----


class Done(_Tagged, frozen=True, kw_only=True):
    pass


class Prefilled(_Tagged, frozen=True, kw_only=True):
    """`first_token` is the model's next token; the rows and the state lie in files of the command's directory."""

    first_token: int
    elapsed_s: float


class Decoded(_Tagged, frozen=True, kw_only=True):
    """The token that prefill gave and those of the decode steps."""

    tokens: list[int]
    elapsed_s: float


class TicketText(_Tagged, frozen=True, kw_only=True):
    text: str


class Ended(_Tagged, frozen=True, kw_only=True):
    """`start_s` and `end_s` are readings of the host's monotonic clock around the call and the terminal event."""

    event: TransferEvent
    start_s: float
    end_s: float


class Verified(_Tagged, frozen=True, kw_only=True):
    """`problem` is empty when every byte is right."""

    problem: str


class EngineOpen(_Tagged, frozen=True, kw_only=True):
    peer: str
    metadata: bytes
    region_id: int
    num_bytes: int


class Written(_Tagged, frozen=True, kw_only=True):
    elapsed_s: float
    path: str


class Progress(_Tagged, frozen=True, kw_only=True):
    """How far a long command is."""

    num_done: int
    num_total: int


class Failed(_Tagged, frozen=True, kw_only=True):
    """The command failed; `error` is the text of a `KvxferError`."""

    error: str


Command = (
    HandOver
    | FillRows
    | Prefill
    | DecodeAlone
    | DecodeShared
    | MakeTicket
    | SendChunks
    | Receive
    | Verify
    | Refill
    | OpenEngine
    | WriteOnce
    | CheckFill
)
Reply = Done | Prefilled | Decoded | TicketText | Ended | Verified | EngineOpen | Written | Progress | Failed

_command_decoder = msgspec.json.Decoder(Command)
_reply_decoder = msgspec.json.Decoder(Reply)


def encode_line(line: Command | Reply) -> bytes:
    """One line of JSON with its line end."""
    return msgspec.json.encode(line) + b"\n"


def decode_command(line: bytes) -> Command:
    """A parent's line. Raises `msgspec.MsgspecError` for anything else."""
    return _command_decoder.decode(line)


def decode_reply(line: bytes) -> Reply:
    """A worker's line. Raises `msgspec.MsgspecError` for anything else."""
    return _reply_decoder.decode(line)
