"""Registered regions of both sides, and the check that every write stays inside them."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, replace
from typing import ClassVar

import msgspec
import numpy as np
import numpy.typing as npt

from kvxfer.errors import BoundsError, ContractError, RegistrationError
from kvxfer.transports.base import ContiguousWrite, Limits, Region, RegionDescriptor, WriteBatch

_Bytes = npt.NDArray[np.uint64]
_Table = npt.NDArray[np.uint64]


@dataclass(frozen=True, slots=True)
class RemoteRegion:
    """A peer's region and where it begins: in the peer's address space, or where it is mapped here. `gpu_index`: of its
    GPU, as the peer counts; -1 for host memory."""

    num_bytes: int
    address: int
    gpu_index: int = -1


class OneEntry(msgspec.Struct, frozen=True, gc=False):
    """A checked write of one entry that has some length: absolute addresses, bytes; the rest as in `Entries`."""

    src: int
    dst: int
    num_bytes: int
    src_regions: tuple[int, ...]
    src_gpu: int = -1
    dst_gpu: int = -1

    num_entries: ClassVar[int] = 1

    @property
    def least_bytes(self) -> int:
        return self.num_bytes

    def rows(self) -> tuple[tuple[int, int, int]]:
        return ((self.src, self.dst, self.num_bytes),)

    @property
    def table(self) -> _Table:
        return np.array(self.rows(), dtype=np.uint64)

    def part(self, first: int, end: int) -> OneEntry | Entries:
        return self if first == 0 < end else Entries(self.table[:0])


@dataclass(frozen=True, slots=True)
class Entries:
    """A checked batch of any number of entries, none of length 0.

    `table`: `[n, 3]` uint64, absolute addresses of source and target, and bytes. `src_regions`: ids of the regions that
    hold the sources. `src_gpu` and `dst_gpu`: index of the GPU on which each side lies, as its owner counts, -1 for
    host memory.
    """

    table: _Table
    src_regions: tuple[int, ...] = ()
    src_gpu: int = -1
    dst_gpu: int = -1

    @property
    def num_entries(self) -> int:
        return len(self.table)

    @property
    def num_bytes(self) -> int:
        return int(self.table[:, 2].sum())

    @property
    def least_bytes(self) -> int:
        """Of the shortest entry; 0 where there is none."""
        return int(self.table[:, 2].min(initial=self.num_bytes))

    def rows(self) -> Iterable[tuple[int, int, int]]:
        """The table, entry by entry."""
        return zip(*self.table.T.tolist(), strict=True)

    def part(self, first: int, end: int) -> Entries:
        """Entries [first, end), as far as there are any."""
        return replace(self, table=self.table[first:end])


CheckedWrite = OneEntry | Entries


def check_new_region(region: Region, known: Iterable[Region], limits: Limits) -> None:
    """Raise `RegistrationError` unless `region` is memory of a kind in `limits` that overlaps no `known` region."""
    if region.kind not in limits.memory_kinds:
        kinds = ", ".join(sorted(kind.value for kind in limits.memory_kinds))
        raise RegistrationError(f"got {region.kind.value} memory, expected one of: {kinds}")
    if region.num_bytes < 1 or region.address < 1 or region.address + region.num_bytes > 1 << 63:
        raise RegistrationError(f"got {region.num_bytes} bytes at {region.address:#x}, expected a range of user memory")
    for other in known:
        if region.address < other.address + other.num_bytes and other.address < region.address + region.num_bytes:
            raise RegistrationError(
                f"got {region.num_bytes} bytes at {region.address:#x}, which overlap the registered "
                f"{other.num_bytes} at {other.address:#x}; expected memory that is not registered yet"
            )


def checked_write(
    write: WriteBatch | ContiguousWrite, local: Mapping[int, Region], remote: Mapping[int, RemoteRegion]
) -> CheckedWrite:
    """Absolute addresses of `write`, once every entry is known to lie inside one `local` and its `remote` region.

    Raises `ContractError` for arrays that are not three equal `[n]` uint64 ones, `BoundsError` for all else.
    """
    if isinstance(write, WriteBatch):
        return _checked_batch(write, local, remote)
    named, src, dst, num_bytes = write.dst_region, write.src_address, write.dst_offset, write.num_bytes
    target = remote.get(named.region_id)
    if target is not None and target.num_bytes == named.num_bytes and 0 <= dst < dst + num_bytes <= target.num_bytes:
        for region_id, source in local.items():
            if source.address <= src and src + num_bytes <= source.address + source.num_bytes:
                return OneEntry(src, target.address + dst, num_bytes, (region_id,), source.gpu_index, target.gpu_index)
    return _checked_batch(write.as_batch(), local, remote)  # nothing to move, or an error that names what is wrong


def _checked_batch(batch: WriteBatch, local: Mapping[int, Region], remote: Mapping[int, RemoteRegion]) -> Entries:
    _check_arrays(batch)
    target = _target_region(batch.dst_region, remote)
    lengths = batch.lengths
    outside = ~_inside(batch.dst_offsets, lengths, target.num_bytes)
    if outside.any():
        entry = int(outside.argmax())
        raise BoundsError(
            f"entry {entry}: got bytes [{batch.dst_offsets[entry]}, +{lengths[entry]}) of the peer's region "
            f"{batch.dst_region.region_id}, expected a range inside its {target.num_bytes} bytes"
        )
    found = np.zeros(len(lengths), dtype=bool)
    sources: list[int] = []
    for region_id, region in local.items():
        # A source below the region wraps round to an offset far above any region's size.
        inside = _inside(batch.src_addresses - np.uint64(region.address), lengths, region.num_bytes)
        if inside.any():
            sources.append(region_id)
            found |= inside
    if not found.all():
        entry = int((~found).argmax())
        raise BoundsError(
            f"entry {entry}: got source bytes [{int(batch.src_addresses[entry]):#x}, +{lengths[entry]}), "
            "expected a range inside one registered region"
        )
    src_gpus = {local[region_id].gpu_index for region_id in sources}
    if len(src_gpus) > 1:
        raise BoundsError(f"got sources on GPUs {sorted(src_gpus)} (-1 is the host), expected one of them in a batch")
    table = np.column_stack((batch.src_addresses, batch.dst_offsets + np.uint64(target.address), lengths))
    return Entries(table[lengths > 0], tuple(sources), max(src_gpus, default=-1), target.gpu_index)


def _check_arrays(batch: WriteBatch) -> None:
    for name in ("src_addresses", "dst_offsets", "lengths"):
        array = getattr(batch, name)
        if array.dtype != np.uint64 or array.shape != (batch.num_entries,):
            raise ContractError(
                f"WriteBatch.{name}: got {array.dtype} {list(array.shape)}, expected uint64 [{batch.num_entries}]"
            )


def _target_region(named: RegionDescriptor, remote: Mapping[int, RemoteRegion]) -> RemoteRegion:
    target = remote.get(named.region_id)
    if target is None or target.num_bytes != named.num_bytes:
        known = {region_id: region.num_bytes for region_id, region in remote.items()}
        raise BoundsError(
            f"got region {named.region_id} of {named.num_bytes} bytes, expected one of the peer's {known}: "
            "call add_peer again with newer metadata if the peer has registered more since"
        )
    return target


def _inside(offsets: _Bytes, lengths: _Bytes, num_bytes: int) -> npt.NDArray[np.bool_]:
    # offset + length could wrap; the difference cannot where the first condition holds.
    size = np.uint64(num_bytes)
    inside: npt.NDArray[np.bool_] = (offsets <= size) & (lengths <= size - np.minimum(offsets, size))
    return inside
