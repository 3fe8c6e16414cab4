"""Tiny random Hugging Face models of every supported family, with a word tokenizer, written to a
directory."""

import json
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file
from tokenizers import Tokenizer
from tokenizers.models import WordLevel
from tokenizers.pre_tokenizers import WhitespaceSplit
from transformers import AutoConfig, AutoModelForCausalLM, PreTrainedTokenizerFast

from kvgraft.engine.config import load_config
from kvgraft.kv.heads import HeadClass, HeadMap
from kvgraft_lab.testbed import MODEL_DIR

VOCAB_SIZE = 200
BOS, EOS, UNKNOWN = 0, 1, 2
TINY: dict[str, Any] = {
    "vocab_size": VOCAB_SIZE,
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 16,
    "max_position_embeddings": 512,
    "initializer_range": 0.2,
    "bos_token_id": BOS,
    "eos_token_id": EOS,
    "rope_parameters": {"rope_type": "default", "rope_theta": 10000.0},
}
YARN = {
    "rope_type": "yarn",
    "rope_theta": 10000.0,
    "factor": 4.0,
    "original_max_position_embeddings": 128,
}
FAMILIES: dict[str, dict[str, Any]] = {
    "llama": {},
    "mistral": {"sliding_window": None, "rope_parameters": YARN},
    "qwen2": {"tie_word_embeddings": True},
    "qwen3": {"head_dim": 32, "num_hidden_layers": 4},
    "qwen3_moe": {
        "head_dim": 32,
        "num_experts": 8,
        "num_experts_per_tok": 3,
        "moe_intermediate_size": 24,
        "norm_topk_prob": True,
        "mlp_only_layers": [1],
    },
    "deepseek_v3": {
        "first_k_dense_replace": 3,
        "num_key_value_heads": 4,
        "kv_lora_rank": 24,
        "q_lora_rank": 40,
        "qk_nope_head_dim": 10,
        "qk_rope_head_dim": 8,
        "v_head_dim": 12,
        "num_nextn_predict_layers": 0,
        "rope_parameters": YARN | {"mscale": 0.8, "mscale_all_dim": 1.4},
    },
}
FAMILIES["deepseek_v2"] = FAMILIES["deepseek_v3"] | {
    "q_lora_rank": None,
    "rope_parameters": TINY["rope_parameters"],
}
CHAT_TEMPLATE = (
    "{% for message in messages %}<{{ message.role }}> {{ message.content }} {% endfor %}"
    "{% if add_generation_prompt %}<assistant> {% endif %}"
)


def make_model(
    directory: Path,
    family: str,
    *,
    seed: int = 0,
    max_shard_size: str = "1GB",
    dtype: torch.dtype = torch.float32,
    **overrides: Any,
) -> Path:
    """Write a model of `family` whose config differs from TINY and FAMILIES by `overrides`; logits
    of order 1-5."""
    torch.manual_seed(seed)
    settings = TINY | FAMILIES[family] | overrides
    if family == "qwen2" or family.startswith("deepseek"):
        settings.pop("head_dim")
    model = AutoModelForCausalLM.from_config(AutoConfig.for_model(family, **settings))
    for name, parameter in model.named_parameters():
        if name.endswith("bias") or "norm" in name:  # transformers makes them all 0 or 1
            parameter.data += 0.1 * torch.randn_like(parameter)
    model.to(dtype).save_pretrained(directory, max_shard_size=max_shard_size)
    make_tokenizer(
        settings["vocab_size"], chat_template=CHAT_TEMPLATE if family == "qwen3" else None
    ).save_pretrained(directory)
    return directory


def make_tokenizer(
    vocab_size: int = VOCAB_SIZE, chat_template: str | None = None
) -> PreTrainedTokenizerFast:
    """Words w3, w4, ... with the ids 3, 4, ... after <bos>, <eos> and <unk>; no <bos> is added by
    itself."""
    # ids BOS, EOS, UNKNOWN
    special = {"bos_token": "<bos>", "eos_token": "<eos>", "unk_token": "<unk>"}
    roles = ["<system>", "<user>", "<assistant>"]  # the last ids
    words = [
        *special.values(),
        *(f"w{i}" for i in range(len(special), vocab_size - len(roles))),
        *roles,
    ]
    tokenizer = Tokenizer(
        WordLevel({word: i for i, word in enumerate(words)}, unk_token=special["unk_token"])
    )
    tokenizer.pre_tokenizer = WhitespaceSplit()
    fast = PreTrainedTokenizerFast(tokenizer_object=tokenizer, **special)
    fast.chat_template = chat_template
    return fast


def make_adapter(
    directory: Path, model: Path, *, seed: int, rank: int = 4, scale: float = 0.25
) -> Path:
    """Write a LoRA adapter for all linear modules of a model, its token embeddings and its head, in
    the format of peft. It is so strong that every answer differs from the model's own."""
    generator, weights, modules = torch.Generator().manual_seed(seed), {}, set()
    for name, parameter in AutoModelForCausalLM.from_pretrained(model).named_parameters():
        if parameter.ndim != 2:
            continue
        path, module = name.removesuffix(".weight"), name.split(".")[-2]
        is_embedding = module == "embed_tokens"
        rows, columns = parameter.T.shape if is_embedding else parameter.shape
        for letter, shape in {"A": (rank, columns), "B": (rows, rank)}.items():
            matrix = f"lora_embedding_{letter}" if is_embedding else f"lora_{letter}.weight"
            weights[f"base_model.model.{path}.{matrix}"] = scale * torch.randn(
                shape, generator=generator
            )
        modules.add(module)
    config = {
        "peft_type": "LORA",
        "r": rank,
        "lora_alpha": rank,
        "target_modules": sorted(modules),
        "bias": "none",
    }
    directory.mkdir(parents=True, exist_ok=True)
    save_file(weights, directory / "adapter_model.safetensors")
    (directory / "adapter_config.json").write_text(json.dumps(config))
    return directory


def make_head_map(directory: Path, *, window: int = 24, sinks: int = 3) -> HeadMap:
    """Heads of all three classes in turn."""
    config = load_config(directory)
    order = (
        HeadClass.LOCAL,
        HeadClass.GLOBAL,
        HeadClass.RETRIEVAL,
        HeadClass.LOCAL,
        HeadClass.LOCAL,
    )
    classes = (order[i % len(order)] for i in range(config.num_layers * config.num_kv_heads))
    return HeadMap(
        config.identity, sinks, window, tuple(zip(*[classes] * config.num_kv_heads, strict=True))
    )


def link_model(directory: Path, source: Path = MODEL_DIR) -> Path:
    """A model directory with the files of another, by default of the bundled one, that more can be
    written into."""
    directory.mkdir(parents=True)
    for file in source.iterdir():
        if file.is_file():
            (directory / file.name).symlink_to(file)
    return directory
