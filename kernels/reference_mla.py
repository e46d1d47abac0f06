"""The definition of `mla_decode` in plain torch: one softmax over all rows, sequence by sequence, in float64."""

import torch


def mla_decode(
    q: torch.Tensor,
    kv_pages: torch.Tensor,
    page_table: torch.Tensor,
    row_lens: torch.Tensor,
    scale: float,
    *,
    v_head_dim: int,
    return_lse: bool = True,
) -> tuple[torch.Tensor, torch.Tensor] | torch.Tensor:
    """As `kvxfer.kernels.mla_decode`; `q` may also be float64, and `out` then is.

    out = softmax(scale * q k^T) v and lse = log(sum(exp(scale * q k^T))), k a row and v its first `v_head_dim` values.
    """
    positions = q.double() if q.dim() == 4 else q.double().unsqueeze(1)
    batch, q_len, heads, _ = positions.shape
    lens = row_lens.reshape(batch, -1).expand(batch, q_len)
    out = positions.new_zeros((batch, q_len, heads, v_head_dim))
    lse = positions.new_full((batch, q_len, heads), float("-inf"))
    for sequence in range(batch):
        for position in range(q_len):
            num_rows = int(lens[sequence, position])
            if num_rows == 0:
                continue
            num_pages = -(-num_rows // kv_pages.shape[1])
            pages = page_table[sequence, :num_pages].long()
            rows = kv_pages[pages].reshape(-1, kv_pages.shape[2])[:num_rows].double()
            scores = positions[sequence, position] @ rows.T * scale
            lse[sequence, position] = torch.logsumexp(scores, dim=-1)
            out[sequence, position] = torch.softmax(scores, dim=-1) @ rows[:, :v_head_dim]
    if q.dim() == 3:
        out, lse = out.squeeze(1), lse.squeeze(1)
    out = out.to(q.dtype)
    return (out, lse.float()) if return_lse else out
