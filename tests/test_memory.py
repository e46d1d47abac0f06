"""Shared host memory: what it holds, and that all of it is given back."""

from __future__ import annotations

import ctypes
import os
from pathlib import Path

import pytest

from kvxfer.errors import HandoffError
from kvxfer.memory import HostMemory

NUM_BYTES = (1 << 20) + 5  # no multiple of a page


def _held(name: str) -> tuple[int, int]:
    """Descriptors and mappings of this process that belong to the memfd `name`."""
    links = [os.readlink(f"/proc/self/fd/{fd}") for fd in os.listdir("/proc/self/fd") if _is_open(fd)]
    maps = Path("/proc/self/maps").read_text(encoding="utf-8")
    return sum(f"memfd:{name} " in f"{link} " for link in links), maps.count(f"/memfd:{name} ")


def _is_open(fd: str) -> bool:
    """The descriptor through which the list was read is closed by now."""
    return os.path.lexists(f"/proc/self/fd/{fd}")


def test_two_mappings_show_the_same_bytes_and_nothing_stays() -> None:
    with HostMemory.create(NUM_BYTES, "kvxfer-shown") as memory:
        assert memory.array.size == NUM_BYTES
        assert not memory.array.any()
        with HostMemory.attach(os.dup(memory.fd), NUM_BYTES) as other:
            other.array[-1] = 7
            assert memory.array[-1] == 7
            assert _held("kvxfer-shown") == (2, 2)
    assert _held("kvxfer-shown") == (0, 0)


def test_forked_children_do_not_inherit_the_mapping() -> None:
    with HostMemory.create(NUM_BYTES, "kvxfer-forked"):
        smaps = Path("/proc/self/smaps").read_text(encoding="utf-8")
        flags = smaps.partition("/memfd:kvxfer-forked ")[2].partition("VmFlags:")[2].partition("\n")[0].split()
        assert "dc" in flags  # do not copy on fork


def test_abandoned_memory_is_given_back_and_its_addresses_never_used_again() -> None:
    """What lands there late is seen by nobody: not by who has it mapped elsewhere, not in memory that comes later."""
    memory = HostMemory.create(NUM_BYTES, "kvxfer-left")
    with HostMemory.attach(os.dup(memory.fd), NUM_BYTES) as other:
        address = memory.address
        memory.abandon()
        assert _held("kvxfer-left") == (1, 1)  # the other one's
        ctypes.memset(address, 0xEE, NUM_BYTES)
        assert not other.array.any()
        with HostMemory.create(NUM_BYTES, "kvxfer-next") as later:
            assert abs(later.address - address) >= NUM_BYTES
            assert not later.array.any()
    assert _held("kvxfer-left") == (0, 0)


def test_memory_that_is_mapped_to_be_read_cannot_be_written() -> None:
    with HostMemory.create(5000, "source") as source:
        source.array[:] = 7
        fd = os.open(f"/proc/self/fd/{source.fd}", os.O_RDONLY | os.O_CLOEXEC)
        with HostMemory.attach(fd, 5000, is_read_only=True) as mapped:
            source.array[4999] = 8
            assert (int(mapped.array[0]), int(mapped.array[4999])) == (7, 8)
            with pytest.raises(ValueError, match="read-only"):
                mapped.array[0] = 1
        fd = os.open(f"/proc/self/fd/{source.fd}", os.O_RDONLY | os.O_CLOEXEC)
        with pytest.raises(HandoffError, match="cannot be mapped for reading and writing"):
            HostMemory.attach(fd, 5000)
