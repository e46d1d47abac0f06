"""What clients ask of a row stream on a GPU, which a host stream stands in for. On both clients."""

from __future__ import annotations

import logging
from pathlib import Path

import pytest

from kvxfer.control import client_link
from kvxfer.control.client import AsyncDecodeClient, AsyncPrefillClient, DecodeClient, PrefillClient
from kvxfer.errors import HandoffError
from kvxfer.memory import HostMemory
from kvxfer.streams import cuda_stream
from kvxfer.streams.device import DevicePool
from kvxfer.streams.host_stream import HostRowStream
from kvxfer.streams.ring import Ring
from tests.control.blocking import Connect, connect_async
from tests.control.fake_agent import FakeAgent, accept_all
from tests.control.pools import POOL_BYTES, layout

pytestmark = pytest.mark.usefixtures("nothing_left")


@pytest.mark.parametrize(
    ("connect", "is_prefill", "max_ctas"),
    [
        (PrefillClient.connect, True, cuda_stream.GATHER_CTAS),
        (connect_async(AsyncPrefillClient), True, cuda_stream.GATHER_CTAS),
        (DecodeClient.connect, False, cuda_stream.SCATTER_CTAS),
        (connect_async(AsyncDecodeClient), False, cuda_stream.SCATTER_CTAS),
    ],
    ids=["prefill", "prefill-asyncio", "decode", "decode-asyncio"],
)
def test_streams_have_programs_by_the_way_that_rows_go(
    connect: Connect,
    is_prefill: bool,
    max_ctas: int,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:
    """A pool of a prefill worker that cannot be shared is not, and the log says why; nobody pulls from the others."""
    pool = HostMemory.create(POOL_BYTES, "pool")
    made: list[tuple[DevicePool, int, bool]] = []

    def make(ring: Ring, device_pool: DevicePool, slots: HostMemory, *, max_ctas: int, may_bind: bool) -> HostRowStream:
        made.append((device_pool, max_ctas, may_bind))
        return HostRowStream(ring, pool, slots)

    def refuse(_: DevicePool) -> None:
        raise HandoffError("pool: got memory without a legacy IPC handle")

    monkeypatch.setattr(cuda_stream, "CudaRowStream", make)
    monkeypatch.setattr(client_link, "share", refuse)
    caplog.set_level(logging.INFO, "kvxfer.worker")
    device_pool = DevicePool(pool.address, POOL_BYTES, 0)
    with FakeAgent(tmp_path, accept_all, is_prefill=is_prefill), connect(tmp_path, device_pool, layout()):
        assert made == [(device_pool, max_ctas, is_prefill)]  # a slot is filled by gathers alone
    assert ("cannot pull rows out of the pool: pool: got memory without a legacy" in caplog.text) == is_prefill
    pool.close()
