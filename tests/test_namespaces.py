"""Agents and workers in containers of their own: they share sockets and a network, and each is process 1."""

from __future__ import annotations

from pathlib import Path

import pytest

from kvxfer.cli.bench_transfer import CaseRunner, TransferResult
from kvxfer.cli.protocol import RowPlacement
from kvxfer.cli.transfer_case import TransferCase
from kvxfer.ops.config import TransferMode, TransportName
from tests import apart


def _case(transport: TransportName, mode: TransferMode, placement: RowPlacement) -> TransferCase:
    return TransferCase(
        transport=transport,
        mode=mode,
        num_tokens=700,
        num_layers=3,
        row_bytes=1152,
        page_tokens=16,
        pages="shuffled",
        num_ranks=1,
        interleave=1,
        chunk_tokens=300,
        num_repeats=1,
        num_slots=3,
        slot_bytes=256 << 10,
        placement=placement,
    )


@pytest.fixture
def interpreter(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """What the programs of a case are run by."""
    path = tmp_path / "python"
    apart.use(path, monkeypatch)
    return path


def _expect_exact(result: TransferResult) -> None:
    assert result.problems == ()
    assert result.moves[-1].sent.num_rows == 700 * 3


@pytest.mark.nixl
@pytest.mark.usefixtures("interpreter")
@pytest.mark.parametrize(("mode", "placement"), [("packed", "worker"), ("packed", "agent"), ("p2p", "agent")])
def test_every_agent_and_worker_apart(
    mode: TransferMode, placement: RowPlacement, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Slots (placement `worker`) or pools (`agent`) go through the socket of a worker, rows over TCP. In mode p2p the
    pool goes on to the other agent, which copies the rows itself."""
    monkeypatch.setenv("UCX_TLS", "tcp,self")  # cma needs the process ids of others
    with CaseRunner(1, None) as runner:
        result = runner.run(_case("nixl", mode, placement))
        children = [*runner._cast._agents, *runner._cast._workers]
        assert len(children) == 6  # with both ends of the yardstick
        apart.expect([child.pid for child in children])
    _expect_exact(result)
    assert result.path == "tcp"
    assert (result.moves[-1].sent.num_descriptors == 0) == (mode == "p2p")


@pytest.mark.parametrize("placement", ["worker", "agent"])
def test_workers_apart_and_agents_beside_each_other(placement: RowPlacement, interpreter: Path) -> None:
    """As the loopback needs it, which finds its peers by process id."""
    apart.write_interpreter(interpreter, beside=("kvxfer.cli.child", "kvxfer.cli.yardstick"))
    with CaseRunner(1, None) as runner:
        result = runner.run(_case("loopback", "packed", placement))
        apart.expect([child.pid for child in runner._cast._workers[:2]])
    _expect_exact(result)
