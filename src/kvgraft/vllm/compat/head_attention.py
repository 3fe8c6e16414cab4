"""vLLM's own attention kernel for a subset of a layer's KV heads, where the kernel allows that."""

from copy import copy
from typing import Any

import torch
from torch import Tensor
from vllm.v1.attention.backends.cpu_attn import CPUAttentionBackendImpl


def attends_by_head(attention: Any) -> bool:
    """Return True if this attention layer's kernel accepts a subset of the cache's heads."""
    return type(attention.impl) is CPUAttentionBackendImpl


def metadata_of(builder: Any, common: Any, num_kv_heads: int) -> Any:
    """Return the metadata that `attend` needs for `num_kv_heads` KV heads of a layer.

    Args:
        builder: builder of the layer's attention metadata.
        common: vLLM's common metadata.
    """
    part = copy(builder)
    part.num_heads, part.num_kv_heads = (
        builder.num_heads // builder.num_kv_heads * num_kv_heads,
        num_kv_heads,
    )
    return part.build(0, common, fast_build=True)


def attend(attention: Any, heads: slice, query: Tensor, metadata: Any) -> Tensor:
    """Return causal attention [n, Hq, d] of the queries [n, Hq, d] of some KV heads to the cache.

    The cache holds the KV of the queries' own tokens too.
    """
    # The kernel takes no strides for its output.
    output = torch.empty_like(query, memory_format=torch.contiguous_format)
    attention.impl.forward(
        attention, query, query, query, attention.kv_cache[:, heads], metadata, output
    )
    return output
