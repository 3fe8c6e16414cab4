"""Decode steps as CUDA graphs: a step of a known shape is one launch.

A graph replays the launches of the captured step, with the same tensors and the same numbers as
arguments. Therefore sequences and blocks are padded to powers of two, and kernels read lengths on
the device. All changing numbers lie in one tensor, which every step overwrites in one copy from
pinned memory.

The first step of a shape runs without a graph; it compiles kernels and makes tables and constants.
The second is captured. A step that cannot be captured runs without a graph, and is counted with the
reason.

Graphs return hidden states, not logits: the logits of all graphs together would take much memory.
"""

import logging
import weakref
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor

from kvgraft.decode.indexer import Indexer
from kvgraft.engine.decode import (
    StepAttention,
    StepInputs,
    decode,
    last_hidden,
    longest,
    num_blocks,
    numbers_of,
)
from kvgraft.engine.decoder import Decoder
from kvgraft.engine.sequence_state import SequenceState
from kvgraft.engine.sparse import Followers, SparseDecode
from kvgraft.kernels import dispatch
from kvgraft.kernels.layout import AttentionLayout
from kvgraft.kernels.watched import is_watched
from kvgraft.kv.cache import KVCache

logger = logging.getLogger("kvgraft")
# Steps with more sequences are not captured.
MOST_ROWS = 256
# Each sequence is padded to at least this number of blocks.
LEAST_BLOCKS = 64
# Beyond this number the least recently used graph is dropped.
MOST_GRAPHS = 32


@dataclass(frozen=True)
class StepShape:
    """Sizes that determine every size in a captured step.

    Attributes:
        indexer: of the flow that all sequences follow; None if they attend to everything.
        rows, blocks: sequences, and blocks of each, with padding.
        length: of the RoPE table that holds all positions.
    """

    indexer: weakref.ref[Indexer] | None
    rows: int
    blocks: int
    length: int


class StepGraphs:
    """The decode steps of an engine.

    Args:
        enforce_eager: capture nothing.

    Attributes:
        counts: steps that were `replayed`, `captured` or `warmed_up`. All others are counted by
            reason: `enforce_eager`, `no_cuda`, `no_triton`, `experts` (the host must know which
            experts have rows), `residual_layers` (writes of residual streams support no padding),
            `too_many_rows`, `mixed_flows` (sequences follow different flows), `new_pages` (the flow
            gets more new pages than there are sequences), `unfused_flow` (kernels do not cover the
            whole flow), `watched` (stages are timed), `not_captured` (CUDA refused the capture; see
            the log).
    """

    def __init__(
        self, decoder: Decoder, cache: KVCache, flows: SparseDecode, *, enforce_eager: bool = False
    ) -> None:
        self.counts: Counter[str] = Counter()
        self._decoder = decoder
        self._cache = cache
        self._flows = flows
        self._never = "enforce_eager" if enforce_eager else _never(decoder, cache)
        self._steps: dict[StepShape, _FixedStep] = {}
        # Graphs share memory, since they run one after the other.
        self._pool: Any = None
        self._captured_from = self._tensors()

    def decode(self, sequences: Sequence[SequenceState]) -> Tensor:
        """Compute the last token of each sequence, write its KV to the pool, and return logits [b,
        V] after it."""
        followed = self._flows.follow(sequences)
        how = self._never or _not_now(sequences, followed)
        if how is None:
            how, hidden = self._run(sequences, followed)
            if hidden is not None:
                self.counts[how] += 1
                return self._decoder.logits(hidden[: len(sequences)])
        self.counts[how] += 1
        return decode(self._decoder, self._cache, self._flows, sequences, followed)

    def _run(
        self, sequences: Sequence[SequenceState], followed: Sequence[Followers]
    ) -> tuple[str, Tensor | None]:
        """Run a step by its graph. Return how it ran, and its hidden states [rows, D] or None if
        CUDA refused the capture."""
        rows, blocks = (
            _padded(len(sequences)),
            _padded(num_blocks(self._cache, sequences), LEAST_BLOCKS),
        )
        table = self._decoder.config.rope.kept_table(longest(sequences), self._decoder.device)
        indexer, full = (
            (followed[0].indexer, followed[0].full) if followed else (None, np.zeros(0, np.int64))
        )
        # pages that become full in this step, then their number
        pages = np.zeros(rows + 1, np.int64)
        pages[: len(full)], pages[-1] = full, len(full)
        numbers = torch.cat(
            (numbers_of(self._cache, sequences, rows, blocks), torch.from_numpy(pages))
        )

        shape = StepShape(weakref.ref(indexer) if indexer else None, rows, blocks, len(table[0]))
        self._pool = self._pool or torch.cuda.graph_pool_handle()
        step = self._step(shape, lambda: _FixedStep(len(numbers), self._decoder.device, table))
        return step.run(numbers, lambda given: self._hidden(given, shape, indexer), self._pool)

    def _hidden(self, numbers: Tensor, shape: StepShape, indexer: Indexer | None) -> Tensor:
        """Compute the hidden states of a step. The host knows only its shape; the numbers are on
        the device."""
        rows, cache = shape.rows, self._cache
        own, full, num_full = numbers.split([len(numbers) - rows - 1, rows, 1])
        step = StepInputs.of(cache, own, rows)
        batches = (
            []
            if indexer is None
            else [self._flows.batch_of_all(indexer, step.rows, full, num_full)]
        )
        layout = AttentionLayout((), cache.layout.sinks, cache.layout.window, step.rows)
        attention = StepAttention(
            cache, self._flows, layout, batches, self._decoder.config.attention_scale
        )

        return last_hidden(self._decoder, attention, step, shape.length)

    def _step(self, shape: StepShape, make: Callable[[], "_FixedStep"]) -> "_FixedStep":
        """Return the step of a shape. Drop steps whose tensors no longer exist."""
        if any(
            now is not then for now, then in zip(self._tensors(), self._captured_from, strict=True)
        ):
            self._steps, self._captured_from = {}, self._tensors()

        for known in [
            known for known in self._steps if known.indexer is not None and known.indexer() is None
        ]:
            del self._steps[known]

        step = self._steps.pop(shape) if shape in self._steps else make()
        self._steps[shape] = step
        if len(self._steps) > MOST_GRAPHS:
            del self._steps[next(iter(self._steps))]

        return step

    def _tensors(self) -> tuple[object, ...]:
        """Tensors that all graphs read."""
        return self._decoder.weights, self._cache.keys, self._cache.values


class _FixedStep:
    """A step whose numbers lie at a fixed address: warmed up, then captured, then replayed.

    Args:
        size: number of input numbers.
        kept: further objects that the graph reads. They are held here, so that they stay alive.
    """

    def __init__(self, size: int, device: torch.device, kept: object) -> None:
        self._room = torch.empty(size, dtype=torch.int64, device=device)
        self._kept = kept
        self._graph: torch.cuda.CUDAGraph | None = None
        self._hidden: Tensor | None = None
        self._is_warm = self._is_refused = False

    def run(
        self, numbers: Tensor, hidden: Callable[[Tensor], Tensor], pool: Any
    ) -> tuple[str, Tensor | None]:
        """Run the step. Return how it ran and its result, or None if CUDA refused to capture it.

        Args:
            numbers: int64 [n] on the CPU.
            hidden: computes the step from the same numbers on the device.
            pool: memory that its graph may share.
        """
        if self._is_refused:
            return "not_captured", None

        self._room.copy_(numbers.pin_memory(), non_blocking=True)
        if self._graph is not None:
            self._graph.replay()
            return "replayed", self._hidden
        if not self._is_warm:
            self._is_warm = True
            return "warmed_up", hidden(self._room)

        try:
            graph = torch.cuda.CUDAGraph()
            with torch.cuda.graph(graph, pool=pool, capture_error_mode="thread_local"):
                self._hidden = hidden(self._room)
        except RuntimeError as error:
            logger.warning("a decode step runs without a CUDA graph: %s", error)
            self._is_refused = True
            return "not_captured", None

        self._graph = graph
        graph.replay()
        return "captured", self._hidden


def _never(decoder: Decoder, cache: KVCache) -> str | None:
    """Reason why no step of an engine can be captured, or None."""
    if decoder.device.type != "cuda":
        return "no_cuda"
    if not dispatch.generates("cuda"):
        return "no_triton"
    if decoder.config.experts is not None:
        return "experts"
    return "residual_layers" if cache.residuals else None


def _not_now(sequences: Sequence[SequenceState], followed: Sequence[Followers]) -> str | None:
    """Reason why this step cannot be captured or replayed, or None."""
    if is_watched():
        return "watched"
    if len(sequences) > MOST_ROWS:
        return "too_many_rows"
    if not followed:
        return None
    if len(followed[0].numbers) < len(sequences):
        return "mixed_flows"
    if len(followed[0].full) > len(sequences):
        return "new_pages"
    return None if followed[0].indexer.is_fused else "unfused_flow"


def _padded(count: int, least: int = 1) -> int:
    """The next power of two of at least `least`."""
    return 1 << (max(count, least) - 1).bit_length()
