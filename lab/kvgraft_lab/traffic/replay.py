"""Replay of requests through the native engine's admission, with pages that hold no data."""

import logging
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field

import numpy as np
import torch

from kvgraft.core.admission import Admission
from kvgraft.core.cost_model import EXACTNESS_WEIGHT, CostModel
from kvgraft.core.costs import TOKENS, Costs
from kvgraft.core.keys import scope_digest
from kvgraft.core.matches import MAX_DEPTH
from kvgraft.core.pins import PinnedDocuments
from kvgraft.core.provenance import BlockProvenance
from kvgraft.core.reuse_index import ReuseIndex
from kvgraft.core.segmentation import Similarity
from kvgraft.engine.memory import Memory, logger
from kvgraft.engine.request import Request
from kvgraft.engine.sampling import Sampler, SamplingParams
from kvgraft.engine.sequence_state import SequenceState
from kvgraft.engine.text import IncrementalText
from kvgraft.kv.cache import KVCache
from kvgraft.kv.heads import StreamLayout
from kvgraft.kv.pages import PagePool
from kvgraft.methods import require_at_least
from kvgraft.policies import parse_policy
from kvgraft.prefill import DEFAULT_POLICY
from kvgraft_lab.traffic.origins import Origin

NAMESPACE = "traffic"


@dataclass(frozen=True)
class ReplaySettings:
    """Settings of the engine.

    Attributes:
        block_size, max_depth, exactness_weight: see `Engine`.
        costs: costs for the decision what to graft; None grafts all known text.
        similarity: also graft near-duplicates of this similarity; None finds identical text only.
        anchors: token sequences that begin a segment, for near-duplicates.
    """

    block_size: int = 16
    max_depth: int = MAX_DEPTH
    costs: Costs | None = TOKENS
    exactness_weight: float = EXACTNESS_WEIGHT
    similarity: Similarity | None = None
    anchors: Sequence[Sequence[int]] = field(default=())

    def __post_init__(self) -> None:
        require_at_least("block_size", self.block_size, 1)
        require_at_least("max_depth", self.max_depth, 0)


class Replay:
    """Replay of requests, one after another, through an engine with an empty cache.

    Args:
        num_pages: pages of the pool.
        grafts: False is exact prefix caching alone.
    """

    def __init__(self, settings: ReplaySettings, num_pages: int, *, grafts: bool) -> None:
        size = settings.block_size
        self._policy = parse_policy(DEFAULT_POLICY if grafts else "full")
        self._similar = grafts and settings.similarity is not None
        pool, layout = PagePool(num_pages, size), StreamLayout.dense(1, 1)
        # pages are never written or read
        cache = KVCache(layout, 1, size, 1, torch.int8, torch.device("cpu"))
        index = ReuseIndex(pool, settings.max_depth, False, settings.similarity, settings.anchors)
        cost_model = (
            None if settings.costs is None else CostModel(settings.costs, settings.exactness_weight)
        )
        pins = PinnedDocuments(pool)
        admission = Admission(pool, index, pins, cost_model, continuation=grafts)
        self._memory = Memory(admission, cache, max_prefill_tokens=1 << 30)
        self._scope = scope_digest("", NAMESPACE)

    @property
    def num_given_up(self) -> int:
        """Number of requests without grafts because their sources and own pages did not fit into
        the pool together.
        """
        return self._memory.fallbacks.total()

    def ask(self, tokens: np.ndarray, answer: np.ndarray) -> np.ndarray:
        """Return the origin of each prompt token, int16 [T]. Prompt int32 [T] and answer int32 [a]
        stay in the cache.

        Raises:
            PoolExhausted: the pool is smaller than the request.
        """
        sequence = self._sequence(tokens.tolist(), len(answer))
        with _without_warnings():
            self._memory.admit(sequence, idle=True)
        origins = _origins(sequence)
        self._memory.unpin_sources(sequence)
        sequence.tokens += answer.tolist()
        # the model never reads the last token of an answer
        sequence.num_computed = len(tokens) + max(len(answer) - 1, 0)
        self._memory.register(sequence, ended=True)
        self._memory.release(sequence)
        return origins

    def _sequence(self, tokens: list[int], num_answer: int) -> SequenceState:
        sampling = SamplingParams(max_tokens=max(num_answer, 1))
        request = Request(tokens, self._policy, sampling, NAMESPACE)
        sequence = SequenceState(
            0,
            request,
            self._policy,
            np.array(tokens),
            BlockProvenance(self._scope),
            Sampler(sampling),
            IncrementalText(None),
        )
        sequence.matches_similar = self._similar
        return sequence


def pages_for(num_tokens: int, block_size: int) -> int:
    """Return the number of pages for `num_tokens` tokens of one sequence."""
    return -(-num_tokens // block_size)


def _origins(sequence: SequenceState) -> np.ndarray:
    """Return the origins of an admitted sequence's tokens, int16 [T]."""
    plan, size, continued = (
        sequence.admitted_plan,
        sequence.admitted_plan.block_size,
        sequence.continued,
    )
    origins = np.where(plan.prefix.numpy(), Origin.PREFIX, Origin.NEW).astype(np.int16)
    steps, held = sequence.provenance.steps, range(0)
    if continued is not None:
        held = range(continued.first_block * size, continued.stop_block * size)
        origins[held.start : held.stop] = Origin.CONTINUED

    # start, depth+1
    matches = np.array(sorted(step for step in steps if step[0] not in held), np.int64).reshape(
        -1, 2
    )
    targets = plan.graft_targets.numpy()
    # match of each grafted token
    match = np.searchsorted(matches[:, 0], targets, side="right") - 1
    kinds = np.where(
        _holds_block(sequence, match, len(matches)),
        Origin.GRAFTED + matches[:, 1] - 1,
        Origin.SIMILAR,
    )
    origins[targets] = kinds[match]
    return origins


def _holds_block(sequence: SequenceState, match: np.ndarray, num_matches: int) -> np.ndarray:
    """Return whether each match covers a whole block of its source, bool [num_matches].

    A match without a whole block is part of a near-duplicate, because identical text is found by
    whole blocks.

    Args:
        match: match of each grafted token, int64 [g].
    """
    plan, size = sequence.admitted_plan, sequence.admitted_plan.block_size
    first = np.searchsorted(match, np.arange(num_matches))  # first token of each match
    lengths = np.bincount(match, minlength=num_matches)
    if plan.ends_in_graft[0] and num_matches:
        lengths[-1] += 1  # the last token of a prompt is computed even if known
    sources = (plan.graft_targets - plan.graft_shifts).numpy()
    starts = (
        sources[np.minimum(first, len(sources) - 1)]
        if len(sources)
        else np.zeros(num_matches, np.int64)
    )
    whole: np.ndarray = -(-starts // size) * size + size <= starts + lengths
    return whole


@contextmanager
def _without_warnings() -> Iterator[None]:
    """Suppress warnings about given-up grafts, because they are counted."""
    level = logger.level
    logger.setLevel(logging.ERROR)
    try:
        yield
    finally:
        logger.setLevel(level)
