"""Numbers in vLLM's KV cache: the model's dtype, or eight bits with a scale for each layer."""

import torch
from torch import Tensor
from vllm.platforms import current_platform

from kvgraft.vllm.limits import FP8_NAMES

_E5M2 = {"fp8_e5m2": torch.float8_e5m2}
FP8 = {name: _E5M2.get(name, current_platform.fp8_dtype()) for name in FP8_NAMES}


def as_codes(stored: Tensor, cache_dtype: str) -> Tensor:
    """View stored numbers in their true dtype. vLLM declares FP8 bytes as integers."""
    return stored.view(FP8[cache_dtype]) if cache_dtype in FP8 else stored


def decode(codes: Tensor, scale: float, dtype: torch.dtype) -> Tensor:
    """Return the numbers that codes of a quantised cache stand for, rounded to dtype once."""
    return codes.to(dtype) * scale


def encode(numbers: Tensor, scale: float, kind: torch.dtype) -> Tensor:
    """Return the nearest codes of dtype `kind`; numbers out of range become the largest code."""
    limit = torch.finfo(kind).max
    return (numbers.float() / scale).clamp(-limit, limit).to(kind)


def as_written(codes: Tensor, scale: float, dtype: torch.dtype) -> Tensor:
    """Return numbers that a backend stores as exactly these codes.

    GPUs round to the nearest code, vLLM's CPU kernels towards zero. So the numbers lie an eighth to
    a quarter of a step above the codes.
    """
    return codes.to(dtype) * (scale * (1 + torch.finfo(codes.dtype).eps / 8))
