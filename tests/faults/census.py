"""What a process holds."""

from __future__ import annotations

import os
from pathlib import Path

_PAGE_BYTES = os.sysconf("SC_PAGESIZE")


def census() -> dict[str, int]:
    """Descriptors, mappings of shared memory and threads of this process."""
    maps = Path("/proc/self/maps").read_text(encoding="utf-8")
    return {
        "fds": len(os.listdir("/proc/self/fd")) - 1,  # less the one of the listing
        "maps": maps.count("/memfd:"),
        "threads": len(os.listdir("/proc/self/task")),
    }


def rss_bytes(pid: int) -> int:
    """Resident memory of a process."""
    return int(Path(f"/proc/{pid}/statm").read_text(encoding="ascii").split()[1]) * _PAGE_BYTES


def cpu_s(pid: int) -> float:
    """Processor time that a process has used."""
    fields = Path(f"/proc/{pid}/stat").read_text(encoding="ascii").rpartition(")")[2].split()
    return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")
