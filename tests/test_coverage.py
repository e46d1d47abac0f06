"""What was submitted may not be submitted again."""

from __future__ import annotations

import random

import pytest

from kvxfer.coverage import Coverage, Rectangle
from kvxfer.errors import LayoutError
from kvxfer.layout import LayerRange, TokenRange


def rectangle(group_idx: int, first_layer: int, end_layer: int, first: int, end: int) -> Rectangle:
    return group_idx, LayerRange(first_layer, end_layer), TokenRange(first, end)


def test_chunks_side_by_side_are_fine() -> None:
    coverage = Coverage()
    coverage.add([rectangle(0, 0, 3, 0, 100), rectangle(1, 0, 3, 0, 100)])
    coverage.add([rectangle(0, 0, 3, 100, 130)])
    coverage.add([rectangle(0, 3, 6, 0, 130)])
    coverage.add([rectangle(0, 6, 6, 0, 130), rectangle(0, 0, 6, 50, 50)])  # no rows, no overlap


def test_overlap_names_both_and_adds_nothing() -> None:
    coverage = Coverage()
    coverage.add([rectangle(1, 0, 3, 0, 100)])
    message = r"group 1: got layers \[2, 4\) of tokens \[99, 120\), .* layers \[0, 3\) of tokens \[0, 100\)"
    with pytest.raises(LayoutError, match=message):
        coverage.add([rectangle(0, 0, 3, 0, 100), rectangle(1, 2, 4, 99, 120)])
    coverage.add([rectangle(0, 0, 3, 0, 100), rectangle(1, 3, 4, 99, 120)])


def test_overlap_within_one_submit() -> None:
    coverage = Coverage()
    with pytest.raises(LayoutError, match=r"group 0: got layers \[0, 1\) of tokens \[4, 6\)"):
        coverage.add([rectangle(0, 0, 1, 0, 5), rectangle(0, 0, 1, 4, 6)])
    coverage.add([rectangle(0, 0, 1, 0, 5)])


@pytest.mark.parametrize("seed", range(20))
def test_against_a_set_of_cells(seed: int) -> None:
    rng = random.Random(seed)
    coverage = Coverage()
    cells: set[tuple[int, int, int]] = set()
    num_refused = 0
    for _ in range(40):
        layers = sorted(rng.choices(range(7), k=2))
        tokens = sorted(rng.choices(range(12), k=2))
        group_idx = rng.randrange(2)
        new = {(group_idx, layer, token) for layer in range(*layers) for token in range(*tokens)}
        if new & cells:
            num_refused += 1
            with pytest.raises(LayoutError):
                coverage.add([rectangle(group_idx, *layers, *tokens)])
        else:
            coverage.add([rectangle(group_idx, *layers, *tokens)])
            cells |= new
    assert num_refused
    assert cells
