"""What the parent of a demo or bench and its worker processes say to each other: JSON lines over pipes.

A worker answers each command with exactly one reply, in order, `Progress` lines aside. The end of its standard input
ends it.
"""

from __future__ import annotations

import msgspec

from kvxfer.cli.protocol_data import Busy as Busy
from kvxfer.cli.protocol_data import Chunk as Chunk
from kvxfer.cli.protocol_data import Device as Device
from kvxfer.cli.protocol_data import Expected as Expected
from kvxfer.cli.protocol_data import FileRows as FileRows
from kvxfer.cli.protocol_data import PageList as PageList
from kvxfer.cli.protocol_data import PatternRows as PatternRows
from kvxfer.cli.protocol_data import RowPlacement as RowPlacement
from kvxfer.cli.protocol_data import RowSource as RowSource
from kvxfer.control.messages import TransferEvent
from kvxfer.layout import PoolLayout


class _Tagged(msgspec.Struct, frozen=True, tag_field="kind", tag=True, kw_only=True):
    pass


# ---- commands ----


class HandOver(_Tagged, frozen=True, kw_only=True):
    """Create a pool whose every byte is `fill`, and hand it to the agent. Answered by `Done`.

    `placement` says whose threads or streams move its rows; a pool on a GPU is moved by its worker.
    """

    socket_dir: str
    layout: PoolLayout
    pool_bytes: int
    fill: int
    device: Device = "cpu"
    device_index: int = 0
    placement: RowPlacement = "agent"


class LetGo(_Tagged, frozen=True, kw_only=True):
    """Leave the agent and free the pool; another `HandOver` may follow. Answered by `Done`."""


class CopyAcross(_Tagged, frozen=True, kw_only=True):
    """Prefill worker, whose pool lies on a GPU: copy `num_bytes` of it to GPU `dst_device_index`. Answered by
    `Copied`."""

    num_bytes: int
    dst_device_index: int


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
    """Decode worker, after `AwaitEnd`: greedily decode together with the other ranks, each over its own rows.

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
    """Prefill worker: submit a chunk every `interval_s` and wait for the end. Answered by `Sent`.

    With `busy` it computes meanwhile, from the same thread.
    """

    ticket: str
    chunks: list[Chunk]
    aux: bytes
    deadline_s: float
    interval_s: float = 0.0
    busy: Busy = "none"


class Compute(_Tagged, frozen=True, kw_only=True):
    """Prefill worker: compute for `duration_s` and do nothing else. Answered by `Computed`."""

    busy: Busy
    duration_s: float


class Open(_Tagged, frozen=True, kw_only=True):
    """Decode worker: open the transfer. Answered by `Opened`."""

    ticket: str
    groups: dict[str, PageList]
    deadline_s: float


class AwaitEnd(_Tagged, frozen=True, kw_only=True):
    """Decode worker, after `Open`: wait for the end of the transfer. Answered by `Ended`."""

    ticket: str
    timeout_s: float


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


class Computed(_Tagged, frozen=True, kw_only=True):
    """How many products a second came out."""

    products_per_s: float


class Opened(_Tagged, frozen=True, kw_only=True):
    """`start_s` is a reading of the host's monotonic clock, as in `Ended`; `client_cpu_s` is processor time that the
    worker's thread spent inside the client."""

    start_s: float
    client_cpu_s: float


class Ended(_Tagged, frozen=True, kw_only=True):
    """`end_s` was read after the terminal event."""

    event: TransferEvent
    end_s: float
    client_cpu_s: float


class Sent(_Tagged, frozen=True, kw_only=True):
    """`start_s` was read before the first submit, `last_submit_s` before the last, `end_s` after the terminal event.

    `products_per_s` came out from the first submit to the end, 0 without `busy`. `device_bytes` is memory of the GPU
    that neither the pools of this process nor what it computes take.
    """

    event: TransferEvent
    start_s: float
    last_submit_s: float
    end_s: float
    client_cpu_s: float
    products_per_s: float
    device_bytes: int


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


class Copied(_Tagged, frozen=True, kw_only=True):
    """One copy of torch, seen from the host."""

    elapsed_s: float


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
    | LetGo
    | Prefill
    | DecodeAlone
    | DecodeShared
    | MakeTicket
    | Compute
    | SendChunks
    | CopyAcross
    | Open
    | AwaitEnd
    | Verify
    | Refill
    | OpenEngine
    | WriteOnce
    | CheckFill
)
Reply = (
    Done
    | Prefilled
    | Decoded
    | TicketText
    | Computed
    | Opened
    | Ended
    | Sent
    | Verified
    | EngineOpen
    | Written
    | Copied
    | Progress
    | Failed
)

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
