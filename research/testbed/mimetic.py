"""Starting weights that already look for things, in the standard architecture.

A small transformer spends most of its training on finding out that attention can look up a key;
this one starts with it (the idea of Trockman and Kolter, "Mimetic Initialization of Self-Attention
Layers", carried further):

- All embeddings share one direction. Through it the heads of layer 0 attend to fixed offsets behind
  each token and write a hash of what stands there into a subspace of their own.
- The heads of all later layers match such hashes (what stood two words before a key's answer with
  what stands a few words before the question's end), in slow rotary dimensions only, so that
  distance does not matter.
"""

import math
from typing import Any

import torch
from torch import Tensor
from transformers import LlamaForCausalLM

# that the query heads of each KV head of layer 0 look back
OFFSETS = ((2, 3), (2, 3), (4, 5), (6, 1))
EMBEDDING_SCALE = 0.05
FAST_FREQUENCIES = 6  # of the rotary embedding, that tell offsets apart
SHARPNESS = 2.1  # of the match
COPY_SCALE = 0.1  # of what is copied from where a key matches


@torch.no_grad()
def initialise(model: LlamaForCausalLM, seed: int) -> None:
    """Overwrite the weights of a model of 4 KV heads with 2 query heads each.

    Raises:
        ValueError: the model has other head counts.
    """
    config = model.config
    if (config.num_attention_heads, config.num_key_value_heads) != (8, 4):
        raise ValueError(
            f"the model must have 8 query and 4 KV heads, got {config.num_attention_heads} and "
            f"{config.num_key_value_heads}"
        )
    torch.manual_seed(seed)
    width, depth = config.hidden_size, config.num_hidden_layers
    for name, weight in model.named_parameters():
        if weight.dim() == 2:
            scale = 0.6 / math.sqrt(weight.shape[1])
            weight.normal_(
                0,
                scale / math.sqrt(2 * depth) if "o_proj" in name or "down_proj" in name else scale,
            )
    shared = torch.nn.functional.normalize(torch.randn(width), dim=0)
    embeddings = torch.randn(config.vocab_size, width)
    embeddings -= torch.outer(embeddings @ shared, shared)
    model.model.embed_tokens.weight.copy_(
        EMBEDDING_SCALE * (embeddings + shared * math.sqrt(width / 3))
    )
    written, hashes = _look_back(model, shared)
    for layer in model.model.layers[1:]:
        _match(layer.self_attn, written, hashes, shared)


def _look_back(model: LlamaForCausalLM, shared: Tensor) -> tuple[list[Tensor], list[Tensor]]:
    """Layer 0: for each query head, what it writes [width, d], and the hash [d, width] that its KV
    head reads."""
    config, attention = model.config, model.model.layers[0].self_attn
    width, d = config.hidden_size, config.head_dim
    frequencies = config.rope_parameters["rope_theta"] ** -(torch.arange(0, d, 2) / d)
    strength = math.sqrt(width) / 2  # of the shared direction after the layer's norm
    key = torch.zeros(d)
    key[:FAST_FREQUENCIES] = math.sqrt(8 * math.sqrt(d))
    written: list[Tensor] = []
    hashes: list[Tensor] = []
    for head, offsets in enumerate(OFFSETS):
        rows = slice(head * d, (head + 1) * d)
        attention.k_proj.weight[rows] = torch.outer(key, shared) / strength + 0.003 * torch.randn(
            d, width
        )
        hashed = (
            hashes[head - 2] if head >= 2 else _orthogonal(d, width)
        )  # so heads 0 and 2, 1 and 3 understand each other
        hashed = hashed - torch.outer(hashed @ shared, shared)
        hashes.append(hashed)
        attention.v_proj.weight[rows] = hashed
        for number, offset in enumerate(offsets):
            rows = slice((2 * head + number) * d, (2 * head + number + 1) * d)
            query = _rotate(key, -offset * frequencies)
            attention.q_proj.weight[rows] = torch.outer(
                query, shared
            ) / strength + 0.003 * torch.randn(d, width)
            written.append(_orthogonal(width, d))
            attention.o_proj.weight[:, rows] = written[-1] * (EMBEDDING_SCALE * 16 / 5)
    return written, hashes


def _match(attention: Any, written: list[Tensor], hashes: list[Tensor], shared: Tensor) -> None:
    """A later layer: what the keys of each KV head are read from, and its two query heads."""
    d, width = hashes[0].shape

    def before(head: int) -> Tensor:  # what stands at the offset of this head of layer 0
        return written[head].T

    # key, query, query: a key is what stands two words back; a query is what stands so many words
    # back
    readers = (
        (before(0), before(1), hashes[0]),  # three, none
        (before(2), before(3), hashes[1]),  # three, none
        (before(0), before(4), before(5)),  # four, five
        (before(2), before(6), before(7)),  # six, one
    )
    slow = torch.cat([torch.arange(d // 4, d // 2), torch.arange(3 * d // 4, d)])
    for head, (key, *queries) in enumerate(readers):
        mixed = _orthogonal(len(slow), d) * SHARPNESS
        targets = [(attention.k_proj.weight, head, key)]
        targets += [
            (attention.q_proj.weight, 2 * head + number, query)
            for number, query in enumerate(queries)
        ]
        for weight, row, reader in targets:
            values = torch.zeros(d, width)
            values[slow] = mixed @ reader * (math.sqrt(d) / reader.norm())
            weight[row * d : (row + 1) * d] = values + 0.01 * torch.randn(d, width)
        copied = _orthogonal(d, width)
        copied = copied - torch.outer(copied @ shared, shared)
        attention.v_proj.weight[head * d : (head + 1) * d] = copied
        for row in (2 * head, 2 * head + 1):
            attention.o_proj.weight[:, row * d : (row + 1) * d] = copied.T * COPY_SCALE


def _orthogonal(rows: int, columns: int) -> Tensor:
    matrix, _ = torch.linalg.qr(torch.randn(max(rows, columns), min(rows, columns)))
    return matrix if rows >= columns else matrix.T


def _rotate(vector: Tensor, angles: Tensor) -> Tensor:
    low, high = vector.chunk(2)
    return torch.cat(
        [low * angles.cos() - high * angles.sin(), high * angles.cos() + low * angles.sin()]
    )
