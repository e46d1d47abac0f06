"""DcpGroup over gloo, one process a rank, against float64 attention over all keys."""

from pathlib import Path

import pytest
import torch

from kvxfer.decode.dcp import align_chunk_tokens
from kvxfer.decode.exchange import AUTO_A2A_BUFFERS_BYTES, choose_backend
from kvxfer.errors import KernelContractError
from kvxfer.kernels import A2ALayout, lse_combine
from tests.attention import attend, owned, relative_error
from tests.decode import dcp_scenarios
from tests.decode.dcp_ranks import run_ranks


@pytest.mark.parametrize("world", [2, 3, 4])
def test_partials_merge_to_the_whole(tmp_path: Path, world: int) -> None:
    run_ranks(dcp_scenarios.merges_to_the_whole, world, tmp_path)


def test_speculative_verify(tmp_path: Path) -> None:
    run_ranks(dcp_scenarios.verifies_speculated_tokens, 3, tmp_path)


def test_a_staging_smaller_than_the_batch(tmp_path: Path) -> None:
    run_ranks(dcp_scenarios.stages_in_small_tiles, 2, tmp_path)


def test_results_lie_at_fixed_addresses(tmp_path: Path) -> None:
    run_ranks(dcp_scenarios.addresses_stay, 2, tmp_path)


def test_a_merge_is_one_exchange_of_no_more_bytes_than_the_batch_needs(tmp_path: Path) -> None:
    run_ranks(dcp_scenarios.sends_what_the_batch_needs, 2, tmp_path)


def test_a_wrong_base_is_caught(tmp_path: Path) -> None:
    run_ranks(dcp_scenarios.a_wrong_base_shows, 2, tmp_path)


def test_fp8(tmp_path: Path) -> None:
    for dtype in (torch.float8_e4m3fn, torch.float8_e5m2):
        run_ranks(dcp_scenarios.merges_fp8, 2, tmp_path, dtype)


@pytest.mark.parametrize("world", [1, 3])
def test_queries_are_gathered_bit_by_bit(tmp_path: Path, world: int) -> None:
    for dtype in (torch.bfloat16, torch.float8_e4m3fn):
        run_ranks(dcp_scenarios.gathers_queries, world, tmp_path, dtype)


def test_shard_lens_count_the_owned_tokens(tmp_path: Path) -> None:
    run_ranks(dcp_scenarios.counts_owned_tokens, 3, tmp_path)


def test_bad_input_is_refused_by_name(tmp_path: Path) -> None:
    run_ranks(dcp_scenarios.refuses_bad_input, 2, tmp_path)


def test_one_rank_is_a_pass_through(tmp_path: Path) -> None:
    run_ranks(dcp_scenarios.passes_through_alone, 1, tmp_path)


def test_auto_says_what_it_took_and_why() -> None:
    small = A2ALayout(8, 512, 128, 512, torch.bfloat16)
    assert choose_backend("auto", small) == (
        "a2a",
        f"its buffers take {2 * small.total_bytes} bytes, within {AUTO_A2A_BUFFERS_BYTES}, and it sums in float32",
    )
    large = A2ALayout(4, 16384, 96, 512, torch.float32)
    backend, reason = choose_backend("auto", large)
    assert backend == "ag_rs"
    assert str(2 * large.total_bytes) in reason


@pytest.mark.parametrize(
    ("block", "size", "interleave", "num_tokens", "expected"),
    [(64, 8, 1, 1, 64), (64, 3, 16, 1, 192), (48, 4, 16, 100, 192), (1, 5, 1, 26, 30), (64, 8, 1, 64, 64)],
)
def test_align_chunk_tokens(block: int, size: int, interleave: int, num_tokens: int, expected: int) -> None:
    assert align_chunk_tokens(block, size, interleave, num_tokens) == expected


def test_align_chunk_tokens_refuses_nothing_to_align() -> None:
    with pytest.raises(KernelContractError, match=r"^interleave: got 0, expected at least 1"):
        align_chunk_tokens(64, 8, 0)


@pytest.mark.parametrize(("block", "size", "interleave"), [(16, 4, 1), (24, 3, 4), (10, 4, 5)])
def test_attention_over_a_context_in_aligned_chunks(block: int, size: int, interleave: int) -> None:
    """A prefill attends to an earlier context chunk by chunk, each gathered from the ranks in equal parts."""
    chunk = align_chunk_tokens(block, size, interleave)
    assert chunk % block == 0
    num_tokens, query_rows = 3 * chunk, 2
    generator = torch.Generator().manual_seed(3)
    keys, values = (torch.randn(num_tokens, 8, generator=generator, dtype=torch.float64) for _ in range(2))
    query = torch.randn(query_rows, 2, 8, generator=generator, dtype=torch.float64)
    shards = [owned(num_tokens, rank, size, interleave) for rank in range(size)]
    outs, lses = [], []
    for first in range(0, num_tokens, chunk):
        rows = chunk // size
        parts = [shard[first // size : first // size + rows] for shard in shards]
        # Gathered rank by rank; equal parts of whole interleaves fall into token order by a plain transpose.
        tokens = torch.stack(parts).view(size, -1, interleave).transpose(0, 1).flatten()
        assert tokens.tolist() == list(range(first, first + chunk))
        out, lse = attend(query, keys[tokens], values[tokens], torch.full((query_rows,), chunk), "e")
        outs.append(out.float())
        lses.append(lse.float())
    merged = lse_combine(torch.stack(outs), torch.stack(lses), lse_base="e")
    whole, _ = attend(query, keys, values, torch.full((query_rows,), num_tokens), "e")
    assert isinstance(merged, torch.Tensor)
    assert relative_error(merged, whole) < 1e-5
    # A chunk that ends elsewhere leaves the ranks with unequal parts: nothing a plain all-gather can take.
    ragged = chunk + interleave
    assert len({int((shard < ragged).sum()) for shard in shards}) > 1
