"""vLLM's model classes with an attention layer for each KV head."""

from vllm.config import VllmConfig
from vllm.distributed import get_tensor_model_parallel_rank
from vllm.model_executor.models.llama import LlamaForCausalLM
from vllm.model_executor.models.mistral import MistralForCausalLM
from vllm.model_executor.models.qwen2 import Qwen2ForCausalLM
from vllm.model_executor.models.qwen3 import Qwen3ForCausalLM
from vllm.model_executor.models.qwen3_moe import Qwen3MoeForCausalLM

from kvgraft.vllm.compat import HEAD_MAP, HEAD_MAP_DIGEST
from kvgraft.vllm.compat.head_maps import map_of_rank
from kvgraft.vllm.compat.support import check_head_map
from kvgraft.vllm.heads.attention import ATTEND_HEADS, HeadAttention


class _ByHead:
    """Mixin that puts `HeadAttention` into the layers of a model of the Llama family."""

    def __init__(self, *, vllm_config: VllmConfig, prefix: str = "") -> None:
        whole = check_head_map(vllm_config, vllm_config.additional_config.get(HEAD_MAP))
        head_map = map_of_rank(whole, vllm_config, get_tensor_model_parallel_rank())
        super().__init__(vllm_config=vllm_config, prefix=prefix)  # type: ignore[call-arg]
        # As attention operators do, this one divides a graph whose parts CUDA graphs capture.
        splitting = vllm_config.compilation_config.splitting_ops
        if splitting and ATTEND_HEADS not in splitting:
            splitting.append(ATTEND_HEADS)
        # Compiled graphs depend on the classes, and vLLM caches them by its configuration.
        vllm_config.additional_config[HEAD_MAP_DIGEST] = whole.digest
        for index, layer in enumerate(self.model.layers):  # type: ignore[attr-defined]
            layer.self_attn.attn = HeadAttention(
                layer.self_attn.attn, head_map, index, vllm_config.cache_config
            )


class LlamaByHead(_ByHead, LlamaForCausalLM):
    pass


class MistralByHead(_ByHead, MistralForCausalLM):
    pass


class Qwen2ByHead(_ByHead, Qwen2ForCausalLM):
    pass


class Qwen3ByHead(_ByHead, Qwen3ForCausalLM):
    pass


class Qwen3MoeByHead(_ByHead, Qwen3MoeForCausalLM):
    pass
