"""KV changes of recomputed tokens, and copies that apply them, in plain torch. Also serves the
CPU.
"""

import torch
from torch import Tensor

from kvgraft.kernels.changes import Turn
from kvgraft.kernels.heads import LayerHeads
from kvgraft.kv.rope import rotate

# elements of keys that are copied at a time, so that they stay in the CPU cache
CHUNK_ELEMENTS = 1 << 18


def kv_changes(
    pools: tuple[Tensor, ...], heads: LayerHeads, new: tuple[Tensor, Turn], old: tuple[Tensor, Turn]
) -> Tensor:
    """See `kvgraft.kernels.changes.kv_changes`."""
    width = len(pools) * pools[0].shape[-1]
    changes = torch.empty(len(heads.streams), new[0].shape[1], width, device=pools[0].device)
    for head_set in heads.every:
        after, before = (
            _still(pools, head_set.streams, slots[head_set.page_list], turn)
            for slots, turn in (new, old)
        )
        lost = old[0][head_set.page_list] < 0
        changes[head_set.places,] = (after - before).masked_fill_(lost[:, None], 0.0)
    return changes


def average_changes(changes: Tensor, around: Tensor, weights: Tensor) -> Tensor:
    """See `kvgraft.kernels.changes.average_changes`."""
    return torch.einsum("cw,hcwd->hcd", weights, changes[:, around])


def copy_changed(
    pools: tuple[Tensor, ...],
    heads: LayerHeads,
    source: tuple[Tensor, Turn],
    target: tuple[Tensor, Turn],
    changes: Tensor,
    sides: Tensor,
    weights: Tensor,
) -> None:
    """See `kvgraft.kernels.changes.copy_changed`."""
    size = max(1, CHUNK_ELEMENTS // (pools[0].shape[-1] * len(heads.streams)))
    given = source[0].T, *source[1], target[0].T, *target[1], sides.T, weights

    for old, *shift, new, cos, sin, beside, weight in zip(
        *(part.split(size) for part in given), strict=True
    ):
        for head_set in heads.every:
            has = (old[:, head_set.page_list] >= 0).nonzero()[:, 0]
            from_, to = (part[has, head_set.page_list] for part in (old, new))
            before, behind = beside[has].T
            own = changes[head_set.places,]
            added = torch.lerp(
                own[:, before.clamp(min=0)], own[:, behind.clamp(min=0)], weight[has][:, None]
            )
            added.masked_fill_((before < 0)[:, None], 0.0)
            turned, place = _by_row(shift[0][has], shift[1][has]), _by_row(cos[has], sin[has])
            _copy(pools, head_set.streams, from_, to, turned, place, added)


def anchors_nearby(
    anchors: tuple[Tensor, Tensor],
    tokens: tuple[Tensor, Tensor],
    distance: float,
    share: float,
    averaged: int,
    fewest: int,
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """See `kvgraft.kernels.changes.anchors_nearby`."""
    (places, segments), (others, own) = anchors, tokens
    count, device = len(places), places.device
    row = torch.arange(count, device=device)[:, None]
    place = row + torch.arange(-averaged, averaged + 1, device=device)  # [c, w]
    around = place.clamp(0, count - 1)
    near = (place == around) & (segments[around] == segments[:, None])
    decay = torch.exp(-(places[around] - places[:, None]).abs() / distance)
    weights = torch.where(near, decay, 0.0)
    weights = share * weights / weights.sum(1, keepdim=True)

    after = torch.searchsorted(places, others, right=True)
    beside = torch.stack([after - 1, after])  # [2, n]
    sides = beside.clamp(0, count - 1)
    same = (sides == beside) & (segments[sides] == own)
    # An anchor itself, which is not copied, is no distance away.
    away = (places[sides] - others).abs().clamp(min=1)
    nearness = torch.where(same, 1 / away.float(), 0.0)
    # anchors of one segment lie together: enough of them are near, or there are too few
    place = after + torch.arange(-fewest, fewest, device=device)[:, None]
    near = (place == place.clamp(0, count - 1)) & (segments[place.clamp(0, count - 1)] == own)
    some = near.sum(0) >= fewest
    behind = torch.where(some, nearness[1] / nearness.sum(0), 0.0)
    return around, weights, torch.where(some, sides, -1), behind


def _copy(
    pools: tuple[Tensor, ...],
    streams: slice,
    old: Tensor,
    new: Tensor,
    shift: Turn,
    place: Turn,
    added: Tensor,
) -> None:
    """Copy the heads of some streams, and add `added` [h, n, W] to them."""
    for number, (pool, change) in enumerate(
        zip(pools, added.split(pools[0].shape[-1], -1), strict=True)
    ):
        moved = pool[streams].index_select(1, old).float()
        if number == 0:  # keys
            moved, change = rotate(moved, *shift), rotate(change, *place)
        pool[streams].index_copy_(1, new, (moved + change).to(pool.dtype))


def _still(pools: tuple[Tensor, ...], streams: slice, slots: Tensor, turn: Turn) -> Tensor:
    """Return keys rotated back to position 0, and values: float32 [h, n, W]."""
    keys, *values = (pool[streams].index_select(1, slots.clamp(min=0)).float() for pool in pools)
    cos, sin = turn
    return torch.cat([rotate(keys, *_by_row(cos, -sin)), *values], -1)


def _by_row(cos: Tensor, sin: Tensor) -> Turn:
    """Return tables [n, d / 2] in the layout of `rotate` for [h, n, d]."""
    return cos[None, :, None], sin[None]
