"""A Llama, Mistral, Qwen2, Qwen3, Qwen3-MoE or DeepSeek decoder over rows of hidden states.

The decoder contains neither attention nor the KV cache. A layer is `project`, then the caller's
attention, then `after_attention`. The rows of a call are independent, so they may belong to any
tokens of any requests.
"""

from pathlib import Path

import torch
import torch.nn.functional as F
from torch import Tensor

from kvgraft.engine import experts, latent
from kvgraft.engine.config import ModelConfig, load_config
from kvgraft.engine.weights import LayerWeights, Weights, load_weights
from kvgraft.kernels.rows import add_norm, norm_rotate, silu_mul

DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16}


def load_decoder(model_dir: str | Path, dtype: str | None, device: str) -> "Decoder":
    """Load a decoder by the names of its dtype and device.

    Raises:
        ValueError: the dtype or device does not exist here, or as `Decoder.from_pretrained`.
    """
    if dtype is not None and dtype not in DTYPES:
        raise ValueError(f"dtype {dtype!r} is not one of {', '.join(DTYPES)}")
    check_device(device)
    return Decoder.from_pretrained(model_dir, DTYPES[dtype] if dtype else None, device)


def check_device(name: str) -> None:
    """Raise ValueError unless this machine has the torch device."""
    kind = name.partition(":")[0]
    if kind not in ("cpu", "cuda") or (kind == "cuda" and not torch.cuda.is_available()):
        available = "cpu, cuda" if torch.cuda.is_available() else "cpu"
        raise ValueError(f"device {name!r} is not available: choose from {available}")


class Decoder:
    """Linear algebra of a model. Hidden states, queries, keys and values have the dtype of the
    weights."""

    def __init__(self, config: ModelConfig, weights: Weights) -> None:
        self.config = config
        self.weights = weights
        self._qk_norms = tuple(self._qk_norm(layer) for layer in weights.layers)

    @classmethod
    def from_pretrained(
        cls,
        model_dir: str | Path,
        dtype: torch.dtype | None = None,
        device: str | torch.device = "cpu",
    ) -> "Decoder":
        """Load a Hugging Face directory; dtype None keeps the stored one. Raises as `load_config`,
        `load_weights`."""
        config = load_config(model_dir)
        return cls(config, load_weights(model_dir, config, dtype or config.dtype, device))

    @property
    def dtype(self) -> torch.dtype:
        return self.weights.embedding.dtype

    @property
    def device(self) -> torch.device:
        return self.weights.embedding.device

    def embed(self, token_ids: Tensor) -> Tensor:
        """Integer token ids [n] -> hidden states [n, D]."""
        return F.embedding(token_ids, self.weights.embedding)

    def project(
        self, layer: int, hidden: Tensor, cos: Tensor, sin: Tensor
    ) -> tuple[Tensor, Tensor, Tensor]:
        """Hidden states [n, D] that enter `layer` -> rotated queries [n, Hq, d] and keys, and
        values [n, Hkv, d].

        The results are views of shared storage whose rows are strided. With latent attention the
        values are the keys.

        Args:
            cos, sin: float32 [n, d / 2], `config.rope.fresh_table(positions)`; the same for every
                layer.
        """
        config, weights, qk_norm = self.config, self.weights.layers[layer], self._qk_norms[layer]
        normed = self._norm(hidden, weights.input_norm)
        if config.latent is not None:
            q, k = latent.project(config.latent, weights, normed, cos, sin)
            return q, k, k
        heads = F.linear(normed, weights.qkv, weights.qkv_bias).unflatten(-1, (-1, config.head_dim))
        qk, v = heads.split((config.num_heads + config.num_kv_heads, config.num_kv_heads), dim=1)
        turned = norm_rotate(qk, qk_norm, config.norm_eps, cos, sin)
        q, k = turned.split((config.num_heads, config.num_kv_heads), dim=1)
        return q, k, v

    def after_attention(self, layer: int, hidden: Tensor, attended: Tensor) -> Tensor:
        """Hidden states [n, D] that entered `layer` and its attention [n, Hq d] -> hidden states
        [n, D] that leave it."""
        output, weight = self._output(layer, attended), self.weights.layers[layer].post_norm
        after, normed = add_norm(output, hidden, weight, self.config.norm_eps)
        return self._mlp(layer, normed).add_(after)

    def add_attention(self, layer: int, hidden: Tensor, attended: Tensor) -> Tensor:
        """The first half of `after_attention` -> hidden states that enter the FFN [n, D]."""
        return self._output(layer, attended).add_(hidden)

    def feed_forward(self, layer: int, hidden: Tensor) -> Tensor:
        """The second half of `after_attention`, for hidden states [n, D] that enter the FFN."""
        return self._mlp(layer, self._norm(hidden, self.weights.layers[layer].post_norm)).add_(
            hidden
        )

    def logits(self, hidden: Tensor) -> Tensor:
        """Hidden states [n, D] that left the last layer -> float32 logits [n, V]."""
        return F.linear(self._norm(hidden, self.weights.norm), self.weights.head).float()

    def _output(self, layer: int, attended: Tensor) -> Tensor:
        """Project the attention [n, Hq d] of `layer` to its contribution to the hidden states, [n,
        D]."""
        weights = self.weights.layers[layer]
        if self.config.latent is not None:
            attended = latent.values(self.config.latent, weights, attended)
        return F.linear(attended, weights.out, weights.out_bias)

    def _mlp(self, layer: int, normed: Tensor) -> Tensor:
        """Compute the contribution of the FFN of `layer` to the hidden states, [n, D]."""
        weights = self.weights.layers[layer]
        if self.config.experts is not None and weights.router is not None:
            return experts.mix(
                self.config.experts, normed, weights.router, weights.gate_up, weights.down
            )
        inner = silu_mul(F.linear(normed, weights.gate_up, weights.gate_up_bias))  # [n, F]
        return F.linear(inner, weights.down, weights.down_bias)

    def _norm(self, x: Tensor, weight: Tensor) -> Tensor:
        return F.rms_norm(x, weight.shape, weight, self.config.norm_eps)

    def _qk_norm(self, layer: LayerWeights) -> Tensor | None:
        """Norm weights of every query and key head, [Hq + Hkv, d], so that one pass norms all
        heads."""
        if self.config.latent is not None or layer.q_norm is None or layer.k_norm is None:
            return None
        counted = ((layer.q_norm, self.config.num_heads), (layer.k_norm, self.config.num_kv_heads))
        return torch.cat([weight.expand(num_heads, -1) for weight, num_heads in counted])


def causal_attention(
    query: Tensor, keys: Tensor, values: Tensor, scale: float, visible: Tensor | None = None
) -> Tensor:
    """Causal attention of a text to itself, without a cache: query [n, Hq, d], keys and values [n,
    Hkv, d] -> [n, Hq, d].

    Args:
        scale: of the logits.
        visible: bool [n, n], keys that each query sees; None is every key up to the query.
    """
    # [1, heads, n, d]
    query, keys, values = (part.transpose(0, 1)[None] for part in (query, keys, values))
    attended = F.scaled_dot_product_attention(
        query,
        keys,
        values,
        attn_mask=visible,
        is_causal=visible is None,
        scale=scale,
        enable_gqa=True,
    )
    return attended[0].transpose(0, 1)
