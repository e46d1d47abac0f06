"""What commands of a demo or bench say of pages, rows and places."""

from __future__ import annotations

from typing import Literal

import msgspec

Device = Literal["cpu", "cuda"]
RowPlacement = Literal["agent", "worker"]
Busy = Literal["none", "long", "short"]


class PageList(msgspec.Struct, frozen=True, kw_only=True):
    """Pages of one group that hold the local rows of tokens `[first_token, end_token)`."""

    first_token: int
    end_token: int
    pages: list[int]


class PatternRows(msgspec.Struct, frozen=True, kw_only=True, tag_field="kind", tag=True):
    """Rows made by `kvxfer.cli.rows.pattern_rows`."""

    seed: int
    num_layers: int
    num_tokens: int
    row_bytes: int


class FileRows(msgspec.Struct, frozen=True, kw_only=True, tag_field="kind", tag=True):
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


class Expected(msgspec.Struct, frozen=True, kw_only=True):
    """What a group of a decode pool must hold: rows of `source`, or, for state, the bytes in `source.path`."""

    pages: PageList
    source: RowSource
