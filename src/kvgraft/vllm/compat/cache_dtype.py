"""The numbers of vLLM's KV cache: the model's own, or eight bits with a scale for each layer."""

import torch
from torch import Tensor
from vllm.platforms import current_platform

from kvgraft.vllm.limits import FP8_NAMES

_E5M2 = {"fp8_e5m2": torch.float8_e5m2}
FP8 = {name: _E5M2.get(name, current_platform.fp8_dtype()) for name in FP8_NAMES}


def as_codes(stored: Tensor, cache_dtype: str) -> Tensor:
    """What a cache holds, whose bytes vLLM takes for integers, as the numbers that they are without
    their scale."""
    return stored.view(FP8[cache_dtype]) if cache_dtype in FP8 else stored


def decode(codes: Tensor, scale: float, dtype: torch.dtype) -> Tensor:
    """What codes of a quantised cache stand for, rounded to dtype once."""
    return codes.to(dtype) * scale


def encode(numbers: Tensor, scale: float, kind: torch.dtype) -> Tensor:
    """The nearest codes of this dtype; the largest one for all that is beyond it."""
    limit = torch.finfo(kind).max
    return (numbers.float() / scale).clamp(-limit, limit).to(kind)


def as_written(codes: Tensor, scale: float, dtype: torch.dtype) -> Tensor:
    """Numbers of which a backend makes just these codes, whether it rounds to the nearest one, as
    on GPUs, or towards zero, as vLLM's CPU kernels do: an eighth to a quarter of a step above
    them."""
    return codes.to(dtype) * (scale * (1 + torch.finfo(codes.dtype).eps / 8))
