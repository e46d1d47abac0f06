"""How KV rows lie in a pool: groups, shards and token ranges.

Data only; imports nothing of ours but the errors. All offsets and sizes are bytes, all ranges half open.
"""

from __future__ import annotations

import enum
from typing import Annotated

import msgspec

from kvxfer.errors import LayoutError

MAX_OFFSET = (1 << 62) - 1
MAX_TOKENS = 1 << 31
MAX_GROUPS = 64

_Size = Annotated[int, msgspec.Meta(ge=0, le=MAX_OFFSET)]
_Count = Annotated[int, msgspec.Meta(ge=1, le=1 << 31)]
_Name = Annotated[str, msgspec.Meta(min_length=1, max_length=64)]


class Placement(enum.Enum):
    """Which decode ranks get the rows of a group."""

    SHARDED = "sharded"  # split by DCP: a token belongs to one rank
    REPLICATED = "replicated"  # every rank gets every row
    STATE = "state"  # one blob a request and layer, no tokens


class TokenRange(msgspec.Struct, frozen=True, forbid_unknown_fields=True, array_like=True):
    """Tokens `[first, end)` of a sequence. A state blob is the range `[0, 1)`, no state is `[0, 0)`."""

    first: Annotated[int, msgspec.Meta(ge=0, le=MAX_TOKENS)]
    end: Annotated[int, msgspec.Meta(ge=0, le=MAX_TOKENS)]

    def __post_init__(self) -> None:
        if self.end < self.first:
            raise LayoutError(f"token range [{self.first}, {self.end}): end lies before first")

    @property
    def num_tokens(self) -> int:
        return self.end - self.first

    def intersect(self, other: TokenRange) -> TokenRange:
        """The common tokens; an empty range at `first` where there are none."""
        first = max(self.first, other.first)
        return TokenRange(first, max(first, min(self.end, other.end)))


class LayerRange(msgspec.Struct, frozen=True, forbid_unknown_fields=True, array_like=True):
    """Global layers `[first, end)`."""

    first: Annotated[int, msgspec.Meta(ge=0, le=1 << 20)]
    end: Annotated[int, msgspec.Meta(ge=0, le=1 << 20)]

    def __post_init__(self) -> None:
        if self.end < self.first:
            raise LayoutError(f"layer range [{self.first}, {self.end}): end lies before first")

    @property
    def num_layers(self) -> int:
        return self.end - self.first

    def intersect(self, other: LayerRange) -> LayerRange:
        """The common layers; an empty range at `first` where there are none."""
        first = max(self.first, other.first)
        return LayerRange(first, max(first, min(self.end, other.end)))


class Shard(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """One rank's place in a DCP layout: token `t` belongs to rank `(t // interleave) % size`."""

    rank: Annotated[int, msgspec.Meta(ge=0, lt=4096)] = 0
    size: Annotated[int, msgspec.Meta(ge=1, le=4096)] = 1
    interleave: _Count = 1

    def __post_init__(self) -> None:
        if self.rank >= self.size:
            raise LayoutError(f"shard.rank: got {self.rank}, expected below shard.size {self.size}")


class StatePart(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """One part of a state blob. `num_bytes` is its full size; `split` parts are cut evenly over the shard's ranks."""

    name: _Name
    num_bytes: _Count
    split: bool = False

    def local_bytes(self, shard: Shard) -> int:
        """Bytes of this part that one rank of `shard` holds.

        Raises `LayoutError` where a split part cannot be cut evenly.
        """
        if not self.split:
            return self.num_bytes
        if self.num_bytes % shard.size:
            raise LayoutError(
                f"state part {self.name!r}: got {self.num_bytes} bytes, expected a multiple of shard.size {shard.size}"
            )
        return self.num_bytes // shard.size


class Group(msgspec.Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """Layers of a pool that share one row shape.

    Row `r` of page `p` in global layer `l` lies at
    `base_offset_bytes + (l - layers.first) * layer_stride_bytes + p * page_stride_bytes + r * row_stride_bytes`.
    Pages are numbered `[0, num_pages)`. A page that holds keys and scales apart is two groups.
    For `Placement.STATE` a page is a request's slot: `page_tokens` is 1, and `row_bytes` is the sum of the local
    parts, which lie one behind the other.
    """

    name: _Name
    layers: LayerRange
    base_offset_bytes: _Size = 0
    layer_stride_bytes: _Size
    page_stride_bytes: _Size
    num_pages: Annotated[int, msgspec.Meta(ge=0, le=1 << 40)]
    page_tokens: Annotated[int, msgspec.Meta(ge=1, le=1 << 20)]
    row_stride_bytes: _Size
    row_bytes: Annotated[int, msgspec.Meta(ge=1, le=1 << 30)]
    placement: Placement = Placement.SHARDED
    parts: tuple[StatePart, ...] = ()

    def __post_init__(self) -> None:
        where = f"group {self.name!r}"
        if self.page_tokens > 1 and self.row_stride_bytes < self.row_bytes:
            raise LayoutError(
                f"{where}: row_stride_bytes: got {self.row_stride_bytes}, expected at least row_bytes {self.row_bytes}"
            )
        page_bytes = (self.page_tokens - 1) * self.row_stride_bytes + self.row_bytes
        if self.num_pages > 1 and self.page_stride_bytes < page_bytes:
            # Layers may interleave within a page, rows of two pages may not.
            raise LayoutError(
                f"{where}: page_stride_bytes: got {self.page_stride_bytes}, expected at least {page_bytes} "
                f"(page_tokens {self.page_tokens} rows)"
            )
        if (self.placement is Placement.STATE) != bool(self.parts):
            raise LayoutError(
                f"{where}: parts: got {len(self.parts)}, expected some for placement 'state' and none for the others"
            )
        if self.placement is Placement.STATE and self.page_tokens != 1:
            raise LayoutError(f"{where}: page_tokens: got {self.page_tokens}, expected 1 for placement 'state'")
        if self.extent_bytes > MAX_OFFSET:
            raise LayoutError(f"{where}: ends at byte {self.extent_bytes}, expected at most {MAX_OFFSET}")

    @property
    def extent_bytes(self) -> int:
        """First byte behind the group's last row, counted from the start of the pool."""
        if self.num_pages == 0 or self.layers.num_layers == 0:
            return self.base_offset_bytes
        return (
            self.base_offset_bytes
            + (self.layers.num_layers - 1) * self.layer_stride_bytes
            + (self.num_pages - 1) * self.page_stride_bytes
            + (self.page_tokens - 1) * self.row_stride_bytes
            + self.row_bytes
        )


class PoolLayout(msgspec.Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """A worker's whole pool.

    `dtype_tag` names the element type of the rows (`"bf16"`, `"fp8_e4m3"`, ...); both sides must name the same.
    `replica` of `num_replicas`: workers that hold identical rows (tensor-parallel ranks of an MLA model) share
    the sending; decode rank `r` is served by replica `r % num_replicas`.
    """

    groups: tuple[Group, ...]
    shard: Shard = Shard()
    dtype_tag: Annotated[str, msgspec.Meta(min_length=1, max_length=32)]
    replica: Annotated[int, msgspec.Meta(ge=0, lt=4096)] = 0
    num_replicas: Annotated[int, msgspec.Meta(ge=1, le=4096)] = 1

    def __post_init__(self) -> None:
        if not 1 <= len(self.groups) <= MAX_GROUPS:
            raise LayoutError(f"groups: got {len(self.groups)}, expected 1 to {MAX_GROUPS}")
        names = [group.name for group in self.groups]
        if len(set(names)) != len(names):
            raise LayoutError(f"groups: got the names {names}, expected each once")
        if self.replica >= self.num_replicas:
            raise LayoutError(f"replica: got {self.replica}, expected below num_replicas {self.num_replicas}")
        for group in self.groups:
            if group.placement is Placement.STATE:
                local_bytes = sum(part.local_bytes(self.shard) for part in group.parts)
                if group.row_bytes != local_bytes:
                    raise LayoutError(
                        f"group {group.name!r}: row_bytes: got {group.row_bytes}, expected {local_bytes}, "
                        f"the sum of its parts on rank {self.shard.rank} of {self.shard.size}"
                    )

    def check_fits(self, pool_bytes: int) -> None:
        """Raise `LayoutError` where a group ends behind `pool_bytes`."""
        for group in self.groups:
            if group.extent_bytes > pool_bytes:
                raise LayoutError(
                    f"group {group.name!r}: ends at byte {group.extent_bytes}, but the pool has {pool_bytes} bytes"
                )
