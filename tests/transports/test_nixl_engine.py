"""The NIXL adapter: its errors, and what UCX's log says about the path."""

from __future__ import annotations

import logging
import os
import pathlib
import subprocess
import sys

import msgspec
import pytest

from kvxfer.errors import ProtocolError
from kvxfer.transports import create_transport
from kvxfer.transports._metadata import PublishedRegion, decode_metadata, encode_metadata
from kvxfer.transports._nixl_engine import MAX_UNREACHABLE_PEERS
from kvxfer.transports._ucx_log import UcxLog

_TABLES = """\
[1795956301.292190] [vm:5005 :0]   +--------+-------------+-----------------------------------+
[1795956301.292190] [vm:5005 :0]   | w-1 intra-node cfg#1                                     |
[1795956301.292190] [vm:5005 :0]   | remote memory write by ucp_put* from host memory to host |
[1795956301.292190] [vm:5005 :0]   +--------+-------------+-----------------------------------+
[1795956301.292190] [vm:5005 :0]   | Range  | Description |              Config               |
[1795956301.292190] [vm:5005 :0]   | 0..inf | zero-copy   | cma/memory                        |
[1795956301.301302] [vm:5005 :0]   | w-1 intra-node cfg#1                                      |
[1795956301.301302] [vm:5005 :0]   | active message by ucp_am_send* from host memory           |
[1795956301.301302] [vm:5005 :0]   |   0..626 | short              | tcp/lo                    |
[1795956301.292190] [vm:5005 :0]   | w-1 inter-node cfg#2                                      |
[1795956301.292190] [vm:5005 :0]   | remote memory write by ucp_put* from host memory to host  |
[1795956301.292190] [vm:5005 :0]   | 0..2000 | short     | rc_mlx5/mlx5_0:1                    |
[1795956301.292190] [vm:5005 :0]   | 2001..inf | zero-copy | 50% on rc_mlx5/mlx5_0:1 and 50% on dc_mlx5/mlx5_1:1 |
[1795956301.292190] [vm:5005 :0]   | w-1 intra-node cfg#3                                                |
[1795956301.292190] [vm:5005 :0]   | remote memory write by ucp_put*(multi) from cuda/GPU0 to cuda      |
[1795956301.292190] [vm:5005 :0]   | 0..inf | zero-copy | cuda_ipc/cuda                                  |
"""


@pytest.fixture
def log_and_file() -> tuple[UcxLog, pathlib.Path]:
    """A log and the file that UCX would open."""
    log = UcxLog()
    with log.environment():
        return log, pathlib.Path(os.environ["UCX_LOG_FILE"])


def test_the_path_is_what_ucx_chose_for_long_writes(log_and_file: tuple[UcxLog, pathlib.Path]) -> None:
    log, file = log_and_file
    assert log.write_path("intra-node") == "unknown"
    file.write_text(_TABLES)
    assert log.write_path("intra-node") == "cma"
    assert log.write_path("inter-node") == "dc_mlx5+rc_mlx5"
    assert log.write_path("self") == "unknown"
    assert log.write_path("intra-node", is_gpu=True) == "cuda_ipc"
    assert log.write_path("inter-node", is_gpu=True) == "unknown"


def test_a_line_may_come_in_two_pieces_and_what_is_no_table_is_passed_on(
    log_and_file: tuple[UcxLog, pathlib.Path], caplog: pytest.LogCaptureFixture
) -> None:
    log, file = log_and_file
    with caplog.at_level(logging.WARNING), file.open("w") as ucx:
        ucx.write("[1.0] [vm:1:0] ib_md.c:1 UCX  WARN  no ")
        ucx.flush()
        log.read_new()
        ucx.write("device\n")
        ucx.flush()
        log.read_new()
    assert caplog.messages == ["[1.0] [vm:1:0] ib_md.c:1 UCX  WARN  no device"]


def test_the_log_does_not_grow_without_bound(log_and_file: tuple[UcxLog, pathlib.Path]) -> None:
    log, file = log_and_file
    with file.open("w") as ucx:
        for _ in range(4):
            ucx.write("[1.0] [vm:1:0]   | a | b | c |\n" * 10_000)
            ucx.flush()
            log.read_new()
            assert file.stat().st_blocks * 512 < 1 << 20
        ucx.write(_TABLES)
        ucx.flush()
        assert log.write_path("intra-node") == "cma"


def test_the_environment_is_as_before_and_what_the_user_set_is_kept(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("UCX_LOG_FILE", "mine")
    monkeypatch.delenv("UCX_PROTO_INFO", raising=False)
    with UcxLog().environment():
        assert os.environ["UCX_LOG_FILE"] == "mine"
        assert os.environ["UCX_PROTO_INFO"] == "y"
    assert os.environ["UCX_LOG_FILE"] == "mine"
    assert "UCX_PROTO_INFO" not in os.environ


_LIST_UNMAPPED = """
from kvxfer.transports import exit_process
from kvxfer.transports._nixl_engine import NixlEngine, NixlOptions, load_bindings
nixl = load_bindings(NixlOptions(interface="lo"))
engine = NixlEngine(nixl, "only", True)
raised = {name for name, kind in vars(nixl).items() if isinstance(kind, type) and issubclass(kind, Exception)}
print(*sorted(raised - {kind.__name__ for kind in engine.errors.mapped}))
engine.destroy()
exit_process(0)
"""


@pytest.mark.nixl
def test_every_exception_of_nixl_is_mapped_but_the_one_about_telemetry() -> None:
    ended = subprocess.run(
        [sys.executable, "-c", _LIST_UNMAPPED], capture_output=True, text=True, timeout=60, check=True
    )
    assert ended.stdout.split() == ["nixlNoTelemetryError"]


_PUBLISH = """
import os
from kvxfer.transports import create_transport
transport = create_transport("nixl", incarnation="c" * 32)
print(transport.metadata().hex(), flush=True)
os._exit(0)
"""
_ADD_DEAD = """
import os, sys
from kvxfer.errors import PeerLostError
from kvxfer.transports import create_transport, exit_process
transport = create_transport("nixl", incarnation="a" * 32, is_target=False)
counts = [len(os.listdir("/proc/self/fd"))]
for number in range(int(sys.argv[2])):
    try:
        transport.add_peer(f"{number:032x}", bytes.fromhex(sys.argv[1]))
    except PeerLostError:
        counts.append(len(os.listdir("/proc/self/fd")))
transport.close()
print(len(counts) - 1, max(counts) - counts[0])
exit_process(0)
"""


@pytest.mark.nixl
def test_peers_that_are_gone_cost_a_bounded_number_of_descriptors() -> None:
    """UCX keeps one for each connection that was refused; a new engine object drops them."""
    num_added = 2 * MAX_UNREACHABLE_PEERS + 3

    def run(*arguments: str) -> str:
        command = [sys.executable, "-c", *arguments]
        return subprocess.run(command, stdout=subprocess.PIPE, text=True, timeout=60, check=True).stdout

    metadata = run(_PUBLISH).strip()
    num_refused, num_kept = run(_ADD_DEAD, metadata, str(num_added)).split()
    assert int(num_refused) == num_added
    assert int(num_kept) <= MAX_UNREACHABLE_PEERS + 4  # two engine objects may differ by a few


@pytest.mark.nixl
def test_memory_of_a_gpu_and_of_the_host_are_no_pair_on_one_host() -> None:
    transport = create_transport("nixl", incarnation="me")
    try:
        metadata = decode_metadata(transport.metadata(), "nixl")
        on_gpu = PublishedRegion(1, 4096, 1 << 20, gpu_index=0)
        with pytest.raises(ProtocolError, match=r"slots.kind: got slots in the host's memory and those of peer p in a"):
            transport.add_peer("p", encode_metadata(msgspec.structs.replace(metadata, regions=[on_gpu])))
    finally:
        transport.close()
