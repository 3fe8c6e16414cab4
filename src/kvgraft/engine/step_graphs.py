"""Decode steps as CUDA graphs: a step of a shape that came before is one launch.

A graph replays the launches of the step that it was captured from, with the same tensors and the
same numbers as their arguments. So sequences and blocks are padded to powers of two, all that
changes lies in one tensor, which every step overwrites in one copy from pinned memory, and kernels
read lengths on the device. The first step of a shape runs without a graph, which compiles its
kernels and makes what is kept (tables, constants); the second is captured. What cannot be captured
runs as it does without graphs, and is counted with the reason.

Hidden states come out of a graph, not logits: those of all graphs together would take much memory.
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
MOST_ROWS = 256  # sequences of a step that is captured
LEAST_BLOCKS = 64  # that a sequence is padded to
MOST_GRAPHS = 32  # then the one that has not been needed for longest is dropped


@dataclass(frozen=True)
class StepShape:
    """What all sizes in a captured step follow from.

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
        counts: steps that were `replayed`, `captured` or `warmed_up`; all others by reason:
            `enforce_eager`, `no_cuda`, `no_triton`, `experts` (the host asks which of them have
            rows), `residual_layers` (writes of kept states know no padding), `too_many_rows`,
            `mixed_flows` (not all sequences follow the same), `new_pages` (more pages than
            sequences are new to the flow), `unfused_flow` (kernels do not do all of it), `watched`
            (stages are timed), `not_captured` (CUDA refused to, as the log says).
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
        self._pool: Any = None  # memory of all graphs, which run one after the other
        self._captured_from = self._tensors()

    def decode(self, sequences: Sequence[SequenceState]) -> Tensor:
        """Logits [b, V] after the last token of each, which is computed and written to the pool."""
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
        """How a step was run, and its hidden states [rows, D]; None if it was not."""
        rows, blocks = (
            _padded(len(sequences)),
            _padded(num_blocks(self._cache, sequences), LEAST_BLOCKS),
        )
        table = self._decoder.config.rope.kept_table(longest(sequences), self._decoder.device)
        indexer, full = (
            (followed[0].indexer, followed[0].full) if followed else (None, np.zeros(0, np.int64))
        )
        pages = np.zeros(rows + 1, np.int64)  # that are full from this step on, and how many
        pages[: len(full)], pages[-1] = full, len(full)
        numbers = torch.cat(
            (numbers_of(self._cache, sequences, rows, blocks), torch.from_numpy(pages))
        )

        shape = StepShape(weakref.ref(indexer) if indexer else None, rows, blocks, len(table[0]))
        self._pool = self._pool or torch.cuda.graph_pool_handle()
        step = self._step(shape, lambda: _FixedStep(len(numbers), self._decoder.device, table))
        return step.run(numbers, lambda given: self._hidden(given, shape, indexer), self._pool)

    def _hidden(self, numbers: Tensor, shape: StepShape, indexer: Indexer | None) -> Tensor:
        """Hidden states of a step that the host knows by its shape alone."""
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
        """The step of a shape; steps that read what is there no more are dropped."""
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
        """What all graphs read."""
        return self._decoder.weights, self._cache.keys, self._cache.values


class _FixedStep:
    """A step whose numbers always lie in the same place: warmed up, then captured, then replayed.

    Args:
        size: how many numbers.
        kept: what else its graph reads, and others might let go.
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
        """How the step was run, and what it gave; None if it was not, since CUDA refused to capture
        it.

        Args:
            numbers: int64 [n] on the CPU.
            hidden: what the step gives for the same on the device.
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
    """Why no step of an engine can be captured."""
    if decoder.device.type != "cuda":
        return "no_cuda"
    if not dispatch.generates("cuda"):
        return "no_triton"
    if decoder.config.experts is not None:
        return "experts"
    return "residual_layers" if cache.residuals else None


def _not_now(sequences: Sequence[SequenceState], followed: Sequence[Followers]) -> str | None:
    """Why this step cannot be captured or replayed."""
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
    """The next power of two."""
    return 1 << (max(count, least) - 1).bit_length()
