"""Slots that do not fit into memory are refused at the start, before any page of them is taken."""

from __future__ import annotations

import errno
from pathlib import Path

import pytest

from kvxfer.decode.agent import DecodeAgent
from kvxfer.errors import ConfigError
from kvxfer.memory import HostMemory
from kvxfer.ops.config import DecodeConfig, PrefillConfig, SlotConfig, TransportConfig
from kvxfer.prefill.agent import PrefillAgent
from kvxfer.slot_memory import SlotMemory, available_bytes


@pytest.mark.parametrize(("make", "kind"), [(PrefillAgent, PrefillConfig), (DecodeAgent, DecodeConfig)])
def test_an_agent_refuses_slots_beyond_memory(
    make: type[PrefillAgent | DecodeAgent], kind: type[PrefillConfig | DecodeConfig], tmp_path: Path
) -> None:
    slots = SlotConfig(num_slots=4096, slot_bytes=1 << 40)
    config = kind(socket_dir=str(tmp_path / "s"), transport=TransportConfig(name="loopback"), slots=slots)
    with pytest.raises(
        ConfigError, match=r"^slots: got 4096 slots of 1099511627776 bytes, .* expected at most \d+ MiB"
    ):
        make(config)  # type: ignore[arg-type]


def test_memory_that_the_system_refuses_is_an_error_of_the_configuration(monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(_num_bytes: int, _name: str) -> HostMemory:
        raise OSError(errno.ENOMEM, "Cannot allocate memory")

    monkeypatch.setattr(HostMemory, "create", refuse)
    with pytest.raises(ConfigError, match=r"slots: got 1 slots of 4096 bytes.*Cannot allocate memory"):
        SlotMemory.at_start(SlotConfig(num_slots=1, slot_bytes=4096))


def test_the_limit_of_the_control_group_counts(monkeypatch: pytest.MonkeyPatch) -> None:
    files = {"/proc/meminfo": "MemTotal: 99 kB\nMemAvailable: 64 kB\n", "/sys/fs/cgroup/memory.max": "max\n"}
    monkeypatch.setattr(Path, "read_text", lambda path, encoding: files[str(path)])  # noqa: ARG005
    monkeypatch.setattr(Path, "exists", lambda path: str(path) in files)
    assert available_bytes() == 64 << 10
    files |= {"/sys/fs/cgroup/memory.max": "9096\n", "/sys/fs/cgroup/memory.current": "6000\n"}
    files["/sys/fs/cgroup/memory.stat"] = "anon 4000\ninactive_file 1000\nactive_file 500\n"
    assert available_bytes() == 4096
    files["/sys/fs/cgroup/memory.current"] = "10200\n"
    assert available_bytes() == 0
    del files["/sys/fs/cgroup/memory.max"]
    assert available_bytes() == 64 << 10
