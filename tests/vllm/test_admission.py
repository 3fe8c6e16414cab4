"""Admission over vLLM's block pool: promises to a prompt hold, and the connector decides as the
native engine does."""

from collections.abc import Iterator

import numpy as np
from test_pool import hasher, make_pool, manager_of
from vllm.sampling_params import SamplingParams
from vllm.v1.request import Request

from desks import (
    MAX_DEPTH,
    SHARED,
    SIZE,
    AdmissionMachine,
    Desk,
    NativeDesk,
    Opened,
    Question,
    check_waiting,
    exercise,
    make_cost_model,
    opened_of,
    scope_of,
)
from kvgraft.core.provenance import BlockProvenance
from kvgraft.policies import parse_policy
from kvgraft.vllm.connector.admission import make_admission, register_blocks
from kvgraft.vllm.connector.prefix_lookup import HashMasking
from kvgraft.vllm.connector.request_state import RequestState
from kvgraft.vllm.options import RequestOptions
from kvgraft.vllm.settings import KVGraftSettings
from properties import examples

SMALL, LARGE = 24, 4000


class SharedDesk(Desk):
    """The connector's part of vLLM's scheduler, over vLLM's own pool."""

    def __init__(self, num_pages: int) -> None:
        super().__init__()
        self.blocks, self.tables = make_pool(num_pages), dict[str, list[int]]()
        manager = manager_of(self.blocks, get_block_ids=lambda name: (self.tables[name],))
        settings = KVGraftSettings.parse({"max_depth": MAX_DEPTH})
        self.admission = make_admission(manager, SIZE, settings, pin_capacity=0.5)
        self.admission.cost_model = make_cost_model()
        self.masking = HashMasking(manager, self.admission)
        self._num_requests = 0

    def admit(self, question: Question) -> Opened | None:
        pool, namespace = self.admission.pool, question.namespace
        self._num_requests += 1
        request = Request(
            str(self._num_requests),
            list(question.tokens),
            SamplingParams(max_tokens=1),
            None,
            cache_salt=namespace,
            block_hasher=hasher(),
        )
        policy = parse_policy(question.policy)
        state = RequestState(
            request,
            RequestOptions(policy),
            BlockProvenance(scope_of(namespace)),
            refusal=None if policy.uses_grafts else "policy_full",
            shared=tuple(map(scope_of, SHARED[namespace])),
        )
        if policy.uses_grafts:
            state.recovery_key = str(policy), state.shared

        self.masking.inject_approximate_prefix(state)
        hashes = request.block_hashes[: (len(question.tokens) - 1) // SIZE]
        state.prefix = pool.find(hashes[: pool.num_cached(hashes)])
        self.masking.after_lookup(state, len(state.prefix) * SIZE)
        hits, earlier = dict(enumerate(state.prefix)), self.waiting.pop(question, None)
        reuse = self.admission.decide(state, hits, earlier)
        num_new = -(-len(question.tokens) // SIZE) - len(state.prefix)
        pool.acquire([*state.prefix, *reuse.sources])
        if num_new > pool.num_free:
            pool.release([*state.prefix, *reuse.sources])
            self.waiting[question] = reuse
            return None
        if reuse.needs_recovery:
            state.plan = reuse.plan
        if reuse.steps:
            self.masking.mask(state, reuse.steps[0][0])
            state.provenance.mark_approximate(reuse.steps, reuse.spans)
        self.tables[state.id] = [*state.prefix, *pool.allocate(num_new)]
        return opened_of(question, state, reuse, self.tables[state.id])

    def register(self, opened: Opened) -> None:
        request, num_tokens = opened.state.request, len(opened.question.tokens)
        blocks = [self.blocks.blocks[page] for page in opened.table]
        num_hits, num_full = len(opened.hits), num_tokens // SIZE
        if num_full > num_hits:
            self.blocks.cache_full_blocks(request, blocks, num_hits, num_full, SIZE, 0)
        register_blocks(self.admission, opened.state, opened.table, num_tokens)

    def unpin(self, opened: Opened) -> None:
        self.admission.pool.release(opened.sources)

    def release(self, opened: Opened) -> None:
        stop = opened.state.provenance.num_continuable
        self.admission.leave(opened.state, opened.table[:stop], self.depths(opened, stop))
        self.masking.release(opened.state)
        self.admission.pool.release(opened.table)


class SharedPoolMachine(AdmissionMachine):
    """The connector, in a pool that reclaims all the time."""

    def make_desks(self) -> Iterator[Desk]:
        yield SharedDesk(SMALL)


class EqualHostsMachine(AdmissionMachine):
    """Both hosts, while nothing is reclaimed."""

    are_equal = True

    def make_desks(self) -> Iterator[Desk]:
        yield NativeDesk(LARGE)
        yield SharedDesk(LARGE)


TestSharedPool = SharedPoolMachine.TestCase
TestEqualHosts = EqualHostsMachine.TestCase
TestSharedPool.settings = examples(40, stateful_step_count=25)
TestEqualHosts.settings = examples(40, stateful_step_count=25)


def test_requests_find_something():
    assert min(exercise(SharedDesk(60), np.random.default_rng(0)).values()) > 10


def test_a_decision_waits_until_its_prefix_or_a_source_changes():
    check_waiting(SharedDesk(12))
