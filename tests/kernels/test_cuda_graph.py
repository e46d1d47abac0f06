"""Captured once, replayed with new inputs and lengths: bit-equal to eager calls, padding zero, addresses fixed."""

import math

import pytest
import torch

from kvxfer.kernels import A2ALayout, pack_a2a, unpack_combine

pytestmark = pytest.mark.gpu


def test_replays_equal_eager_calls_whatever_lies_in_the_padding() -> None:
    batch, heads, head_dim, world = 4, 16, 512, 2
    layout = A2ALayout(world, batch, heads, head_dim, torch.bfloat16)
    out = torch.randn(batch, heads, head_dim, device="cuda").bfloat16()
    lse = torch.randn(batch, heads, device="cuda")
    row_lens = torch.ones(batch, dtype=torch.int32, device="cuda")
    send, recv = (torch.zeros(layout.total_bytes, dtype=torch.uint8, device="cuda") for _ in range(2))
    result = torch.empty(batch, heads // world, head_dim, dtype=torch.bfloat16, device="cuda")
    result_lse = torch.empty(batch, heads // world, device="cuda")

    def step() -> None:
        # The other rank's slot is this rank's own for it: two equal shards.
        pack_a2a(out, lse, send, layout, row_lens=row_lens)
        recv.view(world, -1).copy_(send.view(world, -1)[0].expand(world, -1))
        unpack_combine(recv, layout, lse_base="e", return_lse=True, out=result, lse_out=result_lse)

    step()
    torch.cuda.synchronize()
    before_bytes = torch.cuda.memory_allocated()
    torch.cuda.reset_peak_memory_stats()
    step()
    assert torch.cuda.max_memory_allocated() == before_bytes
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        step()
    for replay in range(100):
        num_real = 1 + replay % (batch - 1)
        out.normal_()
        lse.normal_()
        row_lens[:num_real], row_lens[num_real:] = 7, 0
        out[num_real:], lse[num_real:] = math.nan, math.nan
        graph.replay()
        replayed, replayed_lse = result.clone(), result_lse.clone()
        step()
        assert torch.equal(result, replayed)
        assert torch.equal(result_lse, replayed_lse)
        assert (replayed[num_real:] == 0).all()
        assert (replayed_lse[num_real:] == -math.inf).all()
        # Two equal shards merge to either of them.
        assert torch.equal(replayed[:num_real], out[:num_real, : heads // world])
