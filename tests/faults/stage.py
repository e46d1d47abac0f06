"""Agents as processes that a test can stop and continue, and workers in the test whose every byte it knows.

A pool has one layer and pages of one large row. Row `token` of a transfer is the 32-bit word `salt << 16 | token`,
again and again; a page that nobody has written holds `POISON`.
"""

from __future__ import annotations

import mmap
import os
import signal
import subprocess
import time
from collections.abc import Callable
from contextlib import ExitStack, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Self

import msgspec
import numpy as np
import numpy.typing as npt

from kvxfer.control.client import ChunkPages, DecodeClient, PrefillClient, ReceivePages
from kvxfer.control.messages import Ticket, TransferEvent
from kvxfer.layout import Group, LayerRange, PoolLayout
from kvxfer.memory import HostMemory
from kvxfer.ops.config import DecodeConfig, PrefillConfig, SlotConfig, TransferMode, TransportConfig, TransportName
from tests.agent_world import WAIT_S
from tests.test_agents_processes import process

ROW_BYTES = 128 << 10
ROW_WORDS = ROW_BYTES // 4
NUM_TOKENS = 384  # 48 MiB: long enough to be stopped in the middle
NUM_PAGES = 2 * NUM_TOKENS
SLOTS = SlotConfig(num_slots=4, slot_bytes=2 << 20)
POISON = 0xA5A5A5A5
DEADLINE_S = 1.5
PEER_TIMEOUT_S = 2.5
LAYOUT = PoolLayout(
    groups=(
        Group(
            name="kv",
            layers=LayerRange(0, 1),
            layer_stride_bytes=NUM_PAGES * ROW_BYTES,
            page_stride_bytes=ROW_BYTES,
            num_pages=NUM_PAGES,
            page_tokens=1,
            row_stride_bytes=ROW_BYTES,
            row_bytes=ROW_BYTES,
        ),
    ),
    dtype_tag="bytes",
)
Words = npt.NDArray[np.uint32]
PAGES = np.random.default_rng(0).permutation(NUM_PAGES)


def words_of(salt: int, num_tokens: int = NUM_TOKENS) -> Words:
    """`[num_tokens]`: the word of each row."""
    return np.arange(num_tokens, dtype=np.uint32) | np.uint32(salt << 16)


class Pool:
    """A worker's pool, poisoned."""

    def __init__(self) -> None:
        self.memory = HostMemory.create(NUM_PAGES * ROW_BYTES, "pool")
        self.words[:] = POISON

    @property
    def words(self) -> Words:
        """`[NUM_PAGES, ROW_WORDS]`."""
        return self.memory.array.view(np.uint32).reshape(NUM_PAGES, ROW_WORDS)

    def fill(self, pages: npt.NDArray[np.int64], salt: int) -> None:
        """The rows of a transfer."""
        self.words[pages] = words_of(salt)[:, None]

    def num_begun(self, pages: npt.NDArray[np.int64]) -> int:
        """Pages that hold something else than poison in their first word."""
        return int(np.count_nonzero(self.words[pages, 0] != POISON))


@dataclass(frozen=True)
class AgentProcess:
    """One agent's process."""

    child: subprocess.Popen[bytes]

    def stop(self) -> None:
        os.kill(self.child.pid, signal.SIGSTOP)
        os.waitpid(self.child.pid, os.WUNTRACED)

    def go_on(self) -> None:
        os.kill(self.child.pid, signal.SIGCONT)

    def slots(self) -> dict[int, Path]:
        """The agent's slots as files of /proc, by inode: one, or two while they are being moved to other memory."""
        found = {}
        for path in Path(f"/proc/{self.child.pid}/fd").iterdir():
            with suppress(FileNotFoundError):  # the agent has closed it just now
                if os.readlink(path).startswith("/memfd:kvxfer-slots"):
                    found[path.stat().st_ino] = path
        return found

    def slot_bytes(self) -> bytes:
        """What the slots hold now, the probe area behind them left out."""
        (path,) = self.slots().values()
        with path.open("rb") as file, mmap.mmap(file.fileno(), 0, prot=mmap.PROT_READ) as mapping:
            return mapping[: SLOTS.num_slots * SLOTS.slot_bytes]


class Stage:
    """Starts agents and workers; leaving the block ends them."""

    def __init__(self, path: Path, transport: TransportName) -> None:
        self._path = path
        self._transport = TransportConfig(name=transport)
        self._stack = ExitStack()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self._stack.close()

    def prefill(self, name: str, mode: TransferMode = "packed") -> tuple[AgentProcess, Pool, PrefillClient]:
        config = PrefillConfig(
            socket_dir=str(self._path / name),
            transport=self._transport,
            slots=SLOTS,
            mode=mode,
            peer_timeout_s=PEER_TIMEOUT_S,
        )
        agent, pool = self._start("prefill", config)
        client = PrefillClient.connect(config.socket_dir, pool.memory, LAYOUT, timeout_s=WAIT_S)
        self._stack.callback(client.close)
        return agent, pool, client

    def decode(self, name: str) -> tuple[AgentProcess, Pool, DecodeClient]:
        config = DecodeConfig(
            socket_dir=str(self._path / name), transport=self._transport, slots=SLOTS, peer_timeout_s=PEER_TIMEOUT_S
        )
        agent, pool = self._start("decode", config)
        client = DecodeClient.connect(config.socket_dir, pool.memory, LAYOUT, timeout_s=WAIT_S)
        self._stack.callback(client.close)
        return agent, pool, client

    def _start(self, role: str, config: PrefillConfig | DecodeConfig) -> tuple[AgentProcess, Pool]:
        child, _ = self._stack.enter_context(process("agent", role, msgspec.json.encode(config).decode()))
        pool = Pool()
        self._stack.callback(pool.memory.close)
        return AgentProcess(child), pool


def begin(
    prefill: PrefillClient,
    decode: DecodeClient,
    src_pages: npt.NDArray[np.int64],
    dst_pages: npt.NDArray[np.int64],
    deadline_s: float = WAIT_S,
) -> Ticket:
    """Open and submit one transfer of `NUM_TOKENS` rows."""
    ticket = prefill.ticket(deadline_s=deadline_s)
    decode.open(ticket, {"kv": ReceivePages(0, NUM_TOKENS, dst_pages)}, deadline_s=deadline_s)
    prefill.submit(ticket, {"kv": ChunkPages(0, NUM_TOKENS, src_pages)}, last=True, deadline_s=deadline_s)
    return ticket


def only_event(client: PrefillClient | DecodeClient, ticket: Ticket, timeout_s: float = WAIT_S) -> TransferEvent:
    """The terminal event, and proof that no second one follows."""
    event = client.wait(ticket, timeout_s)
    assert client.next_event(0.1) is None
    return event


def wait_until(is_so: Callable[[], bool], what: str, timeout_s: float = WAIT_S) -> None:
    give_up_s = time.monotonic() + timeout_s
    while not is_so():
        assert time.monotonic() < give_up_s, f"not within {timeout_s} s: {what}"
        time.sleep(0.0005)
