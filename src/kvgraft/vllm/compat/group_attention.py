"""What attends to the rows of a recovery, decided once for each of vLLM's attention groups when a
worker starts.

A backend of vLLM takes rows as sequences, one for each run of consecutive tokens, and reads for
each sequence all keys and values that it sees. A scattered token would read its whole prompt. Our
kernel reads keys and values once for a tile of rows, wherever these stand, so it takes the rows of
runs that are shorter than `LONG_RUN`, and the backend takes the others. The backend takes all rows
where our kernel would not compute the same, and on CPUs."""

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
from kvgraft.vllm.compat.replacing import replaced

logger = logging.getLogger("kvgraft")
# rows: with two query heads to a KV head or more, they fill a tile of flash attention
LONG_RUN = 64
DEVICES = ("cuda",)  # where our kernel is Triton's
# that compute what `_PLAIN` names, and no more
BACKENDS = ("FLASH_ATTN", "FLASHINFER", "TRITON_ATTN")
# whose metadata is not in buffers of `max_num_seqs` sequences
UNBOUNDED = ("FLASH_ATTN", "TRITON_ATTN")
# attribute of an implementation -> what it is; values if not used
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
    """What attends to the rows of a recovery in the layers of one attention group.

    Attributes:
        number: of its KV cache group, 0 being the main one (see `groups`).
        backend: of vLLM, by its name.
        pool: where our kernel finds keys and values; None if the backend attends to all rows.
        reasons: why it does.
        max_runs: sequences that the backend can be given at a time; None for any number. If there
            is a limit, what its metadata builder returns points into buffers that it overwrites the
            next time.
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
        """Decide for the attention layers of a group."""
        backend = str(layers[0].attn_backend.get_name())
        reasons = dict.fromkeys(
            reason for layer in layers for reason in _reasons(layer, backend, config, device)
        )
        pools = set() if reasons else {PoolLayout.of(layer.kv_cache) for layer in layers}
        pool = pools.pop() if len(pools) == 1 else None
        if pool is None and not reasons:
            reasons["a cache that is not rows of keys and values, alike in all layers"] = None
        bounded = device.type in DEVICES and backend not in UNBOUNDED
        max_runs = int(config.scheduler_config.max_num_seqs) if bounded else None
        return cls(number, backend, pool, tuple(reasons), max_runs)

    def __str__(self) -> str:
        if self.pool is None:
            return f"{self.backend} ({', '.join(self.reasons)})"
        return f"KVGraft's kernel; {self.backend} for runs of {LONG_RUN} tokens or more"


@dataclass(frozen=True)
class RecoveryAttention:
    """What attends in all layers.

    Attributes:
        groups: by metadata builder.
        drafts: whether a draft model's layers attend, too, always by their backend alone.
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
        """Decide for vLLM's attention groups, each with the number of its KV cache group, and say
        it in the log."""
        layers = config.compilation_config.static_forward_context
        named = [(number, [layers[name] for name in group.layer_names]) for number, group in groups]
        decided = tuple(GroupAttention.of(number, own, config, device) for number, own in named)
        for attends in dict.fromkeys(map(str, decided)):
            logger.info("attention of recoveries: %s", attends)
        return cls(decided, drafts)

    @property
    def splits_rows(self) -> bool:
        """Whether a backend takes long runs only, anywhere."""
        return any(group.pool is not None for group in self.groups)

    @property
    def max_long_runs(self) -> int | None:
        """Sequences that a backend can be given at a time, at most; None for any number."""
        return min(
            (group.max_runs for group in self.groups if group.max_runs is not None), default=None
        )

    @property
    def max_runs(self) -> int | None:
        """The same, if a backend takes all runs anywhere."""
        takes_all = self.drafts or any(group.pool is None for group in self.groups)
        return self.max_long_runs if takes_all else None


@dataclass(frozen=True, eq=False)
class RowsMetadata:
    """How the layers of one attention group attend to some rows.

    Attributes:
        backend: vLLM's metadata of the rows that its backend takes, which stand first; None if
            there are none.
        pool, scattered: where our kernel finds keys and values, and the other rows; None if there
            are none.
    """

    backend: Any
    pool: PoolLayout | None = None
    scattered: AttentionLayout | None = None

    @contextmanager
    def attending(self, attention: Any) -> Iterator[None]:
        """Have an attention layer attend so."""
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


def pseudo_sequences(
    queries: Sequence[tuple[int, int, int]],
    tables: Sequence[np.ndarray],
    slots: Tensor,
    kernel_blocks: Callable[[Tensor], Tensor],
) -> CommonAttentionMetadata:
    """What a metadata builder is given for runs of consecutive tokens, each as a sequence of its
    own.

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
    return CommonAttentionMetadata(
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
    """Why our kernel cannot stand in for the backend of an attention layer."""
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
