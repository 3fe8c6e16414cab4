"""Model classes of vLLM that are supported, with special needs of some."""

from vllm.config import VllmConfig

from kvgraft.vllm.compat import BY_HEAD

# Attention to the whole prompt, with every channel of a head rotated: `samkv` and `condense` need
# this.
PLAIN = (
    "LlamaForCausalLM",
    "MistralForCausalLM",
    "Qwen2ForCausalLM",
    "Qwen3ForCausalLM",
    "Qwen3MoeForCausalLM",
    "Qwen2MoeForCausalLM",
    "MixtralForCausalLM",
    "Phi3ForCausalLM",
    "Olmo2ForCausalLM",
    "GraniteForCausalLM",
    "GraniteMoeForCausalLM",
)
# Their layers add the attention output to the residual stream unchanged: `redknot` needs this.
IN_STEPS = PLAIN[:8]
# Their KV heads can be attention layers of their own (`vllm/heads`): the classes of which
# `kvgraft profile-heads` makes head maps.
BY_HEAD_ARCHITECTURES = PLAIN[:5]
# supported on CPUs only without vLLM's rotary kernel
ONLY_WITHOUT_ROTARY_KERNEL = ("DeepseekV2ForCausalLM", "DeepseekV3ForCausalLM")
ARCHITECTURES = (
    *PLAIN,
    "Olmo3ForCausalLM",
    "Gemma2ForCausalLM",
    "Gemma3ForCausalLM",
    "GptOssForCausalLM",
    "Glm4ForCausalLM",
    "Glm4MoeForCausalLM",
    "Llama4ForCausalLM",
    *ONLY_WITHOUT_ROTARY_KERNEL,
)

# multimodal classes, and the class of the language model in each
LANGUAGE_MODELS = {
    "Gemma3ForConditionalGeneration": "Gemma3ForCausalLM",
    "Llama4ForConditionalGeneration": "Llama4ForCausalLM",
    "Mistral3ForConditionalGeneration": "MistralForCausalLM",
    "Qwen2_5_VLForConditionalGeneration": "Qwen2ForCausalLM",
    "Qwen3VLForConditionalGeneration": "Qwen3ForCausalLM",
}
# attention without local chunks; with flows, layers with windows attend as before
FLOWS = (
    *PLAIN,
    "Olmo3ForCausalLM",
    "Gemma2ForCausalLM",
    "Gemma3ForCausalLM",
    "GptOssForCausalLM",
    "Glm4ForCausalLM",
    "Glm4MoeForCausalLM",
    *ONLY_WITHOUT_ROTARY_KERNEL,
)


def architecture_of(config: VllmConfig) -> str:
    """Return the class of the language model that vLLM has resolved, without our prefix."""
    architecture: str = config.model_config.architecture.removeprefix(BY_HEAD)
    return LANGUAGE_MODELS.get(architecture, architecture)


def is_by_head(config: VllmConfig) -> bool:
    """Return True if each KV head is an attention layer (`vllm/heads`)."""
    return bool(config.model_config.architecture.startswith(BY_HEAD))


def is_plain(config: VllmConfig) -> bool:
    """Return True if all layers see the whole prompt and rotate all channels of their keys.

    Windows of single heads (`vllm/heads`) do not count here.
    """
    text = config.model_config.hf_text_config
    partial = (text.rope_parameters or {}).get("partial_rotary_factor") or 1.0
    windows = set(getattr(text, "layer_types", None) or ()) - {"full_attention"}
    slides = windows or (
        getattr(text, "sliding_window", None) and getattr(text, "use_sliding_window", True)
    )
    return architecture_of(config) in PLAIN and partial == 1.0 and not slides
