"""The model classes of vLLM that are supported, and what some of them need."""

from vllm.config import VllmConfig

from kvgraft.vllm.compat import BY_HEAD

# attention to the whole prompt, every channel of a head turning: what `samkv` and `condense` can
# compute
PLAIN = (
    "LlamaForCausalLM",
    "MistralForCausalLM",
    "Qwen2ForCausalLM",
    "Qwen3ForCausalLM",
    "Qwen2MoeForCausalLM",
    "Qwen3MoeForCausalLM",
    "MixtralForCausalLM",
    "Phi3ForCausalLM",
    "Olmo2ForCausalLM",
    "GraniteForCausalLM",
    "GraniteMoeForCausalLM",
)
# whose layers add their attention to the residual stream as it is: what `redknot` takes apart
IN_STEPS = PLAIN[:8]
# whose KV heads can be attention layers of their own (`vllm/heads`)
BY_HEAD_ARCHITECTURES = PLAIN[:4]
ONLY_WITHOUT_ROTARY_KERNEL = ("DeepseekV2ForCausalLM", "DeepseekV3ForCausalLM")  # on CPUs
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

# attention without windows, sinks and caps of logits: what flows can attend as
FLOWS = (*PLAIN, "Glm4ForCausalLM", "Glm4MoeForCausalLM")


def architecture_of(config: VllmConfig) -> str:
    """The model class that vLLM has resolved, not only what the checkpoint says; without what we
    put before it."""
    architecture: str = config.model_config.architecture
    return architecture.removeprefix(BY_HEAD)


def is_by_head(config: VllmConfig) -> bool:
    """Whether each KV head is an attention layer (`vllm/heads`)."""
    return bool(config.model_config.architecture.startswith(BY_HEAD))


def is_plain(config: VllmConfig) -> bool:
    """Whether all layers see the whole prompt and turn all channels of their keys, as far as their
    heads let them."""
    text = config.model_config.hf_text_config
    partial = (text.rope_parameters or {}).get("partial_rotary_factor") or 1.0
    windows = set(getattr(text, "layer_types", None) or ()) - {"full_attention"}
    slides = windows or (
        getattr(text, "sliding_window", None) and getattr(text, "use_sliding_window", True)
    )
    return architecture_of(config) in PLAIN and partial == 1.0 and not slides
