"""Choice of the engine for each prompt of a server with data parallelism."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from kvgraft.core.cost_model import WORK
from kvgraft.core.costs import TOKENS
from kvgraft.core.expected_prefill import expect, is_overloaded, with_delays
from kvgraft.core.fingerprints import Fingerprints
from kvgraft.core.keys import scope_digest
from kvgraft.core.text_contents import TextContents

TOKEN_DTYPE = np.dtype("<i4")


@dataclass(frozen=True)
class _Sent:
    """An unfinished request.

    Attributes:
        engine: index of its engine.
        work: expected prefill, in tokens.
    """

    engine: int
    work: float


class EngineChoice:
    """Choice of one of several engines, each of which reuses only what it has read itself.

    The engine with the earliest expected first token is chosen, from the text that it has read and
    the prompts that wait there. An engine above the load cap (`is_overloaded`) comes last. Text is
    compared within the namespaces that a request may read, so the choice reveals nothing of other
    tenants.

    Args:
        num_engines: number of engines.
        pool_tokens: tokens in the KV pool of one engine.
        unfinished: vLLM's request states by id, of all requests whose answer has not ended.
    """

    def __init__(self, num_engines: int, pool_tokens: int, unfinished: Mapping[str, Any]) -> None:
        self._unfinished = unfinished
        capacity = pool_tokens * TOKEN_DTYPE.itemsize
        self._contents = [TextContents(capacity) for _ in range(num_engines)]
        self._sent: dict[str, _Sent] = {}

    @property
    def num_engines(self) -> int:
        """Number of engines."""
        return len(self._contents)

    def choose(
        self,
        request_id: str,
        token_ids: Sequence[int],
        cache_salts: Sequence[str],
        given: int | None = None,
    ) -> int:
        """Return the index of the engine for a request, and count the request there.

        Args:
            token_ids: the prompt; empty if it has none.
            cache_salts: cache keys of its namespace and of those that it may graft from.
            given: index of the engine if it is settled already.
        """
        tokens = np.asarray(token_ids, TOKEN_DTYPE).tobytes()
        texts = [Fingerprints.of(tokens, scope_digest("", salt)) for salt in cache_salts]
        work = np.min([self._work(text) for text in texts], axis=0)

        loads, waiting = self._load()
        seconds = waiting + with_delays(work, waiting)
        # with equal loads, use the pool that holds less
        held = [len(contents) for contents in self._contents]
        order = np.lexsort((held, loads, seconds, is_overloaded(loads)))
        engine = int(order[0]) if given is None else given

        self._sent[request_id] = _Sent(engine, float(work[engine]))
        self._contents[engine].add(texts[0])
        return engine

    @classmethod
    def of(cls, client: Any) -> "EngineChoice | None":
        """Return the choice among the engines of vLLM's client; None if there is one only."""
        config = client.vllm_config
        num_engines = config.parallel_config.data_parallel_size
        if num_engines == 1:
            return None
        # the sum over all engines
        num_blocks = config.cache_config.num_gpu_blocks
        pool_tokens = num_blocks // num_engines * config.cache_config.block_size
        return cls(num_engines, pool_tokens, client.output_processor.request_states)

    def clear(self) -> None:
        """Forget all text: the engines' caches were reset."""
        for contents in self._contents:
            contents.clear()

    def _work(self, text: Fingerprints) -> np.ndarray:
        """Return the expected prefill of a prompt on each engine in tokens, float64 [engines]."""
        held, begun = zip(*(contents.holds(text) for contents in self._contents), strict=True)
        expected = expect(text, np.stack(held), np.stack(begun), TOKENS, work=WORK)
        return expected.prefill_s

    def _load(self) -> tuple[np.ndarray, np.ndarray]:
        """Return the unfinished requests of each engine, and the prefill of those that wait.

        Returns:
            int64 [engines], and tokens, float64 [engines].
        """
        loads = np.zeros(len(self._contents), np.int64)
        waiting = np.zeros(len(self._contents))
        for request_id, sent in list(self._sent.items()):
            state = self._unfinished.get(request_id)
            if state is None:
                del self._sent[request_id]
                continue
            loads[sent.engine] += 1
            if state.is_prefilling:
                waiting[sent.engine] += sent.work
        return loads, waiting
