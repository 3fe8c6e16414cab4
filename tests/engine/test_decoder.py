"""The decoder against transformers, on tiny random models of every family."""

from pathlib import Path
from typing import Any

import msgspec
import pytest
import torch
import torch.nn.functional as F
from models import VOCAB_SIZE, make_model
from safetensors.torch import load_file, save_file
from torch import Tensor
from transformers import AutoModelForCausalLM

from kvgraft.engine.decoder import Decoder

LLAMA3 = {
    "rope_type": "llama3",
    "rope_theta": 10000.0,
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 64,
}
CASES: dict[str, tuple[str, dict[str, Any]]] = {
    "llama": ("llama", {}),
    "llama-one-kv-head": ("llama", {"num_key_value_heads": 1}),
    "llama-no-gqa-tied": ("llama", {"num_key_value_heads": 4, "tie_word_embeddings": True}),
    "llama-wide-heads": ("llama", {"head_dim": 24}),
    "llama-biases": ("llama", {"attention_bias": True, "mlp_bias": True}),
    "llama-linear": ("llama", {"rope_parameters": {"rope_type": "linear", "rope_theta": 10000.0, "factor": 4.0}}),
    "llama-llama3": ("llama", {"rope_parameters": LLAMA3}),
    "mistral": ("mistral", {}),
    "mistral-harmless-window": ("mistral", {"sliding_window": 512}),
    "qwen2": ("qwen2", {}),
    "qwen2-untied": ("qwen2", {"tie_word_embeddings": False}),
    "qwen3": ("qwen3", {}),
    "qwen3-biases": ("qwen3", {"attention_bias": True}),
    "sharded": ("qwen3", {"max_shard_size": "50KB"}),
}


def dense_logits(decoder: Decoder, token_ids: Tensor) -> Tensor:
    """The whole model with plain causal attention: token ids [n] -> logits [n, V]."""
    config = decoder.config
    cos, sin = config.rope.table(torch.arange(len(token_ids)))
    hidden = decoder.embed(token_ids)
    for layer in range(config.num_layers):
        q, k, v = (x.transpose(0, 1) for x in decoder.project(layer, hidden, cos, sin))  # [H, n, d]
        attended = F.scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=True)
        hidden = decoder.finish(layer, hidden, attended.transpose(0, 1).flatten(1))
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
