"""Tiny models to draft for, and draft models for them that are as good as can be."""

import json
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file

from kvgraft.kv.heads import HEAD_MAP_FILE
from models import make_head_map, make_model


def make_target(directory: Path) -> Path:
    """A Llama of one layer whose first and last norm change nothing: a head without norms can do
    what it does."""
    make_model(directory, "llama", max_position_embeddings=4096, num_hidden_layers=1, head_dim=32)
    weights = load_file(directory / "model.safetensors")
    embeddings = weights["model.embed_tokens.weight"]
    weights["model.embed_tokens.weight"] = (
        embeddings / embeddings.pow(2).mean(-1, keepdim=True).sqrt()
    )
    for name in ("model.layers.0.input_layernorm.weight", "model.norm.weight"):
        weights[name] = torch.ones_like(weights[name])
    save_file(weights, directory / "model.safetensors", metadata={"format": "pt"})
    make_head_map(directory).save(directory / HEAD_MAP_FILE)
    return directory


def make_eagle(directory: Path, target: Path) -> Path:
    """An EAGLE head that does what `make_target` does, from embeddings alone: but for the first
    token, which no such head sees, its drafts are right."""
    weights = load_file(target / "model.safetensors")
    layer = {
        name.removeprefix("model."): value
        for name, value in weights.items()
        if ".layers.0." in name
    }
    del layer["layers.0.input_layernorm.weight"]
    size = weights["model.norm.weight"].numel()
    layer["fc.weight"] = torch.cat((torch.eye(size), torch.zeros(size, size)), dim=1)
    return _save(directory, layer, json.loads((target / "config.json").read_text()))


def make_eagle3(directory: Path, target: Path) -> Path:
    """An EAGLE-3 head of any weights."""
    config = json.loads((target / "config.json").read_text())
    weights = load_file(target / "model.safetensors")
    size = weights["model.norm.weight"].numel()
    head = {"norm.weight": torch.ones(size), "lm_head.weight": weights["lm_head.weight"]}
    head |= {"fc.weight": torch.cat((torch.eye(size), torch.eye(size)), dim=1)}
    for name, value in weights.items():
        if name.startswith("model.layers.0."):
            # they see the embedding, and what is given
            wide = any(f".{part}_proj" in name for part in "qkv")
            head[name.replace("model.layers.0.", "midlayer.")] = (
                torch.cat((value, value), dim=1) if wide else value
            )
    head["midlayer.hidden_norm.weight"] = torch.ones(size)
    layers = {"eagle_aux_hidden_state_layer_ids": [0, 1], "use_aux_hidden_state": True}
    changed = {
        "architectures": ["LlamaForCausalLMEagle3"],
        "draft_vocab_size": config["vocab_size"],
    }
    return _save(
        directory, head, config | changed | {"eagle_config": layers, "num_aux_hidden_states": 2}
    )


def _save(directory: Path, weights: dict[str, torch.Tensor], config: dict[str, Any]) -> Path:
    directory.mkdir()
    whole = {name: value.contiguous().clone() for name, value in weights.items()}
    save_file(whole, directory / "model.safetensors", metadata={"format": "pt"})
    (directory / "config.json").write_text(json.dumps(config))
    return directory
