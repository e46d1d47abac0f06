"""A program in PID, IPC and mount namespaces of its own, as process 1 there: what a container is to another.

It has a /proc and a /dev/shm of its own, and shares the network and all other files with whoever started it.
"""

from __future__ import annotations

import ctypes
import os
import signal
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path

import pytest

_CLONE_NEWNS, _CLONE_NEWIPC, _CLONE_NEWPID = 0x00020000, 0x08000000, 0x20000000  # linux/sched.h
_MS_REC, _MS_SLAVE = 1 << 14, 1 << 19  # linux/mount.h
_PR_SET_PDEATHSIG = 1  # linux/prctl.h
_PYTHON = sys.executable
KINDS = ("pid", "ipc", "mnt")
_libc = ctypes.CDLL(None, use_errno=True)


def run(arguments: list[str]) -> int:
    """Run the program and give its exit status. SIGTERM is passed on; it dies with this process.

    Raises `OSError` where the system does not allow it.
    """
    _check(_libc.unshare(_CLONE_NEWNS | _CLONE_NEWIPC | _CLONE_NEWPID), "unshare")
    pid = os.fork()
    if pid == 0:
        try:
            _libc.prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
            _check(_libc.mount(b"none", b"/", None, _MS_REC | _MS_SLAVE, None), "mount /")
            _check(_libc.mount(b"proc", b"/proc", b"proc", 0, None), "mount /proc")
            _check(_libc.mount(b"tmpfs", b"/dev/shm", b"tmpfs", 0, None), "mount /dev/shm")
            os.execv(arguments[0], arguments)
        finally:
            os._exit(127)
    signal.signal(signal.SIGTERM, lambda *_: os.kill(pid, signal.SIGTERM))
    return os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])


def _check(result: int, what: str) -> None:
    if result:
        raise OSError(ctypes.get_errno(), f"{what}: {os.strerror(ctypes.get_errno())}")


def write_interpreter(path: Path, beside: Sequence[str] = ()) -> None:
    """Write a program that is this interpreter in namespaces of its own; the modules `beside` run where they are
    started."""
    lines = (
        f"#!{_PYTHON}",
        "import os, sys",
        f"sys.path.insert(0, {str(Path(__file__).parent.parent)!r})",
        "from tests.apart import run",
        f"arguments = [{_PYTHON!r}, *sys.argv[1:]]",
        f"if {list(beside)!r} and arguments[2] in {list(beside)!r}:",
        "    os.execv(arguments[0], arguments)",
        "sys.exit(run(arguments))",
    )
    path.write_text("\n".join(lines) + "\n", encoding="utf-8")
    path.chmod(0o755)


def use(path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Have tests start their programs by an interpreter of `write_interpreter`, written to `path`; skip the test where
    the system has no such namespaces for it."""
    write_interpreter(path)
    tried = subprocess.run([path, "-c", ""], capture_output=True, check=False, text=True)
    if "unshare" in tried.stderr:
        pytest.skip(f"no PID, IPC and mount namespaces here: {tried.stderr.splitlines()[-1]}")
    assert tried.returncode == 0, tried.stderr
    monkeypatch.setattr(sys, "executable", str(path))


def expect(pids: Sequence[int]) -> None:
    """Each program, which `run` started in a process of `pids`, is process 1, and no two of them, nor this process,
    share a namespace."""
    programs = [child_of(pid) for pid in pids]
    assert [number_inside(pid) for pid in programs] == [1] * len(programs)
    named = [namespaces_of(pid) for pid in [os.getpid(), *programs]]
    for kind in KINDS:
        assert len({names[kind] for names in named}) == len(named), f"a {kind} namespace is shared: {named}"


def child_of(pid: int) -> int:
    """The only child of a process: the program that `run` started in it."""
    (child,) = Path(f"/proc/{pid}/task/{pid}/children").read_text(encoding="ascii").split()
    return int(child)


def number_inside(pid: int) -> int:
    """The process id that a process has in its own namespace."""
    status = Path(f"/proc/{pid}/status").read_text(encoding="ascii").splitlines()
    return int(next(line for line in status if line.startswith("NSpid:")).split()[-1])


def namespaces_of(pid: int) -> dict[str, str]:
    """What names its PID, IPC and mount namespaces."""
    return {kind: os.readlink(f"/proc/{pid}/ns/{kind}") for kind in KINDS}
