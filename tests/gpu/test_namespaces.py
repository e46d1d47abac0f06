"""Agents and workers in containers of their own that share a GPU: each is process 1 of a PID, IPC and mount namespace.

Its part without a GPU: tests/test_namespaces.py, and tests/test_agents_same_pid.py.
"""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from kvxfer.cli.bench_transfer import CaseRunner
from kvxfer.cli.protocol import RowPlacement
from kvxfer.cli.transfer_case import TransferCase
from kvxfer.control.codec import decode_ticket
from kvxfer.ops.config import SlotConfig, SlotKind
from tests import apart
from tests.test_agents_processes import agent, process

pytestmark = [pytest.mark.gpu(limit_s=40.0), pytest.mark.usefixtures("interpreter")]
ROOT = Path(__file__).parents[2]
SLOTS = SlotConfig(num_slots=4, slot_bytes=1 << 20)
BY_A_DESCRIPTOR = "which others map by a descriptor: a worker has the process id of this agent; between processes"


@pytest.fixture
def interpreter(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """What programs are run by."""
    apart.use(tmp_path / "python", monkeypatch)


@pytest.mark.nixl
@pytest.mark.parametrize(
    ("placement", "slot_kind"), [("worker", "pinned_host"), ("worker", "device"), ("agent", "pinned_host")]
)
def test_every_agent_and_worker_apart(
    placement: RowPlacement, slot_kind: SlotKind, monkeypatch: pytest.MonkeyPatch
) -> None:
    """With placement `worker` slots go through the socket of a worker, in memory of the GPU by a descriptor, since CUDA
    maps no legacy memory between processes of the same id; with `agent` the pool does, which has one anyway."""
    monkeypatch.setenv("UCX_TLS", "tcp,self,cuda_copy")  # the others need the process ids of others
    case = TransferCase(
        transport="nixl",
        mode="packed",
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
        device="cuda",
        placement=placement,
        slot_kind=slot_kind,
        deadline_s=20.0,
    )
    with CaseRunner(1, 1) as runner:
        try:
            result = runner.run(case)
        except Exception as error:
            error.add_note(runner.log_tails())
            raise
        cast = runner._cast
        apart.expect([child.pid for child in (*cast._agents, *cast._workers)])
        logs = {path.name: path.read_text(encoding="utf-8") for path in cast.directory.glob("*.log")}
    assert result.problems == ()
    assert result.moves[-1].sent.num_rows == 700 * 3
    moved = [name for name, text in logs.items() if BY_A_DESCRIPTOR in text]
    assert len(moved) == (2 if slot_kind == "device" else 0), f"slots moved in {moved}, of {sorted(logs)}"


def test_a_pool_of_cudamalloc_is_refused_with_the_remedy(tmp_path: Path) -> None:
    """And the agent serves the next worker, which has a pool of `allocate_pool`."""
    socket_dir = tmp_path / "prefill"
    command = [sys.executable, "-m", "tests.gpu.sharing_child", str(socket_dir)]
    with process(*agent("prefill", socket_dir, slots=SLOTS)) as (child, _):
        apart.expect([child.pid])
        refused = subprocess.run(
            [*command, "legacy"], cwd=ROOT, capture_output=True, text=True, timeout=30, check=False
        )
        assert refused.returncode == 1, refused.stderr
        last = refused.stderr.strip().splitlines()[-1]
        assert last.startswith(
            "kvxfer.errors.HandoffError: pool: got a legacy handle from a process that has the PID"
        ), refused.stderr
        assert "shareProcessNamespace: true" in last
        assert "allocate_pool()" in last
        with subprocess.Popen([*command, "vmm"], cwd=ROOT, stdout=subprocess.PIPE, text=True) as worker:
            assert worker.stdout is not None
            ticket = decode_ticket(worker.stdout.readline().strip())
            worker.kill()
    assert len(ticket.sources) == 1
