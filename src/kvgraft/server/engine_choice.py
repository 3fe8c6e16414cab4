"""Choice of the engine for each prompt of a server with data parallelism."""

import asyncio
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from vllm.v1.engine.core_client import AsyncMPClient

from kvgraft.core.cost_model import WORK
from kvgraft.core.costs import TOKENS
from kvgraft.core.expected_prefill import expect, is_overloaded, with_delays
from kvgraft.core.fingerprints import Fingerprints
from kvgraft.core.keys import scope_digest
from kvgraft.core.text_contents import TextContents

TOKEN_DTYPE = np.dtype("<i4")
# tokens times namespaces above which fingerprints are made in a thread
MANY_TOKENS = 1 << 13


def resets_are_complete() -> bool:
    """Return True if vLLM's answer to a cache reset covers all engines."""
    # since vLLM 0.32; earlier versions return the answer of the first engine
    return hasattr(AsyncMPClient, "call_utility_all_async")


@dataclass(frozen=True)
class PromptText:
    """Text of a prompt, as engines are compared by it.

    Attributes:
        own: fingerprints in the namespace of the request.
        shared: fingerprints in each shared namespace that it may graft from.
        grafts: whether the request may graft; else only exact prefixes count.
    """

    own: Fingerprints
    shared: tuple[Fingerprints, ...] = ()
    grafts: bool = True

    @classmethod
    async def of(
        cls,
        token_ids: Sequence[int],
        cache_salts: Sequence[str],
        adapter: str = "",
        *,
        grafts: bool = True,
    ) -> "PromptText":
        """Make the fingerprints of a prompt, those of a long one in a thread.

        Args:
            token_ids: the prompt; empty if it has none.
            cache_salts: cache key of its namespace, and of each shared namespace.
            adapter: name of its LoRA adapter; text belongs to the adapter that has read it.
            grafts: see the class.
        """
        tokens = np.asarray(token_ids, TOKEN_DTYPE).tobytes()
        scopes = [scope_digest(adapter, salt) for salt in cache_salts]

        def make() -> list[Fingerprints]:
            return [Fingerprints.of(tokens, scope) for scope in scopes]

        is_long = len(token_ids) * len(scopes) > MANY_TOKENS
        own, *shared = await asyncio.to_thread(make) if is_long else make()
        return cls(own, tuple(shared), grafts)


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

    The engine with the least expected work until the prompt's first token is chosen: what it would
    compute of the prompt, and the prefill that waits there. An engine above the load cap
    (`is_overloaded`) comes last. Work is counted in tokens. Text is compared within the namespaces
    that a request may read, so text of other tenants does not change the choice; their load does.

    Args:
        num_engines: number of engines.
        pool_tokens: tokens in the KV pool of one engine.
        unfinished: vLLM's request states by id, of all requests whose answer has not ended.
        grafts: whether the engines graft; in shadow mode they do not.
    """

    def __init__(
        self,
        num_engines: int,
        pool_tokens: int,
        unfinished: Mapping[str, Any],
        *,
        grafts: bool = True,
    ) -> None:
        self._unfinished, self._grafts = unfinished, grafts
        capacity = pool_tokens * TOKEN_DTYPE.itemsize
        self._contents = [TextContents(capacity) for _ in range(num_engines)]
        # work given to each engine so far, in tokens
        self._given = np.zeros(num_engines)
        self._sent: dict[str, _Sent] = {}

    @classmethod
    def of(cls, client: Any, *, grafts: bool = True) -> "EngineChoice | None":
        """Return the choice among the engines of vLLM's client; None if there is one only."""
        cache, num_engines = client.vllm_config.cache_config, len(client.engine_core.core_engines)
        if num_engines == 1:
            return None
        # of one engine; `num_gpu_blocks` is the sum over all engines
        pool_tokens = cache.kv_cache_size_tokens
        if pool_tokens is None:
            pool_tokens = cache.num_gpu_blocks // num_engines * cache.block_size
        unfinished = client.output_processor.request_states
        return cls(num_engines, pool_tokens, unfinished, grafts=grafts)

    @property
    def num_engines(self) -> int:
        """Number of engines."""
        return len(self._contents)

    def choose(self, request_id: str, text: PromptText, given: int | None = None) -> int:
        """Return the index of the engine for a request, and count the request there.

        Args:
            given: index of the engine if it is settled already.
        """
        grafts = text.grafts and self._grafts
        works = [self._work(text.own, grafts=grafts)]
        if grafts:
            works += [self._work(other, begins=False) for other in text.shared]
        work = np.min(works, axis=0)

        loads, waiting = self._load()
        # of equal engines, the one that was given least so far
        until_first_token = waiting + with_delays(work, waiting)
        order = np.lexsort((self._given, loads, until_first_token, is_overloaded(loads)))
        engine = int(order[0]) if given is None else given

        self._sent[request_id] = _Sent(engine, float(work[engine]))
        self._given[engine] += work[engine]
        self._contents[engine].add(text.own)
        return engine

    def clear(self) -> None:
        """Forget all text: the engines' caches were reset."""
        for contents in self._contents:
            contents.clear()

    def _work(self, text: Fingerprints, *, grafts: bool = True, begins: bool = True) -> np.ndarray:
        """Return the expected prefill of a prompt on each engine in tokens, float64 [engines].

        Args:
            grafts: whether text counts that is no exact prefix.
            begins: whether text can be an exact prefix.
        """
        held, begun = map(
            np.stack, zip(*(contents.holds(text) for contents in self._contents), strict=True)
        )
        if not grafts:
            held &= begun
        if not begins:
            begun &= False
        return expect(
            text, held, begun, TOKENS, work=WORK, bytes_per_token=TOKEN_DTYPE.itemsize
        ).prefill_s

    def _load(self) -> tuple[np.ndarray, np.ndarray]:
        """Return the unfinished requests of each engine, and the prefill of those that wait.

        Returns:
            int64 [engines], and tokens, float64 [engines].
        """
        loads = np.zeros(self.num_engines, np.int64)
        waiting = np.zeros(self.num_engines)
        for request_id, sent in list(self._sent.items()):
            state = self._unfinished.get(request_id)
            if state is None:
                del self._sent[request_id]
                continue
            loads[sent.engine] += 1
            if state.is_prefilling:
                waiting[sent.engine] += sent.work
        return loads, waiting
