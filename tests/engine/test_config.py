"""What is read from a model directory, and what is refused."""

import shutil
from pathlib import Path
from typing import Any

import msgspec
import pytest
import torch
from safetensors.torch import load_file, save_file

from kvgraft.engine.checkpoint import UnsupportedModel, weight_files
from kvgraft.engine.config import load_config
from kvgraft.kv.rope import Rope
from models import BOS, EOS, FAMILIES, make_model

LLAMA3 = {
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 64,
}


def edited(source: Path, target: Path, **changes: Any) -> Path:
    """A copy of a model directory whose config.json has `changes` (None removes a key)."""
    shutil.copytree(source, target, dirs_exist_ok=True)
    config = msgspec.json.decode((target / "config.json").read_bytes()) | changes
    config = {key: value for key, value in config.items() if value is not None}
    (target / "config.json").write_bytes(msgspec.json.encode(config))
    return target


def test_every_field_is_read(model_dirs: dict[str, Path]) -> None:
    config = load_config(model_dirs["qwen3"])
    assert (config.architecture, config.num_layers, config.vocab_size) == (
        "Qwen3ForCausalLM",
        4,
        200,
    )
    assert (config.hidden_size, config.intermediate_size, config.head_dim) == (64, 96, 32)
    assert (config.num_heads, config.num_kv_heads, config.max_position) == (4, 2, 512)
    assert (config.norm_eps, config.rope) == (1e-6, Rope(32, theta=10000.0))
    assert (config.qk_norm, config.qkv_bias, config.out_bias, config.mlp_bias) == (
        True,
        False,
        False,
        False,
    )
    assert (config.tie_word_embeddings, config.dtype) == (False, torch.float32)
    assert (config.bos_token_id, config.eos_token_ids) == (BOS, (EOS,))


def test_families_differ_where_they_should(model_dirs: dict[str, Path]) -> None:
    configs = {family: load_config(path) for family, path in model_dirs.items()}
    assert {family for family, config in configs.items() if config.qk_norm} == {
        "qwen3",
        "qwen3_moe",
    }
    assert {family for family, config in configs.items() if config.qkv_bias} == {"qwen2"}
    assert {family for family, config in configs.items() if config.tie_word_embeddings} == {"qwen2"}
    dims = {family: config.head_dim for family, config in configs.items()}
    assert dims == dict.fromkeys(FAMILIES, 32) | {"llama": 16, "mistral": 16, "qwen2": 16}
    assert {family for family, config in configs.items() if config.latent} == {
        "deepseek_v2",
        "deepseek_v3",
    }
    assert {family for family, config in configs.items() if config.experts} == {"qwen3_moe"}


@pytest.mark.parametrize(
    ("old", "new", "rope"),
    [
        ({"rope_theta": 5e5}, {"rope_type": "default", "rope_theta": 5e5}, Rope(16, theta=5e5)),
        (
            {"rope_theta": 1e4, "rope_scaling": {"type": "linear", "factor": 2.0}},
            {"rope_type": "linear", "rope_theta": 1e4, "factor": 2.0},
            Rope(16, kind="linear", factor=2.0),
        ),
        (
            {"rope_theta": 5e5, "rope_scaling": {"rope_type": "llama3", **LLAMA3}},
            {"rope_type": "llama3", "rope_theta": 5e5, **LLAMA3},
            Rope(16, theta=5e5, kind="llama3", factor=8.0, original_max_position=64),
        ),
    ],
)
def test_both_spellings_of_rope(
    old: dict[str, Any],
    new: dict[str, Any],
    rope: Rope,
    model_dirs: dict[str, Path],
    tmp_path: Path,
) -> None:
    assert load_config(edited(model_dirs["llama"], tmp_path, rope_parameters=new)).rope == rope
    assert (
        load_config(edited(model_dirs["llama"], tmp_path, rope_parameters=None, **old)).rope == rope
    )


def test_end_of_sequence_ids_of_both_files(model_dirs: dict[str, Path], tmp_path: Path) -> None:
    model_dir = edited(model_dirs["llama"], tmp_path, eos_token_id=[7, 8])
    (model_dir / "generation_config.json").write_text(
        '{"eos_token_id": [8, 9], "temperature": 0.6}'
    )
    assert load_config(model_dir).eos_token_ids == (7, 8, 9)
    (model_dir / "generation_config.json").unlink()
    assert load_config(model_dir).eos_token_ids == (7, 8)


def test_one_end_of_sequence_id(model_dirs: dict[str, Path], tmp_path: Path) -> None:
    model_dir = edited(model_dirs["llama"], tmp_path, eos_token_id=5)
    (model_dir / "generation_config.json").write_text('{"eos_token_id": 6}')
    assert load_config(model_dir).eos_token_ids == (5, 6)


def window(size: int, full_layers: int) -> dict[str, Any]:
    """Qwen: sliding-window attention in all layers but the first `full_layers`."""
    return {
        "use_sliding_window": True,
        "sliding_window": size,
        "max_window_layers": full_layers,
        "layer_types": None,
    }


def scaled(kind: str, **parameters: Any) -> dict[str, Any]:
    return {"rope_parameters": {"rope_type": kind, "rope_theta": 1e4, "factor": 2.0, **parameters}}


LONGROPE = {
    "short_factor": [1.0] * 8,
    "long_factor": [2.0] * 8,
    "original_max_position_embeddings": 64,
}


@pytest.mark.parametrize(
    ("family", "changes", "message"),
    [
        (
            "llama",
            {"architectures": ["GemmaForCausalLM"]},
            "GemmaForCausalLM.*not supported: LlamaForCausalLM, Mist",
        ),
        ("llama", {"architectures": None, "model_type": ""}, "architecture None"),
        ("llama", {"architectures": "LlamaForCausalLM"}, r"config\.json is malformed"),
        ("llama", {"model_type": "qwen2"}, "model_type 'qwen2'"),
        ("llama", {"auto_map": {"AutoConfig": "evil.Config"}}, "auto_map"),
        ("llama", {"quantization_config": {"quant_method": "awq"}}, "quantized"),
        ("llama", {"hidden_act": "gelu"}, "activation 'gelu'"),
        ("llama", {"hidden_size": "wide"}, "transformers refuses.*config.json(.|\n)*hidden_size"),
        ("llama", {"num_key_value_heads": 0}, "num_key_value_heads must be positive, got 0"),
        ("llama", {"num_key_value_heads": 3}, "4 query heads cannot share 3"),
        ("llama", scaled("dynamic"), "dynamic"),
        ("llama", scaled("longrope", **LONGROPE), "longrope|long_factor"),
        ("llama", {"partial_rotary_factor": 0.5}, "partial_rotary_factor 0.5"),
        ("mistral", {"sliding_window": 64}, "sliding_window 64, 512 positions"),
        (
            "qwen2",
            {
                "use_sliding_window": True,
                "sliding_window": 64,
                "max_window_layers": 1,
                "layer_types": None,
            },
            "64",
        ),
        (
            "deepseek_v3",
            {"first_k_dense_replace": 2},
            "experts are not supported: first_k_dense_replace 2 of 3 layers",
        ),
        ("deepseek_v2", {"attention_bias": True}, "attention_bias with latent attention"),
        (
            "deepseek_v3",
            {"num_key_value_heads": 2},
            "num_key_value_heads 2 with latent attention.* 4, are",
        ),
        ("deepseek_v3", {"kv_lora_rank": 25}, "kv_lora_rank must be positive and even, got 25"),
        (
            "deepseek_v3",
            {"qk_rope_head_dim": 7},
            "qk_rope_head_dim must be positive and even, got 7",
        ),
        ("deepseek_v2", {"q_lora_rank": 0}, "q_lora_rank must be positive, got 0"),
        (
            "qwen3_moe",
            {"use_sliding_window": True, "sliding_window": 64},
            "sliding_window 64, 512 positions",
        ),
        ("qwen3_moe", {"num_experts_per_tok": 9}, "num_experts_per_tok must be 1 to 8, got 9"),
        ("qwen3_moe", {"num_local_experts": 0}, "num_experts must be positive, got 0"),
        (
            "qwen3_moe",
            {"moe_intermediate_size": 0},
            "moe_intermediate_size must be positive, got 0",
        ),
        ("qwen3_moe", {"decoder_sparse_step": 0}, "decoder_sparse_step must be positive, got 0"),
        (
            "qwen3",
            {"layer_types": ["full_attention"] * 3 + ["sliding_attention"]},
            "sliding_window None",
        ),
    ],
)
def test_refused_with_the_reason(
    family: str, changes: dict[str, Any], message: str, model_dirs: dict[str, Path], tmp_path: Path
) -> None:
    with pytest.raises(UnsupportedModel, match=message):
        load_config(edited(model_dirs[family], tmp_path, **changes))


@pytest.mark.parametrize(
    ("family", "changes"),
    [
        ("mistral", {"sliding_window": 512}),
        ("qwen2", window(64, 3)),
        ("qwen2", window(600, 1)),
        ("qwen2", window(64, 1) | {"use_sliding_window": False}),
    ],
)
def test_windows_that_hide_nothing_are_accepted(
    family: str, changes: dict[str, Any], model_dirs: dict[str, Path], tmp_path: Path
) -> None:
    assert load_config(edited(model_dirs[family], tmp_path, **changes)).max_position == 512


@pytest.mark.parametrize("name", ["config.json", "model.safetensors"])
def test_missing_files_are_named(name: str, model_dirs: dict[str, Path], tmp_path: Path) -> None:
    with pytest.raises(FileNotFoundError, match=r"config\.json"):
        load_config(tmp_path / "absent")
    model_dir = edited(model_dirs["llama"], tmp_path)
    (model_dir / name).unlink()
    with pytest.raises(FileNotFoundError, match=name):
        load_config(model_dir)


@pytest.mark.parametrize("name", ["config.json", "generation_config.json", "model.safetensors"])
def test_malformed_files_are_named(name: str, model_dirs: dict[str, Path], tmp_path: Path) -> None:
    model_dir = edited(model_dirs["llama"], tmp_path)
    for content in (b"", b"not json", b"\xff" * 100):
        (model_dir / name).write_bytes(content)
        with pytest.raises(UnsupportedModel, match=name):
            load_config(model_dir)


def test_an_index_names_only_files_of_the_directory(tmp_path: Path) -> None:
    (tmp_path / "inner").mkdir()
    (tmp_path / "outside.safetensors").touch()
    (tmp_path / "inner/model.safetensors.index.json").write_text(
        '{"weight_map": {"a": "../outside.safetensors"}}'
    )
    with pytest.raises(FileNotFoundError, match="outside"):
        weight_files(tmp_path / "inner")


@pytest.mark.parametrize(
    ("dtype", "name"), [(torch.float64, "F64"), (torch.float8_e4m3fn, "F8_E4M3")]
)
def test_other_dtypes_are_refused(
    dtype: torch.dtype, name: str, model_dirs: dict[str, Path], tmp_path: Path
) -> None:
    path = edited(model_dirs["llama"], tmp_path) / "model.safetensors"
    save_file(
        {key: tensor.to(dtype) for key, tensor in load_file(path).items()},
        path,
        metadata={"format": "pt"},
    )
    with pytest.raises(UnsupportedModel, match=name):
        load_config(tmp_path)


def test_identity_follows_the_content(model_dirs: dict[str, Path], tmp_path: Path) -> None:
    identity = load_config(model_dirs["llama"]).identity
    # config.json is written anew
    assert load_config(edited(model_dirs["llama"], tmp_path)).identity != identity
    shutil.copy(model_dirs["llama"] / "config.json", tmp_path)
    assert load_config(tmp_path).identity == identity
    assert load_config(make_model(tmp_path, "llama", seed=1)).identity != identity


def test_identity_sees_a_change_of_one_tensor(model_dirs: dict[str, Path], tmp_path: Path) -> None:
    path = edited(model_dirs["llama"], tmp_path) / "model.safetensors"
    tensors = load_file(path)
    identities = {load_config(tmp_path).identity}
    for name in tensors:
        changed = tensors | {name: tensors[name] + 0.01}
        save_file(changed, path, metadata={"format": "pt"})
        identities.add(load_config(tmp_path).identity)
    assert len(identities) == len(tensors) + 1
