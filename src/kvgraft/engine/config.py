"""Configuration of a model directory, read once. Models that the engine cannot compute exactly are
refused here."""

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import msgspec
import torch
from transformers import AutoConfig

from kvgraft.engine.checkpoint import (
    UnsupportedModel,
    identify,
    read_json,
    stored_dtype,
    weight_files,
)
from kvgraft.engine.experts import Experts, read_experts
from kvgraft.kv.rope import Rope
from kvgraft.kv.rope_scaling import mscale

SUPPORTED_ARCHITECTURES = {
    "LlamaForCausalLM": "llama",
    "MistralForCausalLM": "mistral",
    "Qwen2ForCausalLM": "qwen2",
    "Qwen3ForCausalLM": "qwen3",
    "Qwen3MoeForCausalLM": "qwen3_moe",
    "DeepseekV2ForCausalLM": "deepseek_v2",
    "DeepseekV3ForCausalLM": "deepseek_v3",
}
_SIZES = (
    "hidden_size",
    "intermediate_size",
    "max_position_embeddings",
    "num_attention_heads",
    "num_hidden_layers",
    "num_key_value_heads",
    "vocab_size",
)


class _RawConfig(msgspec.Struct):
    """Fields of config.json that are checked before transformers reads the file."""

    architectures: tuple[str, ...] | None = None
    model_type: str | None = None
    auto_map: Any = None
    quantization_config: Any = None


class _GenerationConfig(msgspec.Struct):
    eos_token_id: int | tuple[int, ...] | None = None


@dataclass(frozen=True)
class LatentAttention:
    """Sizes of multi-head latent attention (MLA; DeepSeek-V2, section 2.1).

    Attributes:
        rank: size of the latent, from which all heads get their keys and values.
        query_rank: size of the queries' own latent; None if they have none.
        nope_dim, rope_dim: channels of a query head without position, and channels that RoPE
            rotates.
        value_dim: channels of a head's value.
        logit_factor: factor of the attention logits for the context that YaRN added
            (`mscale_all_dim`).
        interleaved: whether RoPE rotates channel 2i of `rope_dim` with 2i + 1; otherwise i is
            rotated with its partner in the other half.
    """

    rank: int
    query_rank: int | None
    nope_dim: int
    rope_dim: int
    value_dim: int
    interleaved: bool
    logit_factor: float = 1.0

    @property
    def query_dim(self) -> int:
        """Channels of a query head."""
        return self.nope_dim + self.rope_dim


@dataclass(frozen=True)
class ModelConfig:
    """A decoder of the Llama family, with or without experts (Qwen3-MoE), or one with latent
    attention (DeepSeek) and no experts.

    Attributes:
        num_kv_heads, head_dim: shape of the KV cache. Latent attention has one head of `rank +
            rope_dim`.
        latent: None with grouped-query attention.
        intermediate_size: size of the FFNs that are no experts.
        experts: None if no layer has any.
        max_position: number of positions the model was made for.
        qk_norm: whether RMSNorm is applied to each query and key head before rotation (Qwen3).
        qkv_bias, out_bias, mlp_bias: whether those linear layers have biases.
        eos_token_ids: ids that end a generation, from config.json and generation_config.json
            together.
        dtype: as stored in the checkpoint.
        identity: hexadecimal SHA-256 fingerprint of the checkpoint; part of every cache key.
    """

    architecture: str
    num_layers: int
    hidden_size: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    intermediate_size: int
    vocab_size: int
    norm_eps: float
    max_position: int
    rope: Rope
    qk_norm: bool
    qkv_bias: bool
    out_bias: bool
    mlp_bias: bool
    tie_word_embeddings: bool
    eos_token_ids: tuple[int, ...]
    bos_token_id: int | None
    dtype: torch.dtype
    identity: str
    latent: LatentAttention | None = None
    experts: Experts | None = None

    @property
    def group(self) -> int:
        """Query heads per KV head."""
        return self.num_heads // self.num_kv_heads

    @property
    def attention_scale(self) -> float:
        """Factor of the attention logits."""
        if self.latent is not None:
            return self.latent.query_dim**-0.5 * self.latent.logit_factor
        return float(self.head_dim) ** -0.5

    @property
    def project_flops(self) -> int:
        """Floating-point operations that compute queries, keys and values of one token in one
        layer."""
        if self.latent is not None:
            width, queries = self.latent.query_rank, self.num_heads * self.latent.query_dim
            of_queries = (
                self.hidden_size * queries
                if width is None
                else width * (self.hidden_size + queries)
            )
            absorbed = self.num_heads * self.latent.nope_dim * self.latent.rank
            return 2 * (of_queries + absorbed + self.hidden_size * self.head_dim)
        return 2 * self.hidden_size * (self.num_heads + 2 * self.num_kv_heads) * self.head_dim

    @property
    def output_flops(self) -> int:
        """Floating-point operations that project one token's attention output in one layer."""
        if self.latent is not None:
            return (
                2 * self.num_heads * self.latent.value_dim * (self.latent.rank + self.hidden_size)
            )
        return 2 * self.num_heads * self.head_dim * self.hidden_size

    @property
    def attention_flops(self) -> int:
        """Floating-point operations of both attention products for one query and one key in one
        layer."""
        return 4 * self.num_heads * self.head_dim

    def ffn_flops(self, layer: int) -> int:
        """Floating-point operations of one token's FFN in a layer. With experts: of the router and
        the active experts."""
        if self.experts is not None and layer in self.experts.layers:
            return self.hidden_size * (
                6 * self.experts.active * self.experts.inner_size + 2 * self.experts.count
            )
        return 6 * self.hidden_size * self.intermediate_size


def load_config(model_dir: str | Path) -> ModelConfig:
    """Read config.json, generation_config.json and the safetensors headers of a Hugging Face model
    directory.

    Raises:
        FileNotFoundError: the directory, its config.json or its safetensors files are missing.
        UnsupportedModel: the model is not one that this engine computes exactly; the message says
            why.
    """
    model_dir = Path(model_dir)
    architecture = _supported_architecture(read_json(model_dir / "config.json", _RawConfig))
    files = weight_files(model_dir)
    hf = _with_defaults(model_dir)
    _refuse_inexact(hf, architecture)
    latent = _latent(hf) if architecture.startswith("Deepseek") else None
    head_dim = getattr(hf, "head_dim", None) or hf.hidden_size // hf.num_attention_heads
    if latent is not None:
        head_dim = latent.rank + latent.rope_dim

    attention_bias = bool(getattr(hf, "attention_bias", False))
    return ModelConfig(
        architecture=architecture,
        num_layers=hf.num_hidden_layers,
        hidden_size=hf.hidden_size,
        num_heads=hf.num_attention_heads,
        num_kv_heads=hf.num_key_value_heads if latent is None else 1,
        head_dim=head_dim,
        intermediate_size=hf.intermediate_size,
        vocab_size=hf.vocab_size,
        norm_eps=hf.rms_norm_eps,
        max_position=hf.max_position_embeddings,
        rope=_rope(head_dim, hf.rope_parameters, latent),
        qk_norm=architecture.startswith("Qwen3"),
        qkv_bias=attention_bias or architecture == "Qwen2ForCausalLM",
        out_bias=attention_bias,
        mlp_bias=bool(getattr(hf, "mlp_bias", False)),
        tie_word_embeddings=bool(hf.tie_word_embeddings),
        eos_token_ids=_eos_token_ids(hf, model_dir),
        bos_token_id=hf.bos_token_id,
        dtype=stored_dtype(files),
        identity=identify(model_dir),
        latent=latent,
        experts=read_experts(hf) if architecture == "Qwen3MoeForCausalLM" else None,
    )


def _supported_architecture(raw: _RawConfig) -> str:
    architecture = raw.architectures[0] if raw.architectures else "None"
    if raw.auto_map:
        raise UnsupportedModel("the model brings its own code (auto_map), which is never run")

    if (
        architecture not in SUPPORTED_ARCHITECTURES
        or raw.model_type != SUPPORTED_ARCHITECTURES[architecture]
    ):
        raise UnsupportedModel(
            f"architecture {architecture} of model_type {raw.model_type!r} is not supported: "
            f"{', '.join(SUPPORTED_ARCHITECTURES)} are"
        )

    if raw.quantization_config:
        raise UnsupportedModel(
            "quantized checkpoints are not supported: float32, float16 and bfloat16 are"
        )

    return architecture


def _with_defaults(model_dir: Path) -> Any:
    """Load the transformers config, with defaults filled in and old spellings replaced."""
    try:
        return AutoConfig.from_pretrained(
            str(model_dir), trust_remote_code=False, local_files_only=True
        )
    except Exception as error:  # its validators raise many kinds
        raise UnsupportedModel(
            f"transformers refuses {model_dir / 'config.json'}: {error}"
        ) from error


def _refuse_inexact(hf: Any, architecture: str) -> None:
    """Raise UnsupportedModel for settings that the decoder does not compute. The config must have
    its defaults filled in."""
    if hf.hidden_act != "silu":
        raise UnsupportedModel(f"activation {hf.hidden_act!r} is not supported: silu is")

    for name in _SIZES:
        if getattr(hf, name) < 1:
            raise UnsupportedModel(f"{name} must be positive, got {getattr(hf, name)}")

    if hf.num_attention_heads % hf.num_key_value_heads:
        raise UnsupportedModel(
            f"{hf.num_attention_heads} query heads cannot share {hf.num_key_value_heads} key-value "
            "heads evenly"
        )

    window = getattr(hf, "sliding_window", None)
    local_layers = set(getattr(hf, "layer_types", None) or ()) - {"full_attention"}
    in_all_layers = (
        architecture in ("MistralForCausalLM", "Qwen3MoeForCausalLM") and window is not None
    )
    slides = bool(local_layers) or in_all_layers
    if slides and (window is None or window < hf.max_position_embeddings):
        raise UnsupportedModel(
            f"sliding-window attention (sliding_window {window}, {hf.max_position_embeddings} "
            "positions) is not "
            "supported: full attention, or a window that covers every position, is"
        )


def _latent(hf: Any) -> LatentAttention:
    """Return the sizes of a DeepSeek model; UnsupportedModel if it has experts or settings that the
    decoder does not compute."""
    if hf.first_k_dense_replace < hf.num_hidden_layers:
        raise UnsupportedModel(
            "layers of experts are not supported: first_k_dense_replace "
            f"{hf.first_k_dense_replace} of "
            f"{hf.num_hidden_layers} layers are dense, and all must be"
        )
    if hf.attention_bias:
        raise UnsupportedModel("attention_bias with latent attention is not supported")
    if hf.num_key_value_heads != hf.num_attention_heads:
        raise UnsupportedModel(
            f"num_key_value_heads {hf.num_key_value_heads} with latent attention: only as many as "
            "query heads, "
            f"{hf.num_attention_heads}, are supported"
        )

    for name in (
        "qk_nope_head_dim",
        "v_head_dim",
        "q_lora_rank",
        "kv_lora_rank",
        "qk_rope_head_dim",
    ):
        size, halved = getattr(hf, name), name in ("kv_lora_rank", "qk_rope_head_dim")
        if (size is None and name == "q_lora_rank") or (size > 0 and not (halved and size % 2)):
            continue
        raise UnsupportedModel(
            f"{name} must be positive{' and even' if halved else ''}, got {size}"
        )

    scaling = hf.rope_parameters  # validated by transformers
    mscale_all_dim = scaling.get("mscale_all_dim") if scaling["rope_type"] != "default" else None
    return LatentAttention(
        rank=hf.kv_lora_rank,
        query_rank=hf.q_lora_rank,
        nope_dim=hf.qk_nope_head_dim,
        rope_dim=hf.qk_rope_head_dim,
        value_dim=hf.v_head_dim,
        interleaved=bool(getattr(hf, "rope_interleave", True)),
        logit_factor=mscale(scaling["factor"], mscale_all_dim) ** 2 if mscale_all_dim else 1.0,
    )


def _rope(head_dim: int, parameters: Mapping[str, Any], latent: LatentAttention | None) -> Rope:
    try:
        return Rope.from_parameters(head_dim, parameters, latent.rope_dim if latent else None)
    except ValueError as error:
        raise UnsupportedModel(str(error)) from error


def _eos_token_ids(hf: Any, model_dir: Path) -> tuple[int, ...]:
    path = model_dir / "generation_config.json"
    generation = read_json(path, _GenerationConfig) if path.is_file() else _GenerationConfig()
    ids: list[int] = []
    for value in (hf.eos_token_id, generation.eos_token_id):
        ids += [value] if isinstance(value, int) else value or ()
    return tuple(dict.fromkeys(ids))
