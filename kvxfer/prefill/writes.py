"""Writes between the core, which asks for them, and the engine."""

from __future__ import annotations

import numpy as np

from kvxfer.errors import TransportError
from kvxfer.prefill.actions import Write
from kvxfer.prefill.core import PrefillCore
from kvxfer.prefill.links import PeerLinks
from kvxfer.prefill.raw_pool import RawPool
from kvxfer.sidecar import Sidecar
from kvxfer.transports.base import ContiguousWrite, Outcome, RegionDescriptor, WriteBatch


class Writes:
    """Posts writes and reports their ends to the core; the peer hears of those that are done."""

    def __init__(self, sidecar: Sidecar, links: PeerLinks, core: PrefillCore, raw_pool: RawPool) -> None:
        self._sidecar = sidecar
        self._links = links
        self._core = core
        self._raw_pool = raw_pool
        self._posted: dict[int, Write] = {}
        self.may_still_read = False
        """A raw write has an unknown end: the engine may read the worker's pool until it is made anew."""

    def post(self, write: Write, now: float) -> None:
        """Post a write, unless its leg was stopped just now."""
        if write.cancel.is_set or write.peer not in self._links:
            self._core.write_ended(write.operation, Outcome.FAILED, "was not posted", now)
            return
        try:
            write_id = self._sidecar.transport.submit_write(write.peer, self._entries(write))
        except TransportError as error:
            self._core.write_ended(write.operation, Outcome.FAILED, str(error), now)
            return
        self._posted[write_id] = write
        self._sidecar.trace.begin("write", write_id, write.src_slot, write.notice.segment)

    def _entries(self, write: Write) -> WriteBatch | ContiguousWrite:
        hello = self._links.hello(write.peer)
        region = RegionDescriptor(hello.region_id, hello.region_bytes)
        dst_offset = write.notice.slot * hello.slot_bytes
        if write.runs is None:
            assert write.src_slot is not None
            return ContiguousWrite(
                region, self._sidecar.slots.address(write.src_slot), dst_offset, write.notice.num_bytes
            )
        runs = write.runs
        src = runs.src_offsets.astype(np.uint64) + np.uint64(self._raw_pool.address)
        dst = runs.slot_offsets.astype(np.uint64) + np.uint64(dst_offset)
        return WriteBatch(region, src, dst, runs.lengths.astype(np.uint64))

    def poll(self, now: float) -> None:
        """See which have ended."""
        for completion in self._sidecar.transport.poll():
            write = self._posted.pop(completion.write_id, None)
            if write is None:
                self._links.probe_ended(completion, now)
                continue
            self._sidecar.trace.end("write", completion.write_id)
            outcome, detail = completion.outcome, completion.detail
            # A write that was still under way when its leg stopped, at the latest at the deadline, may have read pages
            # that hold other rows by then: nobody is told of it.
            if outcome is Outcome.DONE and not write.cancel.is_set:
                if self._sidecar.rows.may_have_spoilt:
                    outcome, detail = Outcome.FAILED, "the worker's stream has ended, and may have written its slot"
                else:
                    # The engine has proven the bytes to be in the peer's memory: only now is the peer told.
                    self._links.send(write.peer, write.notice)
            elif outcome is Outcome.UNKNOWN and write.runs is not None:
                self.may_still_read = True
            self._core.write_ended(write.operation, outcome, detail, now)
