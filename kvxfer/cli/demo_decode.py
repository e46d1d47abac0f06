"""Greedy decoding in the demo: by the prefill worker alone, and by the decode ranks over the shards they received."""

from __future__ import annotations

import os
import time

import torch
import torch.distributed as dist

from kvxfer.cli.demo_model import KV_RANK, SCALE, MlaModel, ModelShape
from kvxfer.cli.paged_rows import PagedRows
from kvxfer.cli.protocol import Decoded, DecodeShared
from kvxfer.decode.dcp import DcpGroup
from kvxfer.kernels import mla_decode
from kvxfer.layout import Group
from kvxfer.memory import HostMemory


@torch.inference_mode()
def decode_alone(model: MlaModel, cache: PagedRows, first_token: int, num_tokens: int, num_steps: int) -> Decoded:
    """What one process that holds every row decodes, with the attention of prefill. Appends to `cache`."""
    start_s = time.monotonic()
    tokens = [first_token]
    for position in range(num_tokens, num_tokens + num_steps):
        hidden = model.embed(torch.tensor(tokens[-1:]))
        for layer_idx in range(model.shape.num_layers):
            query, rows = model.project(layer_idx, hidden, torch.tensor([position]))
            cache.write(layer_idx, position, rows)
            values = model.attend_opened(layer_idx, query, cache.read(layer_idx, position + 1), position)
            hidden = hidden + model.project_out(layer_idx, values, slice(None))
            hidden = model.feed_forward(layer_idx, hidden)
        tokens.append(int(model.logits(hidden).argmax()))
    return Decoded(tokens=tokens, elapsed_s=time.monotonic() - start_s)


@torch.inference_mode()
def decode_shared(command: DecodeShared, memory: HostMemory, group: Group, first_token: int) -> Decoded:
    """This rank's part of decoding: attends over its own pages with all heads, merges, and owns some new rows."""
    torch.set_num_threads(1)  # the ranks share the cores
    model = MlaModel(ModelShape(command.num_layers, command.num_draft_layers, command.num_heads))
    cache = PagedRows(memory, group, command.pages)
    os.environ.setdefault("GLOO_SOCKET_IFNAME", "lo")
    dist.init_process_group(
        "gloo",
        init_method=f"file://{command.store_path}",
        rank=command.rank,
        world_size=command.num_ranks,
    )
    try:
        start_s = time.monotonic()
        tokens = _decode(command, model, cache, first_token)
        return Decoded(tokens=tokens, elapsed_s=time.monotonic() - start_s)
    finally:
        dist.destroy_process_group()


def _decode(command: DecodeShared, model: MlaModel, cache: PagedRows, first_token: int) -> list[int]:
    ranks = DcpGroup(
        None, command.num_heads, KV_RANK, torch.float32, lse_base="e", max_batch=1, interleave=command.interleave
    )
    own_heads = slice(*(index * command.num_heads // command.num_ranks for index in (command.rank, command.rank + 1)))
    tokens = [first_token]
    for position in range(command.num_tokens, command.num_tokens + command.num_steps):
        owner = position // command.interleave % command.num_ranks
        row_lens = ranks.shard_lens(torch.tensor([position + 1]))
        num_rows = int(row_lens)
        hidden = model.embed(torch.tensor(tokens[-1:]))
        for layer_idx in range(command.num_layers):
            query, rows = model.project(layer_idx, hidden, torch.tensor([position]))
            if owner == command.rank:
                cache.write(layer_idx, num_rows - 1, rows)
            queries = ranks.gather_query(model.absorb(layer_idx, query, own_heads))
            # In float32: the demo compares tokens, and bf16 arithmetic could flip a close call.
            pages = cache.rows[layer_idx].float()
            out, lse = mla_decode(queries, pages, cache.pages.unsqueeze(0), row_lens, SCALE, v_head_dim=KV_RANK)
            latent = ranks.combine(out, lse, row_lens=row_lens)
            assert isinstance(latent, torch.Tensor)
            added = model.project_out(layer_idx, model.open_values(layer_idx, latent, own_heads), own_heads)
            dist.all_reduce(added)
            hidden = model.feed_forward(layer_idx, hidden + added)
        tokens.append(int(model.logits(hidden).argmax()))
    return tokens
