"""What a model directory holds, read once and refused early when the engine could not run it exactly."""

import hashlib
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeVar

import msgspec
import torch
from transformers import AutoConfig

from kvgraft.kv.rope import Rope

SUPPORTED_ARCHITECTURES = {
    "LlamaForCausalLM": "llama",
    "MistralForCausalLM": "mistral",
    "Qwen2ForCausalLM": "qwen2",
    "Qwen3ForCausalLM": "qwen3",
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
_STORED_DTYPES = {"F32": torch.float32, "F16": torch.float16, "BF16": torch.bfloat16}
_MAX_HEADER_BYTES = 100_000_000  # the limit of the safetensors format
_SAMPLE_BYTES = 4096
_T = TypeVar("_T")


class _RawConfig(msgspec.Struct):
    """What is read of config.json before transformers may see it."""

    architectures: tuple[str, ...] | None = None
    model_type: str | None = None
    auto_map: Any = None
    quantization_config: Any = None


class _Index(msgspec.Struct):
    weight_map: dict[str, str]


class _GenerationConfig(msgspec.Struct):
    eos_token_id: int | tuple[int, ...] | None = None


class _StoredTensor(msgspec.Struct):
    dtype: str
    data_offsets: tuple[int, int]


class UnsupportedModel(ValueError):
    """The model directory is readable, but this engine would not compute the same function as its authors."""


@dataclass(frozen=True)
class ModelConfig:
    """A dense decoder of the Llama family.

    Attributes:
        max_position: number of positions the model was made for.
        qk_norm: RMSNorm over each query and key head before rotation (Qwen3).
        qkv_bias, out_bias, mlp_bias: whether those linear layers have biases.
        eos_token_ids: the ids that end a generation, of config.json and generation_config.json together.
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

    @property
    def project_flops(self) -> int:
        """Floating-point operations to get one token's queries, keys and values in one layer."""
        return 2 * self.hidden_size * (self.num_heads + 2 * self.num_kv_heads) * self.head_dim

    @property
    def output_flops(self) -> int:
        """Those to project one token's attention output in one layer."""
        return 2 * self.num_heads * self.head_dim * self.hidden_size

    @property
    def ffn_flops(self) -> int:
        """Those of one token's FFN in one layer."""
        return 6 * self.hidden_size * self.intermediate_size

    @property
    def attention_flops(self) -> int:
        """Those of one query's attention to one key in one layer, both products."""
        return 4 * self.num_heads * self.head_dim


def load_config(model_dir: str | Path) -> ModelConfig:
    """Read config.json, generation_config.json and the safetensors headers of a Hugging Face model directory.

    Raises:
        FileNotFoundError: the directory, its config.json or its safetensors files are missing.
        UnsupportedModel: the model is not one that this engine computes exactly; the message says why.
    """
    model_dir = Path(model_dir)
    architecture = _supported_architecture(_read_json(model_dir / "config.json", _RawConfig))
    files = weight_files(model_dir)
    hf = _with_defaults(model_dir)
    _refuse_inexact(hf, architecture)
    head_dim = getattr(hf, "head_dim", None) or hf.hidden_size // hf.num_attention_heads
    attention_bias = bool(getattr(hf, "attention_bias", False))
    dtype, identity = _fingerprint(model_dir, files)
    return ModelConfig(
        architecture=architecture,
        num_layers=hf.num_hidden_layers,
        hidden_size=hf.hidden_size,
        num_heads=hf.num_attention_heads,
        num_kv_heads=hf.num_key_value_heads,
        head_dim=head_dim,
        intermediate_size=hf.intermediate_size,
        vocab_size=hf.vocab_size,
        norm_eps=hf.rms_norm_eps,
        max_position=hf.max_position_embeddings,
        rope=_rope(head_dim, hf.rope_parameters),
        qk_norm=architecture == "Qwen3ForCausalLM",
        qkv_bias=attention_bias or architecture == "Qwen2ForCausalLM",
        out_bias=attention_bias,
        mlp_bias=bool(getattr(hf, "mlp_bias", False)),
        tie_word_embeddings=bool(hf.tie_word_embeddings),
        eos_token_ids=_eos_token_ids(hf, model_dir),
        bos_token_id=hf.bos_token_id,
        dtype=dtype,
        identity=identity,
    )


def weight_files(model_dir: Path) -> tuple[Path, ...]:
    """The safetensors files of the checkpoint: `model.safetensors`, or the shards that its index names.

    Raises:
        FileNotFoundError: there is neither, or a shard is missing.
    """
    single, index = model_dir / "model.safetensors", model_dir / "model.safetensors.index.json"
    if single.is_file():
        return (single,)
    if not index.is_file():
        raise FileNotFoundError(f"{model_dir} has no model.safetensors and no {index.name}: convert the weights first")
    names = sorted(set(_read_json(index, _Index).weight_map.values()))
    for name in names:
        if Path(name).name != name or not (model_dir / name).is_file():
            raise FileNotFoundError(f"{index} names {name!r}, which is not a file of {model_dir}")
    return tuple(model_dir / name for name in names)


def _read_json(path: Path, kind: type[_T]) -> _T:
    if not path.is_file():
        raise FileNotFoundError(f"{path.parent} is not a model directory: it has no {path.name}")
    try:
        return msgspec.json.decode(path.read_bytes(), type=kind)
    except msgspec.DecodeError as error:
        raise UnsupportedModel(f"{path} is malformed: {error}") from error


def _supported_architecture(raw: _RawConfig) -> str:
    architecture = raw.architectures[0] if raw.architectures else "None"
    if raw.auto_map:
        raise UnsupportedModel("the model brings its own code (auto_map), which is never run")
    if architecture not in SUPPORTED_ARCHITECTURES or raw.model_type != SUPPORTED_ARCHITECTURES[architecture]:
        raise UnsupportedModel(
            f"architecture {architecture} of model_type {raw.model_type!r} is not supported: "
            f"{', '.join(SUPPORTED_ARCHITECTURES)} are"
        )
    if raw.quantization_config:
        raise UnsupportedModel("quantized checkpoints are not supported: float32, float16 and bfloat16 are")
    return architecture


def _with_defaults(model_dir: Path) -> Any:
    """The transformers config: defaults filled in, old spellings made new."""
    try:
        return AutoConfig.from_pretrained(str(model_dir), trust_remote_code=False, local_files_only=True)
    except Exception as error:  # its validators raise many kinds
        raise UnsupportedModel(f"transformers refuses {model_dir / 'config.json'}: {error}") from error


def _refuse_inexact(hf: Any, architecture: str) -> None:
    """Refuse what the decoder does not compute, on the config with transformers' defaults filled in."""
    if hf.hidden_act != "silu":
        raise UnsupportedModel(f"activation {hf.hidden_act!r} is not supported: silu is")
    for name in _SIZES:
        if getattr(hf, name) < 1:
            raise UnsupportedModel(f"{name} must be positive, got {getattr(hf, name)}")
    if hf.num_attention_heads % hf.num_key_value_heads:
        raise UnsupportedModel(
            f"{hf.num_attention_heads} query heads cannot share {hf.num_key_value_heads} key-value heads evenly"
        )
    window = getattr(hf, "sliding_window", None)
    local_layers = set(getattr(hf, "layer_types", None) or ()) - {"full_attention"}
    slides = bool(local_layers) or (architecture == "MistralForCausalLM" and window is not None)
    if slides and (window is None or window < hf.max_position_embeddings):
        raise UnsupportedModel(
            f"sliding-window attention (sliding_window {window}, {hf.max_position_embeddings} positions) is not "
            "supported: full attention, or a window that covers every position, is"
        )


def _rope(head_dim: int, parameters: Mapping[str, Any]) -> Rope:
    try:
        return Rope.from_parameters(head_dim, parameters)
    except ValueError as error:
        raise UnsupportedModel(str(error)) from error


def _eos_token_ids(hf: Any, model_dir: Path) -> tuple[int, ...]:
    path = model_dir / "generation_config.json"
    generation = _read_json(path, _GenerationConfig) if path.is_file() else _GenerationConfig()
    ids: list[int] = []
    for value in (hf.eos_token_id, generation.eos_token_id):
        ids += [value] if isinstance(value, int) else value or ()
    return tuple(dict.fromkeys(ids))


def _read_header(path: Path) -> tuple[bytes, dict[str, _StoredTensor]]:
    """The header of a safetensors file (an 8-byte little-endian length, then that many bytes of JSON), and decoded."""
    with path.open("rb") as file:
        size = int.from_bytes(file.read(8), "little")
        header = file.read(min(size, _MAX_HEADER_BYTES))
    try:
        entries = msgspec.json.decode(header, type=dict[str, msgspec.Raw])
        entries.pop("__metadata__", None)
        return header, {name: msgspec.json.decode(entry, type=_StoredTensor) for name, entry in entries.items()}
    except msgspec.DecodeError as error:
        raise UnsupportedModel(f"{path} is not a safetensors file: {error}") from error


def _fingerprint(model_dir: Path, files: tuple[Path, ...]) -> tuple[torch.dtype, str]:
    """The stored dtype, and SHA-256 over config.json and every file's name, size, header and a sample per tensor.

    The samples tell two checkpoints of one shape apart (a model and its fine-tune) without reading them whole.
    """
    config = (model_dir / "config.json").read_bytes()
    digest = hashlib.sha256(f"{len(config)}|".encode() + config)
    dtypes: set[str] = set()
    for path in files:
        header, tensors = _read_header(path)
        dtypes |= {tensor.dtype for tensor in tensors.values()}
        digest.update(f"|{path.name}|{path.stat().st_size}|{len(header)}|".encode() + header)
        with path.open("rb") as file:
            for start, end in sorted(tensor.data_offsets for tensor in tensors.values()):
                size = min(_SAMPLE_BYTES, end - start)
                file.seek(8 + len(header) + (start + end - size) // 2)
                digest.update(file.read(size))
    if not dtypes or not dtypes <= _STORED_DTYPES.keys():
        raise UnsupportedModel(f"weights of dtypes {sorted(dtypes)} are not supported: F32, F16 and BF16 are")
    return _STORED_DTYPES[min(dtypes)], digest.hexdigest()
