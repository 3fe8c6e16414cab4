"""Reference of block-sparse decode attention in plain torch."""

import torch
from torch import Tensor

from kvgraft.kernels.workload import Lengths


def block_sparse_attention(
    query: Tensor,
    keys: Tensor,
    values: Tensor,
    tables: Tensor,
    lengths: Tensor,
    scale: float,
    _: Lengths | None,
    sinks: Tensor | None,
) -> Tensor:
    """See `kvgraft.kernels.dispatch.block_sparse_attention`. Computes one sequence at a time, in
    float32.
    """
    attended = []
    keys, values = (pool.flatten(0, 1) if pool.dim() == 4 else pool for pool in (keys, values))
    none = query.new_empty(query.shape[1], 0, dtype=torch.float32)
    for row, (own, table, length) in enumerate(zip(query, tables, lengths.tolist(), strict=True)):
        their_keys, their_values = (
            pool[table].flatten(0, 1)[:length].float() for pool in (keys, values)
        )
        sink = none if sinks is None else sinks[row % len(sinks), :, None]
        logits = torch.cat((own.float() @ their_keys.T * scale, sink), dim=1)
        attended.append(logits.softmax(-1)[:, :length] @ their_values)
    return torch.stack(attended).to(query.dtype)
