"""Exit status and what is printed when something is not right."""

import json

import pytest

from kvxfer.cli import demo as demo_module
from kvxfer.cli import main as main_module
from kvxfer.cli.bench_transfer import TransferCase
from kvxfer.cli.demo import DecodeResult, DemoResult, RankResult
from kvxfer.cli.demo_stage import DemoOptions
from kvxfer.cli.ensemble import Ensemble, Move, Pool, Setup
from kvxfer.cli.harness import Cast, ChildError
from kvxfer.cli.output import Steps
from kvxfer.cli.pools import SPARE_PAGES, GroupShape, cut_chunks, lay_out, page_tables
from kvxfer.cli.protocol import Done, Expected, FillRows, PatternRows
from kvxfer.control.messages import TransferStats
from kvxfer.layout import LayerRange, Placement, Shard
from kvxfer.ops.config import SlotConfig


def _demo_result(options: DemoOptions, problem: str, decoded: DecodeResult | None) -> DemoResult:
    stats = TransferStats(num_rows=8, num_bytes=9216, num_segments=1, num_descriptors=1, num_runs=8)
    move = Move(elapsed_s=0.01, sent=stats, landed=(stats,), landed_s=(0.01,))
    rank = RankResult(0, 8, 9216, 8, 1, 0.01, problem)
    return DemoResult(options, 2, prefill_s=1.0, pair_s=0.1, move=move, ranks=(rank,), decoded=decoded)


def _run_demo(monkeypatch: pytest.MonkeyPatch, arguments: list[str], problem: str, decoded: DecodeResult | None) -> int:
    monkeypatch.setattr(
        demo_module, "run_demo", lambda options, _steps: _demo_result(options, problem, decoded), raising=True
    )
    monkeypatch.setattr("sys.argv", ["kvxfer", "demo", *arguments])
    with pytest.raises(SystemExit) as caught:
        main_module.main()
    assert isinstance(caught.value.code, int)
    return caught.value.code


def test_demo_fails_where_a_byte_differs(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    assert _run_demo(monkeypatch, ["--json"], "1 bytes differ", None) == 1
    printed = json.loads(capsys.readouterr().out)
    assert printed["verified"] is False
    assert printed["per_rank"][0]["problem"] == "1 bytes differ"
    assert _run_demo(monkeypatch, [], "1 bytes differ", None) == 1
    assert "rank 0: 1 bytes differ" in capsys.readouterr().out


def test_demo_fails_where_a_token_differs(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    decoded = DecodeResult([1, 2], ([1, 2], [1, 3]), 0.5)
    assert _run_demo(monkeypatch, ["--json"], "", decoded) == 1
    assert json.loads(capsys.readouterr().out)["tokens_match"] is False
    assert _run_demo(monkeypatch, ["--json"], "", DecodeResult([1, 2], ([1, 2], [1, 2]), 0.5)) == 0


def test_what_a_user_cannot_help_is_status_one(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def fail(_options: DemoOptions, _steps: Steps) -> DemoResult:
        raise ChildError("decode-worker-0: is gone")

    monkeypatch.setattr(demo_module, "run_demo", fail)
    monkeypatch.setattr("sys.argv", ["kvxfer", "demo"])
    with pytest.raises(SystemExit) as caught:
        main_module.main()
    assert caught.value.code == 1
    assert capsys.readouterr().err == "kvxfer: decode-worker-0: is gone\n"


def test_workers_find_what_differs() -> None:
    shape = GroupShape("kv", LayerRange(0, 2), 64, Placement.SHARDED)
    paging = page_tables(Placement.SHARDED, 50, 8, 2, 1, shuffled=True)
    slots = SlotConfig(num_slots=2, slot_bytes=4096)

    def pool(pages: list[int], shard: Shard) -> Pool:
        return Pool(*lay_out([shape], {"kv": len(pages) + SPARE_PAGES}, 8, shard, "u8"))

    def expected(seed: int) -> list[dict[str, Expected]]:
        rows = PatternRows(seed=seed, num_layers=2, num_tokens=50, row_bytes=64)
        return [{"kv": Expected(pages=paging.receive(rank), source=rows)} for rank in range(2)]

    with Cast() as cast:
        ensemble = Ensemble(cast, Setup("loopback", "packed", 2, slots, slots))
        decode_pools = [pool(pages, Shard(rank, 2, 1)) for rank, pages in enumerate(paging.dst_pages)]
        ensemble.hand_over(pool(paging.src_pages, Shard()), decode_pools, fill=7)
        rows = PatternRows(seed=1, num_layers=2, num_tokens=50, row_bytes=64)
        ensemble.prefill.ask(FillRows(group="kv", rows=rows, pages=paging.src_pages), Done, 60.0)
        chunks = cut_chunks({"kv": paging}, frozenset(), 50, 20)
        assert [bool(problem) for problem in ensemble.verify(expected(1))] == [True, True]  # nothing moved yet
        ensemble.move(chunks, [{"kv": paging.receive(rank)} for rank in range(2)])
        assert ensemble.verify(expected(1)) == ["", ""]
        assert [bool(problem) for problem in ensemble.verify(expected(2))] == [True, True]
        assert [bool(problem) for problem in ensemble.verify([{}, {}])] == [True, True]  # rows where none belong


@pytest.mark.parametrize(
    ("num_tokens", "chunk_tokens", "slot_mib"), [(0, 10, 16), (8192, 8192, 138), (8192, 2048, 35), (100, 8192, 16)]
)
def test_serial_slots_hold_a_chunk(num_tokens: int, chunk_tokens: int, slot_mib: int) -> None:
    case = TransferCase("nixl", "serial", num_tokens, 61, 1152, 64, "shuffled", 4, 1, chunk_tokens, 1)
    src, dst = case.slots()
    assert (src.num_slots, dst.num_slots) == (4, 1)
    assert src.slot_bytes == dst.slot_bytes
    assert -(-src.slot_bytes // (1 << 20)) == slot_mib
    largest_chunk = min(chunk_tokens, num_tokens) // 4 * 61 * 1152
    assert src.slot_bytes >= largest_chunk
