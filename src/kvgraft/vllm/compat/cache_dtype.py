"""The numbers of vLLM's KV cache: the model's own, or eight bits with a scale for each layer."""

from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor
from vllm.platforms import current_platform

FP8 = {
    "fp8": current_platform.fp8_dtype(),
    "fp8_e4m3": current_platform.fp8_dtype(),
    "fp8_e5m2": torch.float8_e5m2,
}
READABLE = ("auto", "float16", "bfloat16", *FP8)
_OTHERS = {  # what the names of other dtypes begin or end with -> why they cannot be read or written here
    "per_token_head": "each token of each head has a scale of its own, which lies among the numbers",
    "ds_mla": "it holds latents",
    "fp8_inc": "Gaudi's own",
    "": "several numbers share a byte",
}


def cache_dtype_reasons(cache: Any) -> Iterator[str]:
    """Why keys and values of vLLM's `CacheConfig` cannot be moved."""
    if cache.cache_dtype not in READABLE:
        why = next(why for name, why in _OTHERS.items() if name in cache.cache_dtype)
        yield f"KV cache dtype {cache.cache_dtype} ({why}): supported are {', '.join(READABLE)}"
    if cache.kv_cache_dtype_skip_layers:
        yield f"KV cache dtype of layers {cache.kv_cache_dtype_skip_layers} apart: all layers must have the same"


def as_codes(stored: Tensor, cache_dtype: str) -> Tensor:
    """What a cache holds, whose bytes vLLM takes for integers, as the numbers that they are without their scale."""
    return stored.view(FP8[cache_dtype]) if cache_dtype in FP8 else stored


def decode(codes: Tensor, scale: float, dtype: torch.dtype) -> Tensor:
    """What codes of a quantised cache stand for, rounded to dtype once."""
    return codes.to(dtype) * scale


def encode(numbers: Tensor, scale: float, kind: torch.dtype) -> Tensor:
    """The nearest codes of this dtype; the largest one for all that is beyond it."""
    limit = torch.finfo(kind).max
    return (numbers.float() / scale).clamp(-limit, limit).to(kind)


def as_written(codes: Tensor, scale: float, dtype: torch.dtype) -> Tensor:
    """Numbers of which a backend makes just these codes, whether it rounds to the nearest one, as on GPUs, or towards
    zero, as vLLM's CPU kernels do: an eighth to a quarter of a step above them."""
    return codes.to(dtype) * (scale * (1 + torch.finfo(codes.dtype).eps / 8))
