"""Workers' pools, byte by byte, and what each of their rows is for right now.

Pages of an ended transfer are overwritten at once, as a worker that reuses them does, and the page that was freed last
is the next to be used.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from kvxfer.control.messages import GroupPages
from kvxfer.control.pages import encode_pages
from kvxfer.layout import Group, LayerRange, PoolLayout, TokenRange
from kvxfer.transfer import EventKind
from tests.simulation.topology import ROW_BYTES, owned_rows, row_offset, row_value
from tests.simulation.violation import check

if TYPE_CHECKING:
    from tests.simulation.requests import Request

_POISON = b"\xee" * ROW_BYTES


@dataclass(slots=True, eq=False)
class Side:
    """A transfer as one worker sees it, from its acceptance by an agent to its terminal event."""

    request: Request
    agent: str  # incarnation
    deadline: float
    generation: int = 0  # decode side
    end: EventKind | None = None  # the terminal event, once the core has emitted it
    pages: dict[str, list[int]] = field(default_factory=dict)
    offsets: list[int] = field(default_factory=list)  # of rows that are held for it


class WorkerPool:
    """The pool of one run of a worker. It outlives its agent."""

    def __init__(self, layout: PoolLayout) -> None:
        self.layout = layout
        self.is_lost = False
        self.timeline = 0  # the word that the worker's stream raises
        self.num_marked = 0
        self.stream_until = 0.0  # when the stream has done what it was given
        self._bytes = bytearray(_POISON * (max(group.extent_bytes for group in layout.groups) // ROW_BYTES + 1))
        self._free = {group.name: list(range(group.num_pages))[::-1] for group in layout.groups}
        self.rows: dict[int, tuple[Side, bytes]] = {}
        """Rows in use, by offset: whose they are, and the value that they have or are waiting for."""

    def take_pages(self, side: Side, first_token: int, num_tokens: int) -> None:
        """Give `side` pages for the tokens `[first_token, num_tokens)` of every group."""
        for group in self.layout.groups:
            rows = owned_rows(self.layout, group, num_tokens)
            first_page = _num_below(rows, first_token) // group.page_tokens
            num_pages = (
                -(-len(rows) // group.page_tokens) - first_page if len(rows) > _num_below(rows, first_token) else 0
            )
            side.pages[group.name] = [self._free[group.name].pop() for _ in range(num_pages)]

    def held_layers(self, layers: LayerRange | None) -> LayerRange | None:
        """Those of the model's `layers` that this worker, maybe one stage of a pipeline, has in its pool."""
        held = [group.layers for group in self.layout.groups]
        whole = LayerRange(min(each.first for each in held), max(each.end for each in held))
        return None if layers is None else layers.intersect(whole)

    def hold(
        self, side: Side, tokens: TokenRange, layers: LayerRange | None, first_token: int, *, fill: bool
    ) -> list[int]:
        """The rows of `tokens` are used for `side` from now on; with `fill` they get their values. Returns where they
        are."""
        offsets = []
        for group in self.layout.groups:
            held_layers = group.layers if layers is None else group.layers.intersect(layers)
            for token, row in owned_rows(self.layout, group, tokens.end).items():
                if token < tokens.first:
                    continue
                page = side.pages[group.name][row // group.page_tokens - self._first_page(group, first_token)]
                for layer in range(held_layers.first, held_layers.end):
                    offset = row_offset(group, layer, page, row)
                    value = row_value(side.request.number, group, layer, token)
                    if fill:
                        self._bytes[offset : offset + ROW_BYTES] = value
                    self.rows[offset] = (side, value)
                    offsets.append(offset)
        side.offsets += offsets
        return offsets

    def fill(self, side: Side, offsets: list[int]) -> None:
        """The worker's stream has come to these rows. Of a transfer that has ended, their worker has told it."""
        for offset in offsets:
            owner, value = self.rows.get(offset, (None, b""))
            if owner is side:
                self._bytes[offset : offset + ROW_BYTES] = value

    def pages_of(self, side: Side, tokens: TokenRange, first_token: int) -> tuple[GroupPages, ...]:
        """The pages of `tokens` as a submit or an open names them."""
        entries = []
        for group in self.layout.groups:
            rows = owned_rows(self.layout, group, tokens.end)
            begin, first_page = _num_below(rows, tokens.first), self._first_page(group, first_token)
            pages = range(begin // group.page_tokens, -(-len(rows) // group.page_tokens)) if len(rows) > begin else ()
            ids = [side.pages[group.name][page - first_page] for page in pages]
            entries.append(GroupPages(name=group.name, tokens=tokens, pages=encode_pages(ids, group.name)))
        return tuple(entries)

    def read(self, offset: int, num_bytes: int) -> bytes:
        """What lies there now."""
        return bytes(self._bytes[offset : offset + num_bytes])

    def write(self, offset: int, value: bytes, owner: object) -> None:
        """One row of a scatter. It must be the right one, for the transfer that holds the page."""
        side, expected = self.rows.get(offset, (None, b""))
        check(side is owner and side is not None, "foreign write", f"pool byte {offset} is not held by this transfer")
        check(value == expected, "wrong value", f"pool byte {offset}: got {value.hex()}, expected {expected.hex()}")
        self._bytes[offset : offset + ROW_BYTES] = value

    def write_pulled(self, offset: int, value: bytes, owner: object) -> None:
        """One row of a pull: it may turn out wrong, but only in a page that the transfer holds."""
        side = self.rows.get(offset, (None, b""))[0]
        check(side is owner and side is not None, "foreign write", f"pool byte {offset} is not held by this transfer")
        self._bytes[offset : offset + ROW_BYTES] = value

    def check_complete(self, side: Side) -> None:
        """Every row that `side` holds has its value."""
        for offset in side.offsets:
            got, expected = self.read(offset, ROW_BYTES), self.rows[offset][1]
            check(got == expected, "landed too early", f"byte {offset}: got {got.hex()}, expected {expected.hex()}")

    def release(self, side: Side) -> None:
        """The worker uses the pages for something else from now on."""
        for offset in side.offsets:
            del self.rows[offset]
            self._bytes[offset : offset + ROW_BYTES] = _POISON
        side.offsets.clear()
        for name, pages in side.pages.items():
            self._free[name].extend(pages)
        side.pages.clear()

    def _first_page(self, group: Group, first_token: int) -> int:
        return _num_below(owned_rows(self.layout, group, first_token), first_token) // group.page_tokens


def _num_below(rows: dict[int, int], first_token: int) -> int:
    return sum(token < first_token for token in rows)
