"""Block-sparse decode attention: the blocks of some sequences in one copy, then flash attention, and so on."""

import torch
from torch import Tensor
from torch.nn.functional import scaled_dot_product_attention

from kvgraft.kernels.scratch import PIECE, take


def block_sparse_attention(
    query: Tensor, keys: Tensor, values: Tensor, tables: Tensor, lengths: Tensor, scale: float
) -> Tensor:
    """See `kvgraft.kernels.dispatch.block_sparse_attention`; also serves CUDA without Triton."""
    size, most = keys.shape[1], int(lengths.max())
    token = torch.arange(most, device=tables.device)
    slots = tables[:, token // size] * size + token % size  # [S, T]
    there = token < lengths[:, None]
    slots = torch.where(there, slots, slots[:, :1])  # weights of 0 do not heal what nobody wrote
    even = bool(there.all())
    pools = keys.flatten(0, 1), values.flatten(0, 1)
    output = query.new_empty(*query.shape[:2], values.shape[2])
    step = max(1, PIECE // (most * (keys.shape[2] + values.shape[2]) * keys.itemsize))
    for first in range(0, len(query), step):
        part = slice(first, first + step)
        own_keys, own_values = (
            take(use, pool, slots[part].flatten()).view(-1, 1, most, pool.shape[1])
            for use, pool in zip(("keys", "values"), pools, strict=True)
        )
        mask = None if even else there[part, None, None]
        attended = scaled_dot_product_attention(
            query[part, None], own_keys, own_values, attn_mask=mask, scale=scale
        )  # [s, 1, g, dv]
        output[part] = attended[:, 0]
    return output
