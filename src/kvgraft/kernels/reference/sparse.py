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
) -> Tensor:
    """See `kvgraft.kernels.dispatch.block_sparse_attention`. Computes one sequence at a time, in
    float32.
    """
    attended = []
    keys, values = (pool.flatten(0, 1) if pool.dim() == 4 else pool for pool in (keys, values))
    for own, table, length in zip(query, tables, lengths.tolist(), strict=True):
        their_keys, their_values = (
            pool[table].flatten(0, 1)[:length].float() for pool in (keys, values)
        )
        attended.append((own.float() @ their_keys.T * scale).softmax(-1) @ their_values)
    return torch.stack(attended).to(query.dtype)
