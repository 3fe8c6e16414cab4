"""vLLM's own attention kernel for some KV heads of a layer, where it takes whatever heads of a
cache it is given."""

from copy import copy
from typing import Any

import torch
from torch import Tensor
from vllm.v1.attention.backends.cpu_attn import CPUAttentionBackendImpl


def attends_by_head(attention: Any) -> bool:
    """Whether this attention layer's kernel is such a one."""
    return type(attention.impl) is CPUAttentionBackendImpl


def metadata_of(builder: Any, common: Any, num_kv_heads: int) -> Any:
    """What `attend` needs for so many KV heads of a layer.

    Args:
        builder: of the layer's attention metadata; `common`: what it builds them from.
    """
    part = copy(builder)
    part.num_heads, part.num_kv_heads = (
        builder.num_heads // builder.num_kv_heads * num_kv_heads,
        num_kv_heads,
    )
    return part.build(0, common, fast_build=True)


def attend(attention: Any, heads: slice, query: Tensor, metadata: Any) -> Tensor:
    """Causal attention of the queries [n, Hq, d] of some KV heads to what these have in the cache,
    where what is of the queries' own tokens stands, too: [n, Hq, d]."""
    # the kernel takes no strides for it
    output = torch.empty_like(query, memory_format=torch.contiguous_format)
    attention.impl.forward(
        attention, query, query, query, attention.kv_cache[:, heads], metadata, output
    )
    return output
