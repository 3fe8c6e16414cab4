"""vLLM settings that exclude reuse, with reasons.

This module does not import vLLM, since the settings are checked before vLLM is imported.
"""

from collections.abc import Collection, Iterator
from typing import Any

PARALLEL = {
    "pipeline_parallel_size": "a recovery goes through all layers, and a stage has only its own",
    "decode_context_parallel_size": (
        "a recovery reads whole blocks, and a rank has only some tokens of each"
    ),
    "prefill_context_parallel_size": (
        "a recovery computes whole prompts, and a rank has only some tokens of each"
    ),
}
FP8_NAMES = ("fp8", "fp8_e4m3", "fp8_e5m2")
READABLE = ("auto", "float16", "bfloat16", *FP8_NAMES)
# part of another dtype's name -> reason why it cannot be read or written
_OTHERS = {
    "per_token_head": (
        "each token of each head has a scale of its own, which lies among the numbers"
    ),
    "ds_mla": "it holds latents",
    "fp8_inc": "Gaudi's own",
    "": "several numbers share a byte",
}


def parallel_reasons(parallel: Any) -> Iterator[str]:
    """Yield reasons why a model cannot be split over processes in this way.

    Args:
        parallel: vLLM's `ParallelConfig`, or parsed arguments with fields of the same names.
    """
    for name, reason in PARALLEL.items():
        if (size := getattr(parallel, name, 1)) > 1:
            yield f"{name} {size}: {reason} (allowed is 1)"


def cache_dtype_reasons(cache_dtype: str, skipped_layers: Collection[str]) -> Iterator[str]:
    """Yield reasons why keys and values of this dtype cannot be read or written.

    Args:
        skipped_layers: layers whose keys and values have another dtype.
    """
    if cache_dtype not in READABLE:
        why = next(why for name, why in _OTHERS.items() if name in cache_dtype)
        yield f"KV cache dtype {cache_dtype} ({why}): supported are {', '.join(READABLE)}"
    if skipped_layers:
        yield f"KV cache dtype of layers {skipped_layers} apart: all layers must have the same"
