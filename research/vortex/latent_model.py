"""A small model of latent attention (MLA): the bundled one with its keys and values in a latent,
trained on.

All channels of the bundled model's keys turn. Here those that turn fast make the key that all heads
share, the mean of the KV heads' own, aligned; those that turn slowly go to the latent, which does
not turn, beside the values. That is not the same model, so it is trained on by the testbed's recipe
(`python -m research.testbed --latent`)."""

import math
from typing import Any

import torch
from torch import Tensor
from transformers import DeepseekV2Config, DeepseekV2ForCausalLM, LlamaForCausalLM

from kvgraft_lab.testbed import MODEL_DIR
from research.testbed.batches import make_batch
from research.testbed.curriculum import STAGES

HEADS, KV_HEADS, DIM = 8, 4, 32
FAST_PAIRS = 8  # of 16: those that turn by more than a thousandth a token
CALIBRATION = (3, 4096)  # stage and tokens of the texts on which latents and keys are measured


def make_config() -> DeepseekV2Config:
    """DeepSeek-V2's layers without experts; the latent has room for all keys and values, 256
    channels."""
    bundled = LlamaForCausalLM.config_class.from_pretrained(MODEL_DIR)
    same = (
        "vocab_size", "hidden_size", "intermediate_size", "num_hidden_layers",
        "num_attention_heads",
        "max_position_embeddings", "rope_parameters", "rms_norm_eps", "tie_word_embeddings",
        "bos_token_id",
        "eos_token_id", "pad_token_id",
    )  # fmt: skip
    return DeepseekV2Config(
        **{name: getattr(bundled, name) for name in same},
        num_key_value_heads=HEADS,
        kv_lora_rank=2 * KV_HEADS * DIM,
        q_lora_rank=None,
        qk_nope_head_dim=DIM,
        qk_rope_head_dim=DIM,
        v_head_dim=DIM,
        first_k_dense_replace=bundled.num_hidden_layers,  # no layer has experts
    )


@torch.no_grad()
def initialise(model: DeepseekV2ForCausalLM) -> None:
    """Start from the bundled weights."""
    bundled = LlamaForCausalLM.from_pretrained(MODEL_DIR, dtype=torch.float32).eval()
    measured = _measure(bundled)
    known = {
        name: weight for name, weight in bundled.state_dict().items() if "self_attn" not in name
    }
    missing, _ = model.load_state_dict(known, strict=False)
    if any("self_attn" not in name for name in missing):
        raise RuntimeError(f"the bundled model lacks {missing}")
    for layer, old, (size, key) in zip(
        model.model.layers, bundled.model.layers, measured, strict=True
    ):
        _convert(layer.self_attn, old.self_attn, size, key)


def _convert(attention: Any, old: Any, size: float, key: Tensor) -> None:
    """The weights of one attention layer.

    Args:
        size: root mean square of its latents, which are normed here.
        key: the mean key [Hkv, d] before it turns. Where all keys are their head's mean, as nearly
            in layer 0, whose heads look for distances only, nothing is lost by sharing.
    """
    group, fast = HEADS // KV_HEADS, torch.arange(DIM) % (DIM // 2) < FAST_PAIRS
    # logits are divided by the root of 64, not 32
    query = old.q_proj.weight.unflatten(0, (HEADS, DIM)) * math.sqrt(2)
    keys, values = (x.weight.unflatten(0, (KV_HEADS, DIM)) for x in (old.k_proj, old.v_proj))
    nope = query.masked_fill(fast[:, None], 0.0)
    # [Hkv, d / 2, 1]
    turn = torch.view_as_complex(torch.stack(key.unflatten(1, (2, -1)).unbind(1), dim=-1))[
        ..., None
    ]
    shared = _turned(keys, turn.conj() / turn.abs()).mean(0)
    asking = _turned(query, (turn.conj() / turn.abs().mean(0)).repeat_interleave(group, dim=0))
    rope = _interleaved(asking.masked_fill(~fast[:, None], 0.0))
    attention.q_proj.weight.copy_(torch.cat((nope, rope), dim=1).flatten(0, 1))
    kept = (keys.flatten(0, 1), values.flatten(0, 1), _interleaved(shared))
    attention.kv_a_proj_with_mqa.weight.copy_(torch.cat(kept))
    attention.kv_a_layernorm.weight.fill_(size)
    every = torch.eye(2 * KV_HEADS * DIM).view(2, KV_HEADS, DIM, -1).repeat_interleave(group, dim=1)
    # of each head its key, then its value
    attention.kv_b_proj.weight.copy_(every.transpose(0, 1).flatten(0, 2))
    attention.o_proj.weight.copy_(old.o_proj.weight)


def _turned(rows: Tensor, factors: Tensor) -> Tensor:
    """Channels [H, d, x] of which i turns with the one in the other half, as complex numbers times
    [H, d / 2, 1]."""
    low, high = rows.chunk(2, dim=1)
    found = torch.complex(low, high) * factors
    return torch.cat((found.real, found.imag), dim=1)


def _interleaved(rows: Tensor) -> Tensor:
    """Channels [..., d, x] of which i turns with the one in the other half -> 2i with 2i + 1."""
    return rows.unflatten(-2, (2, -1)).transpose(-3, -2).flatten(-3, -2)


def _measure(bundled: LlamaForCausalLM) -> list[tuple[float, Tensor]]:
    """Of each layer, before keys turn: the root mean square of keys and values together, and the
    mean key [Hkv, d]."""
    stage, tokens = CALIBRATION
    batch, found = make_batch(STAGES[stage], tokens, (0, 0, 0)), []

    def note(module: Any, given: Any, named: dict[str, Any], result: object) -> None:
        states = named["hidden_states"]
        keys = module.k_proj(states)
        size = torch.cat((keys, module.v_proj(states)), dim=-1).square().mean(-1).sqrt().mean()
        found.append((float(size), keys.mean((0, 1)).unflatten(0, (KV_HEADS, DIM))))

    hooks = [
        x.self_attn.register_forward_hook(note, with_kwargs=True) for x in bundled.model.layers
    ]
    bundled(batch.token_ids, position_ids=batch.positions, use_cache=False)
    for hook in hooks:
        hook.remove()
    return found
