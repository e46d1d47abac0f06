"""Prefill of the demo: the model runs over a prompt in chunks and attends over the paged pool that it fills."""

from __future__ import annotations

import time
from pathlib import Path

import numpy as np
import torch

from kvxfer.cli.demo_model import HIDDEN_DIM, MlaModel, ModelShape
from kvxfer.cli.paged_rows import PagedRows
from kvxfer.cli.protocol import Prefill, Prefilled, Progress
from kvxfer.cli.worker import WorkerPipe
from kvxfer.layout import Group
from kvxfer.memory import HostMemory


@torch.inference_mode()
def prefill_prompt(
    command: Prefill, memory: HostMemory, groups: dict[str, Group], pipe: WorkerPipe
) -> tuple[Prefilled, MlaModel]:
    """Fill the pool.

    What the model computed also goes to a file a group, `[num_layers, num_tokens, row_bytes]`, straight from the model
    and not read back from the pool: with these the decode workers are checked.
    """
    start_s = time.monotonic()
    tokens = torch.tensor(list(Path(command.prompt_path).read_bytes()), dtype=torch.int64)
    model = MlaModel(ModelShape(command.num_layers, command.num_draft_layers, command.num_heads))
    caches = {name: PagedRows(memory, group, command.pages) for name, group in groups.items() if name != "state"}
    # Which group, and which of its layers, a layer of the model writes to.
    places = [(name, idx) for name in caches for idx in range(groups[name].layers.num_layers)]
    computed: list[list[torch.Tensor]] = [[] for _ in places]
    state = torch.zeros(HIDDEN_DIM, HIDDEN_DIM)
    first_token = 0
    for first in range(0, len(tokens), command.chunk_tokens):
        positions = torch.arange(first, min(first + command.chunk_tokens, len(tokens)))
        hidden = model.embed(tokens[positions])
        for layer_idx, (name, idx) in enumerate(places):
            query, rows = model.project(layer_idx, hidden, positions)
            caches[name].write(idx, first, rows)
            computed[layer_idx].append(rows)
            context = caches[name].read(idx, first + len(positions))
            values = model.attend_opened(layer_idx, query, context, first)
            hidden = hidden + model.project_out(layer_idx, values, slice(None))
            hidden = model.feed_forward(layer_idx, hidden)
            if layer_idx == command.num_layers - 1:  # the draft layers follow
                first_token = int(model.logits(hidden[-1:]).argmax())
        state = model.advance_state(state, hidden)
        pipe.send(Progress(num_done=first + len(positions), num_total=len(tokens)))
    for name in caches:
        layers = [chunks for (owner, _), chunks in zip(places, computed, strict=True) if owner == name]
        data = b"".join(rows.view(torch.uint8).numpy().tobytes() for chunks in layers for rows in chunks)
        _side_file(command, name).write_bytes(data)
    if "state" in groups:
        _write_state(command, memory, groups["state"], state)
    return Prefilled(first_token=first_token, elapsed_s=time.monotonic() - start_s), model


def _write_state(command: Prefill, memory: HostMemory, group: Group, state: torch.Tensor) -> None:
    """The state, repeated or cut to the asked size, into its slot in the pool and into its side file."""
    blob = np.resize(state.numpy().view(np.uint8).reshape(-1), command.state_bytes)
    start = group.base_offset_bytes + command.state_page * group.page_stride_bytes
    memory.array[start : start + command.state_bytes] = blob
    _side_file(command, group.name).write_bytes(blob.tobytes())


def _side_file(command: Prefill, group: str) -> Path:
    return Path(command.directory, f"{group}.rows")
