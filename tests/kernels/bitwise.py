"""Comparison of bytes that names the first one that differs."""

import torch


def assert_bitwise_equal(got: torch.Tensor, expected: torch.Tensor) -> None:
    """Compares as uint8: payload and LSE bits may spell NaN, which equals nothing."""
    got_bytes, expected_bytes = (t.contiguous().flatten().view(torch.uint8).cpu() for t in (got, expected))
    assert got_bytes.shape == expected_bytes.shape
    wrong = (got_bytes != expected_bytes).nonzero()
    if len(wrong):
        first = int(wrong[0])
        message = f"{len(wrong)} bytes differ, the first at {first}: got {int(got_bytes[first])}"
        raise AssertionError(f"{message}, expected {int(expected_bytes[first])}")
