"""Tiny random checkpoints of the families that people run, in the classes that vLLM has for
them."""

from copy import deepcopy
from pathlib import Path
from typing import Any

import torch
from transformers import AutoConfig, AutoModelForCausalLM

from kvgraft.engine.checkpoint import identify
from kvgraft.kv.heads import HEAD_MAP_FILE, HeadClass, HeadMap
from models import TINY, make_tokenizer

WINDOW = 64
SIZES: dict[str, Any] = TINY | {
    "head_dim": 32,
    "num_hidden_layers": 4,
    "max_position_embeddings": 4096,
}
EXPERTS = {"num_experts": 6, "num_experts_per_tok": 2, "moe_intermediate_size": 48}
YARN = {
    "rope_type": "yarn", "rope_theta": 10000.0, "factor": 8.0, "beta_fast": 32.0, "beta_slow": 1.0,
    "original_max_position_embeddings": 512,
}  # fmt: skip
LONGROPE = {
    "rope_type": "longrope", "rope_theta": 10000.0, "original_max_position_embeddings": 1024,
    "short_factor": [1.0] * 12, "long_factor": [1.0 + 0.25 * number for number in range(12)],
}  # fmt: skip
GEMMA3_ROPE = {
    "full_attention": {"rope_type": "linear", "factor": 8.0, "rope_theta": 1e6},
    "sliding_attention": {"rope_type": "default", "rope_theta": 1e4},
}
GEMMA = {"sliding_window": WINDOW, "query_pre_attn_scalar": 32}
GRANITE = {
    "embedding_multiplier": 6.0, "attention_multiplier": 0.2, "residual_multiplier": 0.5,
    "logits_scaling": 4.0,
}  # fmt: skip
LATENT = {
    "first_k_dense_replace": 1, "num_key_value_heads": 4, "kv_lora_rank": 512, "q_lora_rank": 40,
    "qk_nope_head_dim": 32, "qk_rope_head_dim": 64, "v_head_dim": 32, "n_routed_experts": 6,
    "num_experts_per_tok": 2,
    "n_shared_experts": 1,
    "moe_intermediate_size": 48, "n_group": 1, "topk_group": 1, "num_nextn_predict_layers": 0,
}  # fmt: skip
LATENT_YARN = {"topk_method": "noaux_tc", "rope_parameters": YARN | {"mscale_all_dim": 1.0}}
SOME_EXPERTS = {"num_local_experts": 6, "num_experts_per_tok": 2}
PHI4 = {
    "pad_token_id": 1,
    "partial_rotary_factor": 0.75,
    "rope_parameters": LONGROPE,
    "hidden_size": 128,
}
# name -> model type, what its config has beside SIZES
FAMILIES: dict[str, tuple[str, dict[str, Any]]] = {
    "Qwen3": ("qwen3", {}),
    "Qwen2": ("qwen2", {"hidden_size": 128}),
    "Llama": ("llama", {"rope_parameters": YARN}),
    "Mistral": ("mistral", {"sliding_window": None}),
    "Qwen3-MoE": ("qwen3_moe", EXPERTS),
    "Qwen2-MoE": ("qwen2_moe", EXPERTS | {"shared_expert_intermediate_size": 40,
    "hidden_size": 128}),
    "Mixtral": ("mixtral", {**SOME_EXPERTS, "sliding_window": None, "hidden_size": 128}),
    "gpt-oss": (
        "gpt_oss",
        {
            **SOME_EXPERTS, "sliding_window": WINDOW,
            "rope_parameters": YARN | {"truncate": False},
        },
    ),
    "Gemma 2": ("gemma2", GEMMA | {"attn_logit_softcapping": 20.0,
    "final_logit_softcapping": 30.0}),
    "Gemma 3": (
        "gemma3_text",
        GEMMA | {"layer_types": ["sliding_attention"] * 3 + ["full_attention"],
        "rope_parameters": GEMMA3_ROPE},
    ),
    "Phi-3": ("phi3", {"pad_token_id": 1, "hidden_size": 128}),
    "Phi-4-mini": ("phi3", PHI4),
    "OLMo 2": ("olmo2", {}),
    "OLMo 3": ("olmo3", {"sliding_window": WINDOW}),
    "Granite": ("granite", GRANITE),
    "Granite-MoE": ("granitemoe", GRANITE | SOME_EXPERTS | {"hidden_size": 128}),
    "GLM-4": ("glm4", {"partial_rotary_factor": 0.5, "pad_token_id": 1}),
    "GLM-4.5": (
        "glm4_moe",
        EXPERTS
        | {
            "n_routed_experts": 6, "n_shared_experts": 1, "first_k_dense_replace": 1, "n_group": 1,
            "topk_group": 1,
            "partial_rotary_factor": 0.5, "use_qk_norm": True,
        },
    ),
    "Llama 4": (
        "llama4_text",
        {
            "num_local_experts": 4, "num_experts_per_tok": 1, "intermediate_size_mlp": 96,
            "interleave_moe_layer_step": 2,
            "attention_chunk_size": 2 * WINDOW, "no_rope_layers": [1, 1, 1, 0],
        },
    ),
    "DeepSeek-V2": ("deepseek_v2", LATENT | {"q_lora_rank": None}),
    "DeepSeek-V3": ("deepseek_v3", LATENT | LATENT_YARN),
}  # fmt: skip
WINDOWED = ("gpt-oss", "Gemma 2", "Gemma 3", "OLMo 3", "Llama 4")
DEEPSEEK = ("DeepSeek-V2", "DeepSeek-V3")


def make_family(name: str, directory: Path) -> Path:
    """Write a checkpoint: random weights whose answers depend on all of the prompt."""
    torch.manual_seed(0)
    kind, changes = FAMILIES[name]
    settings = deepcopy(SIZES | changes)  # transformers changes what it is given
    if name in DEEPSEEK:
        settings.pop("head_dim")
    model = AutoModelForCausalLM.from_config(AutoConfig.for_model(kind, **settings))
    for part, parameter in model.named_parameters():
        # transformers makes them all 0 or 1
        if part.endswith("bias") or "norm" in part:
            parameter.data += 0.1 * torch.randn_like(parameter)
        # about as much attention as all tokens get
        if "sinks" in part:
            parameter.data += 5 + torch.randn_like(parameter)
    # tied to the output: less of the last token, or it would come again
    if name.startswith("Gemma"):
        model.get_input_embeddings().weight.data *= 0.1
    model.float().save_pretrained(directory)
    make_tokenizer(settings["vocab_size"]).save_pretrained(directory)
    heads = (HeadClass.LOCAL, HeadClass.GLOBAL, HeadClass.RETRIEVAL, HeadClass.LOCAL)[
        : SIZES["num_key_value_heads"]
    ]
    HeadMap(identify(directory), 3, 24, (heads,) * SIZES["num_hidden_layers"]).save(
        directory / HEAD_MAP_FILE
    )
    return directory
