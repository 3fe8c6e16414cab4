"""KV pool of an engine: its page lists, number of pages, tensors, and the extra state that policies
need."""

from collections.abc import Iterable, Sequence

import torch

from kvgraft.core.segmentation import Similarity, parse_match
from kvgraft.engine.config import ModelConfig
from kvgraft.engine.decoder import Decoder
from kvgraft.engine.profiles import MAKE_MAP
from kvgraft.kv.cache import KVCache
from kvgraft.kv.heads import HeadMap, StreamLayout
from kvgraft.kv.pages import PagePool
from kvgraft.prefill.context import Policy

# The pool never holds more than this number of prompts of the full length.
PROMPTS = 8


def lay_out(
    config: ModelConfig, dtype: torch.dtype, head_map: HeadMap | None, *, head_paging: bool
) -> tuple[StreamLayout, str]:
    """Return the page list of each KV head, and the model's identity, which includes that layout.

    Raises:
        ValueError: head paging without a head map.
    """
    model = f"{config.identity}/{dtype}"
    if not head_paging:
        return StreamLayout.dense(config.num_layers, config.num_kv_heads), model
    if head_map is None:
        raise ValueError(f"head_paging needs a head map: {MAKE_MAP}")
    return StreamLayout.by_class(head_map), f"{model}/{head_map.digest}"


def make_pool(
    decoder: Decoder,
    layout: StreamLayout,
    block_size: int,
    num_pages: int | None,
    kv_gib: float,
    max_length: int,
    residual_layers: Iterable[int],
    *,
    poison: bool,
) -> tuple[PagePool, KVCache]:
    """Make a pool of `num_pages` pages, or of `kv_gib` GiB at most; see `Engine`.

    Args:
        residual_layers: layers whose input residual stream is cached with keys and values.

    Raises:
        ValueError: one of them is no layer of the model.
    """
    config, dtype, device = decoder.config, decoder.dtype, decoder.device
    residual_layers, latent = sorted(set(residual_layers)), config.latent is not None
    if residual_layers and not 0 <= residual_layers[0] <= residual_layers[-1] < config.num_layers:
        raise ValueError(
            f"residual_layers {residual_layers}: layers of this model are 0 to "
            f"{config.num_layers - 1}"
        )

    if num_pages is None:
        beside = len(residual_layers) * config.hidden_size
        page_bytes = KVCache.bytes_per_page(
            layout, block_size, config.head_dim, dtype, latent, beside
        )
        num_pages = min(
            int(kv_gib * 2**30) // page_bytes,
            PROMPTS * layout.num_lists * -(-max_length // block_size),
        )

    pool = PagePool(num_pages, block_size)
    cache = KVCache(
        layout,
        num_pages,
        block_size,
        config.head_dim,
        dtype,
        device,
        latent,
        residual_layers,
        config.hidden_size,
    )
    if poison:
        cache.poison(range(num_pages))
        pool.on_drop = cache.poison

    return pool, cache


def needs(
    policies: Sequence[Policy],
    residual_layers: Sequence[int],
    match: str | Similarity,
    num_layers: int,
) -> tuple[set[int], Similarity | None]:
    """Return the residual layers to cache and the near-duplicate matching that these policies and
    the caller need."""
    layers = set(residual_layers)
    layers.update(layer for policy in policies for layer in policy.residual_layers(num_layers))
    return layers, match if isinstance(match, Similarity) else parse_match(match)
