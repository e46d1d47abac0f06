"""The judge's latent rows on their way through real agents: a paged source pool, and the decode pools they land in.

A decode pool is filled with NaN before anything lands: a row that did not come, or lies elsewhere, spoils every token.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Literal

import msgspec
import torch
import torch.distributed as dist
from transformers import DeepseekV3ForCausalLM

from kvxfer.control.client import ChunkPages, DecodeClient, PrefillClient, ReceivePages
from kvxfer.control.codec import encode_ticket
from kvxfer.control.messages import Ticket
from kvxfer.decode.dcp import DcpGroup
from kvxfer.layout import Group, Placement, PoolLayout, Shard
from kvxfer.memory import HostMemory
from kvxfer.ops.config import TransferMode, TransportName
from kvxfer.ownership import local_len
from kvxfer.streams.device import DevicePool
from kvxfer.transfer import EventKind
from tests.agent_world import WAIT_S, AgentWorld
from tests.decode.dcp_ranks import TIMEOUT_S, run_ranks
from tests.deepseek_judge import (
    HEADS,
    LAYERS,
    RANK_DIM,
    ROW_DIM,
    Attend,
    DecodeRank,
    attend_together,
    build_model,
    decode_tokens,
    prefill_chunks,
    shuffled_pages,
    softmax_scale,
)
from tests.wire_world import GUARD_BYTES, Geometry, GroupSpec, make_layout

MODEL_SEED = 3
SLOT_BYTES = 1024  # a chunk is cut into many segments
CHUNK_TOKENS = 9  # chunks end within pages
_NAN_BYTE = 0xFF  # four of them are a float32 NaN
_GROUP = "latent"
_SPECS = (GroupSpec(_GROUP, Placement.SHARDED, LAYERS, ROW_DIM * 4),)
_NUM_PAGES = 32


def source_layout() -> PoolLayout:
    return _in_float32(make_layout(_SPECS, Geometry(5), _NUM_PAGES, Shard()))


def target_layout(shard: Shard) -> PoolLayout:
    """Other pages than the source's, in another order, with gaps between rows and pages."""
    return _in_float32(make_layout(_SPECS, Geometry(4, "page_major", pad_bytes=16), _NUM_PAGES, shard))


def _in_float32(layout: PoolLayout) -> PoolLayout:
    return msgspec.structs.replace(layout, dtype_tag="fp32")


def layer_pages(pool: torch.Tensor, group: Group) -> list[torch.Tensor]:
    """Per layer a view `[num_pages, page_tokens, ROW_DIM]` float32 of the pool `[num_bytes]` uint8, whose memory it
    borrows."""
    values = pool.view(torch.float32)
    shape = (group.num_pages, group.page_tokens, ROW_DIM)
    strides = (group.page_stride_bytes // 4, group.row_stride_bytes // 4, 1)
    offsets = [group.base_offset_bytes + layer * group.layer_stride_bytes for layer in range(LAYERS)]
    return [values.as_strided(shape, strides, offset // 4) for offset in offsets]


def send_prompt(
    client: PrefillClient, pool: torch.Tensor, ticket: Ticket, model: DeepseekV3ForCausalLM, prompt: Sequence[int]
) -> None:
    """Prefills chunk by chunk, and submits each chunk as soon as its rows are in the pool; with the first token."""
    (group,) = source_layout().groups
    pages = shuffled_pages(Shard(), len(prompt), group.page_tokens, seed=11)
    kv_pages = layer_pages(pool, group)
    for chunk in prefill_chunks(model, prompt, CHUNK_TOKENS):
        tokens = torch.arange(chunk.first, chunk.end)
        for layer, rows in zip(kv_pages, chunk.rows, strict=True):
            layer[pages[tokens // group.page_tokens], tokens % group.page_tokens] = rows.to(pool.device)
        _settle(pool)
        held = slice(chunk.first // group.page_tokens, -(-chunk.end // group.page_tokens))
        is_last = chunk.end == len(prompt)
        client.submit(
            ticket,
            {_GROUP: ChunkPages(chunk.first, chunk.end, pages[held].numpy())},
            last=is_last,
            aux=chunk.next_token.to_bytes(4, "little") if is_last else b"",
        )


def _settle(pool: torch.Tensor) -> None:
    """What was done to `pool` is there for other streams, too."""
    if pool.is_cuda:
        torch.cuda.current_stream().synchronize()


class LatentPool:
    """A decode worker's pool `[num_bytes]` uint8, on the host or a GPU, that waits for a prompt's rows; `num_spare`
    tokens more have room in its pages."""

    def __init__(self, pool: torch.Tensor, client: DecodeClient, shard: Shard, num_tokens: int, num_spare: int) -> None:
        pool.fill_(_NAN_BYTE)
        _settle(pool)
        self._pool, self._client = pool, client
        self._shard, self._num_tokens = shard, num_tokens
        (self._group,) = target_layout(shard).groups
        self._pages = shuffled_pages(shard, num_tokens + num_spare, self._group.page_tokens, seed=shard.rank)

    def open(self, ticket: Ticket | str) -> None:
        num_pages = -(-local_len(self._shard, self._num_tokens) // self._group.page_tokens)
        self._client.open(
            ticket, {_GROUP: ReceivePages(0, self._num_tokens, self._pages[:num_pages].numpy())}, deadline_s=WAIT_S
        )

    def landed(self, ticket: Ticket | str) -> tuple[DecodeRank, int]:
        """The rank once all rows are in its pages, and the first new token."""
        event = self._client.wait(ticket, WAIT_S)
        assert event.event is EventKind.LANDED, event
        rank = DecodeRank(self._shard, layer_pages(self._pool, self._group), self._pages.to(self._pool.device))
        return rank, int.from_bytes(event.aux[0], "little")


def decode_through_agents(
    path: Path,
    model: DeepseekV3ForCausalLM,
    prompt: Sequence[int],
    num_new: int,
    *,
    num_ranks: int,
    interleave: int = 1,
    transport: TransportName = "loopback",
) -> list[int]:
    """Prefill, agents, then decoding by `num_ranks` ranks of this process over the pages that the rows landed in."""
    shards = [Shard(rank=rank, size=num_ranks, interleave=interleave) for rank in range(num_ranks)]
    with AgentWorld(path, transport) as world:
        world.start_prefill("prefill", slot_bytes=SLOT_BYTES)
        source, source_client = world.join_prefill("prefill", source_layout())
        pools = []
        for shard in shards:
            world.start_decode(f"decode{shard.rank}", shard.rank, num_ranks, slot_bytes=SLOT_BYTES)
            seat, client = world.join_decode(f"decode{shard.rank}", target_layout(shard))
            pools.append(LatentPool(torch.from_numpy(seat.memory.array), client, shard, len(prompt), num_new))
        ticket = source_client.ticket(deadline_s=WAIT_S)
        for pool in pools:
            pool.open(ticket)
        send_prompt(source_client, torch.from_numpy(source.memory.array), ticket, model, prompt)
        ranks, first_tokens = zip(*(pool.landed(ticket) for pool in pools), strict=True)
        assert source_client.wait(ticket, WAIT_S).event is EventKind.SENT
        assert len(set(first_tokens)) == 1
        attend = attend_together(ranks, softmax_scale(model))
        return decode_tokens(model, first_tokens[0], len(prompt), num_new, attend)


def decode_in_processes(
    path: Path,
    model: DeepseekV3ForCausalLM,
    prompt: Sequence[int],
    expected: list[int],
    *,
    num_ranks: int,
    interleave: int,
    backend: Literal["a2a", "ag_rs"],
    mode: TransferMode = "auto",
    src_device: Literal["cpu", "cuda"] = "cpu",
    dst_device: Literal["cpu", "cuda"] = "cpu",
) -> None:
    """As `decode_through_agents`, but every decode rank is a process of its own and they merge with a `DcpGroup`.

    Every rank must say `expected`. Rows are pulled out of the source's pool (mode `auto` on one host); the prompt is
    submitted before any rank has opened the transfer. With `dst_device` "cuda" every rank has a GPU: its pool lies
    there, a stream of the rank moves the rows, and attention and merge, over NCCL, run there. With `src_device` "cuda"
    the source's pool lies on GPU 0, and rows can only be pulled: its worker does not look at its stream meanwhile.
    """
    layout = source_layout()
    with AgentWorld(path / "agents") as world:
        world.start_prefill("prefill", mode=mode, slot_bytes=SLOT_BYTES)
        for rank in range(num_ranks):
            world.start_decode(str(rank), rank, num_ranks, slot_bytes=SLOT_BYTES)
        with (
            _new_pool(torch.device(src_device), layout) as (memory, pool),
            PrefillClient.connect(path / "agents" / "prefill", memory, layout, timeout_s=WAIT_S) as client,
        ):
            ticket = client.ticket(deadline_s=TIMEOUT_S)
            send_prompt(client, pool, ticket, model, prompt)
            (path / "ranks").mkdir()
            arguments = (str(path / "agents"), encode_ticket(ticket), len(prompt), interleave, backend, expected)
            run_ranks(_decode_as_rank, num_ranks, path / "ranks", *arguments, device=dst_device)
            assert client.wait(ticket, WAIT_S).event is EventKind.SENT


def _decode_as_rank(
    device: torch.device,
    agents_dir: str,
    ticket: str,
    num_past: int,
    interleave: int,
    backend: Literal["a2a", "ag_rs"],
    expected: list[int],
) -> None:
    """One decode worker: its own pool and client; the model's weights follow from the seed."""
    shard = Shard(rank=dist.get_rank(), size=dist.get_world_size(), interleave=interleave)
    layout = target_layout(shard)
    socket_dir = Path(agents_dir) / str(shard.rank)
    with (
        _new_pool(device, layout) as (memory, tensor),
        DecodeClient.connect(socket_dir, memory, layout, timeout_s=WAIT_S) as client,
    ):
        pool = LatentPool(tensor, client, shard, num_past, len(expected))
        model = build_model(MODEL_SEED)
        group = DcpGroup(
            None,
            HEADS,
            RANK_DIM,
            torch.float32,
            backend,
            lse_base="e",
            max_batch=1,
            interleave=interleave,
            device=device,
        )
        # Now that this rank looks at its client: it maps the source's pool, where rows are pulled, within such a call.
        pool.open(ticket)
        rank, first_token = pool.landed(ticket)
        tokens = decode_tokens(
            model, first_token, num_past, len(expected), _attend_in_group(rank, group, softmax_scale(model))
        )
        assert tokens == expected


@contextmanager
def _new_pool(device: torch.device, layout: PoolLayout) -> Iterator[tuple[HostMemory | DevicePool, torch.Tensor]]:
    """A worker's pool as its client takes it, and its bytes as a tensor."""
    num_bytes = layout.groups[0].extent_bytes + GUARD_BYTES
    if device.type == "cuda":
        tensor = torch.empty(num_bytes, dtype=torch.uint8, device=device)
        yield DevicePool.of(tensor), tensor
        return
    with HostMemory.create(num_bytes, "pool") as memory:
        yield memory, torch.from_numpy(memory.array)


def _attend_in_group(rank: DecodeRank, group: DcpGroup, scale: float) -> Attend:
    """This rank attends with all heads over its own rows and gets its own heads merged, as under tensor parallelism."""
    heads = slice(*(HEADS * index // group.world for index in (group.rank, group.rank + 1)))

    def attend(layer: int, position: int, query: torch.Tensor, row: torch.Tensor) -> torch.Tensor:
        queries = group.gather_query(query[:, heads].to(group.device))
        out, lse = rank.partial(layer, position, queries, row, scale)
        row_lens = group.shard_lens(torch.tensor([position + 1], device=group.device))
        merged = group.combine(out, lse, row_lens=row_lens)
        # The rest of this small model is not split, and on the host: it wants all heads.
        return group.gather_query(merged).to(query.device)

    return attend
