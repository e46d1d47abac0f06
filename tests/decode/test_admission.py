"""What a decode agent refuses at once: pages of an open transfer, and a worker that holds another agent's shard."""

from __future__ import annotations

from pathlib import Path

import pytest

from kvxfer.decode.agent import DecodeAgent
from kvxfer.errors import LayoutError, RefusedError
from kvxfer.layout import Shard
from kvxfer.ops.config import DecodeConfig, SlotConfig, TransportConfig
from kvxfer.transfer import EventKind, Reason
from tests.decode.driver import DecodeDriver
from tests.prefill.driver import pool_layout


def test_pages_of_an_open_transfer_are_given_to_no_second_one() -> None:
    """Two transfers that scatter into one page would both land, and one would be wrong."""
    driver = DecodeDriver()
    source = driver.pair()
    first = driver.open((source,), 8)
    with pytest.raises(LayoutError, match=f"belongs to transfer {first} until its terminal event"):
        driver.open((source,), 8, same_pages=True)
    driver.abort(first)
    assert driver.ends(first) == [(EventKind.ABORTED, Reason.ABORTED_BY_WORKER)]
    driver.open((source,), 8, same_pages=True)


@pytest.mark.parametrize(
    ("dst_rank", "dst_world", "shard"),
    [(1, 2, Shard(0, 2)), (0, 2, Shard(1, 2)), (0, 2, Shard(0, 4)), (0, 4, Shard(0, 3)), (5, 8, Shard(2, 4))],
)
def test_a_worker_with_another_agents_shard_is_refused(
    tmp_path: Path, dst_rank: int, dst_world: int, shard: Shard
) -> None:
    """Two agents with one shard would both land, and the other shard would lie nowhere."""
    config = DecodeConfig(
        socket_dir=str(tmp_path / "d"),
        dst_rank=dst_rank,
        dst_world=dst_world,
        transport=TransportConfig(name="loopback"),
        slots=SlotConfig(num_slots=1, slot_bytes=4096),
    )
    agent = DecodeAgent(config)
    try:
        with pytest.raises(RefusedError, match=r"layout.shard.*dst_rank % shard.size"):
            agent.worker_attached(pool_layout(shard), 0.0)
    finally:
        agent.close()
