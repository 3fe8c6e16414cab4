"""vLLM's host of a recovery without an engine, on the CPU or on a device that is not there.

The model, its decoder layers, their attention layers and forward contexts are vLLM's own, and so is
all code of KVGraft from `RecoveryBatch` down. Three things are stand-ins, each one launch as its
kernel on CUDA: norms, rotary embedding, activation and matrices run on the CPU; the attention
backend, which on CUDA has the name of one of vLLM's, writes keys and values to rows of numbers, as
FlashAttention's cache has them, and attends in plain torch; the metadata builder returns what it is
given."""

import os
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from tempfile import mkdtemp
from types import SimpleNamespace
from typing import Any
from unittest.mock import patch

os.environ |= {"HF_HUB_OFFLINE": "1", "NUMBA_NUM_THREADS": "1", "VLLM_LOGGING_LEVEL": "ERROR"}

import numpy as np
import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from vllm.config import VllmConfig, set_current_vllm_config
from vllm.distributed import (
    destroy_distributed_environment,
    destroy_model_parallel,
    ensure_model_parallel_initialized,
    init_distributed_environment,
)
from vllm.distributed.parallel_state import model_parallel_is_initialized
from vllm.engine.arg_utils import EngineArgs
from vllm.ir.op import enable_torch_wrap
from vllm.model_executor.layers.activation import SiluAndMul
from vllm.model_executor.layers.layernorm import RMSNorm
from vllm.model_executor.layers.linear import LinearBase
from vllm.model_executor.layers.rotary_embedding import _ROPE_DICT
from vllm.model_executor.layers.rotary_embedding.base import RotaryEmbeddingBase
from vllm.model_executor.layers.vocab_parallel_embedding import VocabParallelEmbedding
from vllm.model_executor.model_loader import get_model

from fake_device import VIEWS, FakeDevice, FakeTensor, Kind
from kvgraft.core.costs import TOKENS
from kvgraft.core.matches import Match
from kvgraft.core.plan import Plan
from kvgraft.policies.full import Full
from kvgraft.prefill.context import Policy
from kvgraft.vllm.compat.model import ModelHost
from kvgraft.vllm.recovery import Job, RecoveryBatch, RecoveryResult

BLOCK = 16
FLASH_ROWS = 128  # queries of a run and a KV head that read keys and values together
SETTINGS = {
    "max_model_len": 4096,
    "max_num_batched_tokens": 8192,
    "block_size": BLOCK,
    "num_gpu_blocks_override": 512,
}


def launched(
    name: str, run: Callable[..., Any], *given: Any, nbytes: int | None = None, **named: Any
) -> Any:
    """Run one kernel: as one launch while there is a device."""
    if FakeDevice.is_entered():
        return FakeDevice.current.launch(name, run, *given, nbytes=nbytes, **named)
    return run(*given, **named)


def operations(name: str, run: Callable[..., Any], *given: Any, **named: Any) -> Any:
    """Run what is no kernel: as one launch for each of its operations."""
    with enable_torch_wrap(False), OperationCount() as count:
        made = launched(name, run, *given, **named)
    for _ in range(count.operations - 1 if FakeDevice.is_entered() else 0):
        FakeDevice.current.count(Kind.LAUNCH, name)
    return made


class OperationCount(TorchDispatchMode):
    """Counts operations of PyTorch but views."""

    operations = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.operations += func._schema.name.split("::")[1] not in VIEWS
        return func(*args, **kwargs or {})


class RowAttention:
    """A stand-in for an attention backend on CUDA, whose cache is [blocks, Hkv, N, 2 d]: keys, and
    values beside."""

    def __init__(self, scale: float) -> None:
        self.scale = scale

    def do_kv_cache_update(
        self, layer: Any, key: Tensor, value: Tensor, cache: Tensor, slots: Tensor
    ) -> None:
        """Write keys and values [n, Hkv, d] to slots int64 [n]."""
        launched("reshape_and_cache", _write, key, value, cache, slots)

    def forward(
        self, layer: Any, query: Tensor, key: Tensor, value: Tensor, cache: Tensor, metadata: Any,
        output: Tensor,
        **named: Any,
    ) -> Tensor:  # fmt: skip
        """Attend causally, queries and output [n, Hq, d]."""
        tables = metadata.query_start_loc, metadata.seq_lens, metadata.block_table_tensor
        queries = np.diff(metadata.query_start_loc_cpu.numpy()) * (query.shape[1] // cache.shape[1])
        tiles = -(-queries // FLASH_ROWS)
        seen = int((tiles * metadata.seq_lens_cpu_upper_bound.numpy()).sum())
        nbytes = seen * cache.shape[1] * cache.shape[3] * cache.element_size()
        run = partial(_attend, self.scale)
        attended: Tensor = launched("attention", run, query, cache, *tables, output, nbytes=nbytes)
        return attended


def _write(key: Tensor, value: Tensor, cache: Tensor, slots: Tensor) -> None:
    cache.transpose(1, 2)[slots // BLOCK, slots % BLOCK] = torch.cat((key, value), -1)


def _attend(
    scale: float,
    query: Tensor,
    cache: Tensor,
    starts: Tensor,
    lengths: Tensor,
    blocks: Tensor,
    output: Tensor,
) -> Tensor:
    attend = torch.nn.functional.scaled_dot_product_attention
    for run, (first, stop) in enumerate(
        zip(starts[:-1].tolist(), starts[1:].tolist(), strict=True)
    ):
        seen = int(lengths[run])
        # [t, Hkv, 2 d]
        rows = cache[blocks[run, : -(-seen // BLOCK)].long()].transpose(1, 2).flatten(0, 1)[:seen]
        keys, values = rows.transpose(0, 1).chunk(2, -1)
        visible = torch.ones(stop - first, seen, dtype=torch.bool).tril(seen - (stop - first))
        asking = query[first:stop].transpose(0, 1)
        attended = attend(asking, keys, values, visible, scale=scale, enable_gqa=True)
        output[first:stop] = attended.transpose(0, 1)
    return output


def _as_given(common: Any) -> Any:
    return common


def _norm(forward: Callable[..., Any], rows: Tensor, residual: Tensor | None = None) -> Any:
    """Overwrite what it is given, as the fused norm does on CUDA."""
    if residual is None:
        return forward(rows)
    for given, made in zip((rows, residual), forward(rows.clone(), residual.clone()), strict=True):
        given.copy_(made)
    return rows, residual


@dataclass(frozen=True)
class LoadedModel:
    """vLLM's model, on the CPU whatever the device of its host is."""

    config: VllmConfig
    model: torch.nn.Module

    @classmethod
    def of(cls, folder: Path, **settings: Any) -> "LoadedModel":
        """Load the model of a folder in bfloat16, with these settings of vLLM."""
        given = EngineArgs(
            model=str(folder), dtype="bfloat16", **SETTINGS | {"enforce_eager": True} | settings
        )
        with (
            set_current_vllm_config(config := given.create_engine_config()),
            torch.inference_mode(),
        ):
            if not model_parallel_is_initialized():
                init_distributed_environment(1, 0, f"file://{mkdtemp()}/store", 0, "gloo")
                ensure_model_parallel_initialized(1, 1)
            with patch.object(torch.accelerator, "empty_cache"), patch.dict(_ROPE_DICT, clear=True):
                model = get_model(vllm_config=config)
        config.cache_config.num_gpu_blocks = config.cache_config.num_gpu_blocks_override
        for module in model.modules():
            _stand_in(module)
        return cls(config, model)

    @torch.inference_mode()
    def host(
        self, device: str, backend: str = "FLASH_ATTN", build: Callable[[Any], Any] = _as_given
    ) -> ModelHost:
        """Return its host, whose cache is on the CPU or on "cuda", with an attention backend of
        this name and what builds its metadata."""
        attentions = self.config.compilation_config.static_forward_context
        for attention in attentions.values():
            attention.impl = RowAttention(attention.impl.scale)
            attention.attn_backend = SimpleNamespace(
                get_name=lambda: backend, forward_includes_kv_cache_update=False
            )
            attention.use_direct_call = True
            blocks = self.config.cache_config.num_gpu_blocks
            shape = blocks, attention.num_kv_heads, BLOCK, 2 * attention.head_size
            attention.kv_cache = torch.zeros(shape, dtype=torch.bfloat16, device=device)
        spec = next(iter(attentions.values())).get_kv_cache_spec(self.config)
        builder = SimpleNamespace(
            kv_cache_spec=spec, build=lambda _, common, fast_build: build(common)
        )
        group = SimpleNamespace(layer_names=list(attentions), get_metadata_builder=lambda: builder)
        cache = SimpleNamespace(kv_cache_groups=[SimpleNamespace(kv_cache_spec=spec)])
        runner = SimpleNamespace(
            vllm_config=self.config, get_model=lambda: self.model, kv_cache_config=cache,
            attn_groups=[[group]],
            device=torch.device(device),
        )  # fmt: skip
        return ModelHost(runner)


def _stand_in(module: Any) -> None:
    """Make one launch of what is one kernel on CUDA. In a compiled server operators run natively
    until somebody has them dispatched."""
    name = type(module).__name__
    if isinstance(module, RMSNorm | SiluAndMul | RotaryEmbeddingBase):
        run = (
            partial(_norm, module.forward_native)
            if isinstance(module, RMSNorm)
            else module.forward_native
        )
        is_native = _is_native(module)
        module.forward_native, module.forward_cpu = (
            partial(form, name, run) for form in (operations, launched)
        )
        module._forward_method = module.forward_native if is_native else module.forward_cpu
    elif isinstance(module, LinearBase | VocabParallelEmbedding):
        module.forward = partial(launched, name, module.forward)


def _is_native(operator: Any) -> bool:
    running = operator._forward_method
    return getattr(running, "_torchdynamo_orig_callable", running) == operator.forward_native


@contextmanager
def process_groups() -> Iterator[None]:
    """Those that models make when they are loaded, unless they are there: an engine of this process
    makes its own."""
    was_initialised = model_parallel_is_initialized()
    yield
    if not was_initialised:
        destroy_model_parallel()
        destroy_distributed_environment()


class Recoveries:
    """One prompt of documents that were read before, recovered into the same blocks again and
    again.

    Args:
        read: what was read; documents: their places in it; prompt: in which they stand.
    """

    def __init__(
        self,
        host: ModelHost,
        read: Sequence[int],
        documents: Sequence[range],
        prompt: Sequence[int],
    ) -> None:
        self._host, self._prompt = host, prompt
        count = -(-len(read) // BLOCK)
        self._source, self._table = (
            np.arange(1, count + 1),
            np.arange(count + 1, count + 1 - -len(prompt) // BLOCK),
        )
        self._matches = [self._match(read, document) for document in documents]
        self._recover(Full(), read, Plan.for_prompt(len(read), BLOCK), [self._source])

    @torch.inference_mode()
    def forget(self) -> None:
        """Clear its blocks."""
        self._host.clear(torch.from_numpy(self._table))

    def __call__(self, policy: Policy, copies: int = 1) -> RecoveryResult:
        """Recover it under this policy, as the first of so many prompts, each in blocks of its
        own."""
        matches = self._matches if policy.uses_grafts else []
        plan = Plan.for_prompt(len(self._prompt), BLOCK, matches=matches)
        return self._recover(
            policy, self._prompt, plan, [self._table_of(number) for number in range(copies)]
        )

    def cached(self, number: int = 0) -> list[Tensor]:
        """By layer what the cache has of one of the prompts: [T, Hkv, 2 d]."""
        table = self._table_of(number)
        caches = (_held(attention.kv_cache)[table] for attention in self._host.attentions)
        return [cache.transpose(1, 2).flatten(0, 1)[: len(self._prompt)] for cache in caches]

    def _table_of(self, number: int) -> np.ndarray:
        return self._table + number * len(self._table)

    def _match(self, read: Sequence[int], document: range) -> Match:
        text, size = list(read[document.start : document.stop]), len(document)
        start = next(
            at for at in range(len(self._prompt)) if list(self._prompt[at : at + size]) == text
        )
        pages = self._source[document.start // BLOCK : -(-document.stop // BLOCK)]
        return Match(start, size, document.start, pages.astype(np.int32), 0, 0)

    @torch.inference_mode()
    def _recover(
        self, policy: Policy, tokens: Sequence[int], plan: Plan, tables: Sequence[np.ndarray]
    ) -> RecoveryResult:
        pages = np.unique(plan.graft_sources.numpy() // BLOCK)[:, None]
        given = policy, plan, np.array(tokens)
        jobs = [Job(str(number), *given, (table,), pages) for number, table in enumerate(tables)]
        batch = RecoveryBatch(self._host, None, None, jobs)  # type: ignore[arg-type]  # no library: nothing is kept
        batch.advance(float("inf"), TOKENS)
        if batch.outcomes is None or any(outcome.failure for outcome in batch.outcomes.values()):
            raise ValueError(f"{policy} failed: {batch.outcomes}")
        return batch.outcomes["0"]


def _held(tensor: Tensor) -> Tensor:
    return tensor.held if isinstance(tensor, FakeTensor) else tensor
