"""Who may talk to whom: keys of agents, the files they lie in, and the list of those that are let in.

Keys are CURVE25519 keys in Z85: 40 printable characters for 32 bytes. Nothing here opens a socket.
"""

from __future__ import annotations

import os
import stat
from dataclasses import dataclass, field
from pathlib import Path

from kvxfer.errors import ConfigError

KEY_CHARS = 40
MAX_ALLOWED_KEYS = 65536
_MAX_KEY_FILE_BYTES = 4096
_MAX_LIST_FILE_BYTES = 16 << 20
_Z85 = "0123456789abcdefghijklmnopqrstuvwxyzABCDEFGHIJKLMNOPQRSTUVWXYZ.-:+=^!/*?&<>()[]{}@%$#"
_Z85_DIGITS = {char: digit for digit, char in enumerate(_Z85)}


@dataclass(frozen=True, slots=True)
class KeyPair:
    """An agent's keys, in Z85. The secret one stays out of logs."""

    public: str
    secret: str = field(repr=False)


def is_key(text: str) -> bool:
    """Whether `text` is a key: 40 characters of Z85, each five of them below 2^32."""
    if len(text) != KEY_CHARS or not _Z85_DIGITS.keys() >= set(text):
        return False
    for start in range(0, KEY_CHARS, 5):
        value = 0
        for char in text[start : start + 5]:
            value = value * 85 + _Z85_DIGITS[char]
        if value >= 1 << 32:
            return False
    return True


def encode_key(key: bytes) -> str:
    """The 32 bytes of a key in Z85."""
    assert len(key) == 32
    text = ""
    for start in range(0, 32, 4):
        value = int.from_bytes(key[start : start + 4], "big")
        text += "".join(_Z85[value // 85**power % 85] for power in (4, 3, 2, 1, 0))
    return text


def write_secret_key(path: Path, keys: KeyPair) -> None:
    """Write a secret key into a new file that only its owner can read. Raises `ConfigError`; nothing is overwritten."""
    try:
        fd = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC | os.O_NOFOLLOW, 0o600)
    except FileExistsError as error:
        raise ConfigError(f"{path}: exists already, expected a new file: a key is never overwritten") from error
    except OSError as error:
        raise ConfigError(f"{path}: cannot be created: {error.strerror}") from error
    with os.fdopen(fd, "w", encoding="ascii") as file:
        file.write(f"# Secret key of a kvxfer agent. Its public key is\n# {keys.public}\n{keys.secret}\n")


def read_secret_key(path: Path) -> str:
    """The secret key in a file that `write_secret_key` made.

    Raises `ConfigError` where there is none, and where others than its owner can read or change it.
    """
    lines = _key_lines(path, "key_file", _MAX_KEY_FILE_BYTES, forbidden_mode=0o077, remedy="chmod 600")
    if len(lines) != 1 or not is_key(lines[0][1]):
        # What was found instead is not shown: it may be most of a secret.
        raise ConfigError(f"key_file: {path}: expected one key of {KEY_CHARS} characters: make one with kvxfer keygen")
    return lines[0][1]


class AllowList:
    """The public keys that may connect, from a file: one a line, maybe a comment behind it. Lines that begin with "#"
    are comments as well. An empty list lets nobody in."""

    def __init__(self, path: Path) -> None:
        """Read the file. Raises `ConfigError`."""
        self._path = path
        self._stamp = _stamp(path)
        self._keys = _read_list(path)

    def __contains__(self, key: object) -> bool:
        return key in self._keys

    def __len__(self) -> int:
        return len(self._keys)

    def reload(self) -> str | None:
        """Read the file again if it has changed; what became of it, for the log, or None.

        A file that is gone or wrong leaves the list as it was: a slip of an editor must not cut every peer off.
        """
        stamp = _stamp(self._path)
        if stamp == self._stamp:
            return None
        self._stamp = stamp
        try:
            self._keys = _read_list(self._path)
        except ConfigError as error:
            return f"{error}; the {len(self._keys)} keys of before stay allowed"
        return f"allowed_keys_file: {self._path}: {len(self._keys)} keys"


def _stamp(path: Path) -> tuple[int, ...]:
    """What changes with the file's content; empty where there is no file."""
    try:
        info = path.stat()
    except OSError:
        return ()
    return (info.st_dev, info.st_ino, info.st_size, info.st_mtime_ns, info.st_ctime_ns)


def _read_list(path: Path) -> frozenset[str]:
    lines = _key_lines(path, "allowed_keys_file", _MAX_LIST_FILE_BYTES, forbidden_mode=0o022, remedy="chmod go-w")
    for number, key in lines:
        if not is_key(key):
            raise ConfigError(
                f"allowed_keys_file: {path}: line {number}: got {key[:60]!r}, expected a public key of {KEY_CHARS} "
                "characters, as kvxfer keygen prints it"
            )
    if len(lines) > MAX_ALLOWED_KEYS:
        raise ConfigError(f"allowed_keys_file: {path}: got {len(lines)} keys, expected at most {MAX_ALLOWED_KEYS}")
    return frozenset(key for _, key in lines)


def _key_lines(path: Path, name: str, max_bytes: int, *, forbidden_mode: int, remedy: str) -> list[tuple[int, str]]:
    """Number and first word of each line that is neither empty nor a comment.

    Links are followed, since mounted secrets are links. Owner and mode are those of the opened file, so that it cannot
    be exchanged in between.
    """
    try:
        # Without O_NONBLOCK a pipe in the file's place would hold the agent up for ever.
        fd = os.open(path, os.O_RDONLY | os.O_CLOEXEC | os.O_NONBLOCK)
        try:
            _check_file(path, name, os.fstat(fd), forbidden_mode, remedy)
            with open(fd, "rb", closefd=False) as file:
                data = file.read(max_bytes + 1)
        finally:
            os.close(fd)
    except OSError as error:
        raise ConfigError(f"{name}: {path}: cannot be read: {error.strerror}") from error
    if len(data) > max_bytes:
        raise ConfigError(f"{name}: {path}: got more than {max_bytes} bytes, expected a list of keys")
    try:
        text = data.decode("utf-8")
    except UnicodeDecodeError as error:
        raise ConfigError(f"{name}: {path}: is no text: {error.reason} at byte {error.start}") from error
    lines = enumerate((line.strip() for line in text.splitlines()), start=1)
    # No key begins with "#": five characters that do stand for more than 2^32.
    return [(number, line.split()[0]) for number, line in lines if line and not line.startswith("#")]


def _check_file(path: Path, name: str, info: os.stat_result, forbidden_mode: int, remedy: str) -> None:
    if not stat.S_ISREG(info.st_mode):
        raise ConfigError(f"{name}: {path}: expected a file")
    if info.st_uid not in (os.geteuid(), 0):
        raise ConfigError(
            f"{name}: {path}: is owned by user {info.st_uid}, expected {os.geteuid()} (the agent's) or root"
        )
    mode = stat.S_IMODE(info.st_mode)
    if mode & forbidden_mode:
        raise ConfigError(
            f"{name}: {path}: got mode {mode:#o}, expected none of {forbidden_mode:#o}: "
            f"others can reach it; {remedy} {path}"
        )
