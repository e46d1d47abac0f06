"""Host memory that processes share: a sealed memfd and its mapping."""

from __future__ import annotations

import ctypes
import fcntl
import mmap
import os
from types import TracebackType
from typing import Self

import numpy as np
import numpy.typing as npt

from kvxfer.errors import HandoffError

_SIZE_SEALS = fcntl.F_SEAL_GROW | fcntl.F_SEAL_SHRINK
_SEALS = _SIZE_SEALS | fcntl.F_SEAL_SEAL

_MAP_FIXED, _MAP_NORESERVE = 0x10, 0x4000  # not in the mmap module
_RESERVED_FLAGS = mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS | _MAP_NORESERVE
_READ_WRITE = mmap.PROT_READ | mmap.PROT_WRITE
_abandoned: list[mmap.mmap] = []
_libc = ctypes.CDLL(None, use_errno=True)
_libc.mmap.restype = ctypes.c_void_p
_libc.mmap.argtypes = (
    ctypes.c_void_p,
    ctypes.c_size_t,
    ctypes.c_int,
    ctypes.c_int,
    ctypes.c_int,
    ctypes.c_int64,
)


class HostMemory:
    """A mapping of a memfd whose size can never change again.

    The object owns its file descriptor and its mapping; `close()` frees both. Views taken from `array` must be gone
    by then: a mapping with live views stays mapped until they are collected. Forked children do not inherit the
    mapping (MADV_DONTFORK).
    """

    def __init__(self, fd: int, num_bytes: int, *, is_read_only: bool = False) -> None:
        """Take over `fd` and map it. Use `create` or `attach`."""
        self.fd = fd
        self.num_bytes = num_bytes
        # Addresses first, the file into them afterwards: `mmap` would keep a descriptor of its own for a file, and an
        # abandoned memory could never be given back.
        self._mapping = mmap.mmap(-1, num_bytes, _RESERVED_FLAGS, _READ_WRITE)
        self.array: npt.NDArray[np.uint8] = np.frombuffer(self._mapping, dtype=np.uint8)
        """`[num_bytes]` uint8 view of the whole mapping."""
        _map_over(self.address, num_bytes, mmap.MAP_SHARED, fd, mmap.PROT_READ if is_read_only else _READ_WRITE)
        self.array.flags.writeable = not is_read_only
        self._mapping.madvise(mmap.MADV_DONTFORK)

    @classmethod
    def create(cls, num_bytes: int, name: str) -> Self:
        """Allocate `num_bytes` (at least 1) of zeroed memory; `name` shows up in /proc/PID/maps.

        Pages are backed when first touched. Raises `OSError` where the system has no more memory to give.
        """
        fd = _sealed_memfd(num_bytes, name)
        try:
            return cls(fd, num_bytes)
        except BaseException:
            os.close(fd)
            raise

    @classmethod
    def attach(cls, fd: int, num_bytes: int, what: str = "pool", *, is_read_only: bool = False) -> Self:
        """Map memory that another process created, and that errors call `what`. Takes over `fd`, also when it raises.

        `is_read_only`: rows are only pulled from it; writing there ends this process.

        Raises `HandoffError` where `fd` is no memfd, could still shrink, has another size than `num_bytes`, or cannot
        be mapped.
        """
        try:
            check_memfd(fd, num_bytes, what)
            return cls(fd, num_bytes, is_read_only=is_read_only)
        except BaseException as error:
            os.close(fd)
            if isinstance(error, OSError | OverflowError):
                how = "reading" if is_read_only else "reading and writing"
                raise HandoffError(f"{what} descriptor: cannot be mapped for {how} ({error})") from error
            raise

    @property
    def address(self) -> int:
        """Virtual address of the first byte in this process."""
        return int(self.array.ctypes.data)

    def close(self) -> None:
        """Give back the mapping and the descriptor. Calling it again does nothing."""
        if self.fd < 0:
            return
        self.array = np.empty(0, dtype=np.uint8)
        os.close(self.fd)
        self.fd = -1
        try:
            self._mapping.close()
        except BufferError:
            # A view is still alive somewhere; the mapping goes when that view does.
            return

    def abandon(self) -> None:
        """Give the memory back, but keep its addresses for ever.

        For memory that a peer may still write to: what lands late falls into empty pages that nobody reads. Nothing
        else is ever mapped there, so a late write of another process cannot hit what it was not meant for.
        """
        address, num_bytes = self.address, self.num_bytes
        self.array = np.empty(0, dtype=np.uint8)
        os.close(self.fd)
        self.fd = -1
        _map_over(address, num_bytes, _RESERVED_FLAGS, -1)
        _abandoned.append(self._mapping)  # closing it would free the addresses

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()


def _sealed_memfd(num_bytes: int, name: str) -> int:
    """A new memfd whose size can never change; the caller closes it. Raises `OSError`."""
    fd = os.memfd_create(name, os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING)
    try:
        os.ftruncate(fd, num_bytes)
        fcntl.fcntl(fd, fcntl.F_ADD_SEALS, _SEALS)
    except BaseException:
        os.close(fd)
        raise
    return fd


def _map_over(address: int, num_bytes: int, flags: int, fd: int, access: int = _READ_WRITE) -> None:
    """Replace what is mapped there, atomically. Raises `OSError`; nothing has changed then."""
    if _libc.mmap(address, num_bytes, access, flags | _MAP_FIXED, fd, 0) != address:
        raise OSError(ctypes.get_errno(), "the mapping could not be replaced")


def check_memfd(fd: int, num_bytes: int, what: str = "pool") -> None:
    """Raise `HandoffError` unless `fd` is a memfd of exactly `num_bytes` that can neither grow nor shrink."""
    try:
        seals = fcntl.fcntl(fd, fcntl.F_GET_SEALS)
    except OSError as error:
        raise HandoffError(
            f"{what} descriptor: got a file that has no seals ({error.strerror}), expected a memfd"
        ) from error
    if seals & _SIZE_SEALS != _SIZE_SEALS:
        raise HandoffError(
            f"{what} descriptor: got seals {seals:#x}, expected F_SEAL_GROW and F_SEAL_SHRINK to be set: "
            "an unsealed memfd could be shrunk under the agent"
        )
    actual_bytes = os.fstat(fd).st_size
    if num_bytes < 1 or actual_bytes != num_bytes:
        raise HandoffError(f"{what} descriptor: got {actual_bytes} bytes, expected the announced {num_bytes}")
