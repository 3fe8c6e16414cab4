"""Measured times of the native engine, for the cost model."""

from functools import partial
from pathlib import Path

import torch

from kvgraft.core.cost_model import CostModel
from kvgraft.core.costs import Costs, find_costs
from kvgraft.core.plan import Plan
from kvgraft.engine.decoder import Decoder
from kvgraft.engine.prefill import NativePrefill
from kvgraft.kv.cache import KVCache
from kvgraft.prefill.cost_calibration import calibrate


def make_cost_model(
    costs: str | Path | Costs | None,
    exactness_weight: float,
    decoder: Decoder,
    cache: KVCache,
    max_length: int,
) -> CostModel | None:
    """Make the cost model for the arguments of `Engine`; None without costs. The cache must be
    empty."""
    if costs is None:
        return None
    return CostModel(
        find_costs(costs, partial(measure_costs, decoder, cache, max_length)), exactness_weight
    )


@torch.inference_mode()
def measure_costs(decoder: Decoder, cache: KVCache, max_length: int) -> Costs:
    """Measure prefill in the first pages of an empty cache, on prompts of max_length tokens at
    most."""
    lists, length = cache.layout.num_lists, min(max_length, cache.keys.shape[1])

    def context(plan: Plan) -> NativePrefill:
        slots = torch.arange(plan.num_tokens, device=decoder.device).expand(lists, -1)
        tokens, sources = (
            torch.zeros(plan.num_tokens, dtype=torch.int64),
            plan.graft_sources.expand(lists, -1),
        )
        return NativePrefill(decoder, cache, plan, tokens, [slots], sources)

    on_gpu = decoder.device.type == "cuda"
    return calibrate(context, decoder.config.num_layers, cache.block_size, length, on_gpu=on_gpu)
