"""Reference of SegPagedAttention and Sparse-Q scores in plain torch."""

from collections.abc import Sequence

import torch
from torch import Tensor

from kvgraft.kernels.heads import LayerHeads
from kvgraft.kernels.layout import AttentionLayout
from kvgraft.kernels.long_runs import Sequences


def segpaged_attention(
    query: Tensor,
    keys: Tensor,
    values: Tensor,
    heads: LayerHeads,
    layout: AttentionLayout,
    scale: float,
    output: Tensor | None = None,
) -> Tensor:
    """See `kvgraft.kernels.dispatch.segpaged_attention`.

    Computes one head of one prompt at a time, with a mask, in float32.
    """
    output = torch.empty_like(query) if output is None else output
    # query heads per KV head
    size = query.shape[1] // len(heads.streams)

    for context, rows in zip(layout.contexts, layout.rows, strict=True):
        here, at = torch.arange(context.seen, device=keys.device), context.device_positions[:, None]
        for head, (stream, page_list) in enumerate(
            zip(heads.streams, heads.page_lists, strict=True)
        ):
            slots = context.slots[page_list, : context.seen]
            visible = (here <= at) & (slots >= 0)  # [n, T]
            if heads.local[head]:
                visible &= (here < layout.sinks) | (here > at - layout.window)
            own, slots = slice(head * size, (head + 1) * size), slots.clamp(min=0)
            # [G, n, T]
            logits = (
                query[rows, own].float().transpose(0, 1) @ keys[stream, slots].float().T * scale
            )
            weights = logits.masked_fill(~visible, float("-inf")).softmax(-1)
            present = values[stream, slots].float().masked_fill(~visible.any(0)[:, None], 0)
            output[rows, own] = (weights @ present).transpose(0, 1).to(query.dtype)

    return output


def varlen_attention(
    query: Tensor, keys: Tensor, values: Tensor, sequences: Sequences, scale: float
) -> Tensor:
    """Causal attention of sequences to their keys, as in flash attention; zeros for a sequence
    without keys.

    Args:
        query: [n, Hq, d].
        keys, values: [k, Hkv, d].
    """
    output = torch.zeros_like(query, memory_format=torch.contiguous_format)
    starts, firsts, counts = (
        x.tolist() for x in (sequences.query_starts, sequences.key_starts, sequences.num_keys)
    )

    for number, count in enumerate(counts):
        rows, seen = (
            slice(starts[number], starts[number + 1]),
            slice(firsts[number], firsts[number] + count),
        )
        if count:
            at = torch.arange(count - rows.stop + rows.start, count, device=keys.device)
            weights = _probabilities(query[rows], keys[seen], scale, at)
            spread = (
                values[seen].float().repeat_interleave(query.shape[1] // values.shape[1], dim=1)
            )
            output[rows] = torch.einsum("hnt,thd->nhd", weights, spread).to(query.dtype)

    return output


def attention_mass(
    query: Tensor,
    keys: Tensor,
    positions: Tensor,
    scale: float,
    reduction: str,
    counts: Sequence[tuple[int, int]],
) -> Tensor:
    """See `kvgraft.kernels.dispatch.attention_mass`.

    Computes the whole attention matrix of a prompt at once.
    """
    queries, tokens = map(list, zip(*counts, strict=True))
    found = []
    for asking, own, at in zip(
        query.split(queries), keys.split(tokens), positions.split(queries), strict=True
    ):
        # A query that sees no key has no weights.
        weights = _probabilities(asking, own, scale, at).nan_to_num(0.0).flatten(0, 1)
        # keys receive nothing where there are no queries
        nothing = weights.new_zeros(1, len(own))
        found.append(
            weights.sum(0) if reduction == "sum" else torch.cat((nothing, weights)).amax(0)
        )
    return torch.cat(found)


def _probabilities(query: Tensor, keys: Tensor, scale: float, positions: Tensor) -> Tensor:
    """Causal softmax weights, float32 [Hq, n, T]."""
    groups = query.shape[1] // keys.shape[1]
    expanded = keys.float().repeat_interleave(groups, dim=1)  # [T, Hq, d]
    logits = torch.einsum("nhd,thd->hnt", query.float(), expanded) * scale
    future = torch.arange(keys.shape[0], device=keys.device)[None] > positions[:, None]  # [n, T]
    return logits.masked_fill(future, float("-inf")).softmax(-1)
