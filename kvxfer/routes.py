"""What one source owes one destination: the facts on which both sides of a leg must agree.

`match_layouts` compares two layouts at pairing and refuses what does not fit; `check_complete` proves, before a
transfer moves a byte, that all its sources together owe each wanted row exactly once.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

import numpy as np

from kvxfer.errors import PairingError
from kvxfer.layout import Group, LayerRange, Placement, PoolLayout, Shard, StatePart, TokenRange
from kvxfer.ownership import Int64Array, owned_tokens, owner


@dataclass(frozen=True, slots=True)
class WireGroup:
    """One group of a leg. `layers` are those that both sides hold, and may be none (pipeline stages)."""

    name: str
    src_idx: int  # position in the source's layout
    dst_idx: int  # position in the destination's layout
    layers: LayerRange
    row_bytes: int  # meaningless for state, whose ranks may hold different shares
    placement: Placement
    parts: tuple[StatePart, ...]


@dataclass(frozen=True, slots=True)
class Route:
    """Everything that decides which rows go over one leg. Its groups stand in the destination's order."""

    src_shard: Shard
    dst_shard: Shard
    groups: tuple[WireGroup, ...]
    active: bool  # False: another replica of the source serves this destination
    sends_replicated: bool  # True: replicated rows and unsplit state come from this source


def match_layouts(src: PoolLayout, dst: PoolLayout, dst_rank: int, dst_world: int) -> Route:
    """The route from a source pool to decode agent `dst_rank` of `dst_world`.

    Several decode agents may hold the same shard, so `dst_world` may exceed `dst.shard.size`. Of `num_replicas`
    equal sources, replica `dst_rank % num_replicas` sends; of its shards, rank
    `(dst_rank // num_replicas) % size` sends what is not sharded. So all sources share the work.

    Raises `PairingError`, with field, got and expected, where the layouts do not fit together.
    """
    if not 0 <= dst_rank < dst_world:
        raise PairingError(f"dst_rank: got {dst_rank}, expected 0 to dst_world - 1 = {dst_world - 1}")
    if dst_world < dst.shard.size:
        raise PairingError(f"dst_world: got {dst_world}, expected at least dst.shard.size {dst.shard.size}")
    if src.dtype_tag != dst.dtype_tag:
        raise PairingError(f"dtype_tag: got {src.dtype_tag!r} at the source, expected {dst.dtype_tag!r}")
    src_idx_of = {group.name: idx for idx, group in enumerate(src.groups)}
    dst_names = {group.name for group in dst.groups}
    for group in src.groups:
        if group.name not in dst_names:
            raise PairingError(f"groups: got {group.name!r} at the source, expected only {sorted(dst_names)}")
    wire_groups = []
    for dst_idx, group in enumerate(dst.groups):
        if group.name not in src_idx_of:
            raise PairingError(f"groups: got {sorted(src_idx_of)} at the source, expected {group.name!r} among them")
        src_idx = src_idx_of[group.name]
        wire_groups.append(_match_groups(src.groups[src_idx], group, src_idx, dst_idx))
    return Route(
        src_shard=src.shard,
        dst_shard=dst.shard,
        groups=tuple(wire_groups),
        active=dst_rank % src.num_replicas == src.replica,
        sends_replicated=dst_rank // src.num_replicas % src.shard.size == src.shard.rank,
    )


def _match_groups(src: Group, dst: Group, src_idx: int, dst_idx: int) -> WireGroup:
    where = f"group {dst.name!r}"
    if src.placement is not dst.placement:
        raise PairingError(
            f"{where}: placement: got {src.placement.value!r} at the source, expected {dst.placement.value!r}"
        )
    if src.parts != dst.parts:
        raise PairingError(f"{where}: parts: got {src.parts} at the source, expected {dst.parts}")
    if src.placement is not Placement.STATE and src.row_bytes != dst.row_bytes:
        raise PairingError(f"{where}: row_bytes: got {src.row_bytes} at the source, expected {dst.row_bytes}")
    return WireGroup(
        name=dst.name,
        src_idx=src_idx,
        dst_idx=dst_idx,
        layers=src.layers.intersect(dst.layers),
        row_bytes=dst.row_bytes,
        placement=dst.placement,
        parts=dst.parts,
    )


def subtract(token_range: TokenRange, have: Iterable[TokenRange]) -> tuple[TokenRange, ...]:
    """What is left of `token_range` without the ranges `have`, which may overlap: non-empty ranges, ascending."""
    left = []
    first = token_range.first
    for held in sorted((each for each in have if each.num_tokens), key=lambda each: each.first):
        if held.first > first and first < token_range.end:
            left.append(TokenRange(first, min(held.first, token_range.end)))
        first = max(first, held.end)
    if first < token_range.end:
        left.append(TokenRange(first, token_range.end))
    return tuple(left)


def part_interval(part: StatePart, shard: Shard) -> tuple[int, int]:
    """The bytes `[first, end)` of the whole part that the rank holds."""
    if not part.split:
        return 0, part.num_bytes
    share_bytes = part.local_bytes(shard)
    return shard.rank * share_bytes, (shard.rank + 1) * share_bytes


def check_complete(
    routes: Sequence[Route],
    dst: PoolLayout,
    wanted: Sequence[TokenRange],
    have: Sequence[Sequence[TokenRange]],
) -> None:
    """Raise `PairingError` unless the sources together owe each wanted row of the destination exactly once.

    `routes` lead from every source of one transfer to the same destination; `wanted` and `have` stand in the
    order of `dst.groups`. Exact, and without a look at single tokens where all sources share one DCP layout.
    """
    sending = [route for route in routes if route.active]
    for group_idx, group in enumerate(dst.groups):
        ranges = subtract(wanted[group_idx], have[group_idx])
        if not ranges:
            continue
        cuts = {group.layers.first, group.layers.end}
        for route in sending:
            layers = route.groups[group_idx].layers
            if layers.num_layers:
                cuts |= {layers.first, layers.end}
        bounds = sorted(cuts)
        for first, end in itertools.pairwise(bounds):
            sources = [route for route in sending if _holds(route.groups[group_idx].layers, first)]
            _check_layers(group, dst.shard, LayerRange(first, end), sources, ranges)


def _holds(layers: LayerRange, layer: int) -> bool:
    return layers.first <= layer < layers.end


def _check_layers(
    group: Group, dst_shard: Shard, layers: LayerRange, sources: list[Route], ranges: tuple[TokenRange, ...]
) -> None:
    """Check layers that all `sources` hold, and no other source does."""
    where = f"group {group.name!r}, layers [{layers.first}, {layers.end})"
    num_senders = sum(route.sends_replicated for route in sources)
    if group.placement is Placement.SHARDED:
        _check_sharded(where, dst_shard, sources, ranges)
    elif group.placement is Placement.REPLICATED:
        num_tokens = sum(each.num_tokens for each in ranges)
        if num_senders != 1:
            raise PairingError(
                f"{where}: got {num_senders * num_tokens} rows from all sources, expected {num_tokens} "
                f"({num_senders} sources send the replicated rows, expected 1)"
            )
    else:
        for part in group.parts:
            shares = [part_interval(part, route.src_shard) for route in sources if part.split or route.sends_replicated]
            _check_part(f"{where}, state part {part.name!r}", part_interval(part, dst_shard), shares)


def _check_sharded(where: str, dst_shard: Shard, sources: list[Route], ranges: tuple[TokenRange, ...]) -> None:
    ranks_of: dict[tuple[int, int], list[int]] = {}
    for route in sources:
        shard = route.src_shard
        ranks_of.setdefault((shard.size, shard.interleave), []).append(shard.rank)
    if len(ranks_of) == 1:
        (size, _), ranks = next(iter(ranks_of.items()))
        if sorted(ranks) == list(range(size)):
            return  # every rank of one layout, once: exactly a partition of the tokens
    tokens = np.concatenate([owned_tokens(dst_shard, each) for each in ranges])
    num_sources: Int64Array = np.zeros(tokens.size, dtype=np.int64)
    for (size, interleave), ranks in ranks_of.items():
        num_sources += np.bincount(ranks, minlength=size)[owner(tokens, Shard(0, size, interleave))]
    wrong = np.flatnonzero(num_sources != 1)
    if wrong.size:
        raise PairingError(
            f"{where}: got {int(num_sources.sum())} rows a layer from all sources, expected {tokens.size}: "
            f"token {int(tokens[wrong[0]])} comes from {int(num_sources[wrong[0]])} sources, expected 1"
        )


def _check_part(where: str, wanted: tuple[int, int], shares: list[tuple[int, int]]) -> None:
    """Shares, each cut down to the wanted bytes, must lie side by side and fill them."""
    clipped = sorted((max(first, wanted[0]), min(end, wanted[1])) for first, end in shares)
    clipped = [(first, end) for first, end in clipped if first < end]
    reached = wanted[0]
    for first, end in clipped:
        if first != reached:
            break
        reached = end
    num_bytes = sum(end - first for first, end in clipped)
    if reached != wanted[1] or num_bytes != wanted[1] - wanted[0]:
        raise PairingError(
            f"{where}: got {num_bytes} bytes from all sources, expected bytes [{wanted[0]}, {wanted[1]}) exactly once"
        )
