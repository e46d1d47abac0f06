"""What `kvxfer bench transfer` is told to measure, and whether that can be done."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final, Literal

from kvxfer.cli.ensemble import DEADLINE_S, Pace, Setup, Wire
from kvxfer.cli.protocol import Busy, Device, RowPlacement
from kvxfer.errors import ConfigError
from kvxfer.layout import Shard
from kvxfer.ops.config import SlotConfig, SlotKind, TransferMode, TransportName, Verify
from kvxfer.ownership import local_len

NUM_SLOTS, SLOT_BYTES = 4, 16 << 20
"""64 MiB in few large slots: on one host a segment costs processor time, and more in flight gain nothing."""
MAX_RANKS: Final = 16
MAX_MEMORY_SHARE: Final = 0.6
"""Of what is available: workers also take copies while they fill and compare pools, and others use the machine."""
MAX_WIRE_GB_S: Final = 1e4
MAX_DESCRIPTOR_US: Final = 1e6
MAX_INTERVAL_S: Final = 10.0


@dataclass(frozen=True, slots=True)
class TransferCase:
    """The command line of the bench."""

    transport: TransportName
    mode: TransferMode
    num_tokens: int
    num_layers: int
    row_bytes: int
    page_tokens: int
    pages: Literal["shuffled", "adjacent"]
    num_ranks: int
    interleave: int
    chunk_tokens: int
    num_repeats: int
    num_slots: int = NUM_SLOTS
    slot_bytes: int = SLOT_BYTES
    interval_s: float = 0.0
    wire_gb_s: float | None = None
    descriptor_us: float = 0.0
    device: Device = "cpu"
    placement: RowPlacement = "agent"
    busy: Busy = "none"
    verify: Verify = "off"
    deadline_s: float = DEADLINE_S
    num_gpus: int = 1
    slot_kind: SlotKind = "pinned_host"

    def check(self) -> None:
        """Raise `ConfigError` for values that make no bench."""
        self._check_numbers()
        if self.num_ranks > MAX_RANKS:
            raise ConfigError(f"--dcp: got {self.num_ranks}, expected at most {MAX_RANKS}: each rank is two processes")
        if self.row_bytes > self.slot_bytes:
            raise ConfigError(f"--row-bytes: got {self.row_bytes}, expected at most a slot, {self.slot_bytes}")
        if self.transport != "loopback" and self.wire_gb_s is not None:
            raise ConfigError(
                f"--wire-gb-s: got {self.wire_gb_s:g} with transport {self.transport}, expected --transport loopback: "
                "it alone holds writes as a wire would"
            )
        if self.mode == "raw":
            self._check_raw()
        if self.verify == "full" and self.mode in ("raw", "p2p"):
            raise ConfigError(f"--verify: got full with mode {self.mode}, expected off: packed segments have checksums")
        if self.device == "cpu" and self.busy != "none":
            raise ConfigError(f"--busy: got {self.busy}, expected none with --device cpu: a GPU computes the products")
        if self.device == "cpu" and self.num_gpus != 1:
            raise ConfigError(f"--gpus: got {self.num_gpus} with --device cpu, expected --device cuda")
        if self.slot_kind == "device":
            self._check_device_slots()

    def _check_raw(self) -> None:
        if self.placement == "worker":
            raise ConfigError(
                "--mode: got raw with --placement worker, expected --placement agent: engines read no pool that stays "
                "with its worker"
            )
        if self.device == "cuda" and (self.transport == "mooncake" or self.slot_kind != "device"):
            raise ConfigError(
                f"--mode: got raw with --device cuda, transport {self.transport} and --slots {self.slot_kind}, "
                "expected nixl or loopback with --slots device: no other reads a pool on a GPU"
            )

    def _check_device_slots(self) -> None:
        if self.device == "cpu":
            raise ConfigError("--slots: got device with --device cpu, expected --device cuda")
        if self.transport == "mooncake":
            raise ConfigError("--slots: got device with transport mooncake, expected nixl or loopback")

    def _check_numbers(self) -> None:
        minimum = {"tokens": (self.num_tokens, 0), "layers": (self.num_layers, 1), "row-bytes": (self.row_bytes, 1)}
        minimum |= {"page": (self.page_tokens, 1), "dcp": (self.num_ranks, 1), "interleave": (self.interleave, 1)}
        minimum |= {"chunk": (self.chunk_tokens, 1), "repeat": (self.num_repeats, 1)}
        for name, (got, least) in minimum.items():
            if got < least:
                raise ConfigError(f"--{name}: got {got}, expected at least {least}")
        if not 0.0 <= self.interval_s <= MAX_INTERVAL_S:
            raise ConfigError(
                f"--interval-ms: got {self.interval_s * 1e3:g}, expected 0 to {MAX_INTERVAL_S * 1e3:.0f} ms"
            )
        if self.wire_gb_s is not None and not 0.0 < self.wire_gb_s <= MAX_WIRE_GB_S:
            raise ConfigError(f"--wire-gb-s: got {self.wire_gb_s:g}, expected more than 0, at most {MAX_WIRE_GB_S:g}")
        if not 0.0 <= self.descriptor_us <= MAX_DESCRIPTOR_US:
            raise ConfigError(f"--descriptor-us: got {self.descriptor_us:g}, expected 0 to {MAX_DESCRIPTOR_US:g}")
        if self.descriptor_us and self.wire_gb_s is None:
            raise ConfigError(f"--descriptor-us: got {self.descriptor_us:g}, expected --wire-gb-s beside it")
        if not 1 <= self.num_slots <= 4096 or self.slot_bytes < 4096:
            raise ConfigError(
                f"--num-slots, --slot-kib: got {self.num_slots} slots of {self.slot_bytes >> 10} KiB, "
                "expected 1 to 4096 of at least 4 KiB"
            )

    def check_memory(self, available_bytes: int) -> None:
        """Raise `ConfigError` where the run would take more than `MAX_MEMORY_SHARE` of `available_bytes`."""
        src_slots, dst_slots = self.slots()
        slot_bytes = src_slots.num_slots * src_slots.slot_bytes
        slot_bytes += self.num_ranks * dst_slots.num_slots * dst_slots.slot_bytes
        if self.slot_kind == "device":
            slot_bytes = 0
        # The KV lies in the source pool, split over the decode pools, and at both ends of the yardstick.
        num_copies = (2 if self.device == "cpu" else 0) + (2 if self.has_yardstick and not self.stays_on_gpus else 0)
        needed_bytes = num_copies * self.num_bytes + slot_bytes
        limit_bytes = int(available_bytes * MAX_MEMORY_SHARE)
        if needed_bytes > limit_bytes:
            raise ConfigError(
                f"--tokens, --layers, --row-bytes: got pools and slots of {needed_bytes >> 20} MiB in all, expected at "
                f"most {limit_bytes >> 20} MiB, {MAX_MEMORY_SHARE:.0%} of the memory that is available"
            )

    @property
    def num_bytes(self) -> int:
        return self.num_tokens * self.num_layers * self.row_bytes

    @property
    def has_yardstick(self) -> bool:
        """Whether one contiguous write, or copy, is timed beside the transfers; an emulated wire says itself what it
        can do."""
        return self.num_bytes > 0 and self.wire_gb_s is None

    @property
    def stays_on_gpus(self) -> bool:
        """Whether rows go from GPU to GPU without host memory: what they are compared with is a copy by torch."""
        return self.device == "cuda" and (self.mode in ("auto", "p2p") or self.slot_kind == "device")

    @property
    def opens_first(self) -> bool:
        """Whether the clock starts with the first submit, when the ranks have opened: where a wire is to be filled, or
        a GPU works, the time at which processes hear of a command is not to be measured."""
        return self.wire_gb_s is not None or self.device == "cuda" or self.interval_s > 0.0

    def pace(self) -> Pace:
        """How its chunks are submitted."""
        return Pace(self.interval_s, self.busy, self.opens_first, self.deadline_s)

    def setup(self) -> Setup:
        """Agents and pools of the case."""
        wire = None if self.wire_gb_s is None else Wire(self.wire_gb_s * 1e9, self.descriptor_us * 1e-6)
        return Setup(
            self.transport,
            self.mode,
            self.num_ranks,
            *self.slots(),
            wire,
            device=self.device,
            placement=self.placement,
            verify=self.verify,
            num_gpus=self.num_gpus,
        )

    def slots(self) -> tuple[SlotConfig, SlotConfig]:
        """Slots of the prefill agent and of each decode agent.

        `serial` packs the whole chunk of a rank into one slot before it sends anything: its slots grow with the chunk,
        and the sender needs one for each rank.
        """
        if self.mode != "serial":
            slots = SlotConfig(kind=self.slot_kind, num_slots=self.num_slots, slot_bytes=self.slot_bytes)
            return slots, slots
        num_rows = max(
            local_len(shard, min(first + self.chunk_tokens, self.num_tokens)) - local_len(shard, first)
            for shard in (Shard(rank, self.num_ranks, self.interleave) for rank in range(self.num_ranks))
            for first in range(0, max(self.num_tokens, 1), self.chunk_tokens)
        )
        slot_bytes = max(self.slot_bytes, -(-num_rows * self.num_layers * self.row_bytes // 4096) * 4096)
        src_slots = SlotConfig(kind=self.slot_kind, num_slots=self.num_ranks, slot_bytes=slot_bytes)
        return src_slots, SlotConfig(kind=self.slot_kind, num_slots=1, slot_bytes=slot_bytes)
