"""The commands as a user runs them, in processes of their own."""

import json
import os
import pty
import re
import signal
import socket
import subprocess
import sys
import tempfile
import uuid
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

KVXFER = (sys.executable, "-m", "kvxfer.cli.main")
_MARK = "KVXFER_TEST_RUN"
_TEXT = "Latent rows travel in few large blocks, however the pages lie. " * 40


def _marked(mark: str) -> list[int]:
    """Processes, zombies aside, that have `mark` in their environment."""
    found = []
    for path in Path("/proc").glob("[0-9]*/environ"):
        try:
            if mark.encode() in path.read_bytes():
                found.append(int(path.parent.name))
        except OSError:  # gone, or not ours
            continue
    return found


@pytest.fixture
def environment() -> Iterator[dict[str, str]]:
    """For commands under test; afterwards none of their processes and files may be left."""
    mark = uuid.uuid4().hex
    # Not below `tmp_path`, whose long names leave no room for socket paths.
    with tempfile.TemporaryDirectory(prefix="e2e-") as directory:
        yield os.environ | {_MARK: mark, "TMPDIR": directory, "COLUMNS": "200"}
        assert _marked(mark) == []
        assert list(Path(directory).iterdir()) == []


def _run(environment: dict[str, str], *arguments: str, status: int = 0) -> subprocess.CompletedProcess[str]:
    done = subprocess.run(
        [*KVXFER, *arguments], env=environment, capture_output=True, text=True, timeout=150, check=False
    )
    assert done.returncode == status, done.stderr
    return done


def _result(environment: dict[str, str], *arguments: str) -> dict[str, Any]:
    parsed: dict[str, Any] = json.loads(_run(environment, *arguments, "--json").stdout)
    return parsed


@pytest.fixture
def prompt(tmp_path: Path) -> str:
    path = tmp_path / "prompt.txt"
    path.write_text(_TEXT, encoding="utf-8")
    return str(path)


# ---- demo ----


@pytest.mark.nixl
def test_demo_over_nixl_with_draft_state_and_decoding(environment: dict[str, str], prompt: str) -> None:
    options = ("--draft-layers", "2", "--state-bytes", "65536", "--decode-steps", "6", "--prompt", prompt)
    result = _result(environment, "demo", "--transport", "nixl", *options)
    assert result["verified"] is True
    assert result["tokens_match"] is True
    assert len(set(result["tokens_alone"])) > 3  # a stuck model would match by chance
    assert (result["transport"], result["mode"], result["ranks"]) == ("nixl", "packed", 4)
    assert result["tokens"] == len(_TEXT)
    kv_bytes, draft_bytes = (len(_TEXT) * layers * 1152 for layers in (result["layers"], 2))
    # A replicated group goes to every rank; half of the state is split, half goes to every rank.
    assert result["bytes"] == kv_bytes + 4 * draft_bytes + 32768 + 4 * 32768
    assert 0 < result["descriptors_sent"] <= result["descriptors_raw"] / 50
    assert sum(rank["descriptors_raw"] for rank in result["per_rank"]) == result["descriptors_raw"]
    assert sum(rank["descriptors_sent"] for rank in result["per_rank"]) == result["descriptors_sent"]
    assert result["goodput_gb_s"] == pytest.approx(result["bytes"] / result["transfer_ms"] / 1e6, rel=1e-3)


def test_demo_raw_over_loopback_prints_a_table(environment: dict[str, str], prompt: str) -> None:
    done = _run(environment, "demo", "--transport", "loopback", "--mode", "raw", "--ranks", "3", "--prompt", prompt)
    rows = re.findall(r"│ +(\d|all) │ +([\d,]+) │ +[\d.]+ │ +([\d,]+) │ +([\d,]+) │", done.stdout)
    assert [row[0] for row in rows] == ["0", "1", "2", "all"]
    num_rows, if_raw, sent = (int(cell.replace(",", "")) for cell in rows[-1][1:])
    assert num_rows == if_raw == sent == 4 * len(_TEXT)
    assert "wrong" not in done.stdout


def test_demo_of_an_empty_prompt(environment: dict[str, str], tmp_path: Path) -> None:
    (tmp_path / "empty").touch()
    options = ("--prompt", str(tmp_path / "empty"), "--ranks", "2", "--decode-steps", "2")
    result = _result(environment, "demo", "--transport", "loopback", *options)
    assert (result["tokens"], result["bytes"], result["verified"], result["tokens_match"]) == (0, 0, True, True)


def test_demo_without_torch_says_what_is_missing(environment: dict[str, str], tmp_path: Path) -> None:
    (tmp_path / "torch.py").write_text("raise ModuleNotFoundError(\"No module named 'torch'\", name='torch')")
    options = ("--transport", "loopback", "--ranks", "1")
    error = _run(environment | {"PYTHONPATH": str(tmp_path)}, "demo", *options, status=1).stderr
    assert error == "kvxfer: prefill-worker: the model needs torch, which is not installed: pip install torch\n"


# ---- bench transfer ----

_SHAPES = [
    "--tokens 700 --dcp 3 --interleave 1 --page 16",
    "--tokens 1500 --dcp 8 --interleave 64 --page 64",
    "--tokens 500 --dcp 2 --row-bytes 577 --chunk 201 --pages adjacent",
    "--tokens 1",
    "--tokens 0",
]


def _bench(environment: dict[str, str], *arguments: str) -> dict[str, Any]:
    return _result(environment, "bench", "transfer", "--layers", "3", "--repeat", "1", *arguments)


@pytest.mark.parametrize("shape", _SHAPES)
def test_bench_over_loopback(environment: dict[str, str], shape: str) -> None:
    result = _bench(environment, "--transport", "loopback", *shape.split())
    assert result["verified"] is True
    assert result["bytes"] == result["tokens"] * 3 * result["row_bytes"]
    assert result["slot_bytes"] <= 64 << 20
    if result["tokens"] == 0:
        assert (result["descriptors_sent"], result["contiguous_gb_s"], result["efficiency"]) == (0, None, None)
    else:
        assert result["efficiency"] == pytest.approx(result["goodput_gb_s"] / result["contiguous_gb_s"], rel=1e-3)


@pytest.mark.nixl
@pytest.mark.parametrize("shape", [_SHAPES[0], _SHAPES[3]])
def test_bench_over_nixl(environment: dict[str, str], shape: str) -> None:
    assert _bench(environment, "--transport", "nixl", *shape.split())["verified"] is True


@pytest.mark.nixl
def test_bench_with_sums_by_streams(environment: dict[str, str]) -> None:
    shape = "--dcp 2 --tokens 300 --row-bytes 577 --slot-kib 64"
    result = _bench(environment, "--transport", "nixl", "--placement", "worker", "--verify", "full", *shape.split())
    assert result["verified"] is True


@pytest.mark.nixl
def test_bench_compares_modes(environment: dict[str, str]) -> None:
    result = _bench(
        environment, "--transport", "nixl", "--dcp", "2", "--tokens", "600", "--compare", "packed,raw,serial,p2p"
    )
    assert result["verified"] is True
    sent = {fact["mode"]: fact["descriptors_sent"] for fact in result["modes"]}
    assert sent == {"packed": 2, "raw": 1800, "serial": 2, "p2p": 0}
    assert result["ratios"].keys() == {"packed_to_raw", "packed_to_serial", "packed_to_p2p"}


@pytest.mark.mooncake
def test_bench_over_mooncake(environment: dict[str, str]) -> None:
    assert _bench(environment, "--transport", "mooncake", "--dcp", "2", "--tokens", "300")["verified"] is True


def test_steps_are_shown_on_a_terminal(environment: dict[str, str]) -> None:
    ours, theirs = pty.openpty()
    command = [*KVXFER, "bench", "transfer", "--transport", "loopback", "--tokens", "1", "--repeat", "1", "--json"]
    try:
        done = subprocess.run(command, env=environment, stdout=subprocess.PIPE, stderr=theirs, timeout=100, check=True)
        shown = os.read(ours, 1 << 16).decode()
    finally:
        os.close(ours)
        os.close(theirs)
    assert json.loads(done.stdout)["verified"] is True
    assert "packed: starting agents" in shown


# ---- agents ----


def _config(tmp_path: Path, text: str) -> str:
    path = tmp_path / "agent.toml"
    path.write_text(text, encoding="utf-8")
    return str(path)


@pytest.mark.nixl
@pytest.mark.parametrize("role", ["prefill", "decode"])
def test_agent_is_small_and_ends_well(environment: dict[str, str], tmp_path: Path, role: str) -> None:
    text = f'socket_dir = "{tmp_path}/s"\n[slots]\nnum_slots = 2\nslot_bytes = 65536\n[transport]\nname = "nixl"'
    command = [*KVXFER, role, "--config", _config(tmp_path, text), "--json"]
    with subprocess.Popen(command, env=environment, stdout=subprocess.PIPE, text=True) as agent:
        assert agent.stdout is not None
        ready = json.loads(agent.stdout.readline())
        # CPU time, because the machine may be busy with something else: at rest the two are the same.
        fields = Path(f"/proc/{agent.pid}/stat").read_text(encoding="utf-8").rpartition(") ")[2].split()
        cpu_s = (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")
        status = Path(f"/proc/{agent.pid}/status").read_text(encoding="utf-8")
        maps = Path(f"/proc/{agent.pid}/maps").read_text(encoding="utf-8")
        agent.send_signal(signal.SIGTERM)
        assert agent.stdout.read() == ""
        assert agent.wait(20) == 0
    assert ready["ready"] is True
    assert re.fullmatch("[0-9a-f]{32}", ready["incarnation"])
    resident = re.search(r"VmRSS:\s+(\d+) kB", status)
    assert resident is not None
    assert int(resident[1]) < 200 << 10
    assert "torch" not in maps
    assert cpu_s < 2.0


def test_second_agent_of_a_socket_directory_is_refused(environment: dict[str, str], tmp_path: Path) -> None:
    config = _config(tmp_path, f'socket_dir = "{tmp_path}/s"\n[slots]\nnum_slots = 1\n[transport]\nname = "loopback"')
    command = [*KVXFER, "decode", "--config", config]
    with subprocess.Popen(command, env=environment, stdout=subprocess.PIPE, text=True) as agent:
        assert agent.stdout is not None
        assert "decode agent ready" in agent.stdout.readline()
        try:
            error = _run(environment, "decode", "--config", config, status=2).stderr
        finally:
            agent.send_signal(signal.SIGINT)
            assert agent.wait(20) == 0
    assert f"{tmp_path}/s is in use by another agent" in error
    assert list((tmp_path / "s").glob("*.sock")) == []


# ---- bad input ----


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["demo", "--prompt", "/nonexistent"], "--prompt: /nonexistent cannot be read"),
        (["demo", "--ranks", "0"], "--ranks: got 0, expected 1 to 16"),
        (["demo", "--mode", "serial"], "serial"),
        (["bench", "transfer", "--tokens", "-1"], "--tokens: got -1, expected at least 0"),
        (["bench", "transfer", "--row-bytes", "0"], "--row-bytes: got 0, expected at least 1"),
        (["bench", "transfer", "--row-bytes", "20000000"], "--row-bytes: got 20000000, expected at most"),
        (
            ["bench", "transfer", "--compare", "packed,fast"],
            "--compare: got 'fast', expected some of auto, packed",
        ),
        (["prefill", "--config", "/nonexistent.toml"], "/nonexistent.toml: cannot be read"),
    ],
)
def test_wrong_command_lines(environment: dict[str, str], arguments: list[str], message: str) -> None:
    done = _run(environment, *arguments, status=2)
    assert message in done.stderr
    assert "Traceback" not in done.stderr
    assert done.stdout == ""


def test_long_prompts_are_refused(environment: dict[str, str], tmp_path: Path) -> None:
    path = tmp_path / "long"
    path.write_bytes(b"x" * 20_000)
    assert "--prompt: got 20000 bytes" in _run(environment, "demo", "--prompt", str(path), status=2).stderr


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("socket_path = '/tmp/x'", "socket_path: no such key, .*did you mean socket_dir?"),
        ("socket_dir = '/tmp/x'\npeer_timeout_s = '5 s'", r"peer_timeout_s: got '5 s', expected `float` \(seconds\)"),
        ("socket_dir = '/tmp/x'\n[transport.options]\nnum_wires = 3\n[transport]\nname = 'loopback'", "num_wires"),
    ],
)
def test_wrong_config_files(environment: dict[str, str], tmp_path: Path, text: str, message: str) -> None:
    error = _run(environment, "decode", "--config", _config(tmp_path, text), status=2).stderr
    assert re.search(message, error), error
    assert "Traceback" not in error


def test_taken_port(environment: dict[str, str], tmp_path: Path) -> None:
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        port = taken.getsockname()[1]
        text = f'socket_dir = "{tmp_path}/s"\nlisten_port = {port}\n[transport]\nname = "loopback"'
        error = _run(environment, "prefill", "--config", _config(tmp_path, text), status=2).stderr
    assert str(port) in error
    assert "Traceback" not in error
