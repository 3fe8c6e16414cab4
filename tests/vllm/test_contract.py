"""What we rely on in vLLM, read off our own source: names that we import, calls, attributes of what
vLLM hands to us.

Each failure names the line of ours that would break. How vLLM behaves is in
`test_contract_behaviour.py`."""

import ast
import importlib
import inspect
import re
import textwrap
from collections.abc import Callable, Iterator
from functools import cache
from importlib.metadata import entry_points
from importlib.util import find_spec
from pathlib import Path
from typing import Any, NewType

import pytest
from engines import HAS_KERNELS

import kvgraft.vllm
from kvgraft.vllm.compat import CONNECTOR, CONNECTOR_MODULE
from kvgraft.vllm.compat.families import ARCHITECTURES, IN_STEPS
from kvgraft.vllm.compat.support import vllm_version
from kvgraft.vllm.connector import KVGraftConnector
from kvgraft.vllm.patches.events import ExactEvents
from kvgraft.vllm.patches.prefix_cache import before_prefix_lookup, on_cache_reset

PACKAGE = Path(kvgraft.vllm.__file__).parent.parent
SOURCE, SERVER = PACKAGE / "vllm", PACKAGE / "server"
FILES = sorted([*SOURCE.rglob("*.py"), *SERVER.rglob("*.py")])

CONFIG, MODEL_CONFIG = "vllm.config:VllmConfig", "vllm.config:ModelConfig"
CACHE, PARALLEL, SCHEDULING = (
    "vllm.config:CacheConfig",
    "vllm.config:ParallelConfig",
    "vllm.config:SchedulerConfig",
)
TRANSFER, SPECULATIVE = "vllm.config:KVTransferConfig", "vllm.config:SpeculativeConfig"
REQUEST, PREFILL_STATS = "vllm.v1.request:Request", "vllm.v1.metrics.stats:PrefillStats"
POOL, BLOCK = "vllm.v1.core.block_pool:BlockPool", "vllm.v1.core.kv_cache_utils:KVCacheBlock"
MANAGER, BLOCKS = (
    "vllm.v1.core.kv_cache_manager:KVCacheManager",
    "vllm.v1.core.kv_cache_manager:KVCacheBlocks",
)
WINDOW_SPEC = "vllm.v1.kv_cache_interface:SlidingWindowSpec"
WINDOW_MANAGER = "vllm.v1.core.single_type_kv_cache_manager:SlidingWindowManager"
SPEC, ATTENTION = (
    "vllm.v1.kv_cache_interface:FullAttentionSpec",
    "vllm.model_executor.layers.attention:Attention",
)
BASE = "vllm.distributed.kv_transfer.kv_connector.v1.base:KVConnectorBase_V1"
METRICS = "vllm.distributed.kv_transfer.kv_connector.v1.metrics"
PROM, STATS = f"{METRICS}:KVConnectorPromMetrics", f"{METRICS}:KVConnectorStats"
WORKERS = "vllm.v1.worker.cpu_worker:CPUWorker vllm.v1.worker.gpu_worker:Worker"
RUNNERS = (
    "vllm.v1.worker.cpu_model_runner:CPUModelRunner vllm.v1.worker.gpu_model_runner:GPUModelRunner "
    "vllm.v1.worker.gpu.model_runner:GPUModelRunner"
)
DRAFTERS = (
    "vllm.v1.spec_decode.draft_model:DraftModelProposer vllm.v1.spec_decode.eagle:EagleProposer"
)
BACKENDS = "vllm.v1.attention.backends."
BUILDERS = (
    f"{BACKENDS}cpu_attn:CPUAttentionMetadataBuilder "
    f"{BACKENDS}flash_attn:FlashAttentionMetadataBuilder "
    f"{BACKENDS}triton_attn:TritonAttentionMetadataBuilder"
)
IMPLS = (
    f"{BACKENDS}cpu_attn:CPUAttentionBackendImpl {BACKENDS}flash_attn:FlashAttentionImpl "
    f"{BACKENDS}triton_attn:TritonAttentionImpl"
)
LATENT_ATTENTION = "vllm.model_executor.layers.attention:MLAAttention"
LATENT_IMPLS = (
    f"{BACKENDS}mla.cpu_mla:CPUMLAImpl {BACKENDS}mla.amx_mla:AMXMLAImpl "
    f"{BACKENDS}mla.triton_mla:TritonMLAImpl"
)
FLOW_BACKENDS = (
    f"{BACKENDS}cpu_attn:CPUAttentionBackend {BACKENDS}flash_attn:FlashAttentionBackend "
    f"{BACKENDS}triton_attn:TritonAttentionBackend"
)

OUTPUT, PROCESSOR = "vllm.outputs:RequestOutput", "vllm.v1.engine.output_processor:OutputProcessor"
TOKENIZE, MODELS = "vllm.entrypoints.serve.tokenize", "vllm.entrypoints.openai.models"
PROCESSORS, SLOT_PROCESSORS = (
    "vllm.v1.sample.logits_processor",
    "vllm.v1.worker.gpu.sample.logits_processor",
)
BUFFERS = "vllm.v1.worker.gpu.buffer_utils"
LORA, LORA_MANAGER = (
    "vllm.lora.request:LoRARequest",
    "vllm.lora.worker_manager:LRUCacheWorkerLoRAManager",
)

# what vLLM hands to us: file, function or class ("" for all), expression -> the classes behind it
HANDED = {
    ("compat/support.py", "", "config"): CONFIG,
    ("compat/model.py", "", "self.config"): CONFIG,
    ("compat/support.py", "", "config.cache_config"): CACHE,
    ("compat/model.py", "", "self.config.cache_config"): CACHE,
    ("compat/model.py", "", "self.config.scheduler_config"): SCHEDULING,
    ("compat/support.py", "", "config.model_config"): MODEL_CONFIG,
    ("compat/support.py", "_model_reasons", "model"): MODEL_CONFIG,
    ("compat/support.py", "_model_reasons", "speculation"): SPECULATIVE,
    ("compat/support.py", "_parallel_reasons", "parallel"): PARALLEL,
    ("compat/support.py", "_cache_reasons", "transfer"): TRANSFER,
    ("compat/support.py", "check_connector", "transfer"): TRANSFER,
    ("compat/support.py", "_group_reasons", "kv_cache"): "vllm.v1.kv_cache_interface:KVCacheConfig",
    ("compat/support.py", "_group_reasons", "group"): "vllm.v1.kv_cache_interface:KVCacheGroupSpec",
    ("compat/support.py", "_draft_reasons", "speculation"): SPECULATIVE,
    ("compat/drafts.py", "", "config"): CONFIG,
    ("compat/drafts.py", "", "config.speculative_config"): SPECULATIVE,
    ("compat/drafts.py", "", "speculation"): SPECULATIVE,
    ("compat/drafts.py", "", "self._config"): CONFIG,
    ("compat/drafts.py", "", "self._config.compilation_config"): "vllm.config:CompilationConfig",
    ("compat/drafts.py", "draft_rope", "model"): MODEL_CONFIG,
    ("compat/drafts.py", "", "runner"): " ".join(RUNNERS.split()[:2]),
    ("compat/drafts.py", "", "self._proposer"): DRAFTERS,
    ("compat/drafts.py", "", "group"): "vllm.v1.worker.utils:AttentionGroup",
    ("compat/ranks.py", "", "get_tp_group()"): "vllm.distributed.parallel_state:GroupCoordinator",
    ("compat/support.py", "_head_reasons", "parallel"): PARALLEL,
    ("compat/support.py", "_head_reasons", "transfer"): TRANSFER,
    ("compat/support.py", "_head_reasons", "config.scheduler_config"): SCHEDULING,
    ("patches/prefix_cache.py", "", "kv_cache_manager"): MANAGER,
    (
        "patches/requests.py",
        "set_known_prompt",
        "known",
    ): "vllm.v1.worker.gpu_input_batch:CachedRequestState",
    ("heads/spec.py", "SinkWindowSpec", "super()"): WINDOW_SPEC,
    ("heads/spec.py", "SinkWindowSpec", "self"): WINDOW_SPEC,
    ("heads/spec.py", "SinkWindowManager", "super()"): WINDOW_MANAGER,
    ("heads/spec.py", "", "block_pool"): POOL,
    ("heads/spec.py", "", "self.block_pool"): POOL,
    ("heads/attention.py", "LocalAttention", "super()"): ATTENTION,
    ("heads/attention.py", "", "vllm_config"): CONFIG,
    ("heads/attention.py", "", "vllm_config.cache_config"): CACHE,
    (
        "heads/attention.py",
        "HeadBuilder",
        "common",
    ): "vllm.v1.attention.backend:CommonAttentionMetadata",
    ("heads/attention.py", "", "whole"): ATTENTION,
    ("lengths.py", "", "common"): "vllm.v1.attention.backend:CommonAttentionMetadata",
    ("sparse/program.py", "", "config"): CONFIG,
    ("sparse/program.py", "", "config.cache_config"): CACHE,
    ("sparse/program.py", "", "config.model_config"): MODEL_CONFIG,
    ("sparse/program.py", "program_of", "model"): MODEL_CONFIG,
    ("sparse/program.py", "_reasons", "cache"): CACHE,
    ("sparse/program.py", "", "layer"): ATTENTION,
    ("sparse/program.py", "check_installed", "layer.attn_backend"): FLOW_BACKENDS,
    ("sparse/metadata.py", "SparseBuilder", "super()"): BUILDERS,
    ("sparse/metadata.py", "SparseBuilder", "self._others"): BUILDERS,
    ("sparse/metadata.py", "SparseBuilder", "kv_cache_spec"): SPEC,
    ("sparse/metadata.py", "", "common"): "vllm.v1.attention.backend:CommonAttentionMetadata",
    ("sparse/attention.py", "with_flow", "own"): FLOW_BACKENDS,
    ("sparse/attention.py", "SparseImpl", "super()"): IMPLS,
    ("sparse/attention.py", "SparseImpl", "stock"): IMPLS,
    ("sparse/attention.py", "SparseLatentImpl", "super()"): LATENT_IMPLS,
    ("sparse/attention.py", "SparseLatentImpl", "stock"): LATENT_IMPLS,
    ("sparse/attention.py", "", "layer"): f"{ATTENTION} {LATENT_ATTENTION}",
    ("sparse/layouts.py", "Latents", "layer"): LATENT_ATTENTION,
    ("sparse/layouts.py", "", "impl"): IMPLS,
    ("sparse/layouts.py", "holds_codes", "layer"): f"{ATTENTION} {LATENT_ATTENTION}",
    ("sparse/layouts.py", "dtype_of", "layer"): ATTENTION,
    ("sparse/layouts.py", "Packed", "layer"): ATTENTION,
    ("sparse/layouts.py", "_attend_packed", "layer"): ATTENTION,
    ("heads/model.py", "", "vllm_config"): CONFIG,
    ("compat/model.py", "", "runner"): RUNNERS,
    ("compat/model.py", "__init__", "group"): "vllm.v1.worker.utils:AttentionGroup",
    ("compat/model.py", "", "builder"): BUILDERS,
    ("compat/model.py", "", "self._builders[0]"): BUILDERS,
    ("compat/model.py", "", "self._builders[0].kv_cache_spec"): SPEC,
    ("compat/group_attention.py", "", "config"): CONFIG,
    ("compat/group_attention.py", "", "config.compilation_config"): "vllm.config:CompilationConfig",
    ("compat/group_attention.py", "", "config.model_config"): MODEL_CONFIG,
    ("compat/group_attention.py", "", "config.scheduler_config"): SCHEDULING,
    ("compat/group_attention.py", "", "layer"): ATTENTION,
    ("compat/group_attention.py", "", "layers[0]"): ATTENTION,
    ("compat/group_attention.py", "of", "group"): "vllm.v1.worker.utils:AttentionGroup",
    ("compat/head_attention.py", "", "builder"): BUILDERS.split()[0],
    ("compat/head_attention.py", "", "part"): BUILDERS.split()[0],
    ("compat/head_attention.py", "", "attention"): ATTENTION,
    ("compat/head_attention.py", "", "attention.impl"): IMPLS.split()[0],
    ("compat/head_maps.py", "", "config"): CONFIG,
    ("compat/head_maps.py", "", "config.model_config"): MODEL_CONFIG,
    ("compat/head_maps.py", "", "model"): MODEL_CONFIG,
    ("compat/head_maps.py", "", "parallel"): PARALLEL,
    ("compat/key_rotation.py", "", "config"): CONFIG,
    ("compat/key_rotation.py", "", "config.model_config"): MODEL_CONFIG,
    ("compat/model.py", "", "self.attentions[0]"): ATTENTION,
    ("compat/layer_caches.py", "", "first"): ATTENTION,
    ("compat/layer_caches.py", "", "attention"): ATTENTION,
    ("compat/model.py", "", "self.attentions[at]"): ATTENTION,
    ("compat/model.py", "", "attention"): ATTENTION,
    ("compat/support.py", "_cache_reasons", "cache"): CACHE,
    ("server/summary.py", "_model", "cache"): CACHE,
    ("server/summary.py", "_model", "model"): MODEL_CONFIG,
    ("compat/model.py", "", "self.attentions[0].impl"): IMPLS,
    ("compat/layer_caches.py", "", "attention.impl"): IMPLS,
    ("compat/ranks.py", "over_ranks", "ranks"): "vllm.distributed.parallel_state:GroupCoordinator",
    ("worker.py", "", "super()"): WORKERS,
    ("worker.py", "", "self"): WORKERS,
    ("worker.py", "", "self.cache_config"): CACHE,
    ("worker.py", "", "config"): CONFIG,
    ("worker.py", "", "config.scheduler_config"): SCHEDULING,
    ("worker.py", "", "model"): MODEL_CONFIG,
    ("groups.py", "", "self._pool"): POOL,
    ("groups.py", "of", "kv_cache_manager"): MANAGER,
    ("groups.py", "", "manager"): "vllm.v1.core.single_type_kv_cache_manager:FullAttentionManager",
    ("connector/prefix_lookup.py", "", "request"): REQUEST,
    (
        "groups.py",
        "",
        "self._managers[group]",
    ): "vllm.v1.core.single_type_kv_cache_manager:SlidingWindowManager",
    ("pool.py", "__init__", "blocks"): POOL,
    ("pool.py", "", "self._pool"): POOL,
    ("pool.py", "", "blocks[page]"): BLOCK,
    ("pool.py", "", "found[0]"): BLOCK,
    ("pool.py", "", "self._pool.blocks[page]"): BLOCK,
    ("stats.py", "", "super()"): PROM,
    ("stats.py", "PromMetrics", "self"): PROM,
    ("stats.py", "aggregate", "self"): STATS,
    ("stats.py", "aggregate", "other"): STATS,
    ("connector/__init__.py", "", "super()"): BASE,
    ("connector/__init__.py", "start_load_kv", "self"): BASE,
    ("connector/__init__.py", "", "blocks"): BLOCKS,
    ("connector/reporting.py", "", "request"): REQUEST,
    ("connector/reporting.py", "", "request.prefill_stats"): PREFILL_STATS,
    ("patches/forced_tokens.py", "", "config"): CONFIG,
    ("patches/forced_tokens.py", "", "config.model_config"): MODEL_CONFIG,
    ("patches/forced_tokens.py", "", "params"): "vllm.sampling_params:SamplingParams",
    ("patches/forced_tokens.py", "", "super()"): f"{PROCESSORS}:AdapterLogitsProcessor",
    (
        "patches/forced_tokens.py",
        "SlotAnswers",
        "req_states",
    ): "vllm.v1.worker.gpu.states:RequestState",
    (
        "patches/forced_tokens.py",
        "SlotAnswers",
        "req_states.prompt_len",
    ): f"{BUFFERS}:UvaBackedTensor",
    ("patches/forced_tokens.py", "SlotAnswers", "ctx"): f"{SLOT_PROCESSORS}:LogitsContext",
    ("patches/forced_tokens.py", "add_forced_tokens", "runner"): RUNNERS,
    ("patches/forced_tokens.py", "add_forced_tokens", "runner.vllm_config"): CONFIG,
    ("patches/forced_tokens.py", "_add_to_batch", "runner"): " ".join(RUNNERS.split()[:2]),
    (
        "patches/forced_tokens.py",
        "_add_to_batch",
        "runner.input_batch",
    ): "vllm.v1.worker.gpu_input_batch:InputBatch",
    ("patches/forced_tokens.py", "_add_to_batch", "processors"): f"{PROCESSORS}:LogitsProcessors",
    ("patches/forced_tokens.py", "_add_to_slots", "runner"): RUNNERS.split()[2],
    (
        "patches/forced_tokens.py",
        "_add_to_slots",
        "runner.sampler",
    ): "vllm.v1.worker.gpu.sample.sampler:Sampler",
    ("patches/events.py", "", "block_pool"): POOL,
    ("patches/events.py", "", "self._pool"): POOL,
    ("patches/events.py", "cache_full_blocks", "request"): REQUEST,
    ("patches/events.py", "_first_blocks", "event"): "vllm.distributed.kv_events:BlockStored",
    ("patches/reports.py", "", "request"): REQUEST,
    ("patches/reports.py", "process_outputs", "output"): "vllm.v1.engine:EngineCoreOutput",
    ("patches/reports.py", "", "output_processor"): PROCESSOR,
    ("patches/reports.py", "", "self._processor"): PROCESSOR,
    ("connector/reporting.py", "", "state.request"): REQUEST,
    ("connector/prefix_lookup.py", "", "state.request"): REQUEST,
    ("connector/prefix_lookup.py", "", "self._manager"): MANAGER,
    ("connector/admission.py", "", "kv_cache_manager"): MANAGER,
    ("connector/admission.py", "", "state.request"): REQUEST,
    ("connector/request_state.py", "", "self.request"): REQUEST,
    ("connector/worker_side.py", "", "self._config"): CONFIG,
    ("connector/worker_side.py", "", "self._config.model_config"): MODEL_CONFIG,
    ("connector/worker_side.py", "", "self._config.scheduler_config"): SCHEDULING,
    ("connector/scheduler_side.py", "", "config"): CONFIG,
    ("settings.py", "of", "config"): CONFIG,
    ("settings.py", "of", "transfer"): TRANSFER,
    ("compat/adapters.py", "", "request"): LORA,
    ("compat/adapters.py", "", "runner"): RUNNERS,
    ("compat/adapters.py", "", "manager"): LORA_MANAGER,
    ("connector/eligibility.py", "", "request"): REQUEST,
    ("connector/eligibility.py", "__init__", "lora"): "vllm.config.lora:LoRAConfig",
    ("connector/eligibility.py", "of", "lora"): LORA,
    ("connector/eligibility.py", "learn", "lora"): LORA,
    ("connector/eligibility.py", "", "config"): CONFIG,
    ("compat/residuals.py", "", "get_forward_context()"): "vllm.forward_context:ForwardContext",
    ("compat/support.py", "_residual_reasons", "config.model_config"): MODEL_CONFIG,
    ("connector/scheduler_side.py", "bind", "model"): MODEL_CONFIG,
    ("connector/eligibility.py", "", "config.model_config"): MODEL_CONFIG,
    ("connector/scheduler_side.py", "", "config.cache_config"): CACHE,
    ("connector/scheduler_side.py", "", "self.intake.config.scheduler_config"): SCHEDULING,
    ("connector/scheduler_side.py", "", "request"): REQUEST,
    ("connector/store_scheduler.py", "", "state.request"): REQUEST,
    ("connector/worker_side.py", "", "parallel"): PARALLEL,
    ("connector/scheduler_side.py", "", "state.request"): REQUEST,
    ("connector/worker_side.py", "", "self._config.parallel_config"): PARALLEL,
    ("connector/scheduler_side.py", "", "other.request"): REQUEST,
    ("connector/recoveries.py", "", "request.prefill_stats"): PREFILL_STATS,
    ("connector/recoveries.py", "", "request"): REQUEST,
    ("connector/recoveries.py", "", "state.request"): REQUEST,
    ("connector/controls.py", "", "state.request"): REQUEST,
    ("connector/scheduler_side.py", "bind", "kv_cache_manager"): MANAGER,
    (
        "connector/scheduler_side.py",
        "end_of_schedule",
        "output",
    ): "vllm.v1.core.sched.output:SchedulerOutput",
    ("connector/scheduler_side.py", "on_outcomes", "output"): "vllm.v1.outputs:KVConnectorOutput",
    ("connector/scheduler_side.py", "", "config.parallel_config"): PARALLEL,
    ("server/engine_choice.py", "of", "client"): "vllm.v1.engine.async_llm:AsyncLLM",
    ("server/engine_choice.py", "of", "client.output_processor"): PROCESSOR,
    ("server/engine_choice.py", "of", "client.vllm_config"): CONFIG,
    ("server/engine_choice.py", "of", "cache"): CACHE,
    (
        "server/engine_choice.py",
        "of",
        "client.engine_core",
    ): "vllm.v1.engine.core_client:AsyncMPClient",
    (
        "server/engine_choice.py",
        "_load",
        "state",
    ): "vllm.v1.engine.output_processor:RequestState",
    ("server/engine_client.py", "", "client"): "vllm.v1.engine.async_llm:AsyncLLM",
    ("server/engine_client.py", "", "self._client"): "vllm.v1.engine.async_llm:AsyncLLM",
    (
        "server/engine_client.py",
        "",
        "client.engine_core",
    ): "vllm.v1.engine.core_client:AsyncMPClient",
    ("server/engine_client.py", "admit", "request"): "vllm.v1.engine:EngineCoreRequest",
    ("server/engine_client.py", "", "output"): OUTPUT,
    ("server/request_log.py", "", "output"): OUTPUT,
    ("server/request_log.py", "", "metrics"): "vllm.v1.metrics.stats:RequestStateStats",
    ("server/pin_routes.py", "_token_ids", "answer"): f"{TOKENIZE}.protocol:TokenizeResponse",
    (
        "server/pin_routes.py",
        "_token_ids",
        "error",
    ): "vllm.entrypoints.serve.engine.protocol:ErrorInfo",
    (
        "server/pin_routes.py",
        "",
        "request.app.state.serving_tokenization",
    ): f"{TOKENIZE}.serving:ServingTokenization",
    ("server/engine_client.py", "", "lora_request"): LORA,
    ("server/pin_routes.py", "", "models"): f"{MODELS}.serving:OpenAIServingModels",
    ("patches/model_list.py", "hide_paths", "models"): f"{MODELS}.serving:OpenAIServingModels",
    (
        "patches/model_list.py",
        "hide_paths",
        "card",
    ): "vllm.entrypoints.serve.engine.protocol:ModelCard",
    (
        "server/status.py",
        "",
        "request.app.state.openai_serving_models",
    ): f"{MODELS}.serving:OpenAIServingModels",
}
OWN = {
    "attentions", "attach", "worker_side", "scheduler_side", "_metrics", "sinks", "sink_blocks",
}  # attributes of `self` that are ours  # fmt: skip
SET_SCALES = "vllm.model_executor.layers.attention.attention:set_default_quant_scales"
SET_BY_OTHERS = {
    (ATTENTION, "isa"): f"{BACKENDS}cpu_attn:CPUAttentionMetadataBuilder._set_isa_to_layers",
    (ATTENTION, "_k_scale"): SET_SCALES,
    (ATTENTION, "_k_scale_float"): SET_SCALES,
    (ATTENTION, "_v_scale_float"): SET_SCALES,
}


def resolve(path: str) -> Any:
    """The object at `module:name.name`."""
    module, _, names = path.partition(":")
    found: Any = load(module)
    for name in filter(None, names.split(".")):
        found = getattr(found, name)
    return found


@cache
def tree(file: Path) -> ast.Module:
    return ast.parse(file.read_text())


def place(file: Path, node: ast.AST) -> str:
    return f"kvgraft/{file.relative_to(PACKAGE)}:{node.lineno}"


def imports(file: Path) -> Iterator[tuple[ast.AST, str, str, str]]:
    """Every import from vLLM: its node, our name for it, module, name. Where one stands in for
    another, after `except ImportError`, that which this version takes."""
    idle = {
        id(node)
        for choice in ast.walk(tree(file))
        if isinstance(choice, ast.Try)
        for node in not_taken(choice)
    }
    for node in ast.walk(tree(file)):
        if (
            id(node) not in idle
            and isinstance(node, ast.ImportFrom)
            and (node.module or "").split(".")[0] == "vllm"
        ):
            yield from (
                (node, alias.asname or alias.name, str(node.module), alias.name)
                for alias in node.names
            )


def not_taken(choice: ast.Try) -> Iterator[ast.AST]:
    """What Python does not get to, if this chooses between imports."""
    if not any(
        handler.type is not None and ast.unparse(handler.type) == "ImportError"
        for handler in choice.handlers
    ):
        return
    try:
        for node in choice.body:
            for alias in node.names if isinstance(node, ast.ImportFrom) else ():
                imported(str(node.module), alias.name)
    except (ImportError, AttributeError):
        idle: list[Any] = choice.body
    else:
        idle = choice.handlers
    for part in idle:
        yield from ast.walk(part)


def imported(module: str, name: str) -> Any:
    """What `from module import name` gives; AttributeError or ImportError if nothing."""
    source = load(module)
    return getattr(source, name) if hasattr(source, name) else load(f"{module}.{name}")


def load(module: str) -> Any:
    """A module. Where there are only vLLM's Python files, its requirements may be missing: a test
    says so, skipped."""
    try:
        return importlib.import_module(module)
    except ModuleNotFoundError as error:
        if HAS_KERNELS or (error.name or "").partition(".")[0] in ("", "vllm", "kvgraft"):
            raise
        pytest.skip(f"{module} imports {error.name}, which is not installed")


@cache
def attributes(path: str) -> frozenset[str]:
    """What instances of a class have: members, fields, and what its methods assign to `self`."""
    cls, found = resolve(path), set()
    for base in cls.__mro__:
        found |= {*vars(base), *getattr(base, "__annotations__", ())}
        try:
            nodes = list(ast.walk(ast.parse(textwrap.dedent(inspect.getsource(base)))))
        except (OSError, TypeError):  # built in
            continue
        stored = (n for n in nodes if isinstance(n, ast.Attribute) and isinstance(n.ctx, ast.Store))
        found |= {
            node.attr
            for node in stored
            if isinstance(node.value, ast.Name) and node.value.id == "self"
        }
    return frozenset(found)


def has(path: str, attribute: str) -> bool:
    setter = SET_BY_OTHERS.get((path, attribute))
    if setter is not None:
        source = inspect.getsource(resolve(setter))
        return f".{attribute} = " in source or f'register_buffer("{attribute}"' in source
    return attribute in attributes(path)


def used(
    file: Path, scope: str, expression: str
) -> Iterator[tuple[ast.Attribute, ast.Call | None]]:
    """Attributes that we take of an expression, each with its call, if it is called."""
    roots = (
        [n for n in ast.walk(tree(file)) if getattr(n, "name", None) == scope]
        if scope
        else [tree(file)]
    )
    nodes = [node for root in roots for node in ast.walk(root)]
    calls = {id(node.func): node for node in nodes if isinstance(node, ast.Call)}
    for node in nodes:
        if isinstance(node, ast.Attribute) and ast.unparse(node.value) == expression:
            yield node, calls.get(id(node))


def fits(function: Any, call: ast.Call, *, bound: bool = False) -> str | None:
    """Why the arguments of our call do not fit, or None."""
    if isinstance(function, NewType):
        return None
    try:
        signature = inspect.signature(function)
        stars = any(isinstance(a, ast.Starred) for a in call.args) or any(
            k.arg is None for k in call.keywords
        )
        given = [None] * (len([a for a in call.args if not isinstance(a, ast.Starred)]) + bound)
        (signature.bind_partial if stars else signature.bind)(
            *given, **{k.arg: None for k in call.keywords if k.arg}
        )
    except (TypeError, ValueError) as error:
        return str(error)
    return None


def test_the_version_that_we_go_by_is_that_of_the_code():
    entered, imported = (
        version.partition("+")[0] for version in (vllm_version(), resolve("vllm").__version__)
    )
    assert entered == imported, (
        "compat.support reads the version off the packages; so does `make contract`"
    )


@pytest.mark.parametrize("file", FILES, ids=lambda file: str(file.relative_to(PACKAGE)))
def test_what_we_import_exists(file: Path):
    for node, _, module, name in imports(file):
        try:
            imported(module, name)
        except (ImportError, AttributeError) as error:
            pytest.fail(f"{place(file, node)} imports {module}.{name}: {error}")


@pytest.mark.parametrize("file", FILES, ids=lambda file: str(file.relative_to(PACKAGE)))
def test_what_we_call_takes_our_arguments(file: Path):
    ours = {alias: imported(module, name) for _, alias, module, name in imports(file)}
    for node in ast.walk(tree(file)):
        if not isinstance(node, ast.Call):
            continue
        root, *names = ast.unparse(node.func).split(".")
        if root not in ours or not all(name.isidentifier() for name in names):
            continue
        function = ours[root]
        for name in names:
            assert hasattr(function, name), (
                f"{place(file, node)} calls {ast.unparse(node.func)}: no {name!r}"
            )
            function = getattr(function, name)
        problem = fits(function, node)
        assert problem is None, f"{place(file, node)} calls {ast.unparse(node)}: {problem}"


@pytest.mark.parametrize(
    ("where", "paths"), HANDED.items(), ids=lambda x: " ".join(x) if isinstance(x, tuple) else ""
)
def test_what_vllm_hands_to_us_has_what_we_use(where: tuple[str, str, str], paths: str):
    name, scope, expression = where
    file, found = (PACKAGE if name.startswith("server/") else SOURCE) / name, 0
    for node, call in used(file, scope, expression):
        if expression == "self" and (node.attr in OWN or isinstance(node.ctx, ast.Store)):
            continue
        found += 1
        for path in paths.split():
            assert has(path, node.attr), (
                f"{place(file, node)} uses {ast.unparse(node)}: {path} has none"
            )
            member = inspect.getattr_static(resolve(path), node.attr, None)
            if call is not None and inspect.isfunction(member):
                problem = fits(member, call, bound=True)
                assert problem is None, (
                    f"{place(file, node)} calls {ast.unparse(call)} of {path}: {problem}"
                )
    assert found, (
        f"{name} no longer uses {expression} in {scope or 'any function'}: take this entry away"
    )


@pytest.mark.parametrize(
    ("stand_in", "name"),
    [(before_prefix_lookup, "get_computed_blocks"), (on_cache_reset, "reset_prefix_cache")],
)
def test_what_stands_in_for_a_method_takes_what_that_takes(
    stand_in: Callable[..., None], name: str
):
    manager = object.__new__(resolve(MANAGER))
    theirs = inspect.signature(getattr(manager, name))
    stand_in(manager, lambda *_: True)
    inspect.signature(getattr(manager, name)).bind(*theirs.parameters)


def test_the_sizes_that_we_refuse_are_still_called_so():
    for name in (
        "pipeline_parallel_size",
        "decode_context_parallel_size",
        "prefill_context_parallel_size",
    ):
        assert has(PARALLEL, name), (
            f"compat.support._parallel_reasons asks for {name}, with 1 where there is none"
        )


def test_all_blocks_become_cached_and_all_events_are_taken_where_we_stand():
    pool, manager = resolve(POOL), resolve(MANAGER)
    ours = list(inspect.signature(ExactEvents.cache_full_blocks).parameters)[:5]
    assert list(inspect.signature(pool.cache_full_blocks).parameters)[:5] == ours, (
        "ExactEvents stands before it"
    )
    assert "self.block_pool.take_events()" in inspect.getsource(manager.take_events), (
        "ExactEvents stands before it"
    )


def overrides() -> list[str]:
    named = {
        name
        for name, member in vars(KVGraftConnector).items()
        if callable(getattr(member, "__func__", member))
    }
    return sorted(named - {"__init__", "__abstractmethods__"} - {"__doc__"})


@pytest.mark.parametrize("name", overrides())
def test_the_connector_overrides_what_vllm_calls(name: str):
    base = next(
        (vars(cls)[name] for cls in KVGraftConnector.__mro__[1:] if name in vars(cls)), None
    )
    assert base is not None, f"KVGraftConnector.{name} overrides nothing: vLLM would never call it"
    theirs, ours = (
        inspect.signature(getattr(m, "__func__", m)) for m in (base, vars(KVGraftConnector)[name])
    )
    shapes = [
        [(p.name, p.kind) for p in signature.parameters.values()] for signature in (theirs, ours)
    ]
    assert shapes[0] == shapes[1], f"KVGraftConnector.{name}{ours} is called as {theirs}"


def test_the_connector_is_complete():
    assert not KVGraftConnector.__abstractmethods__, (
        "vLLM asks connectors for more methods than KVGraftConnector has"
    )
    parameters = list(inspect.signature(KVGraftConnector).parameters)
    assert parameters == ["vllm_config", "role", "kv_cache_config"], (
        "the factory passes these to KVGraftConnector"
    )


def test_the_plugin_is_loaded_in_every_process():
    group = resolve("vllm.plugins:DEFAULT_PLUGINS_GROUP")
    [point] = entry_points(group=group, name="kvgraft")
    register, factory = (
        point.load(),
        resolve("vllm.distributed.kv_transfer.kv_connector.factory:KVConnectorFactory"),
    )
    register()
    register()  # vLLM says that plugins may be loaded more than once
    found = factory.get_connector_class_by_name(CONNECTOR)
    assert found is KVGraftConnector, "kvgraft.vllm.plugin registers the connector by name"
    transfer = resolve(TRANSFER)(
        kv_connector=CONNECTOR, kv_connector_module_path=CONNECTOR_MODULE, kv_role="kv_both"
    )
    assert factory.get_connector_class(transfer) is KVGraftConnector, (
        "`--kv-transfer-config` names the module"
    )
    assert factory.supports_hma_config(transfer), "vLLM refuses connectors without SupportsHMA"


TRANSFORMERS = "vllm.model_executor.models.transformers"  # runs what vLLM has no classes for


def modules_of(architecture: str) -> list[Any]:
    """Where the classes of a model stand, its own first."""
    registry = resolve("vllm.model_executor.models.registry:ModelRegistry")
    found = registry.models[architecture]
    if found.module_name.startswith(TRANSFORMERS):
        return []
    model = getattr(importlib.import_module(found.module_name), found.class_name)
    assert has(f"{model.__module__}:{model.__name__}", "embed_input_ids"), (
        "decoder_layers.embed calls it"
    )
    return [
        importlib.import_module(cls.__module__)
        for cls in model.__mro__
        if ".models." in cls.__module__
    ]


@pytest.mark.parametrize("architecture", ARCHITECTURES)
def test_decoder_layers_are_what_the_host_runs(architecture: str):
    modules = modules_of(architecture)
    if not modules:
        assert has(f"{TRANSFORMERS}.base:Base", "embed_input_ids"), "decoder_layers.embed calls it"
        forward = inspect.signature(resolve(f"{TRANSFORMERS}:vllm_attention_forward"))
        assert list(forward.parameters)[:4] == ["module", "query", "key", "value"]
        return
    layers = [
        c
        for m in modules
        for n, c in vars(m).items()
        if re.search(r"(DecoderLayer|TransformerBlock)$", n)
    ]
    layer = inspect.signature(layers[0].forward)
    assert {"positions", "hidden_states"} <= set(layer.parameters), (
        "DecoderLayer calls it by these names"
    )
    rest = [
        p
        for n, p in layer.parameters.items()
        if n not in ("self", "positions", "hidden_states", "residual")
    ]
    assert all(p.default is not p.empty or p.kind is p.VAR_KEYWORD for p in rest), (
        f"more is wanted: {layer}"
    )
    calls = {
        ast.unparse(n)
        for m in modules
        for n in ast.walk(ast.parse(inspect.getsource(m)))
        if isinstance(n, ast.Call)
    }
    assert "self.attn(q, k, v)" in calls, "ModelHost is shown (query, key, value) by place"


@pytest.mark.parametrize("architecture", IN_STEPS)
def test_layers_can_be_run_in_steps(architecture: str):
    """What `HeadwisePrefill` does between the steps is what these lines do."""
    modules = modules_of(architecture)
    layers = [c for m in modules for n, c in vars(m).items() if n.endswith("DecoderLayer")]
    forward = ast.unparse(ast.parse(textwrap.dedent(inspect.getsource(layers[0].forward))))
    added = (
        r"hidden_states = self\.self_attn\(.*\)\n *\(?hidden_states, residual\)? = "
        r"self\.post_attention_layernorm\("
    )
    assert re.search(added + r"hidden_states, residual\)\n", forward), (
        "the residual stream is not added to as it is"
    )
    assert "self.input_layernorm(hidden_states, residual)" in forward, (
        "DecoderLayer.after_attention leaves it out"
    )
    assert any("output, _ = self.o_proj(attn_output)" in inspect.getsource(m) for m in modules)


def test_backends_attend_to_the_rows_that_their_metadata_say():
    """Our kernel attends to those behind them, in the layers in which an implementation computes
    nothing unusual."""
    called = inspect.getsource(
        resolve("vllm.model_executor.layers.attention.attention:unified_attention_with_output")
    )
    assert re.search(r"self\.impl\.forward\(\s*self,\s*query,\s*key,\s*value,\s*kv_cache,", called)
    assert "output=output," in called
    backends = {
        name: source_of(f"{BACKENDS}{name.lower()}")
        for name in ("flash_attn", "flashinfer", "triton_attn")
    }
    for source in backends.values():
        for name in (
            "sliding_window",
            "logits_soft_cap",
            "alibi_slopes",
            "sinks",
            "kv_sharing_target_layer_name",
        ):
            assert f"self.{name}" in source
        assert "query[:num_actual_tokens]" in source
        assert "output[:num_actual_tokens]" in source
    taken = "layer query key value kv_cache attn_metadata output output_scale output_block_scale"
    for name in IMPLS.split()[1:]:
        assert list(inspect.signature(resolve(name).forward).parameters)[1:] == taken.split()
    assert "max_num_reqs + 1, dtype=torch.int32" in backends["flashinfer"], (
        "its buffers are for `max_num_seqs` runs"
    )


def source_of(module: str) -> str:
    """Of a module that may want what is not installed."""
    spec = find_spec(module)
    assert spec is not None
    assert spec.origin is not None
    return Path(spec.origin).read_text()


def test_adapters_are_loaded_set_and_removed_where_we_stand():
    """`RunnerAdapters` replaces these methods on the runner's manager, so vLLM must call them on
    it."""
    mixin = inspect.getsource(
        resolve("vllm.v1.worker.lora_model_runner_mixin:LoRAModelRunnerMixin")
    )
    assert "self.lora_manager.set_active_adapters(lora_requests, lora_mapping)" in mixin, (
        "give_back restores this"
    )
    assert "self.lora_manager.remove_all_adapters()" in mixin, (
        "adapters of the warm-up are not given back"
    )
    assert "self._load_adapter(lora_request)" in inspect.getsource(
        resolve(LORA_MANAGER).add_adapter
    )
    hashed = inspect.getsource(resolve("vllm.v1.core.kv_cache_utils:_gen_lora_extra_hash_keys"))
    assert '[("lora", lora_request.lora_name, lora_request.lora_path)]' in hashed, (
        "RequestAdapters tells weights apart"
    )


def test_every_rank_has_all_logits():
    """ModelHost.logits gives them to policies, which must decide alike."""
    gathering = inspect.getsource(
        resolve("vllm.model_executor.layers.logits_processor:LogitsProcessor")
    )
    assert "self.use_all_gather = current_platform.use_all_gather()" in gathering
    assert resolve("vllm.platforms:current_platform").use_all_gather()


def test_forced_tokens_come_behind_the_models_log_probabilities():
    first = inspect.getsource(resolve("vllm.v1.sample.sampler:Sampler").forward)
    told, processed = (
        first.index("self.compute_logprobs(logits)"),
        first.index("self.apply_logits_processors("),
    )
    assert told < processed, "BatchAnswers changes logits that nobody looks at any more"
    second = inspect.getsource(
        resolve("vllm.v1.worker.gpu.sample.sampler:Sampler").apply_sampling_params
    )
    unused, copied = (
        second.index("self.needs_logits_processing[idx_mapping_np]"),
        second.index(".copy_(logits)"),
    )
    assert unused < copied < second.index("processor.apply(logits, ctx)"), (
        "SlotAnswers changes a copy, where it is needed"
    )


def test_the_first_runner_counts_tokens_that_it_does_not_know_yet():
    runner = inspect.getsource(resolve(RUNNERS.split()[1]))
    assert "sampled_ids = [-1]" in runner
    assert "req_state.output_token_ids.extend(sampled_ids)" in runner, (
        "BatchAnswers counts the tokens of the answer"
    )
    added = inspect.getsource(
        resolve("vllm.v1.worker.gpu_input_batch:InputBatch")._register_add_request
    )
    assert "request.output_token_ids," in added, "BatchAnswers keeps the list itself"


def test_processors_of_the_configuration_make_the_first_runner_wait():
    runner = inspect.getsource(resolve(RUNNERS.split()[1]))
    assert "logitsprocs_need_output_token_ids=bool(custom_logitsprocs)" in runner, (
        "add_forced_tokens goes past vllm_config.model_config.logits_processors for this reason "
        "only"
    )
    assert "logitsprocs=self.input_batch.logitsprocs," in runner, (
        "what we added is kept in a new batch"
    )


def test_runners_know_a_prompt_before_they_resume_a_request():
    """`set_known_prompt` gives the first runner another one; the second forgets what is
    preempted."""
    first, second = (resolve(runner) for runner in RUNNERS.split()[1:])
    step = inspect.getsource(first.execute_model)
    told, looked_at = (
        ".handle_preemptions(kv_connector_metadata)",
        "self._update_states(scheduler_output)",
    )
    assert step.index(told) < step.index(looked_at)
    assert has(RUNNERS.split()[1], "requests")
    added = inspect.getsource(resolve("vllm.v1.worker.gpu_input_batch:InputBatch").add_request)
    assert "request.prompt_token_ids" in added, (
        "the batch has the prompt of the state that is resumed"
    )
    assert "finished_req_ids.union(preempted_req_ids)" in inspect.getsource(second.finish_requests)
    assert "all_token_ids=new_req_data.prefill_token_ids" in inspect.getsource(second.add_requests)
