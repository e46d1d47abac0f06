"""`kvxfer bench transfer`: what its figures mean, what it refuses, and small runs of it."""

import re
from dataclasses import replace

import pytest

from kvxfer.cli import main as main_module
from kvxfer.cli.bench_transfer import TransferResult, run_cases
from kvxfer.cli.ensemble import Ensemble, Move, Pool, Setup, start_workers
from kvxfer.cli.harness import Cast, ChildError, ThreadsTime
from kvxfer.cli.output import Steps
from kvxfer.cli.pools import GroupShape, lay_out
from kvxfer.cli.protocol import Compute, Computed, Done, FillRows, PatternRows
from kvxfer.cli.tables import print_transfers
from kvxfer.cli.transfer_case import TransferCase
from kvxfer.control.messages import TransferStats
from kvxfer.layout import LayerRange, Placement, Shard
from kvxfer.ops.config import SlotConfig, TransportName

_CASE = TransferCase(
    transport="loopback",
    mode="packed",
    num_tokens=300,
    num_layers=3,
    row_bytes=1152,
    page_tokens=16,
    pages="shuffled",
    num_ranks=2,
    interleave=1,
    chunk_tokens=128,
    num_repeats=1,
    num_slots=3,
    slot_bytes=64 << 10,
)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--wire-gb-s", "50"], "--wire-gb-s: got 50 with transport nixl, expected --transport loopback"),
        (["--wire-gb-s", "0", "--transport", "loopback"], "--wire-gb-s: got 0, expected more than 0"),
        (["--descriptor-us", "1.4", "--transport", "loopback"], "--descriptor-us: got 1.4, expected --wire-gb-s"),
        (["--device", "cuda", "--mode", "raw"], "--mode: got raw with --placement worker, expected --placement agent"),
        (
            ["--device", "cuda", "--placement", "agent", "--mode", "raw", "--transport", "loopback"],
            "--mode: got raw with --device cuda, transport loopback and --slots pinned_host, expected",
        ),
        (
            ["--device", "cuda", "--placement", "agent", "--mode", "raw", "--transport", "mooncake"],
            "--mode: got raw with --device cuda, transport mooncake and --slots pinned_host, expected",
        ),
        (["--verify", "full", "--compare", "packed,raw"], "--verify: got full with mode raw, expected off"),
        (["--placement", "worker", "--compare", "packed,raw"], "--mode: got raw with --placement worker, expected"),
        (["--busy", "long"], "--busy: got long, expected none with --device cpu"),
        (["--gpus", "2"], "--gpus: got 2 with --device cpu, expected --device cuda"),
        (["--slots", "device"], "--slots: got device with --device cpu, expected --device cuda"),
        (
            ["--slots", "device", "--device", "cuda", "--transport", "mooncake"],
            "--slots: got device with transport mooncake, expected nixl or loopback",
        ),
        (["--plot", "x.png"], "--plot: got x.png, expected a file name that ends in .svg"),
        (["--plot", "/nowhere/x.svg"], "--plot: got /nowhere/x.svg, expected a file that can be written"),
        (["--plot", "/dev/null/x.svg"], "--plot: got /dev/null/x.svg, expected a file that can be written (Not"),
        (["--plot", "/proc/self/x.svg"], "--plot: got /proc/self/x.svg, expected a file that can be written"),
        (["--plot", "x.svg", "--compare", "packed,raw"], "--plot: got x.svg beside --compare packed,raw"),
        (["--interval-ms", "-1"], "--interval-ms: got -1, expected 0 to 10000 ms"),
    ],
)
def test_what_cannot_be_measured_is_refused_up_front(
    arguments: list[str], message: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr("sys.argv", ["kvxfer", "bench", "transfer", *arguments])
    with pytest.raises(SystemExit) as caught:
        main_module.main()
    assert caught.value.code == 2
    assert re.match(f"kvxfer: {re.escape(message)}", capsys.readouterr().err)


def _move(elapsed_s: float, **changes: float) -> Move:
    sent = TransferStats(num_rows=900, num_bytes=_CASE.num_bytes, num_segments=4, num_descriptors=4, num_runs=900)
    facts: dict[str, object] = {"tail_s": elapsed_s / 2, "landed_s": (elapsed_s,), "client_cpu_s": 0.001}
    facts |= {"decode_client_cpu_s": (0.002, 0.004), "products_per_s": 90.0, "device_bytes": 7}
    facts |= {"agent_cpu": (ThreadsTime(0.0008, 1.0), ThreadsTime(2.0, 0.0))}
    return Move(elapsed_s=elapsed_s, sent=sent, landed=(sent,), **(facts | changes))  # type: ignore[arg-type]


def test_figures_of_an_emulated_wire_and_of_workers() -> None:
    case = replace(_CASE, wire_gb_s=0.01, descriptor_us=1.4)
    moves = (_move(0.3, device_bytes=9), _move(0.2), _move(0.4, products_per_s=70.0))
    facts = TransferResult(case, 0.1, moves, None, "", (), alone_per_s=100.0).as_json()
    assert facts["share_of_wire"] == pytest.approx(300 * 3 * 1152 / 10e6 / 0.3)
    assert facts["exposed_tail_ms"] == pytest.approx(150)
    assert facts["worker_us_per_segment"] == pytest.approx(250)
    assert facts["decode_worker_us_per_segment"] == pytest.approx(1500)
    assert facts["agent_us_per_segment"] == pytest.approx(200)
    assert facts["worker_rate_kept"] == pytest.approx(0.9)
    assert facts["peak_device_bytes"] == 9
    assert facts["efficiency"] is None
    plain = TransferResult(_CASE, 0.1, moves, 0.15, "cma", ()).as_json()
    assert plain["share_of_wire"] is None
    assert plain["worker_rate_kept"] is None
    assert plain["efficiency"] == pytest.approx(0.5)


def test_rows_that_were_pulled_are_said_to_have_no_checksum(capsys: pytest.CaptureFixture[str]) -> None:
    pulled = TransferStats(num_rows=900, num_bytes=_CASE.num_bytes, num_segments=4)
    case = replace(_CASE, mode="auto", verify="full")
    said = "ranks pulled their rows, and no checksum is made of such rows."
    print_transfers([TransferResult(case, 0.1, (replace(_move(0.3), sent=pulled),), 0.15, "cma", ())])
    assert said in " ".join(capsys.readouterr().out.split())
    print_transfers([TransferResult(case, 0.1, (_move(0.3),), 0.15, "cma", ())])
    assert "pulled" not in capsys.readouterr().out


def test_cases_take_turns_on_one_stage_and_a_wire_is_never_exceeded() -> None:
    paced = replace(_CASE, wire_gb_s=0.02, descriptor_us=100.0)
    cases = [paced, replace(paced, num_ranks=1, interval_s=0.005), replace(paced, mode="serial"), _CASE]
    results = run_cases(cases, Steps())
    assert [result.case for result in results] == cases
    assert [result.problems for result in results] == [(), (), (), ()]
    for result in results[:3]:
        share = result.share_of_wire
        assert share is not None
        assert 0.0 < share <= 1.0  # each byte has been on the wire between the first submit and the end
        assert result.contiguous_s is None
    assert results[1].tail_s < results[1].elapsed_s - 0.005
    assert results[3].contiguous_s is not None
    assert results[3].path == "shared memory"


@pytest.mark.parametrize("transport", ["loopback", pytest.param("nixl", marks=pytest.mark.nixl)])
def test_streams_of_the_workers_move_every_row(transport: TransportName) -> None:
    case = replace(_CASE, transport=transport, placement="worker")
    results = run_cases([case, replace(case, mode="serial", num_ranks=1)], Steps())
    for result in results:
        facts = result.as_json()
        assert facts["verified"], facts["problems"]
        assert facts["placement"] == "worker"
        assert facts["descriptors_sent"] == facts["segments"] > 0
        assert facts["worker_us_per_segment"] > 0.0


def test_workers_in_one_process_are_told_apart() -> None:
    slots = SlotConfig(num_slots=2, slot_bytes=4096)
    shape = GroupShape("kv", LayerRange(0, 2), 64, Placement.SHARDED)
    pools = [Pool(*lay_out([shape], {"kv": 6}, 8, shard, "u8")) for shard in (Shard(), Shard(0, 2, 1), Shard(1, 2, 1))]
    with Cast() as cast:
        workers = start_workers(cast, 3, num_gpus=2)
        ensemble = Ensemble(cast, Setup("loopback", "packed", 2, slots, slots), workers)
        ensemble.hand_over(pools[0], pools[1:], fill=7)
        rows = PatternRows(seed=1, num_layers=2, num_tokens=40, row_bytes=64)
        ensemble.prefill.ask(FillRows(group="kv", rows=rows, pages=[0, 1, 2, 3, 4]), Done, 60.0)
        assert ensemble.verify([{}, {}]) == ["", ""]
        with pytest.raises(ChildError, match="workers-1, decode-worker-1: a decode worker cannot do Compute"):
            ensemble.decode[1].ask(Compute(busy="long", duration_s=1.0), Computed, 60.0)
        ensemble.let_go()
        ensemble.hand_over(pools[0], pools[1:], fill=8)  # to the same agents, by the same workers
        assert ensemble.verify([{}, {}]) == ["", ""]


def test_a_crew_that_fails_says_who_and_why() -> None:
    with Cast() as cast:
        workers = start_workers(cast, 1, num_gpus=1)
        with pytest.raises(ChildError, match=r"workers-0, decode-worker-0: ended early(.|\n)*AssertionError"):
            workers.decode[0].ask(Compute(busy="long", duration_s=1.0), Computed, 60.0)  # before it has a pool
        with pytest.raises(ChildError, match=r"workers-0: ended with exit status 1(.|\n)*AssertionError"):
            cast.stop()
