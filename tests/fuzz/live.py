"""A million fuzzed frames against live agents in processes of their own.

Frames come from peers whose key is admitted (some of them pair), from nobody over TCP, and over the unix sockets of
both agents. The agents must live, hold on to no memory, and move the next transfer exactly.
"""

from __future__ import annotations

import os
import time
from collections.abc import Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from random import Random

import msgspec

from kvxfer.cli import protocol
from kvxfer.cli.ensemble import Ensemble, Pool, Setup
from kvxfer.cli.harness import Cast
from kvxfer.cli.pools import SPARE_PAGES, GroupShape, Paging, cut_chunks, lay_out, page_tables
from kvxfer.control.codec import decode_ticket, encode
from kvxfer.control.ids import new_id
from kvxfer.control.messages import Hello
from kvxfer.layout import LayerRange, Placement, PoolLayout, Shard
from kvxfer.ops.config import SlotConfig
from kvxfer.transports._metadata import Metadata, PublishedRegion, encode_metadata
from tests.control.examples import EXAMPLES, TRANSFER
from tests.fuzz.attackers import Attacker, HandoffAttacker, TcpAttacker, peer_attacker, worker_attacker
from tests.fuzz.mutate import mutate

MAX_GROWTH_BYTES = 4 << 20
_NUM_TOKENS, _NUM_LAYERS, _ROW_BYTES, _PAGE_TOKENS = 300, 2, 1152, 16
_SLOTS = SlotConfig(num_slots=4, slot_bytes=1 << 20)
_TIMEOUT_S = 60.0
_WARM_UP = 0.1
"""Share of the frames before memory is weighed: caches and queues have their size by then."""
_NUM_PEERS = 6


@dataclass(frozen=True, slots=True)
class Report:
    """What an attack did. `growth_bytes` is resident memory of each agent, from the warm-up to the end."""

    num_frames: int
    elapsed_s: float
    growth_bytes: dict[str, int]
    problems: tuple[str, ...]

    @property
    def is_right(self) -> bool:
        return not self.problems and max(self.growth_bytes.values()) < MAX_GROWTH_BYTES

    def as_text(self) -> str:
        growth = ", ".join(f"{name} {num / 1024:+.0f} KiB" for name, num in self.growth_bytes.items())
        verdict = "; ".join(self.problems) or "agents live, transfers before and after are exact"
        return f"{self.num_frames} frames in {self.elapsed_s:.0f} s, memory: {growth}; {verdict}\n"


def attack(num_frames: int, seed: int) -> Report:
    """Start agents and workers, attack them, move and verify. Raises `ChildError` where a process dies."""
    with Cast() as cast:
        ensemble = Ensemble(cast, Setup("loopback", "packed", 1, _SLOTS, _SLOTS))
        stage = _Stage(ensemble)
        problems = stage.move_and_verify(1)
        pids = {agent.name: agent.pid for agent in cast._agents}
        with ExitStack() as stack:
            rng = Random(seed)
            ticket = decode_ticket(stage.ticket())
            source = ticket.sources[0]
            hellos = [_hello(source.incarnation, stage.dst.layout) for _ in range(_NUM_PEERS)]
            peers = [peer_attacker(source.endpoint, source.key, hello) for hello in hellos]
            host, _, port = source.endpoint.removeprefix("tcp://").rpartition(":")
            socket_dirs = [cast.socket_dir(name) for name in pids]
            others: list[Attacker] = [
                *(worker_attacker(directory) for directory in socket_dirs),
                *(HandoffAttacker(Path(directory) / "handoff.sock") for directory in socket_dirs),
                TcpAttacker(host, int(port)),
            ]
            for each in (*peers, *others):
                stack.callback(each.close)
            frames = [encode(message, 1).replace(TRANSFER.encode(), ticket.transfer.encode()) for message in _MESSAGES]
            volley = _Volley(rng, [*frames, *(encode(hello) for hello in hellos)], peers, others)
            began_s = time.monotonic()
            num_warm = int(num_frames * _WARM_UP)
            volley.fire(num_warm)
            before = {name: _rss_bytes(pid) for name, pid in pids.items()}
            volley.fire(num_frames - num_warm)
            growth = {name: _rss_bytes(pid) - before[name] for name, pid in pids.items()}
            elapsed_s = time.monotonic() - began_s
        problems += stage.move_and_verify(2)
    return Report(num_frames, elapsed_s, growth, tuple(problems))


class _Volley:
    """Frames in random order over all ways. Peers send most, and one frame in 200 may be long."""

    _WEIGHTS = (12, 8, 1, 1, 5)  # of the others, in percent

    def __init__(
        self, rng: Random, valid: Sequence[bytes], peers: Sequence[Attacker], others: Sequence[Attacker]
    ) -> None:
        self._rng = rng
        self._valid = valid
        self._attackers = [*others, *peers]
        share = (100 - sum(self._WEIGHTS)) / len(peers)
        self._weights = [*self._WEIGHTS, *(share for _ in peers)]

    def fire(self, num_frames: int) -> None:
        """Send so many frames and wait until all have been looked at."""
        for attacker in self._rng.choices(self._attackers, self._weights, k=num_frames):
            frame = mutate(self._rng, self._valid)
            attacker.send(frame if self._rng.random() < 0.005 else frame[:2000])
        for attacker in self._attackers:
            attacker.settle()


class _Stage:
    """A prefill and a decode worker, and the sequence that moves between them."""

    def __init__(self, ensemble: Ensemble) -> None:
        self._ensemble = ensemble
        self._paging: Paging = page_tables(Placement.SHARDED, _NUM_TOKENS, _PAGE_TOKENS, 1, 1, shuffled=True)
        src, self.dst = self._pool(self._paging.src_pages), self._pool(self._paging.dst_pages[0])
        ensemble.hand_over(src, [self.dst], fill=0)

    def _pool(self, pages: list[int]) -> Pool:
        shape = GroupShape("kv", LayerRange(0, _NUM_LAYERS), _ROW_BYTES, Placement.SHARDED)
        return Pool(*lay_out([shape], {"kv": len(pages) + SPARE_PAGES}, _PAGE_TOKENS, Shard(), "bytes"))

    def ticket(self) -> str:
        """A ticket whose transfer stays open for the attack."""
        command = protocol.MakeTicket(deadline_s=86_400.0)
        return self._ensemble.prefill.ask(command, protocol.TicketText, _TIMEOUT_S).text

    def move_and_verify(self, seed: int) -> list[str]:
        """One transfer of fresh rows; what is wrong with it."""
        rows = protocol.PatternRows(seed=seed, num_layers=_NUM_LAYERS, num_tokens=_NUM_TOKENS, row_bytes=_ROW_BYTES)
        fill = protocol.FillRows(group="kv", rows=rows, pages=self._paging.src_pages)
        self._ensemble.prefill.ask(fill, protocol.Done, _TIMEOUT_S)
        self._ensemble.refill(seed)
        pages = self._paging.receive(0)
        self._ensemble.move(cut_chunks({"kv": self._paging}, frozenset(), _NUM_TOKENS, 100), [{"kv": pages}])
        found = self._ensemble.verify([{"kv": protocol.Expected(pages=pages, source=rows)}])
        return [f"transfer {seed}: {problem}" for problem in found if problem]


_MESSAGES = tuple(EXAMPLES[kind] for kind in sorted(EXAMPLES) if kind not in ("hello", "attach_worker"))


def _hello(expected_incarnation: str, layout: PoolLayout) -> Hello:
    """One that fits the prefill agent; its engine's metadata name nothing that exists."""
    example = EXAMPLES["hello"]
    assert isinstance(example, Hello)
    metadata = Metadata("loopback", "nowhere", [PublishedRegion(1, 1 << 26)])
    return msgspec.structs.replace(
        example,
        incarnation=new_id(),
        expected_incarnation=expected_incarnation,
        layout=layout,
        dst_rank=0,
        dst_world=1,
        transport="loopback",
        metadata=encode_metadata(metadata),
        region_id=1,
        region_bytes=1 << 27,
    )


def _rss_bytes(pid: int) -> int:
    return int(Path(f"/proc/{pid}/statm").read_text(encoding="ascii").split()[1]) * os.sysconf("SC_PAGESIZE")
