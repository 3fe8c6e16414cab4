"""Block-sparse decode attention: copy the blocks of some sequences, run flash attention on them,
and repeat.
"""

import torch
from torch import Tensor
from torch.nn.functional import pad, scaled_dot_product_attention

from kvgraft.kernels.scratch import PIECE, take
from kvgraft.kernels.workload import Lengths, parts_of


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
    """See `kvgraft.kernels.dispatch.block_sparse_attention`. Also serves CUDA without Triton."""
    output = query.new_empty(*query.shape[:2], values.shape[-1])
    for rows, most in parts_of(lengths.tolist()):
        step = max(1, PIECE // (most * (keys.shape[-1] + values.shape[-1]) * keys.itemsize))
        slots, there = _slots(tables[rows], lengths[rows], most, keys.shape[-2])
        even = bool(there.all())
        for first in range(0, len(slots), step):
            part = slice(first, first + step)
            here = slice(rows.start + first, min(rows.start + first + step, rows.stop))
            own_keys = _take("keys", keys, slots[part])[:, None]
            own_values = _take("values", values, slots[part])[:, None]
            mask = None if even else there[part, None, None]
            if sinks is not None:
                # a token whose key and value are zero, and whose logit is in the mask
                own_keys, own_values = (pad(x, (0, 0, 0, 1)) for x in (own_keys, own_values))
                seen = query.new_zeros(there[part].shape).masked_fill_(~there[part], -torch.inf)
                heads = torch.arange(here.start, here.stop, device=query.device) % len(sinks)
                mask = seen[:, None].expand(-1, query.shape[1], -1)
                mask = torch.cat((mask, sinks[heads, :, None].to(query)), dim=-1)[:, None]
            attended = scaled_dot_product_attention(
                query[here, None], own_keys, own_values, attn_mask=mask, scale=scale
            )  # [s, 1, g, dv]
            output[here] = attended[:, 0]

    return output.masked_fill_((lengths == 0)[:, None, None], 0.0)


def _slots(tables: Tensor, lengths: Tensor, most: int, size: int) -> tuple[Tensor, Tensor]:
    """Return the slots of tokens in pages, int64 [s, most], and bool [s, most]: False after the
    last token.
    """
    token = torch.arange(most, device=tables.device)
    slots = tables[:, token // size] * size + token % size
    there = token < lengths[:, None]
    # a weight of 0 does not hide NaN in unwritten memory
    return torch.where(there, slots, slots[:, :1]), there


def _take(use: str, pool: Tensor, slots: Tensor) -> Tensor:
    """Return the tokens of a pool [pages, b, d] or [blocks, H, b, d] at slots [s, t]: [s, t, d]."""
    if pool.dim() == 3:
        return take(use, pool.flatten(0, 1), slots.flatten()).view(*slots.shape, -1)
    heads, size = pool.shape[1:3]
    page = slots // size
    return pool[page // heads, page % heads, slots % size]
