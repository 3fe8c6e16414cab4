"""Choice of the attention kernel for a recovery's rows, made per attention group at worker start.

A backend of vLLM takes rows as sequences, one for each run of consecutive tokens. For each sequence
it reads all keys and values that the run attends to. So a scattered token would read its whole
prompt. Our kernel reads keys and values once for a tile of rows at any positions. It computes the
rows of runs shorter than `LONG_RUN`, and the backend computes the others. On CPUs, and where our
kernel would compute something else, the backend computes all rows.
"""

import logging
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor
from vllm.config import VllmConfig
from vllm.model_executor.layers.attention import Attention
from vllm.v1.attention.backend import AttentionType, CommonAttentionMetadata

from kvgraft.kernels.dispatch import segpaged_attention
from kvgraft.kernels.layout import AttentionLayout
from kvgraft.kernels.upload import upload
from kvgraft.vllm.compat.pools import PoolLayout
from kvgraft.vllm.heads.attention import HeadBackend
from kvgraft.vllm.patches.replacing import replaced

logger = logging.getLogger("kvgraft")
# Rows. With at least two query heads per KV head they fill a tile of flash attention.
LONG_RUN = 64
# devices with our Triton kernel
DEVICES = ("cuda",)
# backends whose attention `_PLAIN` describes completely
BACKENDS = ("FLASH_ATTN", "FLASHINFER", "TRITON_ATTN")
# vLLM's backends whose metadata is not in buffers of `max_num_seqs` sequences
UNBOUNDED = ("FLASH_ATTN", "TRITON_ATTN")
# attribute of an implementation -> its name in messages, and values if it is not used
_PLAIN: dict[str, tuple[str, tuple[Any, ...]]] = {
    "attn_type": ("an encoder", (AttentionType.DECODER,)),
    "sliding_window": ("a sliding window", (None, -1, (-1, -1))),
    "chunk_lookback": ("attention in chunks", (-1,)),
    "logits_soft_cap": ("a soft cap", (None, 0)),
    "alibi_slopes": ("ALiBi", (None,)),
    "sinks": ("sinks", (None,)),
    "kv_sharing_target_layer_name": ("the cache of another layer", (None,)),
}


@dataclass(frozen=True)
class GroupAttention:
    """Attention of a recovery's rows in the layers of one attention group.

    Attributes:
        number: number of its KV cache group, 0 being the main one (see `groups`).
        backend: name of vLLM's backend.
        pool: location of keys and values for our kernel; None if the backend computes all rows.
        reasons: reasons why it does.
        max_runs: maximum number of sequences per call of the backend; None for no limit. With a
            limit, the result of its metadata builder points into buffers that the next call
            overwrites.
    """

    number: int
    backend: str
    pool: PoolLayout | None
    reasons: tuple[str, ...]
    max_runs: int | None

    @classmethod
    def of(
        cls, number: int, layers: Sequence[Any], config: VllmConfig, device: torch.device
    ) -> "GroupAttention":
        """Choose for the attention layers of a group."""
        backend = str(layers[0].attn_backend.get_name())
        reasons = dict.fromkeys(
            reason for layer in layers for reason in _reasons(layer, backend, config, device)
        )
        pools = set() if reasons else {PoolLayout.of(layer.kv_cache) for layer in layers}
        pool = pools.pop() if len(pools) == 1 else None
        if pool is None and not reasons:
            reasons["a cache that is not rows of keys and values, alike in all layers"] = None
        unbounded = backend in UNBOUNDED or layers[0].attn_backend is HeadBackend
        bounded = device.type in DEVICES and not unbounded
        max_runs = int(config.scheduler_config.max_num_seqs) if bounded else None
        return cls(number, backend, pool, tuple(reasons), max_runs)

    def __str__(self) -> str:
        if self.pool is None:
            return f"{self.backend} ({', '.join(self.reasons)})"
        return f"KVGraft's kernel; {self.backend} for runs of {LONG_RUN} tokens or more"


@dataclass(frozen=True)
class RecoveryAttention:
    """Attention of a recovery in all layers.

    Attributes:
        groups: choices by metadata builder.
        drafts: True if layers of a draft model attend too, always by their backend alone.
    """

    groups: tuple[GroupAttention, ...]
    drafts: bool

    @classmethod
    def of(
        cls,
        groups: Iterable[tuple[int, Any]],
        config: VllmConfig,
        device: torch.device,
        *,
        drafts: bool,
    ) -> "RecoveryAttention":
        """Choose for vLLM's attention groups, and log the choices.

        Args:
            groups: number of the KV cache group and attention group, for each metadata builder.
        """
        layers = config.compilation_config.static_forward_context
        named = [(number, [layers[name] for name in group.layer_names]) for number, group in groups]
        decided = tuple(GroupAttention.of(number, own, config, device) for number, own in named)
        for attends in dict.fromkeys(map(str, decided)):
            logger.info("attention of recoveries: %s", attends)
        return cls(decided, drafts)

    @property
    def splits_rows(self) -> bool:
        """True if a backend computes only long runs in some group."""
        return any(group.pool is not None for group in self.groups)

    @property
    def max_long_runs(self) -> int | None:
        """Maximum number of sequences per backend call in all groups; None for no limit."""
        return min(
            (group.max_runs for group in self.groups if group.max_runs is not None), default=None
        )

    @property
    def max_runs(self) -> int | None:
        """Maximum sequences per backend call where a backend computes all runs, else None."""
        takes_all = self.drafts or any(group.pool is None for group in self.groups)
        return self.max_long_runs if takes_all else None


@dataclass(frozen=True, eq=False)
class RowsMetadata:
    """Attention metadata of some rows in the layers of one attention group.

    Attributes:
        backend: vLLM's metadata of the leading rows, which its backend computes; None if there are
            none.
        pool, scattered: location of keys and values for our kernel, and the other rows; None if
            there are none.
    """

    backend: Any
    pool: PoolLayout | None = None
    scattered: AttentionLayout | None = None

    @contextmanager
    def attending(self, attention: Any) -> Iterator[None]:
        """Let an attention layer use both kernels within a context."""
        if self.pool is None or self.scattered is None:
            yield
            return

        impl, pool, scattered = attention.impl, self.pool, self.scattered
        stock, count = impl.forward, scattered.rows[-1].stop

        def forward(
            layer: Any, query: Tensor, key: Tensor, value: Tensor, cache: Tensor, metadata: Any,
            output: Tensor,
            **named: Any,
        ) -> Tensor:  # fmt: skip
            first = len(query) - count
            if metadata is not None:
                stock(
                    layer,
                    query[:first],
                    key[:first],
                    value[:first],
                    cache,
                    metadata,
                    output[:first],
                    **named,
                )

            segpaged_attention(
                query[first:], *pool.pools(cache), pool.heads, scattered, impl.scale, output[first:]
            )
            return output

        with replaced(impl, "forward", forward):
            yield


@dataclass
class PseudoSequences(CommonAttentionMetadata):
    """Input of a metadata builder for runs of consecutive tokens, each as a sequence.

    Attributes:
        prompts: number of each run's prompt.
    """

    prompts: tuple[int, ...] = ()


def pseudo_sequences(
    queries: Sequence[tuple[int, int, int]],
    tables: Sequence[np.ndarray],
    slots: Tensor,
    kernel_blocks: Callable[[Tensor], Tensor],
) -> PseudoSequences:
    """Return input of a metadata builder for runs of consecutive tokens, each as a sequence.

    Args:
        queries: per run (prompt, first position, stop position).
        tables: per prompt its physical blocks, int [b].
        slots: int64 [n] on the device, the slot of every query, and maybe others behind them.
        kernel_blocks: blocks of the KV cache manager, int32 [r, b] -> those of the attention
            kernel.
    """
    sizes = np.array([stop - first for _, first, stop in queries], np.int32)
    seen = torch.tensor([stop for _, _, stop in queries], dtype=torch.int32)
    starts = torch.from_numpy(np.concatenate([[0], np.cumsum(sizes)]).astype(np.int32))

    width = max(map(len, tables))
    padded = np.stack([np.pad(table, (0, width - len(table))) for table in tables]).astype(np.int32)
    rows = kernel_blocks(
        torch.from_numpy(padded)[torch.tensor([prompt for prompt, _, _ in queries])]
    )

    own_starts, own_seen, own_rows = upload(slots.device, starts, seen, rows)

    return PseudoSequences(
        prompts=tuple(prompt for prompt, _, _ in queries),
        query_start_loc=own_starts,
        query_start_loc_cpu=starts,
        seq_lens=own_seen,
        num_reqs=len(queries),
        num_actual_tokens=int(starts[-1]),
        max_query_len=int(sizes.max()),
        max_seq_len=int(seen.max()),
        block_table_tensor=own_rows,
        slot_mapping=slots[: int(starts[-1])],
        causal=True,
        seq_lens_cpu_upper_bound=seen,
        is_prefilling=torch.ones(len(queries), dtype=torch.bool),
    )


def _reasons(layer: Any, backend: str, config: VllmConfig, device: torch.device) -> Iterator[str]:
    """Yield reasons why our kernel cannot replace the backend of an attention layer."""
    if device.type not in DEVICES:
        yield f"device {device.type}"
    elif type(layer) is not Attention or backend not in BACKENDS:
        yield f"none of {', '.join(BACKENDS)} under a plain attention layer"
    else:
        if layer.kv_cache.dtype != config.model_config.dtype:
            yield f"KV cache dtype {layer.kv_cache_dtype}"
        if layer.head_size != layer.head_size_v:
            yield "values of another size than keys"
        for attribute, (name, neutral) in _PLAIN.items():
            if getattr(layer.impl, attribute, neutral[0]) not in neutral:
                yield name
