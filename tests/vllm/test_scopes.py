"""Many namespaces hold the same text, exact and approximate; each goes on with and grafts from what
it may read, and finds nothing of any other. Beside the scheduler: vLLM's block pool, our planner
and continuations, no engine."""

from collections import Counter, defaultdict
from collections.abc import Hashable, Sequence
from dataclasses import dataclass, field

import numpy as np
from test_pool import BLOCK, hasher, make_pool, manager_of
from vllm.sampling_params import SamplingParams
from vllm.v1.request import Request

from kvgraft.core.keys import scope_digest
from kvgraft.core.provenance import BlockProvenance
from kvgraft.policies import parse_policy
from kvgraft.vllm.connector.admission import make_admission, register_blocks
from kvgraft.vllm.connector.prefix_lookup import HashMasking
from kvgraft.vllm.connector.request_state import RequestState
from kvgraft.vllm.options import RequestOptions
from kvgraft.vllm.settings import KVGraftSettings

NUM_PAGES = 6000
NAMESPACES = [str(number) for number in range(16)]
SHARED = {"1": ("0",), "2": ("0", "3"), "4": ("3",)}  # who may read whose text beside its own


@dataclass
class Desk:
    """Serves one request after the other, as vLLM's scheduler and our side of it do, and computes
    nothing.

    Attributes:
        owner: whose text a page holds.
        approximate: pages whose KV holds or follows grafts.
        reached: tokens of each conversation that each namespace has asked, by that and by how it
            recovers.
        counts: tokens that were found by kind, and of other namespaces.
    """

    owner: dict[int, str] = field(default_factory=dict)
    approximate: set[int] = field(default_factory=set)
    reached: dict[Hashable, Counter[str]] = field(default_factory=lambda: defaultdict(Counter))
    counts: Counter[str] = field(default_factory=Counter)

    def __post_init__(self) -> None:
        self.blocks = make_pool(NUM_PAGES)
        self.tables: dict[str, list[int]] = {}
        manager = manager_of(self.blocks, get_block_ids=lambda name: (self.tables[name],))
        settings = KVGraftSettings.parse({"max_depth": 3})
        self.known = make_admission(manager, BLOCK, settings, pin_capacity=0.5)
        self.masking = HashMasking(manager, self.known)

    def ask(
        self,
        tokens: list[int],
        namespace: str,
        policy: str = "naive",
        conversation: int | None = None,
    ) -> None:
        """Serve a request and check what it has found; one that belongs to no conversation reuses
        nothing."""
        name = str(self.counts["requests"])
        self.counts["requests"] += 1
        request = Request(
            name,
            tokens,
            SamplingParams(max_tokens=1),
            None,
            cache_salt=namespace,
            block_hasher=hasher(),
        )
        shared = tuple(scope_digest("model", other) for other in SHARED.get(namespace, ()))
        options = RequestOptions(parse_policy(policy), reuse=conversation is not None)
        state = RequestState(
            request, options, BlockProvenance(scope_digest("model", namespace)), shared=shared
        )
        if options.reuse:
            state.recovery_key = policy, shared
            reached = self.reached[conversation, state.recovery_key]
            self.counts["withheld"] += max(reached.values(), default=0) > reached[namespace]
            reached[namespace] = max(reached[namespace], len(tokens))
        self.masking.inject_approximate_prefix(state)
        hashes = request.block_hashes[: (len(tokens) - 1) // BLOCK]
        state.prefix = self.known.pool.find(hashes[: self.known.pool.num_cached(hashes)])
        self._check_prefix(state)
        if options.reuse:
            self._plan(state)
        self._compute(state)
        self._leave(state)

    def _check_prefix(self, state: RequestState) -> None:
        """Nobody begins with a page of somebody else, and with an approximate one only who goes on
        with it."""
        assert {self.owner[page] for page in state.prefix} <= {state.namespace}
        first = len(state.prefix) if state.continued is None else state.continued.first_block
        assert self.approximate.isdisjoint(state.prefix[:first])
        self.counts["prefix"] += BLOCK * min(first, len(state.prefix))
        self.counts["continued"] += BLOCK * max(len(state.prefix) - first, 0)

    def _plan(self, state: RequestState) -> None:
        readable = state.namespace, *SHARED.get(state.namespace, ())
        self.counts["lookups"] += len(readable) * (len(state.token_ids) - BLOCK + 1)
        candidate = self.known.decide(state, dict(enumerate(state.prefix)))
        if not candidate.needs_recovery:
            return
        owners = {self.owner[page] for page in candidate.sources}
        assert owners <= {*readable}, (
            "a graft from a namespace that is neither its own nor shared with it"
        )
        self.counts["grafted"] += int(candidate.plan.grafted.sum())
        self.counts["shared"] += bool(owners - {state.namespace})
        state.plan = candidate.plan
        if candidate.steps:
            self.masking.mask(state, candidate.steps[0][0])
            state.provenance.mark_approximate(candidate.steps)
            self.counts[f"depth {state.provenance.depth}"] += 1

    def _compute(self, state: RequestState) -> None:
        """vLLM gives it blocks, and names those that are full."""
        request, pool = state.request, self.known.pool
        pool.acquire(state.prefix)
        num_blocks, num_full = -(-request.num_tokens // BLOCK), request.num_tokens // BLOCK
        new = pool.allocate(num_blocks - len(state.prefix))
        table = self.tables[state.id] = [*state.prefix, *new]
        blocks = [self.blocks.blocks[page] for page in table]
        self.blocks.cache_full_blocks(request, blocks, len(state.prefix), num_full, BLOCK, 0)
        depths = state.provenance.depths(num_blocks, BLOCK)
        for page in new:
            self.owner[page] = state.namespace
        self.approximate.difference_update(new)
        self.approximate.update(page for page, depth in zip(table, depths, strict=True) if depth)

    def _leave(self, state: RequestState) -> None:
        table, num_tokens = self.tables[state.id], state.request.num_tokens
        register_blocks(self.known, state, table, num_tokens)
        if stop := min(state.provenance.num_continuable, len(table)):
            self.known.leave(state, table[:stop], state.provenance.depths(stop, BLOCK))
        self.masking.release(state)
        self.known.pool.release(table)


def conversations(rng: np.random.Generator, documents: Sequence[list[int]]) -> list[list[int]]:
    """What is said in some, as all namespaces say it: documents between other text."""
    return [
        [
            token
            for place in rng.permutation(len(documents))[:6]
            for token in [
                *rng.integers(0, 1000, rng.integers(1, 3 * BLOCK)).tolist(),
                *documents[place],
            ]
        ]
        for _ in range(10)
    ]


def test_no_lookup_of_many_finds_what_another_namespace_has_left():
    """Exact or approximate, to graft from or to go on with, of whatever depth."""
    rng, desk = np.random.default_rng(5), Desk()
    documents = [rng.integers(0, 1000, rng.integers(4, 10) * BLOCK).tolist() for _ in range(8)]
    said = conversations(rng, documents)
    for _ in range(1200):
        namespace, number = NAMESPACES[rng.integers(len(NAMESPACES))], int(rng.integers(len(said)))
        if rng.random() < 0.3:
            desk.ask(documents[rng.integers(len(documents))] + [1], namespace)
        policy, stop = (
            ("naive", "transitive")[rng.integers(2)],
            rng.integers(2 * BLOCK, len(said[number])),
        )
        desk.ask(said[number][:stop], namespace, policy, number)
    assert desk.known.pool.num_used == 0
    assert desk.counts["lookups"] > 100_000
    for kind in ("prefix", "continued", "grafted"):
        assert desk.counts[kind] > 5000, f"there was something to find: {desk.counts}"
    for kind in ("depth 1", "depth 2", "depth 3", "depth 4", "shared", "withheld"):
        assert desk.counts[kind] > 20, f"there was something to withhold: {desk.counts}"
