"""Pairing, decode side: one connection to each prefill agent, from hello to goodbye."""

from __future__ import annotations

from dataclasses import dataclass, field

from kvxfer.control.channel import REMOTE
from kvxfer.control.codec import encode_all
from kvxfer.control.heartbeat import Absence, Heartbeat
from kvxfer.control.messages import DecodeToPrefill, Hello, NewRegion, RegionTaken, Source, Welcome
from kvxfer.control.peer_channel import Connection
from kvxfer.decode.receive import SourceInfo
from kvxfer.errors import PairingError, RefusedError
from kvxfer.routes import match_layouts
from kvxfer.transfer import Reason

REGION_AGAIN_S = 1.0


@dataclass(slots=True)
class PrefillPeer:
    """A prefill agent that this agent talks to. `hello` is what it was told; `is_paired` once it has agreed."""

    source: Source
    connection: Connection
    heartbeat: Heartbeat
    hello: Hello
    began_at: float
    pinged_at: float = 0.0
    absence: Absence = field(default_factory=Absence)
    is_paired: bool = False
    new_region: NewRegion | None = None  # what it was told and has not taken yet
    region_told_at: float = 0.0
    info: SourceInfo | None = None  # what was agreed on, while the core is not told yet
    path: str = ""  # how its engine reaches this side
    bytes_per_s: float = 0.0  # of that, as it was measured
    outgoing: list[DecodeToPrefill] = field(default_factory=list)  # what leaves with the next `flush`

    def send(self, message: DecodeToPrefill) -> None:
        """With the next `flush()`."""
        self.outgoing.append(message)

    def flush(self) -> bool:
        """Send what there is, in as few frames as can be. False where the peer does not take it: it is as good as
        lost."""
        frames = encode_all(self.outgoing)
        self.outgoing.clear()
        return all(self.connection.send(REMOTE, frame) for frame in frames)

    def tell_region_again(self, now: float) -> None:
        """The landing slots have moved, and it may not know."""
        if self.new_region is not None and now >= self.region_told_at + REGION_AGAIN_S:
            self.region_told_at = now
            self.send(self.new_region)

    def region_taken(self, message: RegionTaken) -> None:
        """It knows the region that it names."""
        if self.new_region is not None and self.new_region.region_id == message.region_id:
            self.new_region = None

    def close(self) -> None:
        """Hang up."""
        self.connection.close()
        self.heartbeat.close()

    def welcomed(self, welcome: Welcome) -> SourceInfo:
        """The prefill agent agreed: check that it is the one the ticket named and that this side agrees as well.

        Raises `RefusedError`.
        """
        if welcome.incarnation != self.source.incarnation:
            raise RefusedError(
                f"got {welcome.incarnation}, expected {self.source.incarnation} as the ticket says",
                Reason.STALE,
                "incarnation",
            )
        hello = self.hello
        try:
            route = match_layouts(welcome.layout, hello.layout, hello.dst_rank, hello.dst_world)
        except PairingError as error:
            raise RefusedError(str(error), Reason.LAYOUT_MISMATCH, "layout") from error
        if welcome.segment_bytes > hello.slot_bytes:
            raise RefusedError(
                f"got {welcome.segment_bytes}, expected at most the {hello.slot_bytes} bytes of a landing slot",
                Reason.PEER_REFUSED,
                "segment_bytes",
            )
        return SourceInfo(welcome.incarnation, route, welcome.segment_bytes)
