"""The decoder against transformers, on tiny random models of every family."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from safetensors.torch import load_file, save_file
from torch import Tensor
from transformers import AutoModelForCausalLM

from kvgraft.engine.decoder import Decoder
from models import VOCAB_SIZE, make_model

LLAMA3 = {
    "rope_type": "llama3",
    "rope_theta": 10000.0,
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 64,
}
YARN = {
    "rope_type": "yarn",
    "rope_theta": 10000.0,
    "factor": 4.0,
    "original_max_position_embeddings": 64,
}
CASES: dict[str, tuple[str, dict[str, Any]]] = {
    "llama": ("llama", {}),
    "llama-one-kv-head": ("llama", {"num_key_value_heads": 1}),
    "llama-no-gqa-tied": ("llama", {"num_key_value_heads": 4, "tie_word_embeddings": True}),
    "llama-wide-heads": ("llama", {"head_dim": 24}),
    "llama-biases": ("llama", {"attention_bias": True, "mlp_bias": True}),
    "llama-linear": (
        "llama",
        {"rope_parameters": {"rope_type": "linear", "rope_theta": 10000.0, "factor": 4.0}},
    ),
    "llama-llama3": ("llama", {"rope_parameters": LLAMA3}),
    "llama-yarn": ("llama", {"rope_parameters": YARN}),
    "mistral": ("mistral", {}),
    "mistral-yarn-fractions": (
        "mistral",
        {"rope_parameters": YARN | {"truncate": False, "beta_fast": 4}},
    ),
    "mistral-harmless-window": ("mistral", {"sliding_window": 512}),
    "qwen2": ("qwen2", {}),
    "qwen2-untied": ("qwen2", {"tie_word_embeddings": False}),
    "qwen2-yarn-factor": ("qwen2", {"rope_parameters": YARN | {"attention_factor": 1.5}}),
    "qwen3": ("qwen3", {}),
    "qwen3-yarn": ("qwen3", {"rope_parameters": YARN}),
    "qwen3-biases": ("qwen3", {"attention_bias": True}),
    "qwen3-moe": ("qwen3_moe", {}),
    "qwen3-moe-yarn": (
        "qwen3_moe",
        {"rope_parameters": YARN, "attention_bias": True, "tie_word_embeddings": True},
    ),
    "qwen3-moe-weights-of-all": ("qwen3_moe", {"norm_topk_prob": False, "num_experts_per_tok": 1}),
    "qwen3-moe-every-other-layer": ("qwen3_moe", {"decoder_sparse_step": 2, "mlp_only_layers": []}),
    "qwen3-moe-no-layer": ("qwen3_moe", {"decoder_sparse_step": 4}),
    "deepseek-v2": ("deepseek_v2", {}),
    "deepseek-v2-query-latent": ("deepseek_v2", {"q_lora_rank": 40, "mlp_bias": True}),
    "deepseek-v3": ("deepseek_v3", {}),
    "deepseek-v3-halves": ("deepseek_v3", {"rope_interleave": False, "q_lora_rank": None}),
    "deepseek-v3-linear": (
        "deepseek_v3",
        {"rope_parameters": {"rope_type": "linear", "rope_theta": 10000.0, "factor": 4.0}},
    ),
    "deepseek-v2-yarn": (
        "deepseek_v2",
        {"rope_parameters": YARN | {"mscale": 0.707, "mscale_all_dim": 1.4}},
    ),
    "deepseek-v3-yarn-of-one-scale": (
        "deepseek_v3",
        {"rope_parameters": YARN | {"mscale": 1.0, "mscale_all_dim": 1.0}},
    ),
    "deepseek-v3-yarn-plain": ("deepseek_v3", {"rope_parameters": YARN}),
    "sharded": ("qwen3", {"max_shard_size": "50KB"}),
}


def finish(decoder: Decoder, layer: int, hidden: Tensor, attended: Tensor) -> Tensor:
    return decoder.feed_forward(layer, decoder.add_attention(layer, hidden, attended))


def dense_logits(decoder: Decoder, token_ids: Tensor) -> Tensor:
    """The whole model with plain causal attention: token ids [n] -> logits [n, V]."""
    config = decoder.config
    cos, sin = config.rope.fresh_table(torch.arange(len(token_ids)))
    hidden = decoder.embed(token_ids)
    for layer in range(config.num_layers):
        q, k, v = (x.transpose(0, 1) for x in decoder.project(layer, hidden, cos, sin))  # [H, n, d]
        scale = config.attention_scale
        attended = F.scaled_dot_product_attention(
            q, k, v, is_causal=True, scale=scale, enable_gqa=True
        )
        hidden = finish(decoder, layer, hidden, attended.transpose(0, 1).flatten(1))
    return decoder.logits(hidden)


def oracle(model_dir: Path, token_ids: Tensor, dtype: torch.dtype = torch.float32) -> Tensor:
    model = AutoModelForCausalLM.from_pretrained(model_dir, dtype=dtype, attn_implementation="sdpa")
    with torch.inference_mode():
        return model(token_ids[None]).logits[0].float()


def tokens(n: int) -> Tensor:
    return torch.randint(VOCAB_SIZE, (n,), generator=torch.Generator().manual_seed(1))


@pytest.mark.parametrize("case", CASES)
def test_logits_equal_transformers(case: str, tmp_path: Path) -> None:
    family, overrides = CASES[case]
    model_dir = make_model(tmp_path, family, **overrides)
    assert (len(list(model_dir.glob("*.safetensors"))) > 1) == (case == "sharded")
    expected = oracle(model_dir, tokens(150))
    assert 0.5 < expected.std() < 20
    logits = dense_logits(Decoder.from_pretrained(model_dir), tokens(150))
    assert logits.dtype == torch.float32
    torch.testing.assert_close(logits, expected, atol=1e-4, rtol=0)


@pytest.mark.parametrize("family", ["llama", "mistral", "qwen2", "qwen3", "qwen3_moe"])
def test_bfloat16_is_as_close_to_float32_as_transformers_is(family: str, tmp_path: Path) -> None:
    model_dir = make_model(tmp_path, family, dtype=torch.bfloat16)
    decoder = Decoder.from_pretrained(model_dir)
    assert decoder.dtype == decoder.config.dtype == torch.bfloat16
    exact = oracle(model_dir, tokens(100))
    error = (dense_logits(decoder, tokens(100)) - exact).abs().mean()
    assert 0 < error < 1.5 * (oracle(model_dir, tokens(100), torch.bfloat16) - exact).abs().mean()


def test_dtype_is_chosen_by_the_caller(model_dirs: dict[str, Path]) -> None:
    decoder = Decoder.from_pretrained(model_dirs["llama"], dtype=torch.float16, device="cpu")
    assert decoder.dtype == torch.float16
    assert decoder.device == torch.device("cpu")
    assert decoder.config.dtype == torch.float32


@pytest.mark.parametrize("family", ["qwen2", "qwen3", "qwen3_moe"])
def test_rows_are_independent_and_inputs_untouched(
    family: str, model_dirs: dict[str, Path]
) -> None:
    decoder = Decoder.from_pretrained(model_dirs[family])
    config = decoder.config
    hidden = decoder.embed(tokens(40))
    attended = torch.randn(
        40, config.num_heads * config.head_dim, generator=torch.Generator().manual_seed(2)
    )
    before = hidden.clone(), attended.clone()
    rows = torch.tensor([3, 30, 17])
    cos, sin = config.rope.fresh_table(torch.arange(40))
    for whole, part in zip(
        (*decoder.project(1, hidden, cos, sin), finish(decoder, 1, hidden, attended)),
        (
            *decoder.project(1, hidden[rows], cos[rows], sin[rows]),
            finish(decoder, 1, hidden[rows], attended[rows]),
        ),
        strict=True,
    ):
        torch.testing.assert_close(whole[rows], part, atol=1e-5, rtol=1e-5)
    assert torch.equal(hidden, before[0])
    assert torch.equal(attended, before[1])


def test_no_rows(model_dirs: dict[str, Path]) -> None:
    decoder = Decoder.from_pretrained(model_dirs["qwen3"])
    cos, sin = decoder.config.rope.fresh_table(torch.arange(0))
    hidden = decoder.embed(tokens(0))
    q, k, v = decoder.project(0, hidden, cos, sin)
    assert (q.shape, k.shape, v.shape) == ((0, 4, 32), (0, 2, 32), (0, 2, 32))
    assert decoder.logits(finish(decoder, 0, hidden, q.flatten(1))).shape == (0, VOCAB_SIZE)


def test_tied_head_shares_memory_unless_one_is_stored(tmp_path: Path) -> None:
    model_dir = make_model(tmp_path, "qwen2")
    weights = Decoder.from_pretrained(model_dir).weights
    assert weights.head is weights.embedding
    rewrite(model_dir, lambda tensors: tensors | {"lm_head.weight": torch.randn(VOCAB_SIZE, 64)})
    expected = oracle(model_dir, tokens(20))
    torch.testing.assert_close(
        dense_logits(Decoder.from_pretrained(model_dir), tokens(20)), expected, atol=1e-4, rtol=0
    )


def rewrite(model_dir: Path, change: Callable[[dict[str, Tensor]], dict[str, Tensor]]) -> None:
    path = model_dir / "model.safetensors"
    save_file(change(load_file(path)), path, metadata={"format": "pt"})


def without(name: str) -> Callable[[dict[str, Tensor]], dict[str, Tensor]]:
    return lambda tensors: {key: tensor for key, tensor in tensors.items() if key != name}


K_PROJ, K_NORM = "model.layers.2.self_attn.k_proj.weight", "model.layers.1.self_attn.k_norm.weight"


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (without(K_PROJ), f"lacks 1 tensors, the first is '{K_PROJ}'"),
        (without("lm_head.weight"), r"lacks 1 tensors, the first is 'lm_head\.weight'"),
        (
            lambda tensors: tensors | {"model.layers.0.mlp.up_proj.bias": torch.zeros(96)},
            r"unexpected.*up_proj\.bias",
        ),
        (
            lambda tensors: tensors | {"model.layers.4.input_layernorm.weight": torch.zeros(64)},
            r"unexpected.*layers\.4",
        ),
        (
            lambda tensors: tensors | {K_PROJ: torch.zeros(32, 64)},
            r"k_proj\.weight' has shape \[32, 64\]",
        ),
        (lambda tensors: tensors | {K_NORM: torch.zeros(1)}, r"k_norm\.weight' has shape \[1\]"),
    ],
)
def test_wrong_tensors_are_named(
    change: Callable[[dict[str, Tensor]], dict[str, Tensor]], message: str, tmp_path: Path
) -> None:
    model_dir = make_model(tmp_path, "qwen3")
    rewrite(model_dir, change)
    with pytest.raises(ValueError, match=message):
        Decoder.from_pretrained(model_dir)


EXPERT = "model.layers.2.mlp.experts.5.up_proj.weight"
EXPERTS = "model.layers.0.mlp.experts.gate_up_proj"


def test_experts_of_a_layer_may_be_one_tensor(model_dirs: dict[str, Path], tmp_path: Path) -> None:
    model = AutoModelForCausalLM.from_pretrained(model_dirs["qwen3_moe"])
    model.save_pretrained(tmp_path, save_original_format=False)
    one_by_one = dense_logits(Decoder.from_pretrained(model_dirs["qwen3_moe"]), tokens(50))
    assert torch.equal(dense_logits(Decoder.from_pretrained(tmp_path), tokens(50)), one_by_one)
    rewrite(tmp_path, lambda tensors: tensors | {EXPERTS: tensors[EXPERTS][:7]})
    with pytest.raises(
        ValueError, match=rf"{EXPERTS}' has shape \[7, 48, 64\], expected \[8, 48, 64\]"
    ):
        Decoder.from_pretrained(tmp_path)


def test_a_missing_expert_is_named(tmp_path: Path) -> None:
    rewrite(make_model(tmp_path, "qwen3_moe"), without(EXPERT))
    with pytest.raises(ValueError, match=f"lacks 1 tensors, the first is '{EXPERT}'"):
        Decoder.from_pretrained(tmp_path)


def test_rotary_buffers_of_old_checkpoints_are_ignored(tmp_path: Path) -> None:
    model_dir = make_model(tmp_path, "llama")
    expected = dense_logits(Decoder.from_pretrained(model_dir), tokens(20))
    rewrite(
        model_dir,
        lambda tensors: tensors | {"model.layers.0.self_attn.rotary_emb.inv_freq": torch.zeros(8)},
    )
    assert torch.equal(dense_logits(Decoder.from_pretrained(model_dir), tokens(20)), expected)


def test_a_missing_shard_is_named(tmp_path: Path) -> None:
    model_dir = make_model(tmp_path, "llama", max_shard_size="50KB")
    shard = min(model_dir.glob("model-*.safetensors"))
    shard.unlink()
    with pytest.raises(FileNotFoundError, match=shard.name):
        Decoder.from_pretrained(model_dir)


@pytest.mark.parametrize("family", ["llama", "qwen2"])
def test_a_truncated_file_is_named(family: str, tmp_path: Path) -> None:
    path = make_model(tmp_path, family) / "model.safetensors"
    path.write_bytes(path.read_bytes()[:-100])
    with pytest.raises(ValueError, match=r"model\.safetensors is damaged"):
        Decoder.from_pretrained(tmp_path)
