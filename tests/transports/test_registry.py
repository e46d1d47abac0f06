"""Transports by name: what is refused at start, and with which remedy."""

from __future__ import annotations

import importlib
import importlib.util
import pathlib
import subprocess
import sys
from collections.abc import Mapping

import pytest

from kvxfer.errors import ConfigError, EngineMissingError
from kvxfer.transports import create_transport
from kvxfer.transports._mooncake_engine import MooncakeOptions, load_mooncake
from kvxfer.transports._nixl_engine import NixlOptions, has_rdma_device, load_bindings


@pytest.mark.parametrize(
    ("name", "host", "options", "message"),
    [
        ("nixel", "127.0.0.1", {}, "transport: got 'nixel', expected one of loopback, nixl, mooncake"),
        ("nixl", "localhost", {}, "host: got 'localhost', expected the IP address"),
        ("mooncake", "0.0.0.0", {}, r"host: got the wildcard 0\.0\.0\.0, expected one address"),
        ("mooncake", "::1", {}, "host: got ::1, expected an IPv4 address"),
        ("nixl", "::", {}, "host: got the wildcard ::, expected one address"),
        ("nixl", "127.0.0.1", {"interface": "eth9"}, r"transport.interface: got 'eth9', expected one of .*\blo\b"),
        (
            "nixl",
            "127.0.0.1",
            {"interfaces": "lo"},
            "^transport.options.interfaces: no such key, .*did you mean transport.options.interface?",
        ),
        (
            "mooncake",
            "127.0.0.1",
            {"protocol": "tpc"},
            "^transport.options.protocol: got 'tpc', expected one of tcp, rdma; did you mean tcp?",
        ),
        (
            "loopback",
            "127.0.0.1",
            {"faults": {"drop": 2}},
            "^transport.options.faults.drop: got 2, expected `float` <= 1.0",
        ),
        (
            "loopback",
            "127.0.0.1",
            {"wire_bytes_per_s": 0},
            "^transport.options.wire_bytes_per_s: got 0, expected `float` > 0.0",
        ),
    ],
)
def test_a_wrong_name_host_or_option_is_named(
    name: str, host: str, options: Mapping[str, object], message: str
) -> None:
    with pytest.raises(ConfigError, match=message):
        create_transport(name, incarnation="a", host=host, options=options)


def test_a_missing_nixl_is_reported_with_its_package(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(importlib.util, "find_spec", lambda _: None)
    with pytest.raises(EngineMissingError, match=r"pip install 'kvxfer\[nixl\]'"):
        load_bindings(NixlOptions())


def test_a_missing_mooncake_is_reported_with_its_packages(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "mooncake.engine", None)
    with pytest.raises(EngineMissingError, match=r"pip install 'kvxfer\[EXTRA\]', EXTRA one of mooncake-cpu"):
        load_mooncake(MooncakeOptions())


def test_a_missing_system_library_is_reported_with_its_package(monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(_: str) -> None:
        raise ImportError("libibverbs.so.1: cannot open shared object file: No such file or directory")

    monkeypatch.setattr(importlib, "import_module", fail)
    with pytest.raises(EngineMissingError, match="package libibverbs1"):
        load_mooncake(MooncakeOptions())


def test_rdma_is_refused_where_there_is_none(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("kvxfer.transports._mooncake_engine.has_rdma_device", lambda: False)
    with pytest.raises(ConfigError, match=r"got 'rdma', expected 'tcp': this host has no RDMA device"):
        create_transport("mooncake", incarnation="a", options={"protocol": "rdma"})


def test_an_rdma_device_is_found_where_the_kernel_lists_one(
    monkeypatch: pytest.MonkeyPatch, tmp_path: pathlib.Path
) -> None:
    monkeypatch.setattr("kvxfer.transports._nixl_engine._RDMA_DEVICES", tmp_path)
    assert not has_rdma_device()
    (tmp_path / "mlx5_0").mkdir()
    assert has_rdma_device()


@pytest.mark.parametrize("code", [0, 3])
def test_exit_process_flushes_and_ends_with_its_code(code: int) -> None:
    program = f"from kvxfer.transports import exit_process; print('last words', end=''); exit_process({code})"
    ended = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, timeout=60, check=False)
    assert (ended.returncode, ended.stdout) == (code, "last words")
