"""The directory where an agent's unix sockets lie: its permissions, its lock, the modes of what is bound in it."""

from __future__ import annotations

import contextlib
import errno
import fcntl
import os
import select
import socket
import stat
from collections.abc import Iterator
from pathlib import Path

from kvxfer.errors import ConfigError, HandoffError

CONTROL_SOCKET = "control.sock"
HANDOFF_SOCKET = "handoff.sock"
_MAX_PATH_BYTES = 107  # sun_path without its final zero
_NO_ROOM = (errno.EMFILE, errno.ENFILE, errno.ENOMEM, errno.ENOBUFS)
_PAUSE_S = 1.0


def socket_path(socket_dir: str | os.PathLike[str], name: str) -> Path:
    """Path of the socket `name`. Raises `ConfigError` where it is too long for a unix socket."""
    path = Path(socket_dir).absolute() / name
    num_bytes = len(os.fsencode(path))
    if num_bytes > _MAX_PATH_BYTES:
        raise ConfigError(
            f"socket_dir: {path} has {num_bytes} bytes, expected at most {_MAX_PATH_BYTES}: choose a shorter directory"
        )
    return path


class SocketClaim:
    """The right to bind one socket in a directory, held through a lock file until `close()`.

    A second bind would take over the path of a living agent without a word, so the lock is what refuses it. A dead
    agent's lock is free and its socket file is replaced.
    """

    def __init__(self, socket_dir: str | os.PathLike[str], name: str, lock_name: str) -> None:
        """Make the directory where it is missing (0750), check it and lock it. Raises `ConfigError`."""
        self.path = socket_path(socket_dir, name)
        _make_directory(self.path.parent)
        self._lock_path = self.path.parent / lock_name
        self._lock_fd = _lock(self._lock_path)
        if self.path.exists() and not self.path.is_socket():
            self.close()
            raise ConfigError(f"socket_dir: {self.path} is no socket: move it away or choose another directory")
        self.path.unlink(missing_ok=True)

    def close(self) -> None:
        """Remove the socket and the lock, in this order. Calling it again does nothing."""
        if self._lock_fd < 0:
            return
        if not self.path.exists() or self.path.is_socket():
            self.path.unlink(missing_ok=True)
        # Unlinked while it is still held: whoever opened the old file finds that the path names another one.
        self._lock_path.unlink(missing_ok=True)
        os.close(self._lock_fd)
        self._lock_fd = -1


@contextlib.contextmanager
def group_only_umask() -> Iterator[None]:
    """What is created inside gets mode 0660. The umask belongs to the whole process: keep the block short."""
    previous = os.umask(0o117)
    try:
        yield
    finally:
        os.umask(previous)


class Acceptor:
    """Takes who connects to a listening socket, which, as the epoll that it is in, stays the caller's.

    A process that has no descriptor left for one looks away for a while: he keeps the socket readable, and the loop
    would spin.
    """

    def __init__(self, listening: socket.socket, epoll: select.epoll) -> None:
        self._socket = listening
        self._epoll = epoll
        self._paused_until_s = 0.0
        listening.setblocking(False)
        epoll.register(listening, select.EPOLLIN)

    def look(self, now_s: float) -> None:
        """End a pause whose time is over. Call it at every tick; `now_s` is a monotonic clock."""
        if self._paused_until_s and now_s >= self._paused_until_s:
            self._paused_until_s = 0.0
            self._epoll.modify(self._socket, select.EPOLLIN)

    def accept(self, now_s: float) -> socket.socket | None:
        """The next connection, which does not block and is the caller's; None where there is none, or while this looks
        away. Raises `HandoffError` where it begins to."""
        if self._paused_until_s:
            return None
        try:
            accepted, _ = self._socket.accept()
        except (BlockingIOError, ConnectionAbortedError):
            return None
        except OSError as error:
            if error.errno not in _NO_ROOM:
                raise
            self._paused_until_s = now_s + _PAUSE_S
            self._epoll.modify(self._socket, 0)
            raise HandoffError(f"cannot accept a connection: {error.strerror}") from error
        accepted.setblocking(False)
        return accepted


def _make_directory(path: Path) -> None:
    try:
        path.mkdir(mode=0o750, parents=True, exist_ok=True)
        info = path.stat()
    except OSError as error:
        raise ConfigError(f"socket_dir: {path}: {error.strerror}, expected a directory that can be made") from error
    mode = stat.S_IMODE(info.st_mode)
    if mode & 0o027:
        # Not changed here: it may be a directory that others use, such as /tmp.
        raise ConfigError(
            f"socket_dir: {path} has mode {mode:#o}, expected 0750 or stricter: chmod 0750 it, "
            "or name a directory below it that the agent may make"
        )


def _lock(path: Path) -> int:
    while True:
        try:
            fd = os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC | os.O_NOFOLLOW, 0o600)
        except OSError as error:
            raise ConfigError(f"socket_dir: {path}: {error.strerror}, expected a file that can be opened") from error
        try:
            fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            os.close(fd)
            raise ConfigError(
                f"socket_dir: {path.parent} is in use by another agent (it holds {path.name}): "
                "stop that agent or choose another directory"
            ) from None
        try:
            if os.path.samestat(os.fstat(fd), os.stat(path)):
                return fd
        except FileNotFoundError:
            pass  # The holder removed the file between our open and our lock.
        os.close(fd)
