"""Latent attention (MLA; DeepSeek-V2, section 2.1) in vLLM: the cache holds one row per token for
all heads.

Policies see this row, latent and rotated channels, as the key of a single KV head. Values have no
channels. Queries are transformed by the weights that vLLM absorbs when it decodes, so scores equal
those of the heads.
"""

from typing import Any

import torch
from torch import Tensor


def is_latent(attention: Any) -> bool:
    """Return True if an attention layer of vLLM keeps latents."""
    return hasattr(attention, "kv_lora_rank")


def parts(
    attention: Any, query: Tensor, latent: Tensor, turning: Tensor
) -> tuple[Tensor, Tensor, Tensor]:
    """Return queries, keys and values from the arguments of the layer.

    Args:
        query: [n, H, P + R].
        latent: [n, L].
        turning: rotated keys [n, 1, R].

    Returns:
        Queries [n, H, L + R], keys [n, 1, L + R] and values [n, 1, 0].
    """
    content, rotated = query.split([attention.qk_nope_head_dim, attention.qk_rope_head_dim], dim=-1)
    absorbed = torch.einsum("nhp,hpl->nhl", content, attention.W_UK_T)
    keys = torch.cat((latent[:, None], turning), -1)
    return torch.cat((absorbed, rotated), -1), keys, keys[..., :0]


def write(attention: Any, keys: Tensor, slots: Tensor) -> None:
    """Store keys [n, 1, L + R] in slots int64 [n]."""
    latent, turning = keys.split([attention.kv_lora_rank, attention.qk_rope_head_dim], dim=-1)
    attention.impl.do_kv_cache_update(
        latent[:, 0].contiguous(),
        turning.contiguous(),
        attention.kv_cache,
        slots,
        attention.kv_cache_dtype,
        attention._k_scale,
    )
