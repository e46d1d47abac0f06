"""Registered regions of both sides, and the check that every write stays inside them."""

from __future__ import annotations

from collections.abc import Collection, Iterable
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from kvxfer.errors import BoundsError, ContractError, RegistrationError
from kvxfer.transports.base import Limits, Region, RegionDescriptor, WriteBatch

_Bytes = npt.NDArray[np.uint64]


@dataclass(frozen=True, slots=True)
class RemoteRegion:
    """A peer's region and where it begins: in the peer's address space, or where it is mapped here. `gpu_index`: of its
    GPU, as the peer counts; -1 for host memory."""

    num_bytes: int
    address: int
    gpu_index: int = -1


@dataclass(frozen=True, slots=True)
class Entries:
    """A checked batch: `src`, `dst`, `lengths` `[n]` uint64, absolute addresses and bytes, no entry of length 0.

    `src_gpu` and `dst_gpu`: index of the GPU on which each side lies, as its owner counts, -1 for host memory.
    """

    src: _Bytes
    dst: _Bytes
    lengths: _Bytes
    src_gpu: int = -1
    dst_gpu: int = -1

    def part(self, first: int, end: int) -> Entries:
        part = slice(first, end)
        return Entries(self.src[part], self.dst[part], self.lengths[part], self.src_gpu, self.dst_gpu)

    @property
    def num_entries(self) -> int:
        return len(self.lengths)

    @property
    def num_bytes(self) -> int:
        return int(self.lengths[0] if len(self.lengths) == 1 else self.lengths.sum())


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


def checked_entries(batch: WriteBatch, local: Collection[Region], remote: dict[int, RemoteRegion]) -> Entries:
    """Absolute addresses of `batch`, once every entry is known to lie inside one `local` and its `remote` region.

    Raises `ContractError` for arrays that are not three equal `[n]` uint64 ones, `BoundsError` for all else.
    """
    _check_arrays(batch)
    target = _target_region(batch.dst_region, remote)
    lengths = batch.lengths
    if batch.num_entries == 1 and (source := _source_of_the_only_entry(batch, local, target)) is not None:
        dst = batch.dst_offsets + np.uint64(target.address)
        return Entries(batch.src_addresses, dst, lengths, source.gpu_index, target.gpu_index)
    outside = ~_inside(batch.dst_offsets, lengths, target.num_bytes)
    if outside.any():
        entry = int(outside.argmax())
        raise BoundsError(
            f"entry {entry}: got bytes [{batch.dst_offsets[entry]}, +{lengths[entry]}) of the peer's region "
            f"{batch.dst_region.region_id}, expected a range inside its {target.num_bytes} bytes"
        )
    found = np.zeros(len(lengths), dtype=bool)
    src_gpus: set[int] = set()
    for region in local:
        # A source below the region wraps round to an offset far above any region's size.
        inside = _inside(batch.src_addresses - np.uint64(region.address), lengths, region.num_bytes)
        if inside.any():
            src_gpus.add(region.gpu_index)
            found |= inside
    if not found.all():
        entry = int((~found).argmax())
        raise BoundsError(
            f"entry {entry}: got source bytes [{int(batch.src_addresses[entry]):#x}, +{lengths[entry]}), "
            "expected a range inside one registered region"
        )
    if len(src_gpus) > 1:
        raise BoundsError(f"got sources on GPUs {sorted(src_gpus)} (-1 is the host), expected one of them in a batch")
    dst = batch.dst_offsets + np.uint64(target.address)
    gpus = max(src_gpus, default=-1), target.gpu_index
    kept = lengths > 0
    if kept.all():
        return Entries(batch.src_addresses, dst, lengths, *gpus)
    return Entries(batch.src_addresses[kept], dst[kept], lengths[kept], *gpus)


def _source_of_the_only_entry(batch: WriteBatch, local: Iterable[Region], target: RemoteRegion) -> Region | None:
    """The region that holds it, where it has some length and lies where it may: what a packed segment is, in a fifth of
    the time. None: look closer."""
    src, dst, num_bytes = int(batch.src_addresses[0]), int(batch.dst_offsets[0]), int(batch.lengths[0])
    if not 0 < num_bytes <= target.num_bytes - dst:
        return None
    for region in local:
        if region.address <= src and src + num_bytes <= region.address + region.num_bytes:
            return region
    return None


def _check_arrays(batch: WriteBatch) -> None:
    for name in ("src_addresses", "dst_offsets", "lengths"):
        array = getattr(batch, name)
        if array.dtype != np.uint64 or array.shape != (batch.num_entries,):
            raise ContractError(
                f"WriteBatch.{name}: got {array.dtype} {list(array.shape)}, expected uint64 [{batch.num_entries}]"
            )


def _target_region(named: RegionDescriptor, remote: dict[int, RemoteRegion]) -> RemoteRegion:
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
