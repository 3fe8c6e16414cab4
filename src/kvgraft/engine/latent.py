"""Multi-head latent attention (MLA; DeepSeek-V2, section 2.1) in its absorbed form: attention with
one KV head.

The cache holds for each token its latent and a small key that RoPE rotates. The latent is both the
value and the position-free part of the key. Instead of expanding the latent to each head's keys and
values, the matrices are applied to the queries and the attention output (section 2.1.2). The
channels of a key are ordered [latent, first half | rope, first half | latent, second half | rope,
second half], so that half-split RoPE applies to the whole key.
"""

import torch
import torch.nn.functional as F
from torch import Tensor

from kvgraft.engine.config import LatentAttention
from kvgraft.engine.weights import LayerWeights
from kvgraft.kv.rope import rotate

# The norms of latents use this epsilon for every model.
_NORM_EPS = 1e-6


def project(
    latent: LatentAttention, weights: LayerWeights, normed: Tensor, cos: Tensor, sin: Tensor
) -> tuple[Tensor, Tensor]:
    """Normed states [n, D] -> queries [n, Hq, rank + rope_dim] and the cached rows [n, 1, rank +
    rope_dim], rotated.

    Args:
        cos, sin: float32 [n, (rank + rope_dim) / 2].
    """
    kept = latent.rank + latent.rope_dim
    queries, kept_rows = F.linear(normed, weights.qkv).split((len(weights.qkv) - kept, kept), dim=1)
    if weights.query_up is not None:
        queries = F.linear(_norm(queries, weights.q_norm), weights.query_up)
    heads = queries.unflatten(1, (-1, latent.query_dim))  # [n, Hq, .]
    nope, rope = heads.split((latent.nope_dim, latent.rope_dim), dim=2)
    key_up, _ = _ups(latent, weights)
    content = torch.einsum("nhd,hdr->nhr", nope, key_up)
    own, key_rope = kept_rows[:, None].split((latent.rank, latent.rope_dim), dim=2)
    query = _fuse(latent, content, rope, cos, sin)
    return query, _fuse(latent, _norm(own, weights.k_norm), key_rope, cos, sin)


def values(latent: LatentAttention, weights: LayerWeights, attended: Tensor) -> Tensor:
    """Attention over cached rows [n, Hq * (rank + rope_dim)] -> attention over the heads' values
    [n, Hq * value_dim]."""
    halves = attended.unflatten(1, (-1, 2, (latent.rank + latent.rope_dim) // 2))
    content = halves[..., : latent.rank // 2].flatten(2)  # [n, Hq, rank]
    _, value_up = _ups(latent, weights)
    return torch.einsum("nhr,hvr->nhv", content, value_up).flatten(1)


def _ups(latent: LatentAttention, weights: LayerWeights) -> tuple[Tensor, Tensor]:
    """Matrices from the latent to each head's keys [Hq, nope_dim, rank] and values [Hq, value_dim,
    rank]."""
    if weights.kv_up is None:
        raise ValueError("these weights are not of latent attention")
    size = latent.nope_dim + latent.value_dim
    keys, values = weights.kv_up.unflatten(0, (-1, size)).split(
        (latent.nope_dim, latent.value_dim), dim=1
    )
    return keys, values


def _fuse(
    latent: LatentAttention, content: Tensor, rope: Tensor, cos: Tensor, sin: Tensor
) -> Tensor:
    """Content [n, H, rank] and rope channels [n, H, rope_dim] -> rotated rows [n, H, rank +
    rope_dim]."""
    if latent.interleaved:
        rope = rope.unflatten(2, (-1, 2)).transpose(2, 3).flatten(2)
    still = latent.rank // 2
    turned = rotate(rope, cos[:, still:], sin[:, still:])
    pairs = zip(content.chunk(2, dim=2), turned.chunk(2, dim=2), strict=True)
    return torch.cat([part for pair in pairs for part in pair], dim=2)


def _norm(x: Tensor, weight: Tensor | None) -> Tensor:
    return F.rms_norm(x, x.shape[-1:], weight, _NORM_EPS)
