"""The decode core when rows are pulled: whole chunks, one answer each, and nothing after the end."""

from __future__ import annotations

import numpy as np
import pytest

from kvxfer.control.ids import new_id
from kvxfer.control.messages import AbortLeg, Grant, PullChunk, Pulled, PullReady, Source
from kvxfer.control.pages import encode_pages
from kvxfer.decode.actions import Action, PreparePull, Pull
from kvxfer.decode.receive import SourceInfo
from kvxfer.layout import Shard, TokenRange
from kvxfer.routes import match_layouts
from kvxfer.transfer import EventKind, Reason
from tests.decode.driver import DecodeDriver
from tests.prefill.driver import NUM_PAGES, SEGMENT_BYTES, pages_for, pool_layout

LANDED = [(EventKind.LANDED, None)]


class PullDriver(DecodeDriver):
    """`pulls` holds those that were emitted and have not ended, `prepared` all that were to be prepared."""

    pulls: list[Pull]
    prepared: list[PreparePull]

    def __init__(self, shard: Shard | None = None) -> None:
        self.pulls, self.prepared = [], []
        super().__init__(shard=shard)

    def map(self, *, is_mapped: bool = True) -> Source:
        """A paired prefill agent whose pool is mapped here."""
        source = Source(endpoint="tcp://127.0.0.1:1", incarnation=new_id())
        shard = self.layout.shard
        route = match_layouts(pool_layout(), self.layout, shard.rank, shard.size)
        layout = pool_layout() if is_mapped else None
        self.core.peer_paired(SourceInfo(source.incarnation, route, SEGMENT_BYTES, layout), self.now)
        self._take()
        return source

    def tell(
        self,
        source: Source,
        transfer: str,
        first: int,
        end: int,
        *,
        chunk: int = 0,
        pages: tuple[bytes, ...] | None = None,
    ) -> PullChunk:
        """The source says where tokens `[first, end)` lie, and that they are written."""
        message = self.announce(source, transfer, first, end, chunk=chunk, pages=pages)
        self.ready(source, transfer, chunk)
        return message

    def ready(self, source: Source, transfer: str, chunk: int) -> None:
        """The source says that a chunk is written."""
        generation = self.generation(source, transfer)
        self.receive(source, PullReady(transfer=transfer, generation=generation, chunk=chunk))

    def announce(
        self,
        source: Source,
        transfer: str,
        first: int,
        end: int,
        *,
        chunk: int = 0,
        pages: tuple[bytes, ...] | None = None,
    ) -> PullChunk:
        """The source says where tokens `[first, end)` lie."""
        plan = self.plan(source, transfer, first, end)
        message = PullChunk(
            transfer=transfer,
            generation=self.generation(source, transfer),
            chunk=chunk,
            ranges=(TokenRange(first, end),),
            layers=None,
            num_segments=plan.num_segments,
            num_bytes=plan.num_bytes,
            pages=(pages_for(pool_layout(), first, end).pages,) if pages is None else pages,
            lease_word=3,
            lease_value=9,
        )
        self.receive(source, message)
        return message

    def end_pull(self, error: str | None = None) -> None:
        pull = self.pulls.pop(0)
        self.core.scatter_ended(pull.operation, self.now, 0.0, error)
        self._take()

    def end_pulls(self) -> None:
        while self.pulls:
            self.end_pull()

    def finish(self, source: Source, transfer: str, num_chunks: int, end: int) -> None:
        plan = self.plan(source, transfer, 0, end)
        num_segments = sum(message.num_segments for message in self.told)
        self.receive(source, self.finished_message(source, transfer, num_chunks, num_segments, plan.num_bytes))

    told: tuple[PullChunk, ...] = ()

    def _sort(self, action: Action) -> None:
        if isinstance(action, Pull):
            self.pulls.append(action)
        elif isinstance(action, PreparePull):
            self.prepared.append(action)
        else:
            super()._sort(action)

    def assert_idle(self) -> None:
        assert not self.pulls
        super().assert_idle()


def test_rows_are_pulled_chunk_by_chunk_and_land_with_finished() -> None:
    driver = PullDriver()
    source = driver.map()
    transfer = driver.open((source,), 24)
    assert driver.to(source, Grant)[0].can_pull
    driver.told = (driver.tell(source, transfer, 0, 8), driver.tell(source, transfer, 8, 24, chunk=1))
    driver.tell(source, transfer, 0, 8)  # again: nothing
    assert sum(message.num_segments for message in driver.told) == 6
    assert len(driver.pulls) == 2  # each chunk as a whole
    assert all(pull.lease == (3, 9) and pull.peer == source.incarnation for pull in driver.pulls)
    assert driver.to(source, Pulled) == []
    driver.end_pull()
    assert [message.chunk for message in driver.to(source, Pulled)] == [0]
    driver.end_pulls()
    assert [message.chunk for message in driver.to(source, Pulled)] == [0, 1]
    assert driver.ends(transfer) == []
    driver.finish(source, transfer, 2, 24)
    assert driver.ends(transfer) == LANDED
    driver.assert_idle()


def test_a_chunk_is_prepared_when_it_is_announced_and_pulled_when_it_is_written() -> None:
    driver = PullDriver()
    source = driver.map()
    transfer = driver.open((source,), 8)
    driver.ready(source, transfer, 0)  # of a chunk that was not announced: it means nothing
    driver.told = (driver.announce(source, transfer, 0, 8),)
    (prepared,) = driver.prepared
    assert prepared.peer == source.incarnation
    assert not driver.pulls
    driver.finish(source, transfer, 1, 8)  # too early: it is not believed
    assert driver.ends(transfer) == []
    driver.ready(source, transfer, 0)
    driver.ready(source, transfer, 0)
    (pull,) = driver.pulls
    assert (pull.source, pull.src_addresses) == (prepared.source, prepared.src_addresses)
    driver.end_pulls()
    assert driver.ends(transfer) == LANDED
    driver.assert_idle()


def test_nothing_is_pulled_for_a_transfer_that_has_ended_before_its_rows_were_written() -> None:
    driver = PullDriver()
    source = driver.map()
    transfer = driver.open((source,), 8)
    driver.announce(source, transfer, 0, 8)
    driver.abort(transfer)
    assert driver.ends(transfer) == [(EventKind.ABORTED, Reason.ABORTED_BY_WORKER)]
    driver.ready(source, transfer, 0)
    assert not driver.pulls
    driver.quiesced(source, transfer)
    driver.assert_idle()


def test_finished_does_not_stand_for_what_is_still_being_pulled() -> None:
    """A source that says so too early is not believed; past the deadline the transfer has failed."""
    driver = PullDriver()
    source = driver.map()
    transfer = driver.open((source,), 8, deadline_s=5.0)
    driver.told = (driver.tell(source, transfer, 0, 4), driver.tell(source, transfer, 4, 8, chunk=1))
    driver.finish(source, transfer, 2, 8)
    driver.end_pull()
    assert [message.chunk for message in driver.to(source, Pulled)] == [0]
    assert driver.ends(transfer) == []
    driver.tick(6.0)
    assert driver.pulls[0].cancel.is_set
    assert driver.ends(transfer) == []  # one pull still touches the pages
    assert driver.core.num_touching_pool == 1
    driver.end_pull()
    assert driver.ends(transfer) == [(EventKind.FAILED, Reason.DEADLINE)]
    assert [message.chunk for message in driver.to(source, Pulled)] == [0]


@pytest.mark.parametrize("which", ["first", "last"])
def test_a_revoked_lease_fails_the_transfer_and_nothing_lands(which: str) -> None:
    driver = PullDriver()
    source = driver.map()
    transfer = driver.open((source,), 12)
    driver.told = (driver.tell(source, transfer, 0, 8), driver.tell(source, transfer, 8, 12, chunk=1))
    if which == "last":
        driver.end_pull()
    driver.end_pull("the source has revoked the lease on its rows")
    assert all(pull.cancel.is_set for pull in driver.pulls)
    driver.end_pulls()
    assert driver.ends(transfer) == [(EventKind.FAILED, Reason.PULL_FAILED)]
    assert "revoked the lease" in driver.events[-1].detail
    assert driver.to(source, AbortLeg)
    assert len(driver.to(source, Pulled)) == (which == "last")
    driver.finish(source, transfer, 2, 12)
    driver.quiesced(source, transfer)
    assert driver.ends(transfer) == [(EventKind.FAILED, Reason.PULL_FAILED)]
    driver.assert_idle()


@pytest.mark.parametrize("name", ["abort", "source lost", "leg failed", "worker lost"])
def test_an_end_while_rows_are_pulled_waits_for_the_own_copies_alone(name: str) -> None:
    driver = PullDriver()
    source = driver.map()
    transfer = driver.open((source,), 8)
    driver.told = (driver.tell(source, transfer, 0, 8),)
    match name:
        case "abort":
            driver.abort(transfer)
        case "source lost":
            driver.lose(source)
        case "leg failed":
            driver.leg_failed(source, transfer, Reason.WORKER_LOST)
        case _:
            driver.lose_worker()
    assert driver.ends(transfer) == []
    driver.end_pulls()
    expected = {
        "abort": [(EventKind.ABORTED, Reason.ABORTED_BY_WORKER)],
        "source lost": [(EventKind.FAILED, Reason.PEER_LOST)],
        "leg failed": [(EventKind.FAILED, Reason.WORKER_LOST)],
        "worker lost": [],
    }
    assert driver.ends(transfer) == expected[name]
    assert driver.to(source, Pulled) == []
    assert driver.core.num_touching_pool == 0


def test_what_was_pulled_is_said_again_while_the_source_is_silent() -> None:
    driver = PullDriver()
    source = driver.map()
    transfer = driver.open((source,), 4)
    driver.told = (driver.tell(source, transfer, 0, 4),)
    driver.tick(1.5)
    assert driver.to(source, Pulled) == []  # not yet true
    driver.end_pulls()
    driver.tick(1.5)
    assert len(driver.to(source, Pulled)) == 2
    driver.finish(source, transfer, 1, 4)
    assert driver.ends(transfer) == LANDED


def _pages(*ids: int) -> bytes:
    return encode_pages(np.array(ids, dtype=np.int64), "pages")


@pytest.mark.parametrize(
    ("pages", "expected"),
    [
        ((), "got pages of 0 groups, not 1"),
        ((_pages(1, 2), _pages(1, 2)), "got pages of 2 groups, not 1"),
        ((_pages(1),), "pages: got 1, expected 2"),
        ((_pages(1, NUM_PAGES),), f"got page {NUM_PAGES}, expected ids from 0 to below {NUM_PAGES}"),
        ((_pages(5, 5),), "got page 5 twice"),
        ((b"\1\0\0",), "pages"),
    ],
)
def test_pages_that_cannot_be_the_sources_end_the_transfer(pages: tuple[bytes, ...], expected: str) -> None:
    """Before a byte is read from there."""
    driver = PullDriver()
    source = driver.map()
    transfer = driver.open((source,), 8)
    driver.tell(source, transfer, 0, 8, pages=pages)
    assert not driver.pulls
    assert driver.ends(transfer) == [(EventKind.FAILED, Reason.MISMATCH)]
    assert expected in driver.events[-1].detail


def test_a_pool_that_is_not_mapped_cannot_be_pulled_from() -> None:
    driver = PullDriver()
    source = driver.map(is_mapped=False)
    transfer = driver.open((source,), 8)
    assert not driver.to(source, Grant)[0].can_pull
    driver.tell(source, transfer, 0, 8)
    assert not driver.pulls
    assert driver.ends(transfer) == [(EventKind.FAILED, Reason.MISMATCH)]
    assert "the source's pool is not mapped here" in driver.events[-1].detail


def test_a_notice_about_a_chunk_that_is_pulled_is_refused() -> None:
    driver = PullDriver()
    source = driver.map()
    transfer = driver.open((source,), 8)
    driver.told = (driver.tell(source, transfer, 0, 8),)
    driver.segment(source, transfer, 0, 0)
    assert not driver.scatters
    assert driver.core.refused["repeated segment"] == 1
    driver.end_pulls()
    driver.finish(source, transfer, 1, 8)
    assert driver.ends(transfer) == LANDED
    driver.assert_idle()
