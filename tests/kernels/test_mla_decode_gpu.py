"""`mla_decode` at the size of real models on a GPU: the form for many heads, large pools, CUDA graphs."""

import pytest
import torch

from kvxfer.kernels import mla_decode, reference

pytestmark = pytest.mark.gpu
V_DIM, DIM, SCALE = 512, 576, 576**-0.5
TOLERANCES = {torch.bfloat16: 5e-3, torch.float16: 5e-4, torch.float32: 2e-6}


def make_pool(
    lens: torch.Tensor, page_tokens: int, dtype: torch.dtype, num_layers: int = 1
) -> tuple[torch.Tensor, ...]:
    """A layer of a pool with shuffled pages, NaN past the end of every sequence, and its page table."""
    longest = lens.amax(1)
    max_pages = max(1, -(-int(longest.max()) // page_tokens))
    pool = torch.randn(len(lens) * max_pages, num_layers, page_tokens, DIM, device="cuda", dtype=dtype)
    kv_pages = pool[:, num_layers // 2]
    page_table = torch.randperm(len(kv_pages), device="cuda").reshape(len(lens), max_pages).int()
    in_use = torch.arange(max_pages * page_tokens, device="cuda") < longest.unsqueeze(1)
    kv_pages[page_table.long()] = torch.where(
        in_use.reshape(len(lens), max_pages, page_tokens, 1), kv_pages[page_table.long()], float("nan")
    )
    return kv_pages, page_table


def position_lens(ends: list[int], q_len: int) -> torch.Tensor:
    offsets = torch.arange(q_len - 1, -1, -1, device="cuda")
    return (torch.tensor(ends, device="cuda").unsqueeze(1) - offsets).clamp(min=0)


def expect_close(
    q: torch.Tensor, kv_pages: torch.Tensor, page_table: torch.Tensor, lens: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor]:
    out, lse = mla_decode(q, kv_pages, page_table, lens, SCALE, v_head_dim=V_DIM)
    expected_out, expected_lse = reference.mla_decode(q.double(), kv_pages, page_table, lens, SCALE, v_head_dim=V_DIM)
    error = (out.double() - expected_out).norm() / expected_out.norm()
    assert error < TOLERANCES[q.dtype], f"relative error {error:.2e}"
    torch.testing.assert_close(lse, expected_lse, rtol=1e-5, atol=1e-5)
    return out, lse


@pytest.mark.parametrize(
    ("heads", "q_len", "page_tokens", "dtype"),
    [
        (16, 1, 64, torch.bfloat16),
        (16, 1, 16, torch.bfloat16),
        (16, 1, 1, torch.float16),
        (20, 1, 1, torch.bfloat16),
        (12, 3, 192, torch.bfloat16),
        (128, 1, 64, torch.bfloat16),
        (128, 2, 128, torch.float16),
        (128, 1, 16, torch.bfloat16),
        (97, 1, 64, torch.bfloat16),
        (40, 2, 192, torch.bfloat16),
        (16, 4, 64, torch.bfloat16),
        (16, 4, 1, torch.bfloat16),
        (12, 2, 64, torch.float32),
    ],
)
def test_against_float64(heads: int, q_len: int, page_tokens: int, dtype: torch.dtype) -> None:
    torch.manual_seed(heads)
    lens = position_lens([700, 0, 699, 1, 63, 64, 65, 350], q_len)
    kv_pages, page_table = make_pool(lens, page_tokens, dtype)
    expect_close(torch.randn(8, q_len, heads, DIM, device="cuda", dtype=dtype), kv_pages, page_table, lens)


@pytest.mark.parametrize("heads", [16, 128])
@pytest.mark.parametrize("batch", [1, 3])
def test_long_contexts_in_many_splits(heads: int, batch: int) -> None:
    lens = position_lens([30011, 17, 20000][:batch], 1)
    kv_pages, page_table = make_pool(lens, 64, torch.bfloat16)
    expect_close(torch.randn(batch, 1, heads, DIM, device="cuda", dtype=torch.bfloat16), kv_pages, page_table, lens)


@pytest.mark.parametrize("heads", [16, 128])
def test_a_layer_inside_a_pool(heads: int) -> None:
    lens = position_lens([500, 129], 1)
    kv_pages, page_table = make_pool(lens, 64, torch.bfloat16, num_layers=5)
    expect_close(torch.randn(2, 1, heads, DIM, device="cuda", dtype=torch.bfloat16), kv_pages, page_table, lens)


@pytest.mark.parametrize("heads", [16, 128])
def test_page_ids_and_pools_beyond_32_bits(heads: int) -> None:
    """The last page of a pool of 2.1 billion values and more: 4.3 GB in bf16."""
    num_pages = 2**31 // (64 * DIM) + 3
    kv_pages = torch.empty(num_pages, 64, DIM, device="cuda", dtype=torch.bfloat16)
    page_table = torch.tensor([[num_pages - 1, 0]], device="cuda")
    kv_pages[page_table[0]] = torch.randn(2, 64, DIM, device="cuda").bfloat16()
    q = torch.randn(1, 1, heads, DIM, device="cuda", dtype=torch.bfloat16)
    expect_close(q, kv_pages, page_table, position_lens([100], 1))


@pytest.mark.parametrize("heads", [16, 128])
def test_a_cuda_graph_replays_with_new_lengths(heads: int) -> None:
    lens = position_lens([900, 850], 1)
    kv_pages, page_table = make_pool(lens, 64, torch.bfloat16)
    q = torch.randn(2, 1, heads, DIM, device="cuda", dtype=torch.bfloat16)
    mla_decode(q, kv_pages, page_table, lens, SCALE, v_head_dim=V_DIM)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        out, lse = mla_decode(q, kv_pages, page_table, lens, SCALE, v_head_dim=V_DIM)
    for ends in ([900, 850], [1, 64], [0, 849], [333, 0]):
        lens.copy_(position_lens(ends, 1))
        out.fill_(float("nan"))
        graph.replay()
        eager_out, eager_lse = mla_decode(q, kv_pages, page_table, lens, SCALE, v_head_dim=V_DIM)
        assert torch.equal(out, eager_out)
        assert torch.equal(lse, eager_lse)


@pytest.mark.parametrize("heads", [16, 128])
def test_a_length_beyond_the_page_table_shows_as_nan(heads: int) -> None:
    lens = position_lens([128, 128], 1)
    kv_pages, page_table = make_pool(lens, 64, torch.bfloat16)
    lens[1] += 1
    q = torch.randn(2, 1, heads, DIM, device="cuda", dtype=torch.bfloat16)
    out, lse = mla_decode(q, kv_pages, page_table, lens, SCALE, v_head_dim=V_DIM)
    assert bool(out[0].isfinite().all())
    assert bool(out[1].isnan().all())
    assert bool(lse[1].isnan().all())
