"""The flow that a server follows for all requests, named in vLLM's `additional_config`."""

from collections.abc import Iterator
from functools import lru_cache

from torch import nn
from vllm.config import VllmConfig
from vllm.model_executor.layers.attention import Attention, MLAAttention
from vllm.model_executor.models.utils import extract_layer_index
from vllm.platforms import current_platform
from vllm.v1.attention.backends.registry import AttentionBackendEnum, register_backend
from vllm.v1.kv_cache_interface import is_quantized_kv_cache

from kvgraft.decode.flow import Program, trace
from kvgraft.flows import parse_flow
from kvgraft.vllm.compat import FLOW
from kvgraft.vllm.compat.families import FLOWS, architecture_of
from kvgraft.vllm.compat.support import UnsupportedConfiguration
from kvgraft.vllm.limits import PARALLEL

# backends of vLLM that can follow flows
BACKENDS = ("CPU_ATTN", "FLASH_ATTN", "FLASHINFER", "TRITON_ATTN")
# those for latent attention; others pad the query heads (CUTLASS_MLA)
LATENT_BACKENDS = (
    "CPU_MLA", "AMX_MLA", "TRITON_MLA", "FLASHMLA", "FLASH_ATTN_MLA", "FLASHINFER_MLA",
)  # fmt: skip
# attention layers of vLLM
LAYERS = (Attention, MLAAttention)
_MODULE = "kvgraft.vllm.sparse.attention"


def program_of(config: VllmConfig) -> Program | None:
    """Return the flow, traced for the model; None if the server has none.

    Raises:
        ValueError, FileNotFoundError: the configuration names no flow, or an invalid one.
    """
    named = (
        config.additional_config.get(FLOW) if isinstance(config.additional_config, dict) else None
    )
    if named is None:
        return None
    model, parallel = config.model_config, config.parallel_config
    group = model.get_num_attention_heads(parallel) // model.get_num_kv_heads(parallel)
    return _program(named, int(config.cache_config.block_size), model.get_head_size(), group)


@lru_cache(maxsize=16)
def _program(named: str, block_size: int, head_dim: int, group: int) -> Program | None:
    """Return the traced flow, cached for equal shapes."""
    flow = parse_flow(named)
    return None if flow is None else trace(flow, block_size, head_dim, group)


def check_flow(config: VllmConfig) -> Program | None:
    """Return the server's flow as `program_of` does, after a check that it can be followed.

    Raises:
        UnsupportedConfiguration: the message names every reason.
        ValueError, FileNotFoundError: as `program_of`.
    """
    program = program_of(config)
    reasons = [] if program is None else list(_reasons(config, program))
    if program is not None and reasons:
        raise UnsupportedConfiguration(
            f"flow {program.flow.name!r} cannot be followed with " + "; ".join(reasons)
        )
    return program


def install(config: VllmConfig) -> None:
    """Let models that this process loads from now on follow the server's flow, if any.

    Raises:
        UnsupportedConfiguration, ValueError, FileNotFoundError: as `check_flow`.
    """
    if check_flow(config) is None:
        return
    # vLLM chooses one of these backends later.
    for name in (*BACKENDS, *LATENT_BACKENDS):
        register_backend(AttentionBackendEnum[name], f"{_MODULE}.{name}")


def check_installed(config: VllmConfig, model: nn.Module) -> None:
    """Let the layers of a draft model attend densely, and check that the model follows its flow.

    Args:
        model: the model that the server serves; vLLM knows the layers of a draft model, too.

    Raises:
        RuntimeError: the server has a flow that no layer of the model follows, or can follow.
    """
    program = program_of(config)
    if program is None:
        return
    layers = [module for module in model.modules() if isinstance(module, LAYERS)]
    others = set(config.compilation_config.static_forward_context.values()) - set(layers)
    for layer in others:
        if isinstance(layer, LAYERS) and layer.attn_backend.__module__ == _MODULE:
            layer.impl.follow(None)

    ours = [layer for layer in layers if layer.attn_backend.__module__ == _MODULE]
    if not ours:
        chosen = sorted({layer.attn_backend.get_name() for layer in layers})
        allowed = LATENT_BACKENDS if config.model_config.use_mla else BACKENDS
        raise RuntimeError(
            f"no layer follows the flow: the attention backend is {', '.join(chosen)}, not one of "
            f"{', '.join(allowed)}, or this process had chosen it before"
        )
    following = [
        layer
        for layer in ours
        if layer.impl.follows
        and extract_layer_index(layer.layer_name) not in program.flow.layers_skip
    ]
    if not following:
        raise RuntimeError(
            "no layer follows the flow: all layers attend to a window only, or are in layers_skip"
        )


def _reasons(config: VllmConfig, program: Program) -> Iterator[str]:
    """Yield reasons against a flow in this configuration."""
    cache = config.cache_config
    if not current_platform.is_cpu() and not current_platform.is_cuda():
        yield (
            "this platform: only attention backends for CPUs and CUDA can be given block tables by "
            "KV head yet"
        )

    architecture = architecture_of(config)
    if config.model_config.use_mla and config.speculative_config is not None:
        yield "speculative decoding with latent attention: drafts are computed as prompts are"
    if config.model_config.use_mla and is_quantized_kv_cache(cache.cache_dtype):
        yield f"KV cache dtype {cache.cache_dtype} of latents: flows read numbers"
    if architecture == "Llama4ForCausalLM":
        yield f"model class {architecture}: its attention has local chunks"
    elif architecture not in FLOWS:
        yield f"model class {architecture}: flows have not been tested with it"

    for name in PARALLEL:
        if (size := getattr(config.parallel_config, name)) > 1:
            yield f"{name} {size}: it has not been tested (allowed is 1)"

    if config.model_config.use_mla and (
        config.compilation_config.pass_config.fuse_rope_kvcache_cat_mla
    ):
        yield "fuse_rope_kvcache_cat_mla of --compilation-config: it writes KV past the flow"

    text = config.model_config.hf_text_config
    if not current_platform.is_cpu() and getattr(text, "attn_logit_softcapping", None):
        yield "soft caps: our attention kernel for GPUs has none"
    if not current_platform.is_cpu() and is_quantized_kv_cache(cache.cache_dtype):
        yield f"KV cache dtype {cache.cache_dtype}: our attention kernel for GPUs reads numbers"

    if program.is_stateful and config.speculative_config is not None:
        yield "speculative decoding: state of rejected tokens could not be removed"

    if program.is_stateful and cache.enable_prefix_caching:
        yield "prefix caching: the flow keeps state in pages, and two requests could share one"
    elif cache.enable_prefix_caching and config.kv_transfer_config is None:
        yield (
            "prefix caching without reuse: answers would be found again as if they had been "
            "computed densely"
        )
