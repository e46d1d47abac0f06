"""Pairing, prefill side: does a decode agent fit, and what does the wire to it do?"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field

import numpy as np

from kvxfer.control.messages import PROTOCOL_VERSION, Hello, PathFigures, Refused
from kvxfer.errors import PairingError, ProtocolError, RefusedError, TransportError
from kvxfer.layout import Placement, PoolLayout
from kvxfer.prefill.leg import PeerInfo
from kvxfer.routes import match_layouts
from kvxfer.transfer import Reason
from kvxfer.transports.base import Completion, Outcome, RegionDescriptor, Transport, WriteBatch

_NUM_PROBE_DESCRIPTORS = 64
_PROBE_ROW_BYTES = 1152


@dataclass(slots=True)
class _Probe:
    """A measurement under way: a write to warm the path up, one of many descriptors, one of many bytes."""

    hello: Hello
    info: PeerInfo
    step: int = 0
    began_s: float = 0.0
    elapsed_s: list[float] = field(default_factory=list)


@dataclass(frozen=True, slots=True)
class Paired:
    """A decode agent fits and was measured."""

    hello: Hello
    info: PeerInfo
    figures: PathFigures


@dataclass(frozen=True, slots=True)
class Unpaired:
    """A decode agent does not fit, or cannot be written to."""

    incarnation: str
    refusal: Refused


def check_hello(
    hello: Hello, *, incarnation: str, transport: str, layout: PoolLayout | None, slot_bytes: int, host: str = ""
) -> PeerInfo:
    """What a decode agent at `host` said of itself, against this side, which has no `layout` without a worker. Raises
    `RefusedError`, naming the field."""
    if hello.version != PROTOCOL_VERSION:
        raise RefusedError(f"got {hello.version}, expected {PROTOCOL_VERSION}", Reason.PEER_REFUSED, "version")
    if hello.expected_incarnation != incarnation:
        raise RefusedError(f"this endpoint is now {incarnation}", Reason.STALE, "incarnation")
    if layout is None:
        raise RefusedError("it runs, but the worker that made the ticket is gone", Reason.WORKER_LOST)
    if hello.transport != transport:
        raise RefusedError(f"got {hello.transport!r}, expected {transport!r}", Reason.LAYOUT_MISMATCH, "transport")
    if hello.num_slots * hello.slot_bytes > hello.region_bytes or (
        hello.probe_offset_bytes + hello.probe_bytes > hello.region_bytes
    ):
        raise RefusedError(
            f"got slots and probe area beyond the {hello.region_bytes} bytes of the region",
            Reason.PEER_REFUSED,
            "region_bytes",
        )
    try:
        route = match_layouts(layout, hello.layout, hello.dst_rank, hello.dst_world)
    except PairingError as error:
        raise RefusedError(str(error), Reason.LAYOUT_MISMATCH, "layout") from error
    segment_bytes = min(slot_bytes, hello.slot_bytes)
    row_bytes = max((group.row_bytes for group in route.groups if group.placement is not Placement.STATE), default=0)
    if row_bytes > segment_bytes:
        detail = f"got slots of {segment_bytes} bytes on one side, expected at least a row of {row_bytes} bytes"
        raise RefusedError(detail, Reason.LAYOUT_MISMATCH, "slot_bytes")
    return PeerInfo(
        hello.incarnation,
        route,
        segment_bytes,
        hello.dst_world,
        verify=hello.verify,
        region_id=hello.region_id,
        dst_rank=hello.dst_rank,
        host=host,
    )


class Prober:
    """Measures the path to each new peer by writes into its probe area."""

    def __init__(
        self, transport: Transport, probe_address: Callable[[], int], probe_bytes: int, clock: Callable[[], float]
    ) -> None:
        """`probe_address` tells where `probe_bytes` registered bytes that nothing else uses begin now."""
        self._transport = transport
        self._probe_address = probe_address
        self._probe_bytes = probe_bytes
        self._clock = clock
        self._probes: dict[int, _Probe] = {}  # by write

    def begin(self, hello: Hello, info: PeerInfo) -> Unpaired | None:
        """Make the peer known to the engine and begin to measure; `Unpaired` where that fails at once."""
        # Probes of an earlier hello end with the old peer; their ends must not be taken for this one's.
        self._probes = {key: probe for key, probe in self._probes.items() if probe.info.incarnation != info.incarnation}
        try:
            self._transport.drop_peer(hello.incarnation)
            self._transport.add_peer(hello.incarnation, hello.metadata)
            self._next(_Probe(hello, info))
        except (TransportError, ProtocolError) as error:  # also metadata that cannot be read
            return _unpaired(hello, str(error))
        return None

    def ended(self, completion: Completion) -> Paired | Unpaired | None:
        """A write has ended; None where it was no probe, or the measurement goes on."""
        probe = self._probes.pop(completion.write_id, None)
        if probe is None:
            return None
        if completion.outcome is not Outcome.DONE:
            return _unpaired(probe.hello, completion.detail)
        probe.elapsed_s.append(self._clock() - probe.began_s)
        probe.step += 1
        if probe.step == 3:
            return Paired(probe.hello, probe.info, self._figures(probe))
        try:
            self._next(probe)
        except TransportError as error:
            return _unpaired(probe.hello, str(error))
        return None

    def _next(self, probe: _Probe) -> None:
        num_bytes = min(self._probe_bytes, probe.hello.probe_bytes)
        row_bytes = min(_PROBE_ROW_BYTES, num_bytes // _NUM_PROBE_DESCRIPTORS) or 1
        if probe.step == 1:
            # Neighbours are swapped, so that no engine merges them into one descriptor.
            starts = (np.arange(_NUM_PROBE_DESCRIPTORS) * row_bytes).reshape(-1, 2)[:, ::-1].ravel()
            lengths = np.full(_NUM_PROBE_DESCRIPTORS, row_bytes)
        else:
            starts = np.zeros(1, dtype=np.int64)
            lengths = np.array([row_bytes if probe.step == 0 else num_bytes])
        hello = probe.hello
        batch = WriteBatch(
            RegionDescriptor(hello.region_id, hello.region_bytes),
            (starts + self._probe_address()).astype(np.uint64),
            (starts + hello.probe_offset_bytes).astype(np.uint64),
            lengths.astype(np.uint64),
        )
        probe.began_s = self._clock()
        self._probes[self._transport.submit_write(hello.incarnation, batch)] = probe

    def _figures(self, probe: _Probe) -> PathFigures:
        num_bytes = min(self._probe_bytes, probe.hello.probe_bytes)
        _, descriptors_s, bulk_s = probe.elapsed_s
        return PathFigures(
            path=self._transport.path(probe.hello.incarnation)[:200],
            descriptor_s=descriptors_s / _NUM_PROBE_DESCRIPTORS,
            bytes_per_s=num_bytes / max(bulk_s, 1e-9),
        )


def _unpaired(hello: Hello, detail: str) -> Unpaired:
    refusal = Refused(reason=Reason.PEER_UNREACHABLE, detail=f"the engine cannot write to the decode agent: {detail}")
    return Unpaired(hello.incarnation, refusal)
