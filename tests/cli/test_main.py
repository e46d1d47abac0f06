"""Exit status and what is printed when something is not right."""

import importlib.metadata
import json
import re
import socket
import subprocess
import sys
from pathlib import Path

import pytest

from kvxfer.cli import demo as demo_module
from kvxfer.cli import main as main_module
from kvxfer.cli.demo import DecodeResult, DemoResult, RankResult
from kvxfer.cli.demo_stage import DemoOptions
from kvxfer.cli.ensemble import Ensemble, Move, Pool, Setup
from kvxfer.cli.harness import Cast, ChildError
from kvxfer.cli.output import Steps
from kvxfer.cli.pools import SPARE_PAGES, GroupShape, cut_chunks, lay_out, page_tables
from kvxfer.cli.protocol import Done, Expected, FillRows, PatternRows
from kvxfer.cli.tables import way_taken
from kvxfer.cli.transfer_case import TransferCase
from kvxfer.control.messages import TransferStats
from kvxfer.errors import ConfigError
from kvxfer.layout import LayerRange, Placement, Shard
from kvxfer.ops.config import SlotConfig


def _demo_result(options: DemoOptions, problem: str, decoded: DecodeResult | None) -> DemoResult:
    stats = TransferStats(num_rows=8, num_bytes=9216, num_segments=1, num_descriptors=1, num_runs=8)
    move = Move(elapsed_s=0.01, tail_s=0.01, sent=stats, landed=(stats,), landed_s=(0.01,))
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


def _run_main(monkeypatch: pytest.MonkeyPatch, *arguments: str) -> int:
    monkeypatch.setattr("sys.argv", ["kvxfer", *arguments])
    with pytest.raises(SystemExit) as caught:
        main_module.main()
    assert isinstance(caught.value.code, int)
    return caught.value.code


@pytest.mark.parametrize(
    ("command", "message"),
    [
        ("demo --mode serial", "--mode: got 'serial', expected auto, packed, raw or p2p"),
        ("demo --ranks 0", "--ranks: got 0, expected 1 to 16"),
        ("bench transfer --dcp 17", "--dcp: got 17, expected 1 to 16"),
        ("bench transfer --page x", "--page: got 'x', expected a whole number, at least 1"),
        ("bench transfer --mode raw --compare packed", "--mode: got raw beside --compare packed, expected one of"),
        (f"bench transfer --tokens {1 << 40}", r"--tokens, --layers, --row-bytes: got pools .* at most \d+ MiB"),
        # The second mode is refused before the first runs.
        ("bench transfer --compare packed,raw --verify full", "--verify: got full with mode raw, expected off"),
    ],
)
def test_wrong_options_are_refused_up_front(
    command: str, message: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    assert _run_main(monkeypatch, *command.split()) == 2
    error = capsys.readouterr().err
    assert re.match(f"kvxfer: {message}", error)
    assert error.count("\n") == 1


def test_bench_takes_up_to_its_share_of_memory() -> None:
    case = TransferCase("nixl", "packed", 1024, 4, 1024, 64, "shuffled", 2, 1, 1024, 1, num_slots=1, slot_bytes=1 << 20)
    needed_bytes = 4 * (4 << 20) + 3 * (1 << 20)  # two pools and both ends of the yardstick; three agents
    case.check_memory(int(needed_bytes / 0.6) + 2)
    with pytest.raises(ConfigError, match=r"got pools and slots of 19 MiB in all, expected at most 18 MiB, 60%"):
        case.check_memory(int(needed_bytes / 0.6) - 2)


def test_version(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    assert _run_main(monkeypatch, "--version") == 0
    assert capsys.readouterr().out == f"kvxfer {importlib.metadata.version('kvxfer')}\n"


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ('[security]\nkey_file = "/nowhere/key"', "security.key_file: /nowhere/key: cannot be read"),
        ('listen_host = "192.0.2.1"\n[security]\nallowed_keys_file = "/nowhere/keys"', "security.allowed_keys_file: "),
        ("listen_port = {taken}", "listen_port: {taken} on '127.0.0.1' is taken"),
        ('listen_host = "192.0.2.1"', "security.allowed_keys_file: got nothing"),
    ],
)
def test_what_an_agent_finds_wrong_names_file_and_key(tmp_path: Path, text: str, message: str) -> None:
    path = tmp_path / "agent.toml"
    with socket.create_server(("127.0.0.1", 0)) as server:
        taken = str(server.getsockname()[1])
        path.write_text(f'socket_dir = "{tmp_path}/sockets"\n' + text.replace("{taken}", taken), encoding="utf-8")
        command = [sys.executable, "-m", "kvxfer.cli.main", "prefill", "--config", str(path)]
        ended = subprocess.run(command, capture_output=True, text=True, timeout=60, check=False)
    assert ended.returncode == 2
    assert ended.stderr.startswith(f"kvxfer: {path}: {message.replace('{taken}', taken)}")


@pytest.mark.parametrize(
    ("num_segments", "num_descriptors", "way"),
    [(2, 0, "auto (chose p2p)"), (2, 2, "auto (chose packed)"), (2, 8, "auto (chose raw)")],
)
def test_auto_says_what_it_chose(num_segments: int, num_descriptors: int, way: str) -> None:
    sent = TransferStats(num_rows=8, num_segments=num_segments, num_descriptors=num_descriptors, num_runs=8)
    assert way_taken("auto", sent) == way
    assert way_taken("raw", sent) == "raw"


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
