"""Copy with delta-RoPE ("align"), almost as fast as a copy alone.

Tokens are copied in chunks, so that gathered keys are still in the CPU cache when they are rotated
and scattered.
"""

from torch import Tensor

from kvgraft.kv.rope import by_head, rotate

# elements of keys in a chunk: 1 MiB in float32
CHUNK_ELEMENTS = 1 << 18


def align_copy(
    keys: Tensor,
    values: Tensor | None,
    layers: range,
    source: Tensor,
    target: Tensor,
    cos: Tensor,
    sin: Tensor,
) -> None:
    """See `kvgraft.kernels.dispatch.align_copy`."""
    num_heads, head_dim = keys.shape[2:]
    size = max(1, CHUNK_ELEMENTS // (num_heads * head_dim))
    for old, new, c, s in zip(
        *(tensor.split(size) for tensor in (source, target, cos, sin)), strict=True
    ):
        still = bool((c == 1).all()) and not bool(s.any())
        turn = by_head(c, s, num_heads)
        for layer in layers:
            gathered = keys[layer].index_select(0, old)
            keys[layer].index_copy_(0, new, gathered if still else rotate(gathered, *turn))
            if values is not None:
                values[layer].index_copy_(0, new, values[layer].index_select(0, old))
