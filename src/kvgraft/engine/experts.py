"""Mixture of experts (Qwen3-MoE): FFN layers in which a router picks a few experts for each row.

The pick of a row depends on that row alone, so rows of any requests can be computed together.
"""

from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from kvgraft.engine.checkpoint import UnsupportedModel
from kvgraft.kernels.rows import silu_mul


@dataclass(frozen=True)
class Experts:
    """Sizes of a model's experts.

    Attributes:
        count, active: experts of a layer, and experts that each row uses.
        inner_size: of one expert.
        normed: whether the weights of the picked experts add up to 1, instead of the weights of
            all.
        layers: layers that have experts; the others have one FFN for all rows.
    """

    count: int
    active: int
    inner_size: int
    normed: bool
    layers: frozenset[int]


def read_experts(hf: Any) -> Experts | None:
    """Read the sizes from a transformers config; None if no layer has experts. UnsupportedModel if
    sizes are invalid."""
    for name in ("num_experts", "moe_intermediate_size", "decoder_sparse_step"):
        if getattr(hf, name) < 1:
            raise UnsupportedModel(f"{name} must be positive, got {getattr(hf, name)}")

    if not 1 <= hf.num_experts_per_tok <= hf.num_experts:
        raise UnsupportedModel(
            f"num_experts_per_tok must be 1 to {hf.num_experts}, got {hf.num_experts_per_tok}"
        )

    every = hf.decoder_sparse_step
    layers = frozenset(range(every - 1, hf.num_hidden_layers, every)) - set(hf.mlp_only_layers)
    if not layers:
        return None

    return Experts(
        hf.num_experts,
        hf.num_experts_per_tok,
        hf.moe_intermediate_size,
        bool(hf.norm_topk_prob),
        layers,
    )


def mix(experts: Experts, rows: Tensor, router: Tensor, gate_up: Tensor, down: Tensor) -> Tensor:
    """Normed states [n, D] -> [n, D], each row the weighted sum of its experts' outputs.

    router: [E, D]. gate_up, down: [E 2 F, D] and [E D, F], the matrices of all experts one below
    the other."""
    # [n, k] each
    weights, picked = F.linear(rows, router).softmax(-1, dtype=torch.float32).topk(experts.active)
    if experts.normed:
        weights = weights / weights.sum(-1, keepdim=True)

    weights, picked = weights.to(rows.dtype).flatten(), picked.flatten()  # [n k]
    # indices into `picked`, by expert
    pairs = picked.argsort(stable=True).split(picked.bincount(minlength=experts.count).tolist())
    gate_up, down = (matrices.unflatten(0, (experts.count, -1)) for matrices in (gate_up, down))
    mixed = torch.zeros_like(rows)
    for expert, mine in enumerate(pairs):
        if mine.numel():
            where = mine // experts.active
            outputs = F.linear(silu_mul(F.linear(rows[where], gate_up[expert])), down[expert])
            mixed.index_add_(0, where, outputs.mul_(weights[mine, None]))

    return mixed
