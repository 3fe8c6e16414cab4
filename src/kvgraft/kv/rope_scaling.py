"""Frequencies of static RoPE kinds for longer contexts, rounded as in transformers and vLLM.

`periods` are positions per radian, float32 [rotary_dim / 2], ascending. The results are radians per
position, of the same shape.
"""

import math
from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor


def llama3(
    periods: Tensor, factor: float, low: float, high: float, original_max_position: int
) -> Tensor:
    """Llama 3: keep short wavelengths, divide the frequencies of long ones by `factor`, interpolate
    between.

    Args:
        low, high: turns within the original context at which the interpolation begins and ends.
    """
    frequencies = 1.0 / periods
    turns = original_max_position / (2 * math.pi / frequencies)  # within the original context
    share = ((turns - low) / (high - low)).clamp(0, 1)
    return (1 - share) * frequencies / factor + share * frequencies


def yarn(
    periods: Tensor,
    theta: float,
    factor: float,
    fast: float,
    slow: float,
    original_max_position: int,
    truncate: bool,
) -> Tensor:
    """YaRN (Peng et al., 2023, section 3.2): interpolate linearly in the index of the frequency,
    not in its turns.

    Args:
        fast, slow: turns within the original context between which it interpolates.
        truncate: round the indices of these turns outwards.
    """
    dim = 2 * len(periods)

    def index(turns: float) -> float:
        return dim * math.log(original_max_position / (turns * 2 * math.pi)) / (2 * math.log(theta))

    low, high = index(fast), index(slow)
    if truncate:
        low, high = math.floor(low), math.ceil(high)
    low, high = max(low, 0), min(high, dim - 1)
    if low == high:
        high += 0.001
    keep = 1 - ((torch.arange(len(periods), dtype=torch.float32) - low) / (high - low)).clamp(0, 1)
    return 1.0 / (factor * periods) * (1 - keep) + 1.0 / periods * keep


def yarn_attention_factor(parameters: Mapping[str, Any], deepseek: bool) -> float:
    """Return the factor of queries and keys from `rope_parameters`. With `deepseek`, read them as
    vLLM does for DeepSeek's models.
    """
    factor = parameters["factor"]
    if deepseek:
        return mscale(factor, parameters.get("mscale", 1.0)) / mscale(
            factor, parameters.get("mscale_all_dim", 0.0)
        )
    if (given := parameters.get("attention_factor")) is not None:
        return float(given)
    own, all_dims = parameters.get("mscale"), parameters.get("mscale_all_dim")
    return mscale(factor, own) / mscale(factor, all_dims) if own and all_dims else mscale(factor)


def mscale(factor: float, weight: float = 1.0) -> float:
    """Return the square root of YaRN's correction of the attention logits (section 3.4): 1 + 0.1
    weight log(factor).
    """
    return 0.1 * weight * math.log(factor) + 1.0 if factor > 1 else 1.0


def longrope_attention_factor(factor: float, original_max_position: int) -> float:
    """Return LongRoPE's factor as in Phi-3: sqrt(1 + log(factor) / log(original context))."""
    return math.sqrt(1 + math.log(factor) / math.log(original_max_position)) if factor > 1 else 1.0
