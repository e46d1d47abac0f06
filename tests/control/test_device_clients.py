"""What clients ask of a row stream on a GPU, which a host stream stands in for. On both clients."""

from __future__ import annotations

from pathlib import Path

import pytest

from kvxfer.control.client import AsyncDecodeClient, AsyncPrefillClient, DecodeClient, PrefillClient
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
    connect: Connect, is_prefill: bool, max_ctas: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    pool = HostMemory.create(POOL_BYTES, "pool")
    made: list[tuple[DevicePool, int]] = []

    def make(ring: Ring, device_pool: DevicePool, slots: HostMemory, *, max_ctas: int) -> HostRowStream:
        made.append((device_pool, max_ctas))
        return HostRowStream(ring, pool, slots)

    monkeypatch.setattr(cuda_stream, "CudaRowStream", make)
    device_pool = DevicePool(pool.address, POOL_BYTES, 0)
    with FakeAgent(tmp_path, accept_all, is_prefill=is_prefill), connect(tmp_path, device_pool, layout()):
        assert made == [(device_pool, max_ctas)]
    pool.close()
