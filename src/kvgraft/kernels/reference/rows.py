"""Row operations of a decoder layer, apart from matrix products and attention, in plain torch. Also
serves the CPU.
"""

import torch.nn.functional as F
from torch import Tensor

from kvgraft.kernels.heads import LayerHeads
from kvgraft.kv.rope import rotate


def norm_rotate(
    heads: Tensor, weight: Tensor | None, eps: float, cos: Tensor, sin: Tensor
) -> Tensor:
    """See `kvgraft.kernels.rows.norm_rotate`."""
    if weight is not None:
        heads = F.rms_norm(heads, heads.shape[-1:], None, eps).mul_(weight)
    return rotate(heads, cos, sin)


def write_rows(
    pools: tuple[Tensor, ...], rows: tuple[Tensor, ...], heads: LayerHeads, slots: Tensor
) -> None:
    """See `kvgraft.kernels.rows.write_rows`."""
    for head_set in heads.every:
        for pool, new in zip(pools, rows, strict=True):
            part = new[:, head_set.places].transpose(0, 1)  # [h, n, d]
            pool[head_set.streams].index_copy_(1, slots[head_set.page_list], part)


def read_rows(pools: tuple[Tensor, ...], heads: LayerHeads, slots: Tensor) -> tuple[Tensor, ...]:
    """See `kvgraft.kernels.rows.read_rows`."""
    shape = slots.shape[1], len(heads.streams), pools[0].shape[-1]
    rows = tuple(pool.new_empty(shape) for pool in pools)
    for head_set in heads.every:
        for pool, part in zip(pools, rows, strict=True):
            part[:, head_set.places] = pool[head_set.streams, slots[head_set.page_list]].transpose(
                0, 1
            )
    return rows


def add_norm(rows: Tensor, residual: Tensor, weight: Tensor, eps: float) -> tuple[Tensor, Tensor]:
    """See `kvgraft.kernels.rows.add_norm`."""
    total = rows.add_(residual)
    return total, F.rms_norm(total, weight.shape, weight, eps)


def silu_mul(gate_up: Tensor) -> Tensor:
    """See `kvgraft.kernels.rows.silu_mul`."""
    gate, up = gate_up.chunk(2, dim=-1)
    return F.silu(gate, inplace=True).mul_(up)
