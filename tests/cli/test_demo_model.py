"""The demo's model: attention over opened rows, over latent rows and in chunks is one and the same."""

import torch

from kvxfer.cli.demo_model import KV_RANK, ROW_DIM, SCALE, MlaModel, ModelShape

_HEADS = slice(None)


def _hidden(model: MlaModel, num_tokens: int) -> torch.Tensor:
    return model.embed(torch.arange(num_tokens) * 7 % 256)


def test_same_shape_same_weights() -> None:
    first, second = (MlaModel(ModelShape(2, 1, 4)) for _ in range(2))
    rows = [model.project(2, _hidden(model, 3), torch.arange(3))[1] for model in (first, second)]
    assert torch.equal(*rows)


def test_absorbed_attention_equals_opened() -> None:
    model = MlaModel(ModelShape(1, 0, 4))
    query, rows = model.project(0, _hidden(model, 9), torch.arange(9))
    opened = model.attend_opened(0, query, rows, 0)
    scores = torch.einsum("nhd,cd->hnc", model.absorb(0, query, _HEADS), rows.float()) * SCALE
    scores = scores.masked_fill(torch.ones(9, 9).triu(1).bool(), float("-inf"))
    latent = torch.einsum("hnc,cr->nhr", scores.softmax(-1), rows[:, :KV_RANK].float())
    torch.testing.assert_close(model.open_values(0, latent, _HEADS), opened, rtol=1e-4, atol=1e-5)


def test_heads_add_up() -> None:
    model = MlaModel(ModelShape(1, 0, 4))
    values = torch.randn(3, 4, 96, generator=torch.Generator().manual_seed(1))
    parts = [model.project_out(0, values[:, heads], heads) for heads in (slice(0, 2), slice(2, 4))]
    torch.testing.assert_close(parts[0] + parts[1], model.project_out(0, values, _HEADS))


def test_chunks_see_the_past() -> None:
    model = MlaModel(ModelShape(1, 0, 4))
    hidden, positions = _hidden(model, 10), torch.arange(10)
    query, rows = model.project(0, hidden, positions)
    whole = model.attend_opened(0, query, rows, 0)
    late_query, late_rows = model.project(0, hidden[6:], positions[6:])
    assert torch.equal(late_rows, rows[6:])
    torch.testing.assert_close(model.attend_opened(0, late_query, rows, 6), whole[6:], rtol=1e-4, atol=1e-5)


def test_decoded_tokens_vary() -> None:
    """Where they repeat, that two ways of decoding agree says little."""
    model = MlaModel(ModelShape(4, 0, 4))
    tokens = list(b"one prompt like any other, not too short" * 4)
    rows = [torch.empty(0, ROW_DIM, dtype=torch.bfloat16) for _ in range(4)]
    new = tokens
    for _ in range(16):
        num_past = len(rows[0])
        hidden = model.embed(torch.tensor(new))
        for layer_idx in range(4):
            positions = torch.arange(num_past, num_past + len(new))
            query, new_rows = model.project(layer_idx, hidden, positions)
            rows[layer_idx] = torch.cat([rows[layer_idx], new_rows])
            values = model.attend_opened(layer_idx, query, rows[layer_idx], num_past)
            hidden = model.feed_forward(layer_idx, hidden + model.project_out(layer_idx, values, _HEADS))
        new = [int(model.logits(hidden[-1:]).argmax())]
        tokens += new
    assert len(set(tokens[-16:])) >= 8
