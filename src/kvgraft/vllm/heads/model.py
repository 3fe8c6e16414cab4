"""vLLM's model classes with an attention layer for each KV head."""

from typing import Any

import torch
from torch import Tensor, nn
from vllm.config import VllmConfig, get_current_vllm_config
from vllm.model_executor.layers.attention import Attention
from vllm.model_executor.models.llama import LlamaForCausalLM
from vllm.model_executor.models.mistral import MistralForCausalLM
from vllm.model_executor.models.qwen2 import Qwen2ForCausalLM
from vllm.model_executor.models.qwen3 import Qwen3ForCausalLM

from kvgraft.kv.heads import HeadClass, HeadMap
from kvgraft.vllm.compat import HEAD_MAP
from kvgraft.vllm.compat.support import check_head_map
from kvgraft.vllm.heads import spec
from kvgraft.vllm.heads.attention import LocalAttention


class HeadAttention(nn.Module):
    """The attention of a decoder layer, KV head by KV head."""

    def __init__(self, whole: Attention, head_map: HeadMap, layer: int, cache_config: Any) -> None:
        super().__init__()
        del get_current_vllm_config().compilation_config.static_forward_context[whole.layer_name]
        groups = whole.num_heads // whole.num_kv_heads
        self.query_size, self.key_size = groups * whole.head_size, whole.head_size
        heads: list[Attention] = []
        for head, head_class in enumerate(head_map.classes[layer]):
            arguments: dict[str, Any] = {
                "num_heads": groups,
                "head_size": whole.head_size,
                "scale": whole.impl.scale,
                "num_kv_heads": 1,
                "cache_config": cache_config,
                "prefix": f"{whole.layer_name}.kv_head_{head}",
            }
            if head_class is HeadClass.LOCAL:
                heads.append(LocalAttention(**arguments, sinks=head_map.sinks, window=head_map.window))
            else:
                heads.append(Attention(**arguments))
        self.heads = nn.ModuleList(heads)

    def forward(self, query: Tensor, key: Tensor, value: Tensor) -> Tensor:
        """As `Attention`: [n, Hq d], [n, Hkv d] twice -> [n, Hq d]."""
        parts = (
            query.split(self.query_size, dim=-1),
            key.split(self.key_size, dim=-1),
            value.split(self.key_size, dim=-1),
        )
        attended = [
            attention(*(part.contiguous() for part in own)) for attention, *own in zip(self.heads, *parts, strict=True)
        ]
        return torch.cat(attended, dim=-1)


class _ByHead:
    """Puts `HeadAttention` into the layers of a model of the Llama family."""

    def __init__(self, *, vllm_config: VllmConfig, prefix: str = "") -> None:
        head_map = check_head_map(vllm_config, vllm_config.additional_config.get(HEAD_MAP))
        spec.register()
        super().__init__(vllm_config=vllm_config, prefix=prefix)  # type: ignore[call-arg]
        for index, layer in enumerate(self.model.layers):  # type: ignore[attr-defined]
            whole = layer.self_attn.attn
            layer.self_attn.attn = HeadAttention(whole, head_map, index, vllm_config.cache_config)


class LlamaByHead(_ByHead, LlamaForCausalLM):
    pass


class MistralByHead(_ByHead, MistralForCausalLM):
    pass


class Qwen2ByHead(_ByHead, Qwen2ForCausalLM):
    pass


class Qwen3ByHead(_ByHead, Qwen3ForCausalLM):
    pass
