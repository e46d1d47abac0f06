"""What each rank of a DCP group does in the tests, on gloo and on NCCL alike; every rank asserts for itself."""

import math
from collections.abc import Iterator

import pytest
import torch
import torch.distributed as dist

from kvxfer.decode import exchange
from kvxfer.decode.dcp import DcpGroup
from kvxfer.errors import KernelContractError
from kvxfer.kernels import A2ALayout, LseBase
from tests.attention import attend, owned, relative_error, shard_attend

TOLERANCE = {torch.float32: 1e-5, torch.bfloat16: 2e-2}
HEAD_DIM = 24


def heads_of(world: int) -> int:
    return 2 * world


def problem(lens: list[int], heads: int) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]:
    """The same query, keys, values and lengths on every rank."""
    generator = torch.Generator().manual_seed(len(lens) * 100 + heads)
    keys = torch.randn(max(lens), 8, generator=generator, dtype=torch.float64)
    values = torch.randn(max(lens), HEAD_DIM, generator=generator, dtype=torch.float64)
    query = torch.randn(len(lens), heads, 8, generator=generator, dtype=torch.float64)
    return query, keys, values, torch.tensor(lens)


def check_merge(group: DcpGroup, lens: list[int], base: LseBase) -> None:
    """Own partial in, own heads of the whole out: against one float64 pass over all keys."""
    query, keys, values, lengths = problem(lens, group.heads)
    out, lse, local_lens = shard_attend(
        query, keys, values, lengths, base, rank=group.rank, size=group.world, interleave=group.interleave
    )
    row_lens = group.shard_lens(lengths.to(group.device))
    assert row_lens.tolist() == local_lens.tolist()
    # Whatever a kernel leaves in rows without keys.
    lse[local_lens == 0] = (0.0, math.nan, math.inf)[group.rank % 3]
    got, got_lse = group.combine(
        out.to(group.device, group.dtype), lse.float().to(group.device), row_lens=row_lens, return_lse=True
    )
    own = slice(group.rank * group.heads // group.world, (group.rank + 1) * group.heads // group.world)
    whole, whole_lse = attend(query, keys, values, lengths, base)
    real = lengths > 0
    assert relative_error(got.cpu()[real], whole[real, own]) < TOLERANCE[group.dtype]
    assert relative_error(got_lse.cpu()[real], whole_lse[real, own]) < 1e-5
    assert (got.cpu()[~real] == 0).all()
    assert (got_lse.cpu()[~real] == -math.inf).all()


def groups(
    device: torch.device, max_batch: int, interleaves: tuple[int, ...] = (1,)
) -> Iterator[tuple[DcpGroup, LseBase]]:
    world = dist.get_world_size()
    variants: tuple[tuple[torch.dtype, LseBase], ...] = ((torch.float32, "e"), (torch.bfloat16, "2"))
    for backend in ("a2a", "ag_rs"):
        for dtype, base in variants:
            for interleave in interleaves:
                yield (
                    DcpGroup(
                        None,
                        heads_of(world),
                        HEAD_DIM,
                        dtype,
                        backend,
                        lse_base=base,
                        max_batch=max_batch,
                        interleave=interleave,
                        device=device,
                    ),
                    base,
                )


def merges_to_the_whole(device: torch.device) -> None:
    """Ragged and empty shards (3 tokens over up to 4 ranks), padding, more rows than the buffers hold."""
    for group, base in groups(device, max_batch=4, interleaves=(1, 16)):
        assert group.backend_reason == "asked for"
        check_merge(group, [3, 70, 1, 0], base)
        check_merge(group, [33], base)
        check_merge(group, [3, 70, 1, 0, 65, 17, 16, 32, 0], base)


def stages_in_small_tiles(device: torch.device) -> None:
    """`ag_rs` with room for three rows at a time in its staging."""
    row_bytes = heads_of(dist.get_world_size()) * HEAD_DIM * 4
    exchange.STAGING_BYTES = 3 * row_bytes + row_bytes // 2
    for group, base in groups(device, max_batch=8):
        check_merge(group, [3, 70, 1, 0, 65, 17, 16, 32], base)


def verifies_speculated_tokens(device: torch.device) -> None:
    """Two to four positions a sequence, each with a length of its own, flattened into rows."""
    for group, base in groups(device, max_batch=16, interleaves=(1, 16)):
        for query_len in (2, 3, 4):
            lens = [length - query_len + 1 + position for length in (4, 35, 64) for position in range(query_len)]
            check_merge(group, lens, base)


def addresses_stay(device: torch.device) -> None:
    for group, _ in groups(device, max_batch=4):
        seen = set()
        for batch in (4, 1, 3, 4):
            out = torch.randn(batch, group.heads, HEAD_DIM, device=device).to(group.dtype)
            result, lse = group.combine(out, torch.randn(batch, group.heads, device=device), return_lse=True)
            seen.add((result.data_ptr(), lse.data_ptr()))
        assert len(seen) == 1


def sends_what_the_batch_needs(device: torch.device) -> None:
    """One all-to-all of bytes a merge, as many as its rows take; a batch beyond the buffers takes one for each tile."""
    heads, sent_bytes = heads_of(dist.get_world_size()), []
    exchange_bytes = dist.all_to_all_single

    def spy(recv: torch.Tensor, send: torch.Tensor, group: dist.ProcessGroup | None) -> None:
        assert (recv.dtype, send.dtype) == (torch.uint8, torch.uint8)
        sent_bytes.append(send.numel())
        exchange_bytes(recv, send, group=group)

    def needed_bytes(batch: int) -> int:
        return A2ALayout(dist.get_world_size(), batch, heads, HEAD_DIM, torch.bfloat16).total_bytes

    group = DcpGroup(None, heads, HEAD_DIM, torch.bfloat16, "a2a", lse_base="2", max_batch=4, device=device)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(dist, "all_to_all_single", spy)
        for lens in ([70], [3, 70, 1], [5, 6, 7, 8, 9, 10, 11, 12, 13]):
            check_merge(group, lens, "2")
    assert sent_bytes == [needed_bytes(batch) for batch in (1, 3, 4, 4, 1)]


def a_wrong_base_shows(device: torch.device) -> None:
    world = dist.get_world_size()
    group = DcpGroup(None, heads_of(world), HEAD_DIM, torch.float32, lse_base="2", max_batch=4, device=device)
    with pytest.raises(AssertionError):
        check_merge(group, [70, 30], "e")
    check_merge(group, [70, 30], "2")


def merges_fp8(device: torch.device, dtype: torch.dtype) -> None:
    world, rank = dist.get_world_size(), dist.get_rank()
    group = DcpGroup(None, heads_of(world), HEAD_DIM, dtype, lse_base="e", max_batch=2, scale=0.25, device=device)
    assert group.backend == "a2a"
    assert "cannot be summed" in group.backend_reason
    query, keys, values, lengths = problem([70, 30], group.heads)
    out, lse, _ = shard_attend(query, keys, values, lengths, "e", rank=rank, size=world)
    got = group.combine((out / 0.25).float().to(dtype).to(device), lse.float().to(device))
    own = slice(rank * 2, rank * 2 + 2)
    assert isinstance(got, torch.Tensor)
    assert got.dtype == torch.bfloat16
    assert relative_error(got.cpu(), attend(query, keys, values, lengths, "e")[0][:, own]) < 0.1
    with pytest.raises(KernelContractError, match=r"^dtype: got torch.float8"):
        DcpGroup(None, heads_of(world), HEAD_DIM, dtype, "ag_rs", lse_base="e", max_batch=2, device=device)


def gathers_queries(device: torch.device, dtype: torch.dtype) -> None:
    world, rank = dist.get_world_size(), dist.get_rank()
    group = DcpGroup(None, 2 * world, HEAD_DIM, torch.float32, lse_base="e", max_batch=3, device=device)
    generator = torch.Generator().manual_seed(1)
    addresses = set()
    for batch in (3, 2, 8):
        whole = torch.randn(batch, 2 * world, 9, generator=generator).to(dtype)
        # Own heads as a view into a wider tensor: strided, as a projection leaves it.
        query = whole.to(device)[:, rank * 2 : rank * 2 + 2]
        got = group.gather_query(query)
        assert torch.equal(got.cpu().view(torch.uint8), whole.view(torch.uint8))
        if batch <= 3:
            addresses.add(got.data_ptr())
    assert len(addresses) == 1 or world == 1


def counts_owned_tokens(device: torch.device) -> None:
    world, rank = dist.get_world_size(), dist.get_rank()
    for interleave in (1, 3, 64):
        group = DcpGroup(None, world, 8, torch.float32, lse_base="e", max_batch=1, interleave=interleave, device=device)
        lens = torch.arange(0, 400, device=device, dtype=torch.int32).view(20, 20)
        got = group.shard_lens(lens)
        assert got.dtype == torch.int32
        tokens = owned(400, rank, world, interleave)
        assert got.flatten().tolist() == [int((tokens < length).sum()) for length in range(400)]


def refuses_bad_input(device: torch.device) -> None:
    world = dist.get_world_size()
    group = DcpGroup(None, 4, 8, torch.float32, lse_base="e", max_batch=2, device=device)
    out, lse = torch.zeros(2, 4, 8, device=device), torch.zeros(2, 4, device=device)
    for message, call in (
        (r"^out: got shape \[2, 3, 8\], expected \[any, 4, 8\]", lambda: group.combine(out[:, :3], lse)),
        (r"^out: got dtype torch.float64, expected torch.float32", lambda: group.combine(out.double(), lse)),
        (r"^out: got device meta, expected", lambda: group.combine(out.to("meta"), lse)),
        (r"^lse: got shape \[1, 4\], expected \[2, 4\]", lambda: group.combine(out, lse[:1])),
        (r"^row_lens: got dtype torch.float32", lambda: group.combine(out, lse, row_lens=lse[:, 0])),
        (r"^query: got shape \[2, 4, 8\]", lambda: group.gather_query(out)),
        (
            rf"^heads: got 5, expected a multiple of the {world} ranks",
            lambda: DcpGroup(None, 5, 8, torch.float32, lse_base="e", max_batch=2, device=device),
        ),
        (
            r"^backend: got 'nvlink', expected 'auto', 'a2a' or 'ag_rs'",
            lambda: DcpGroup(None, 4, 8, torch.float32, "nvlink", lse_base="e", max_batch=2),  # type: ignore[arg-type]
        ),
        (
            r"^lse_base: got None, expected 'e' or '2'",
            lambda: DcpGroup(None, 4, 8, torch.float32, lse_base=None, max_batch=2),  # type: ignore[arg-type]
        ),
        (
            r"^max_batch: got 0, expected at least 1",
            lambda: DcpGroup(None, 4, 8, torch.float32, lse_base="e", max_batch=0),
        ),
        (
            r"^scale: got 2.0 for torch.float32, expected None",
            lambda: DcpGroup(None, 4, 8, torch.float32, lse_base="e", max_batch=2, scale=2.0),
        ),
    ):
        with pytest.raises(KernelContractError, match=message):
            call()


def passes_through_alone(device: torch.device) -> None:
    group = DcpGroup(None, 4, 8, torch.bfloat16, lse_base="e", max_batch=3, device=device)
    out, lse = torch.randn(3, 4, 8, device=device).bfloat16(), torch.randn(3, 4, device=device)
    assert group.combine(out, lse) is out
    got, got_lse = group.combine(out, lse, return_lse=True)
    assert got is out
    assert got_lse is lse
    assert group.gather_query(out) is out
    # With lengths, the padding is still cleared, and the rest is bit for bit the same.
    out[2] = math.nan
    lens = torch.tensor([5, 1, 0], device=device)
    got, got_lse = group.combine(out, lse, row_lens=lens, return_lse=True)
    assert torch.equal(got[:2], out[:2])
    assert torch.equal(got_lse[:2], lse[:2])
    assert (got[2] == 0).all()
    assert (got_lse[2] == -math.inf).all()
