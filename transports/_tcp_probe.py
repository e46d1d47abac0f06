"""Counts the bytes that this process has sent over TCP, to find out whether an engine uses it."""

from __future__ import annotations

import contextlib
import os
import pathlib
import socket
import stat
import struct

# struct tcp_info of linux/tcp.h: 8 bytes, 24 words of 32 bits, two pacing rates, then tcpi_bytes_acked.
_BYTES_ACKED_OFFSET = 120
_TCP_INFO_BYTES = _BYTES_ACKED_OFFSET + 8


def acknowledged_tcp_bytes() -> int:
    """Bytes that peers have acknowledged on all TCP connections this process holds open now."""
    total = 0
    for name in os.listdir("/proc/self/fd"):
        # Descriptors of other threads may close at any moment.
        with contextlib.suppress(OSError):
            if stat.S_ISSOCK(pathlib.Path(f"/proc/self/fd/{name}").stat().st_mode):
                total += _acknowledged_bytes(int(name))
    return total


def _acknowledged_bytes(fd: int) -> int:
    with socket.socket(fileno=os.dup(fd)) as connection:
        if connection.type != socket.SOCK_STREAM or connection.family not in (socket.AF_INET, socket.AF_INET6):
            return 0
        info = connection.getsockopt(socket.IPPROTO_TCP, socket.TCP_INFO, _TCP_INFO_BYTES)
    return int(struct.unpack_from("=Q", info, _BYTES_ACKED_OFFSET)[0]) if len(info) == _TCP_INFO_BYTES else 0
