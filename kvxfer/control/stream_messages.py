"""What agent and worker say about the stream that moves rows in the worker's process; see `kvxfer.streams.ring`."""

from __future__ import annotations

from kvxfer.control.message_base import Counter, Index, MessageBase, Text


class SlotsMapped(MessageBase, frozen=True, kw_only=True):
    """Worker to agent: the slots of move number `move`, which came over the hand-off connection, are mapped; orders
    that are given from now on mean these."""

    move: Counter


class PeerPoolMapped(MessageBase, frozen=True, kw_only=True):
    """Worker to agent: the peer's pool `index`, which came over the hand-off connection, is mapped, so that orders may
    name it; with `detail` it is not, and that says why."""

    index: Index
    detail: Text = ""


class PeerPoolUnmapped(MessageBase, frozen=True, kw_only=True):
    """Worker to agent: nothing is mapped under `index` any more."""

    index: Index
