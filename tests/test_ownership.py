"""Ownership against counting tokens one by one."""

from __future__ import annotations

import itertools

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from kvxfer.layout import MAX_TOKENS, Shard, TokenRange
from kvxfer.ownership import local_len, local_row, num_pages_of, owned_tokens, owner

bounded = settings(max_examples=200, deadline=None, derandomize=True, database=None)
sizes = st.integers(1, 9)
interleaves = st.sampled_from([1, 2, 3, 16, 64])
tokens = st.integers(0, 400)


def dealt_out(size: int, interleave: int, num_tokens: int) -> list[list[int]]:
    """Tokens dealt to ranks like cards, `interleave` at a time."""
    hands: list[list[int]] = [[] for _ in range(size)]
    rank = 0
    for token in range(num_tokens):
        hands[rank].append(token)
        if (token + 1) % interleave == 0:
            rank = (rank + 1) % size
    return hands


@bounded
@given(sizes, interleaves, tokens)
def test_ranks_partition_the_tokens_in_order(size: int, interleave: int, num_tokens: int) -> None:
    hands = dealt_out(size, interleave, num_tokens)
    everything = np.arange(num_tokens, dtype=np.int64)
    for rank, hand in enumerate(hands):
        shard = Shard(rank, size, interleave)
        assert local_len(shard, num_tokens) == len(hand)
        np.testing.assert_array_equal(everything[owner(everything, shard) == rank], hand)
        np.testing.assert_array_equal(local_row(np.array(hand, dtype=np.int64), shard), np.arange(len(hand)))


@bounded
@given(sizes, interleaves, tokens, tokens)
def test_owned_tokens_of_a_range_that_starts_anywhere(size: int, interleave: int, first: int, num_tokens: int) -> None:
    hands = dealt_out(size, interleave, first + num_tokens)
    for rank, hand in enumerate(hands):
        got = owned_tokens(Shard(rank, size, interleave), TokenRange(first, first + num_tokens))
        assert got.dtype == np.int64
        np.testing.assert_array_equal(got, [token for token in hand if token >= first])


@bounded
@given(sizes, interleaves, st.sampled_from([1, 4, 16, 64]), tokens, tokens)
def test_pages_of_a_range(size: int, interleave: int, page_tokens: int, first: int, num_tokens: int) -> None:
    hands = dealt_out(size, interleave, first + num_tokens)
    for rank, hand in enumerate(hands):
        touched = {row // page_tokens for row, token in enumerate(hand) if token >= first}
        shard = Shard(rank, size, interleave)
        assert num_pages_of(shard, page_tokens, TokenRange(first, first + num_tokens)) == len(touched)


@pytest.mark.parametrize(("size", "interleave"), list(itertools.product([1, 3, 8, 4096], [1, 64, 1 << 31])))
def test_largest_tokens_do_not_overflow(size: int, interleave: int) -> None:
    first = MAX_TOKENS - 3
    last_tokens = TokenRange(first, MAX_TOKENS)
    owned = np.concatenate([owned_tokens(Shard(rank, size, interleave), last_tokens) for rank in range(size)])
    np.testing.assert_array_equal(np.sort(owned), [first, first + 1, first + 2])
    assert sum(local_len(Shard(rank, size, interleave), MAX_TOKENS) for rank in range(size)) == MAX_TOKENS
    for token in owned:
        rank = int(token) // interleave % size
        before = local_len(Shard(rank, size, interleave), int(token))
        assert int(local_row(np.array([token]), Shard(0, size, interleave))[0]) == before


def test_owned_tokens_cost_what_the_rank_owns() -> None:
    huge = TokenRange(0, MAX_TOKENS)
    assert owned_tokens(Shard(4095, 4096, 64), huge).size == MAX_TOKENS // 4096
