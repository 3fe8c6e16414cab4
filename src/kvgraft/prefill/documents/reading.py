"""Reading of a document on its own, with statistics of its blocks (SamKV, Appendix A.1)."""

from collections import defaultdict

import numpy as np
import torch
from torch import Tensor

from kvgraft.core.plan import Plan
from kvgraft.kv.documents import BlockCut, Document
from kvgraft.kv.importance import by_block, exceptionally_small, received_attention
from kvgraft.prefill.documents.context import DocumentLayout
from kvgraft.prefill.documents.partial import LayerHost, PartialPrefill

MEMORY = torch.device("cpu")  # device of documents


def read_document(host: LayerHost, tokens: np.ndarray, blocks: BlockCut) -> Document:
    """Compute the KV of a text at positions 0..n-1, and the statistics of its blocks."""
    count, size, middle = len(tokens), blocks.size, blocks.middle(len(tokens))
    # First token of the local query. The last token is always part of it.
    local = min(blocks.middle_tokens(count).stop, count - 1)
    everything, nothing = torch.ones(count, dtype=torch.bool), torch.zeros(count, dtype=torch.bool)
    ctx = PartialPrefill(
        host,
        Plan.for_prompt(count, 1),
        torch.from_numpy(tokens),
        DocumentLayout([], blocks, count),
        0,
    )
    hidden, by_name = ctx.embed(everything), defaultdict[str, list[Tensor]](list)
    for index in range(host.num_layers):
        outputs = everything if index < host.num_layers - 1 else nothing
        hidden = ctx.layer(index, hidden, sees=nothing, writes=everything, outputs=outputs)
        query, (keys, values) = ctx.query(), ctx.computed()  # [n, Hq, d], [Hkv, n, d]
        importance = by_block(received_attention(query, keys.transpose(0, 1), ctx.over_heads), size)
        outliers = torch.zeros(count, dtype=torch.bool, device=query.device)
        small = exceptionally_small(importance.exponent[middle.start : middle.stop])
        outliers[importance.representative[middle.start : middle.stop][small]] = True
        # [B, Hkv, d]
        block_keys = torch.stack([part.float().mean(1) for part in keys.split(size, dim=1)])
        for name, value in (
            ("keys", keys),
            ("values", values),
            ("block_keys", block_keys.to(keys.dtype)),
            ("local_query", query[local:].float().mean(0).to(query.dtype)),
            ("exponents", importance.exponent),
            ("attention", importance.attention),
            ("outliers", outliers),
        ):
            by_name[name].append(value.to(MEMORY))

    return Document(
        block_size=size, **{name: torch.stack(values) for name, values in by_name.items()}
    )
