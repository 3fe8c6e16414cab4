"""Callbacks before vLLM looks up a prefix, and before it resets its prefix cache."""

from collections.abc import Callable
from typing import Any


def before_prefix_lookup(kv_cache_manager: Any, callback: Callable[[Any], object]) -> None:
    """Call `callback` with a request before vLLM looks up its prefix. vLLM has no hook there."""
    look_up = kv_cache_manager.get_computed_blocks

    def get_computed_blocks(request: Any, *args: Any) -> Any:
        callback(request)
        return look_up(request, *args)

    kv_cache_manager.get_computed_blocks = get_computed_blocks


def on_cache_reset(kv_cache_manager: Any, callback: Callable[[], bool]) -> None:
    """Call `callback` before vLLM resets its prefix cache; keep the cache if it returns False.

    vLLM has no hook there, and refuses the reset while blocks are pinned.
    """
    reset = kv_cache_manager.reset_prefix_cache

    def reset_prefix_cache() -> bool:
        return callback() and bool(reset())

    kv_cache_manager.reset_prefix_cache = reset_prefix_cache
