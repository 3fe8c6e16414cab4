"""Block-sparse decode attention: all blocks of all sequences in one copy, then flash attention."""

import torch
from torch import Tensor
from torch.nn.functional import scaled_dot_product_attention


def block_sparse_attention(
    query: Tensor, keys: Tensor, values: Tensor, tables: Tensor, lengths: Tensor, scale: float
) -> Tensor:
    """See `kvgraft.kernels.dispatch.block_sparse_attention`; also serves CUDA without Triton."""
    size, most = keys.shape[1], int(lengths.max())
    token = torch.arange(most, device=tables.device)
    slots = tables[:, token // size] * size + token % size  # [S, T]
    there = token < lengths[:, None]
    slots = torch.where(there, slots, slots[:, :1])  # weights of 0 do not heal what nobody wrote
    own_keys, own_values = (
        pool.flatten(0, 1).index_select(0, slots.flatten()).view(len(slots), 1, most, -1) for pool in (keys, values)
    )
    mask = None if bool((lengths == most).all()) else there[:, None, None]
    return scaled_dot_product_attention(query[:, None], own_keys, own_values, attn_mask=mask, scale=scale)[:, 0]
