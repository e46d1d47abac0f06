"""The sum of a segment: the same in any parts and any order, and different whenever a word of it is."""

from __future__ import annotations

import itertools
import random

import numpy as np
import pytest

from kvxfer.row_sums import MODULUS, WORD_KEYS, block_keys, row_sum

DATA = np.random.default_rng(0).integers(0, 256, 70_003, dtype=np.uint8)


def test_parts_in_any_order_give_the_sum_of_the_whole() -> None:
    rng = random.Random(1)
    for num_bytes in (0, 1, 15, 16, 17, 4096 * 16, len(DATA)):
        cuts = sorted({0, num_bytes, *(rng.randint(0, num_bytes) for _ in range(9))})
        parts = list(itertools.pairwise(cuts))
        rng.shuffle(parts)
        total = sum(row_sum(DATA[begin:end], begin) for begin, end in parts) % MODULUS
        assert total == row_sum(DATA[:num_bytes])


def test_zeros_count_nothing_wherever_they_are() -> None:
    padded = np.concatenate([DATA[:100], np.zeros(60, dtype=np.uint8)])
    assert row_sum(padded) == row_sum(DATA[:100])
    assert row_sum(np.zeros(100, dtype=np.uint8), 5) == 0


def test_every_flipped_bit_is_found() -> None:
    data = DATA[:1000].copy()
    right = row_sum(data)
    found = set()
    for bit in range(8 * data.size):
        data[bit // 8] ^= 1 << bit % 8
        found.add(row_sum(data))
        data[bit // 8] ^= 1 << bit % 8
    assert right not in found
    assert len(found) == 8 * data.size, "two flips have the same sum"


@pytest.mark.parametrize("bit", [0, 7, 15, 31])
def test_flips_of_the_same_bit_in_two_words_do_not_cancel(bit: int) -> None:
    """As a line that is stuck would make them: the highest bit of two words of 8 bytes would, in a sum of those."""
    data = DATA[:4096].copy()
    right = row_sum(data)
    rng = random.Random(bit)
    for _ in range(500):
        places = [4 * word + bit // 8 for word in rng.sample(range(data.size // 4), 2)]
        data[places] ^= 1 << bit % 8
        assert row_sum(data) != right
        data[places] ^= 1 << bit % 8


@pytest.mark.parametrize("row_bytes", [16, 48, 576, 1152, 577])
def test_rows_that_are_swapped_or_moved_are_found(row_bytes: int) -> None:
    rows = DATA[: 20 * row_bytes].reshape(20, row_bytes)
    right = row_sum(rows.ravel())
    for first in range(19):
        swapped = rows.copy()
        swapped[[first, first + 1]] = rows[[first + 1, first]]
        assert row_sum(swapped.ravel()) != right
        assert row_sum(np.roll(rows, first + 1, axis=0).ravel()) != right


def test_keys_are_odd_and_behave_like_random_ones() -> None:
    """Of a whole slot of 8 MiB: half of all bits are set, also of the differences of keys some rows apart."""
    keys = block_keys(0, (8 << 20) // 16)
    assert (keys & np.uint64(1)).all()
    assert all(key % 2 for key in WORD_KEYS)
    for values in (keys, keys[1:] - keys[:-1], keys[72:] - keys[:-72], keys[128:] - keys[:-128]):
        for bit in range(1, 64):
            share = float(((values >> np.uint64(bit)) & np.uint64(1)).mean())
            assert abs(share - 0.5) < 0.005, bit
    # Words that differ in their highest bit alone see 33 bits of a key; as many pairs agree as chance has it.
    num_alike = keys.size - np.unique(keys & np.uint64((1 << 33) - 1)).size
    assert num_alike < 2 * keys.size**2 / 2 / 2**32
