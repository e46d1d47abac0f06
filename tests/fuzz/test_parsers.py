"""Every parser against nearly valid and arbitrary input: one kind of error, nothing else."""

from __future__ import annotations

from random import Random

import pytest
from hypothesis import HealthCheck, example, given, settings
from hypothesis import strategies as st

from tests.fuzz.mutate import mutate
from tests.fuzz.targets import SEEDS, TARGETS

_QUICK = settings(deadline=None, max_examples=100, suppress_health_check=[HealthCheck.too_slow])


@pytest.mark.parametrize("target", TARGETS)
@_QUICK
@given(rng=st.randoms(use_true_random=False))
def test_nearly_valid(target: str, rng: Random) -> None:
    TARGETS[target](mutate(rng, SEEDS[target]))


@pytest.mark.parametrize("target", TARGETS)
@_QUICK
@example(b"")
@example(b"\x91" * 100_000)
@example(b"[" * 100_000)
@example(b"a=" + b"{a=" * 50_000)
@example(b"\xdf\xff\xff\xff\xff")
@example(b"\xc6\x7f\xff\xff\xff")
@given(data=st.binary(max_size=300))
def test_arbitrary(target: str, data: bytes) -> None:
    TARGETS[target](data)


@pytest.mark.parametrize("target", TARGETS)
def test_valid(target: str) -> None:
    for seed in SEEDS[target]:
        TARGETS[target](seed)
