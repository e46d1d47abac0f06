"""What one source has been given to send so far: a set of (group, layers, tokens) that may not overlap."""

from __future__ import annotations

from collections.abc import Iterable

from kvxfer.errors import LayoutError
from kvxfer.layout import LayerRange, TokenRange

Rectangle = tuple[int, LayerRange, TokenRange]  # group_idx, global layers, tokens


class Coverage:
    """The rectangles of one transfer's submits at one source.

    A row that is submitted twice would be counted twice, and could hide one that never came.
    """

    def __init__(self) -> None:
        self._held: dict[int, list[tuple[LayerRange, TokenRange]]] = {}

    def add(self, rectangles: Iterable[Rectangle]) -> None:
        """Add the rectangles; those without rows are left out.

        Raises `LayoutError`, which names both, where one overlaps another or one added before; nothing is added then.
        """
        added: dict[int, list[tuple[LayerRange, TokenRange]]] = {}
        for group_idx, layers, tokens in rectangles:
            if not (layers.num_layers and tokens.num_tokens):
                continue
            of_group = added.setdefault(group_idx, [])
            for held_layers, held_tokens in (*self._held.get(group_idx, ()), *of_group):
                if layers.intersect(held_layers).num_layers and tokens.intersect(held_tokens).num_tokens:
                    raise LayoutError(
                        f"group {group_idx}: got layers [{layers.first}, {layers.end}) of tokens "
                        f"[{tokens.first}, {tokens.end}), expected none of what was submitted before: "
                        f"layers [{held_layers.first}, {held_layers.end}) of tokens "
                        f"[{held_tokens.first}, {held_tokens.end})"
                    )
            of_group.append((layers, tokens))
        for group_idx, of_group in added.items():
            self._held.setdefault(group_idx, []).extend(of_group)
