"""What a rank does in the NCCL tests beside the scenarios that gloo runs too."""

import math

import torch
import torch.distributed as dist

from kvxfer.decode.dcp import DcpGroup


def replays_a_graph(device: torch.device) -> None:
    """Captured once, replayed 100 times with new lengths and poisoned padding: bit-equal to eager, padding zero."""
    rank = dist.get_rank()
    for backend in ("a2a", "ag_rs"):
        group = DcpGroup(None, 16, 512, torch.bfloat16, backend, lse_base="e", max_batch=4)
        out = torch.randn(4, 16, 512, device=device).bfloat16()
        lse = torch.randn(4, 16, device=device)
        lens = torch.ones(4, dtype=torch.int32, device=device)

        def step(group: DcpGroup = group, *inputs: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
            partial, partial_lse, row_lens = inputs
            merged, merged_lse = group.combine(partial, partial_lse, row_lens=row_lens, return_lse=True)
            return merged, merged_lse

        step(group, out, lse, lens)
        torch.cuda.synchronize()
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            result, result_lse = step(group, out, lse, lens)
        for replay in range(100):
            num_real = 1 + replay % 3
            out.normal_()
            lse.normal_()
            # Real rows may be empty on one of the ranks.
            lens[:num_real], lens[num_real:] = (replay + rank) % 3, 0
            out[num_real:], lse[num_real:] = math.nan, math.nan
            graph.replay()
            replayed, replayed_lse = result.clone(), result_lse.clone()
            eager, eager_lse = step(group, out, lse, lens)
            assert eager.data_ptr() == result.data_ptr()
            assert torch.equal(eager, replayed)
            assert torch.equal(eager_lse, replayed_lse)
            assert not replayed.isnan().any()
            assert (replayed[num_real:] == 0).all()


def stays_within_memory(device: torch.device) -> None:
    """A prefill-sized float32 partial through `ag_rs`: the output slice, the LSEs and 64 MiB, no second partial."""
    world = dist.get_world_size()
    out = torch.randn(16384, 96, 512, device=device)
    lse = torch.randn(16384, 96, device=device)
    torch.cuda.synchronize()
    before_bytes = torch.cuda.memory_allocated()
    torch.cuda.reset_peak_memory_stats()
    group = DcpGroup(None, 96, 512, torch.float32, "ag_rs", lse_base="e", max_batch=16384)
    group.combine(out, lse, return_lse=True)
    torch.cuda.synchronize()
    extra_bytes = torch.cuda.max_memory_allocated() - before_bytes
    assert extra_bytes <= out.nbytes // world + world * lse.nbytes + (64 << 20)
