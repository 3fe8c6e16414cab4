"""Weights of a decoder, read from safetensors tensor by tensor into fused matrices."""

import math
import sys
from collections.abc import Iterator, Set
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from rich.console import Console
from rich.progress import Progress
from safetensors import SafetensorError, safe_open
from torch import Tensor

from kvgraft.engine.checkpoint import weight_files
from kvgraft.engine.config import LatentAttention, ModelConfig
from kvgraft.engine.experts import Experts

_Parts = dict[str, tuple[int, ...]]  # stored tensors, by name and shape, that are stacked
# field -> biased, stored layers with their rows, columns
_Linears = dict[str, tuple[bool, dict[str, int], int]]
_Norms = dict[str, tuple[str, int]]  # field -> stored norm, size
_PROGRESS_FROM_BYTES = 1_000_000_000


@dataclass(frozen=True)
class LayerWeights:
    """One layer: D hidden, F inner, Hq query and Hkv key-value heads of size d. Absent biases and
    norms are None.

    With a router: E experts with F inner each, whose matrices are stacked. With latent attention: r
    and q are the ranks of the latents, t is rope_dim, n is nope_dim + t, v is value_dim.
    """

    input_norm: Tensor  # [D]
    # [(Hq + 2 Hkv) d, D]; latent: [q + r + t, D], without a latent of the queries [Hq n + r + t, D]
    qkv: Tensor
    out: Tensor  # [D, Hq d]; latent: [D, Hq v]
    post_norm: Tensor  # [D]
    gate_up: Tensor  # [2 F, D]; of experts [E 2 F, D]
    down: Tensor  # [D, F]; of experts [E D, F]
    qkv_bias: Tensor | None = None
    out_bias: Tensor | None = None
    gate_up_bias: Tensor | None = None
    down_bias: Tensor | None = None
    q_norm: Tensor | None = None  # [d]; latent: [q]
    k_norm: Tensor | None = None  # [d]; latent: [r]
    query_up: Tensor | None = None  # latent: [Hq n, q]
    kv_up: Tensor | None = None  # latent: [Hq (nope_dim + v), r]
    router: Tensor | None = None  # [E, D]


@dataclass(frozen=True)
class Weights:
    """All weights. With tied embeddings `head` is `embedding`."""

    embedding: Tensor  # [V, D]
    layers: tuple[LayerWeights, ...]
    norm: Tensor  # [D]
    head: Tensor  # [V, D]


def load_weights(
    model_dir: str | Path,
    config: ModelConfig,
    dtype: torch.dtype,
    device: str | torch.device = "cpu",
) -> Weights:
    """Read a single or sharded safetensors checkpoint, converted to `dtype` on `device`.

    A stored output head is used even if the configuration calls it tied (as in transformers).

    Raises:
        FileNotFoundError: the checkpoint or a shard is missing.
        ValueError: a file is damaged, or a tensor is missing, unexpected or has an unexpected
            shape.
    """
    files = weight_files(Path(model_dir))
    targets: dict[str, Tensor] = {}  # stored name -> destination

    def fused(parts: _Parts) -> Tensor:
        sizes = [math.prod(shape) for shape in parts.values()]
        whole = torch.empty(sum(sizes), dtype=dtype, device=device)
        for (name, shape), part in zip(parts.items(), whole.split(sizes), strict=True):
            targets[name] = part.view(shape)
        return whole.view(-1, *shape[1:][-1:])

    table = (config.vocab_size, config.hidden_size)
    embedding = fused({"model.embed_tokens.weight": table})
    norm = fused({"model.norm.weight": table[1:]})
    stored = {name for path in files for name in _names(path)}
    layers = tuple(
        LayerWeights(
            **{field: fused(parts) for field, parts in _layer_parts(config, i, stored).items()}
        )
        for i in range(config.num_layers)
    )
    tied = config.tie_word_embeddings and "lm_head.weight" not in stored
    head = embedding if tied else fused({"lm_head.weight": table})
    _fill(targets, files)
    return Weights(embedding, layers, norm, head)


def _layer_parts(config: ModelConfig, layer: int, stored: Set[str]) -> dict[str, _Parts]:
    """Map each field of LayerWeights to the stored tensors that are stacked into it."""
    hidden, inner, prefix = config.hidden_size, config.intermediate_size, f"model.layers.{layer}."
    linears, norms = (
        _grouped_parts(config) if config.latent is None else _latent_parts(config, config.latent)
    )
    norms |= {
        "input_norm": ("input_layernorm", hidden),
        "post_norm": ("post_attention_layernorm", hidden),
    }
    parts: dict[str, _Parts] = {
        field: {f"{prefix}{name}.weight": (size,)} for field, (name, size) in norms.items()
    }
    if config.experts is not None and layer in config.experts.layers:
        parts |= _expert_parts(config.experts, hidden, f"{prefix}mlp.", stored)
    else:
        linears["gate_up"] = (
            config.mlp_bias,
            {"mlp.gate_proj": inner, "mlp.up_proj": inner},
            hidden,
        )
        linears["down"] = (config.mlp_bias, {"mlp.down_proj": hidden}, inner)

    for field, (bias, rows, columns) in linears.items():
        parts[field] = {f"{prefix}{name}.weight": (size, columns) for name, size in rows.items()}
        if bias:
            parts[f"{field}_bias"] = {
                f"{prefix}{name}.bias": (size,) for name, size in rows.items()
            }

    return parts


def _grouped_parts(config: ModelConfig) -> tuple[_Linears, _Norms]:
    """Linear layers and norms of grouped-query attention."""
    query, key = config.num_heads * config.head_dim, config.num_kv_heads * config.head_dim
    rows = {"self_attn.q_proj": query, "self_attn.k_proj": key, "self_attn.v_proj": key}
    linears = {
        "qkv": (config.qkv_bias, rows, config.hidden_size),
        "out": (config.out_bias, {"self_attn.o_proj": config.hidden_size}, query),
    }
    if not config.qk_norm:
        return linears, {}
    return linears, {name: (f"self_attn.{name}", config.head_dim) for name in ("q_norm", "k_norm")}


def _latent_parts(config: ModelConfig, latent: LatentAttention) -> tuple[_Linears, _Norms]:
    """Linear layers and norms of latent attention."""
    hidden, heads, shared = (
        config.hidden_size,
        config.num_heads,
        {"self_attn.kv_a_proj_with_mqa": config.head_dim},
    )
    queries = heads * latent.query_dim
    linears = {
        "qkv": (False, {"self_attn.q_proj": queries, **shared}, hidden),
        "kv_up": (
            False,
            {"self_attn.kv_b_proj": heads * (latent.nope_dim + latent.value_dim)},
            latent.rank,
        ),
        "out": (False, {"self_attn.o_proj": hidden}, heads * latent.value_dim),
    }
    norms = {"k_norm": ("self_attn.kv_a_layernorm", latent.rank)}
    if latent.query_rank is not None:
        linears["qkv"] = (False, {"self_attn.q_a_proj": latent.query_rank, **shared}, hidden)
        linears["query_up"] = (False, {"self_attn.q_b_proj": queries}, latent.query_rank)
        norms["q_norm"] = ("self_attn.q_a_layernorm", latent.query_rank)

    return linears, norms


def _expert_parts(
    experts: Experts, hidden: int, prefix: str, stored: Set[str]
) -> dict[str, _Parts]:
    """Tensors of a layer of experts. They are stored one by one, or stacked as transformers 5 holds
    them in memory."""
    count, inner = experts.count, experts.inner_size
    gate_up, down = f"{prefix}experts.gate_up_proj", f"{prefix}experts.down_proj"
    parts: dict[str, _Parts] = {"router": {f"{prefix}gate.weight": (count, hidden)}}
    if gate_up in stored:
        return parts | {
            "gate_up": {gate_up: (count, 2 * inner, hidden)},
            "down": {down: (count, hidden, inner)},
        }

    names = [f"{prefix}experts.{i}" for i in range(count)]
    parts["gate_up"] = {
        f"{name}.{half}_proj.weight": (inner, hidden) for name in names for half in ("gate", "up")
    }
    parts["down"] = {f"{name}.down_proj.weight": (hidden, inner) for name in names}
    return parts


def _open(path: Path) -> Any:
    try:
        return safe_open(path, framework="pt")
    except SafetensorError as error:
        raise ValueError(f"{path} is damaged: {error}") from error


def _names(path: Path) -> list[str]:
    with _open(path) as file:
        return list(file.keys())


def _stored(files: tuple[Path, ...]) -> Iterator[tuple[str, Tensor]]:
    """Yield every stored tensor except rotary buffers of old checkpoints, with a progress bar for
    large checkpoints."""
    total = sum(path.stat().st_size for path in files)
    visible = total > _PROGRESS_FROM_BYTES and sys.stderr.isatty()
    with Progress(console=Console(stderr=True), disable=not visible, transient=True) as progress:
        task = progress.add_task("loading weights", total=total)
        for path in files:
            with _open(path) as file:
                for name in file.keys():  # noqa: SIM118 - a safetensors handle, not a dict
                    tensor = file.get_tensor(name)
                    if not name.endswith("rotary_emb.inv_freq"):
                        yield name, tensor
                    progress.advance(task, tensor.nbytes)


def _fill(targets: dict[str, Tensor], files: tuple[Path, ...]) -> None:
    """Copy every stored tensor to its target, each exactly once."""
    for name, tensor in _stored(files):
        target = targets.pop(name, None)
        if target is None:
            raise ValueError(
                f"unexpected tensor {name!r} {list(tensor.shape)}: the architecture has none of "
                "that name"
            )
        if target.shape != tensor.shape:
            raise ValueError(
                f"tensor {name!r} has shape {list(tensor.shape)}, expected {list(target.shape)}"
            )
        target.copy_(tensor)
    if targets:
        raise ValueError(
            f"the checkpoint lacks {len(targets)} tensors, the first is {next(iter(targets))!r}"
        )
