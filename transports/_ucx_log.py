"""What UCX says about itself: its log, caught in memory, and the protocol tables in it.

UCX prints its log to standard output, where it would spoil a command's result. Here it goes to a memfd instead; its
warnings are passed on to `logging`, and its tables of chosen protocols tell which path writes really take.
"""

from __future__ import annotations

import contextlib
import ctypes
import logging
import os
import re
from collections.abc import Iterator

_LOG_FILE = "UCX_LOG_FILE"
_TABLES = "UCX_PROTO_INFO"
_KEPT_BYTES = 1 << 18
_logger = logging.getLogger("kvxfer.transports.ucx")

# | agent-name intra-node cfg#1 |                                           a table's title: where the peer is
_TITLE = re.compile(r"\|.* (self|intra-node|inter-node) cfg#\d+ .*\|")
# | remote memory write by ucp_put* from host memory to host |              what the table is about: writes that stay in
# | remote memory write by ucp_put*(multi) from cuda/GPU0 to cuda |         one kind of memory, as those of slots do
_WRITE = re.compile(r"\| remote memory write by ucp_put\S* from (host|cuda)\S*(?: memory)? to \1")
_libc = ctypes.CDLL(None)
# | 0..inf | zero-copy | cma/memory |                                       its rows; the last one is for long writes
_ROW = re.compile(r"\|[^|]*\.\.[^|]*\|[^|]*\|([^|]*)\|")
_TABLE_LINE = re.compile(r"\]\s+[|+]")


class UcxLog:
    """The log of this process's UCX, which opens it once and for good: there is one object in a process."""

    def __init__(self) -> None:
        self._fd = os.memfd_create("ucx-log", os.MFD_CLOEXEC)
        self._num_read_bytes = 0
        self._rest = ""
        self._scope = ""
        self._source = ""  # of the writes that the table is about, empty in other tables
        self._paths: dict[tuple[str, str], str] = {}

    @contextlib.contextmanager
    def environment(self) -> Iterator[None]:
        """Set what makes UCX write here while it starts. Removed afterwards: a child process must not inherit it."""
        ours = {_LOG_FILE: f"/proc/self/fd/{self._fd}", _TABLES: "y"}
        added = {name: value for name, value in ours.items() if name not in os.environ}
        os.environ.update(added)
        try:
            yield
        finally:
            for name in added:
                del os.environ[name]

    def write_path(self, scope: str, *, is_gpu: bool = False) -> str:
        """Transports that UCX chose for long writes to peers in `scope` (`self`, `intra-node`, `inter-node`), out of
        host memory or that of a GPU."""
        self.read_new()
        return self._paths.get((scope, "cuda" if is_gpu else "host"), "unknown")

    def read_new(self) -> None:
        """Take in what UCX has written since the last call; pass on what is no table."""
        _libc.fflush(None)  # the newest table lies in a buffer of the C library, often half of it
        num_bytes = os.fstat(self._fd).st_size - self._num_read_bytes
        if num_bytes <= 0:
            return
        text = self._rest + os.pread(self._fd, num_bytes, self._num_read_bytes).decode(errors="replace")
        self._num_read_bytes += num_bytes
        if self._num_read_bytes > _KEPT_BYTES:
            # UCX goes on at its own position; what lies before becomes a hole that takes no memory.
            os.ftruncate(self._fd, 0)
        *lines, self._rest = text.split("\n")
        for line in lines:
            self._take(line.replace("\0", ""))

    def _take(self, line: str) -> None:
        if not _TABLE_LINE.search(line):
            if line.strip():
                _logger.warning("%s", line)
            return
        if title := _TITLE.search(line):
            self._scope = title[1]
            self._source = ""
        elif "| remote memory write by" in line:
            write = _WRITE.search(line)
            self._source = write[1] if write else ""
        elif self._source and (row := _ROW.search(line)):
            names = sorted(set(re.findall(r"([a-z]\w*)/", row[1])))
            if names:
                self._paths[self._scope, self._source] = "+".join(names)
