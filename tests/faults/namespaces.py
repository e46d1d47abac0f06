"""Network namespaces that vanish with the processes in them, and a network between them that can be cut.

A hub routes between namespaces. The network is cut by letting the hub forward nothing: every packet vanishes, no end
is told, and every interface stays up.
"""

from __future__ import annotations

import ctypes
import errno
import os
import shutil
import subprocess
import time
from pathlib import Path

_CLONE_NEWNS, _CLONE_NEWNET = 0x00020000, 0x40000000  # linux/sched.h
_MS_REC, _MS_SLAVE = 1 << 14, 1 << 19  # linux/mount.h
_FORWARD = Path("/proc/sys/net/ipv4/ip_forward")
_LINK_S = 10.0
_libc = ctypes.CDLL(None, use_errno=True)
LINK = "kv"
"""The interface of a namespace."""


def why_not() -> str:
    """Why this process can make no namespaces with a network between them; empty if it can."""
    if shutil.which("ip") is None:
        return "the command ip is missing"
    pid = os.fork()
    if pid == 0:
        code = 1
        try:
            enter_new()
            begin_hub()
            _ip("link", "add", "kv0", "type", "veth", "peer", "name", LINK)
            code = 0
        finally:
            os._exit(code)
    _, status = os.waitpid(pid, 0)
    return "the system lets this user make no network namespaces" if status else ""


def enter_new() -> None:
    """Put this process, and all that it starts, into a namespace of its own. Raises `OSError`.

    Engines look for interfaces in /sys, which shows those of the namespace that mounted it: so it is mounted anew, in a
    mount namespace of its own.
    """
    _check(_libc.unshare(_CLONE_NEWNET | _CLONE_NEWNS), "unshare")
    _check(_libc.mount(b"none", b"/", None, _MS_REC | _MS_SLAVE, None), "mount /")
    _check(_libc.mount(b"sysfs", b"/sys", b"sysfs", 0, None), "mount /sys")


def _check(result: int, what: str) -> None:
    if result:
        raise OSError(ctypes.get_errno(), f"{what}: {os.strerror(ctypes.get_errno())}")


def begin_hub() -> None:
    """Let this process's namespace be the hub."""
    _ip("link", "set", "lo", "up")
    mend()


def attach(number: int, pid: int) -> None:
    """From the hub: a cable to the namespace of process `pid`, which then calls `join` with the same number."""
    near = f"kv{number}"
    _ip("link", "add", near, "type", "veth", "peer", "name", LINK, "netns", str(pid))
    _ip("addr", "add", f"10.77.{number}.1/24", "dev", near)
    _ip("link", "set", near, "up")


def join(number: int) -> None:
    """Use the cable that the hub has attached: this namespace's address is `address(number)`."""
    _ip("link", "set", "lo", "up")
    _ip("addr", "add", f"{address(number)}/24", "dev", LINK)
    _ip("link", "set", LINK, "up")
    _ip("route", "add", "default", "via", f"10.77.{number}.1")
    # The kernel sees a moment later that the other end is up, too; engines use no interface before.
    give_up_s = time.monotonic() + _LINK_S
    while Path(f"/sys/class/net/{LINK}/operstate").read_text(encoding="ascii").strip() != "up":
        if time.monotonic() > give_up_s:
            raise OSError(errno.ENETDOWN, f"{LINK} did not come up within {_LINK_S} s")
        time.sleep(0.01)


def address(number: int) -> str:
    return f"10.77.{number}.2"


def cut() -> None:
    """From the hub: no packet arrives any more."""
    _FORWARD.write_text("0", encoding="ascii")


def mend() -> None:
    """From the hub: packets arrive again."""
    _FORWARD.write_text("1", encoding="ascii")


def _ip(*arguments: str) -> None:
    subprocess.run(["ip", *arguments], check=True, stdin=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
