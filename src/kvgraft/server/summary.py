"""Configuration that a server will use, for `kvgraft serve --check`, before a model is loaded."""

from argparse import Namespace
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import msgspec
from vllm.config import VllmConfig

from kvgraft.core.matches import MAX_DEPTH
from kvgraft.server.keys import Keys
from kvgraft.store import StoreOptions
from kvgraft.vllm.compat import FLOW
from kvgraft.vllm.compat.families import is_by_head, is_plain
from kvgraft.vllm.compat.head_maps import find_head_map, works_by_head
from kvgraft.vllm.setting_fields import SHADOW
from kvgraft.vllm.settings import KVGraftSettings

GIB = 1 << 30


class ConfigurationSummary(msgspec.Struct, frozen=True):
    """Settings that will be used, and features that are off.

    Attributes:
        uses: values by name.
        off: reasons by feature.
    """

    uses: dict[str, str]
    off: dict[str, str]

    @classmethod
    def of(cls, args: Namespace, config: VllmConfig) -> "ConfigurationSummary":
        """Return the summary of checked arguments and vLLM's configuration."""
        uses = _model(args, config) | _address(args)
        if args.no_kvgraft:
            return cls(uses, {"reuse": "--no-kvgraft"})
        settings = KVGraftSettings.of(config)
        return cls(uses | _reuse(settings), dict(_off(args, settings, config)))


def _model(args: Namespace, config: VllmConfig) -> dict[str, str]:
    """Return the settings of the model and its KV cache."""
    model, cache = config.model_config, config.cache_config
    names = ", ".join(args.served_model_name or [model.model])
    pool = f"{cache.gpu_memory_utilization:.0%} of device memory, without weights and activations"
    if cache.kv_cache_memory_bytes:
        pool = f"{cache.kv_cache_memory_bytes / GIB:.2f} GiB"

    tokens = config.scheduler_config.max_num_batched_tokens
    return {
        "model": model.model,
        "model class": model.architecture,
        "served as": names,
        "dtype": f"{str(model.dtype).removeprefix('torch.')}, KV cache {cache.cache_dtype}",
        "longest prompt and answer": f"{model.max_model_len} tokens",
        "KV cache": f"{pool}, blocks of {cache.block_size} tokens",
        "tokens of a step": str(tokens),
        "engines": str(config.parallel_config.data_parallel_size),
        "ranks of an engine": str(config.parallel_config.world_size),
    }


def _address(args: Namespace) -> dict[str, str]:
    """Return the address of the server and its number of tenants."""
    scheme = "https" if args.ssl_certfile else "http"
    address = f"unix:{args.uds}" if args.uds else f"{scheme}://{args.host or '0.0.0.0'}:{args.port}"  # noqa: S104
    if args.no_kvgraft:
        return {"address": address}
    num_keys = len(Keys.of(args).api_keys)
    tenants = f"{num_keys}, one for each API key" if num_keys else "1, whoever reaches the address"
    return {"address": address, "tenants": tenants}


def _reuse(settings: KVGraftSettings) -> dict[str, str]:
    """Return the settings of reuse."""
    profile, target = settings.policy_profile, settings.guard_target
    uses = {"policy": settings.default_policy}
    if profile is not None:
        uses["policy profile"] = f"{settings.profile} ({profile.name})"

    uses["mode"] = settings.mode
    uses["costs"] = settings.costs
    uses["greatest depth"] = (
        "no limit" if settings.max_depth == MAX_DEPTH else str(settings.max_depth)
    )

    if settings.store is not None:
        uses["store"] = _store(settings.store)
    if settings.guard:
        uses["guard"] = f"{settings.guard:.1%} of approximate answers, target {target or 'none'}"
    if settings.idle_refresh:
        uses["refresh"] = f"{settings.idle_refresh:.1%} of prompt tokens"
    if settings.exact_for:
        uses["exact for"] = ", ".join(settings.exact_for)
    return uses


def _store(options: StoreOptions) -> str:
    """Return a description of the store's tiers."""
    tiers = [f"{options.ram_gib:g} GiB of host memory"] if options.ram_gib else []
    if options.directory is not None:
        tiers.append(f"{options.disk_gib:g} GiB in {Path(options.directory).resolve()}")
    if options.shared_url is not None:
        tiers.append(f"shared at {options.shared_place}")
    return ", ".join(tiers) + (" (int8)" if options.int8 else "")


def _off(
    args: Namespace, settings: KVGraftSettings, config: VllmConfig
) -> Iterator[tuple[str, str]]:
    """Yield each feature that is off, with its reason."""
    if settings.mode == SHADOW:
        yield "grafting", f"--kvgraft-mode {SHADOW}"
    if not settings.continuation:
        yield "continuation of conversations", "--no-kvgraft-continuation"

    if settings.similarity is None:
        yield "near-duplicates", "no --kvgraft-match similar"
    if settings.store is None:
        yield "store", "no --kvgraft-store-dir, -ram-gib or -shared"

    if not settings.guard:
        yield "guard", "no --kvgraft-guard"
    if not settings.idle_refresh:
        yield "refresh", "no --kvgraft-idle-refresh"

    if Keys.of(args).admin_key is None:
        yield "pins API", "no KVGRAFT_ADMIN_KEY"
    if (config.additional_config or {}).get(FLOW) is None:
        yield "flow", "no --flow"

    yield from _off_by_model(config)


def _off_by_model(config: VllmConfig) -> Iterator[tuple[str, Any]]:
    """Yield each policy that this model does not support, with its reason."""
    if not works_by_head(config):
        yield "policy redknot", f"not for {config.model_config.architecture} (unsupported_model)"
    elif find_head_map(config) is None:
        yield "policy redknot", "no head map: kvgraft profile-heads makes one (no_head_map)"
    if not is_plain(config) or is_by_head(config):
        yield (
            "policies samkv, condense",
            f"not for {config.model_config.architecture} (unsupported_model)",
        )
