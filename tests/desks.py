"""Hosts without a model: they look up, pin, allocate and release as the real ones do, and remember
which tokens each page stands for.

The rules and invariants of `AdmissionMachine` are the same for every pool.
"""

from abc import ABC, abstractmethod
from collections import Counter
from collections.abc import Hashable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from itertools import count
from typing import Any, ClassVar

import numpy as np
import torch
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from kvgraft.core.admission import Admission, PromptState, Reuse
from kvgraft.core.approximate_prefix import Continued
from kvgraft.core.cost_model import CostModel
from kvgraft.core.costs import Costs
from kvgraft.core.keys import scope_digest
from kvgraft.core.pins import PinnedDocuments
from kvgraft.core.plan import Plan
from kvgraft.core.provenance import BlockProvenance
from kvgraft.core.report import PrefillReport
from kvgraft.core.reuse_index import ReuseIndex
from kvgraft.engine.memory import Memory
from kvgraft.engine.request import Request
from kvgraft.engine.sampling import Sampler, SamplingParams
from kvgraft.engine.sequence_state import SequenceState
from kvgraft.engine.text import IncrementalText
from kvgraft.kv.cache import KVCache
from kvgraft.kv.heads import StreamLayout
from kvgraft.kv.pages import PagePool
from kvgraft.policies import parse_policy

SIZE = 4
MAX_DEPTH = 1
POLICIES = ("naive", "transitive", "full")  # copies only, recovers in place, grafts nothing
SHARED = {"a": (), "b": ("a",), "c": ()}  # namespaces, and those that each may also graft from
DOCUMENTS = [[100 * number + i for i in range(length)] for number, length in ((1, 9), (2, 14))]


def make_cost_model() -> CostModel:
    """Costs under which short matches are worth a graft, and some are not."""
    return CostModel(Costs(pass_s=2.0, token_s=1.0, copy_s=0.1), exactness_weight=0.5)


def scope_of(namespace: str) -> bytes:
    return scope_digest("model", namespace)


@dataclass(frozen=True)
class Question:
    """A prompt, and how it asks."""

    tokens: tuple[int, ...]
    namespace: str
    policy: str


@dataclass(frozen=True)
class Content:
    """Text that a page holds: the last `SIZE` of these tokens, computed behind the others."""

    namespace: str
    tokens: tuple[int, ...]
    is_exact: bool
    policy: str


@dataclass(eq=False)
class Opened:
    """A request between admission and release.

    Attributes:
        table: its pages.
        hits: leading pages of `table` that it has found, by block.
        sources: pages that are pinned for it until it is computed; `versions` of them.
    """

    question: Question
    state: Any
    plan: Plan
    table: list[int]
    hits: dict[int, int]
    sources: list[int]
    versions: np.ndarray
    is_computed: bool = False


class Desk(ABC):
    """A host. Subclasses do what is different in each."""

    admission: Admission[Any]

    def __init__(self) -> None:
        self.open: list[Opened] = []
        self.contents: dict[int, Content] = {}
        # decisions that wait for room
        self.waiting: dict[Question, Reuse] = {}

    @abstractmethod
    def admit(self, question: Question) -> Opened | None:
        """Decide, pin and allocate. None if there is not enough room; the decision may wait."""

    @abstractmethod
    def register(self, opened: Opened) -> None:
        """Publish its blocks in the host's cache, and register them."""

    @abstractmethod
    def release(self, opened: Opened) -> None:
        """Release its pages."""

    @abstractmethod
    def unpin(self, opened: Opened) -> None:
        """Release its sources."""

    def ask(self, question: Question) -> Opened | None:
        """Admit a request, and check what it has found."""
        opened = self.admit(question)
        if opened is not None:
            self.open.append(opened)
            for block, page in enumerate(opened.table):
                if block not in opened.hits:
                    self.contents.pop(page, None)
            self.check(opened)
            if opened.plan.in_place.any():  # a host lets nobody read what is rewritten
                self.compute(opened)
        return opened

    def compute(self, opened: Opened) -> None:
        """Note what its new pages hold, and register them."""
        question, opened.is_computed = opened.question, True
        num_blocks = len(question.tokens) // SIZE
        depths = self.depths(opened, num_blocks)
        for block, page in enumerate(opened.table[:num_blocks]):
            if block not in opened.hits:
                text = question.tokens[: (block + 1) * SIZE]
                is_exact = not depths[block]
                self.contents[page] = Content(question.namespace, text, is_exact, question.policy)
        self.unpin(opened)
        self.register(opened)

    def depths(self, opened: Opened, num_blocks: int) -> np.ndarray:
        """Depths of its first blocks."""
        found: np.ndarray = opened.state.provenance.depths(num_blocks, SIZE)
        return found

    def end(self, opened: Opened) -> None:
        """Let a request go, whether it was computed or not."""
        self.open.remove(opened)
        if not opened.is_computed:
            self.unpin(opened)
        self.release(opened)

    def check(self, opened: Opened) -> None:
        """What is used where it is has the prompt's text and namespace. Approximate blocks are
        found only by prompts that continue from them, and recovered only if nobody else holds them.
        Grafted tokens are those of their sources, which the namespace may read."""
        question, continued = opened.question, opened.state.continued
        pool, plan = self.admission.pool, opened.plan
        approximate = range(continued.first_block, continued.stop_block) if continued else range(0)
        for block, page in opened.hits.items():
            held = self.contents[page]
            assert opened.table[block] == page
            assert held.namespace == question.namespace
            assert held.tokens == question.tokens[: (block + 1) * SIZE]
            assert held.is_exact or (block in approximate and held.policy == question.policy)

        rewritten = {opened.table[block] for block in np.flatnonzero(plan.in_place[::SIZE])}
        assert {pool.ref_count(page) for page in rewritten} <= {1}
        readable = {question.namespace, *SHARED[question.namespace]}
        for target, slot in zip(
            plan.graft_targets.tolist(), plan.graft_sources.tolist(), strict=True
        ):
            held = self.contents[slot // SIZE]
            assert held.namespace in readable
            assert held.tokens[-SIZE:][slot % SIZE] == question.tokens[target]

    def counts(self) -> Counter[int]:
        """References that the open requests hold, by page."""
        held = Counter(page for opened in self.open for page in opened.table)
        held.update(
            page for opened in self.open if not opened.is_computed for page in opened.sources
        )
        return held


class BarePool:
    """The least that the core needs. Of the pages that nobody holds it reclaims the one that was
    reclaimed least often, for any content."""

    def __init__(self, num_pages: int) -> None:
        self.block_size, self.num_pages = SIZE, num_pages
        self.hit_counts = np.zeros(num_pages, np.int64)
        self._refs, self._versions = np.zeros(num_pages, np.int64), np.zeros(num_pages, np.int64)
        self._keys: dict[Hashable, int] = {}

    @property
    def num_free(self) -> int:
        return int((self._refs == 0).sum())

    @property
    def num_used(self) -> int:
        return self.num_pages - self.num_free

    def ref_count(self, page: int) -> int:
        return int(self._refs[page])

    def allocate(self, count: int) -> list[int]:
        free = np.flatnonzero(self._refs == 0)
        order = np.argsort(self._versions[free], kind="stable")
        pages: list[int] = free[order][:count].tolist()
        assert len(pages) == count
        self.forget(pages)
        self.acquire(pages)
        return pages

    def acquire(self, pages: Sequence[int]) -> None:
        np.add.at(self._refs, np.array(pages, np.int64), 1)

    def release(self, pages: Sequence[int]) -> None:
        np.subtract.at(self._refs, np.array(pages, np.int64), 1)
        assert (self._refs >= 0).all()

    def publish(self, page: int, key: Any) -> None:
        self._keys.setdefault(key, page)

    def lookup_all(self, keys: Iterable[Any]) -> list[int | None]:
        return [self._keys.get(key) for key in keys]

    def keep(self, pages: Sequence[int]) -> None:
        pass

    def forget(self, pages: Sequence[int]) -> None:
        self._versions[np.array(pages, np.int64)] += 1
        self._keys = {key: page for key, page in self._keys.items() if page not in pages}

    def versions_of(self, pages: Sequence[int]) -> np.ndarray:
        found: np.ndarray = self._versions[np.array(pages, np.int64)]
        return found

    def is_live(self, pages: np.ndarray, versions: np.ndarray) -> np.ndarray:
        found: np.ndarray = self._versions[pages] == versions
        return found


@dataclass(eq=False)
class BarePrompt:
    """The least that the core needs to know of a prompt."""

    input_ids: np.ndarray
    scopes: tuple[bytes, ...]
    policy_name: str
    refusal: str | None
    recovers_in_place: bool
    provenance: BlockProvenance
    continued: Continued[Any] | None = None
    plan: Plan | None = None
    matches_similar: bool = False
    grafts_local_heads: bool = True
    documents: tuple[range, ...] = ()
    report: PrefillReport = field(default_factory=PrefillReport)

    @property
    def recovery_name(self) -> str:
        return self.policy_name

    @property
    def recovery_key(self) -> Hashable:
        return self.policy_name, self.scopes


class BareDesk(Desk):
    """A host of a few lines."""

    def __init__(self, num_pages: int) -> None:
        super().__init__()
        pool = BarePool(num_pages)
        index = ReuseIndex(pool, MAX_DEPTH)
        self.admission = Admission(pool, index, PinnedDocuments(pool), make_cost_model())
        self._numbers = count()

    def admit(self, question: Question) -> Opened | None:
        admission, pool, namespace = self.admission, self.admission.pool, question.namespace
        scopes = tuple(scope_of(name) for name in (namespace, *SHARED[namespace]))
        policy, tokens = parse_policy(question.policy), np.array(question.tokens, np.int64)
        prompt = BarePrompt(
            tokens,
            scopes,
            str(policy),
            None if policy.uses_grafts else "policy_full",
            policy.recovers_in_place,
            BlockProvenance(scopes[0]),
        )
        checked: PromptState = prompt
        admission.make_room()
        hits: dict[int, int] = {}
        for page in pool.lookup_all(prompt.provenance.chains(tokens[:-1], SIZE)):
            if page is None:
                break
            hits[len(hits)] = page
        prompt.continued = admission.find_approximate(checked, len(hits))
        if prompt.continued is not None:
            first, pages = prompt.continued.first_block, pool.lookup_all(prompt.continued.keys)
            hits = {block: page for block, page in hits.items() if block < first}
            hits |= dict(enumerate(pages, first))
        reuse = admission.decide(checked, hits, self.waiting.pop(question, None))
        num_new = -(-len(tokens) // SIZE) - len(hits)
        pool.acquire([*hits.values(), *reuse.sources])
        if num_new > pool.num_free:
            pool.release([*hits.values(), *reuse.sources])
            self.waiting[question] = reuse
            return None
        admission.mark(checked, reuse)
        prompt.plan, prompt.report.reason = reuse.plan, reuse.reason
        table = [*hits.values(), *pool.allocate(num_new)]
        return opened_of(question, prompt, reuse, table)

    def register(self, opened: Opened) -> None:
        prompt, num_blocks = opened.state, len(opened.question.tokens) // SIZE
        table = opened.table[:num_blocks]
        chains, depths = (
            prompt.provenance.chains(prompt.input_ids, SIZE),
            self.depths(opened, num_blocks),
        )
        keys = list(prompt.continued.keys) if prompt.continued else []
        first = int(np.argmax(depths > 0)) if depths.any() else num_blocks
        keys += [next(self._numbers) for _ in range(first + len(keys), num_blocks)]
        for block, page in enumerate(table):
            key = chains[block] if block < first else keys[block - first]
            self.admission.pool.publish(page, key)
        self.admission.register(prompt, np.array(table, np.int64), depths, keys)

    def unpin(self, opened: Opened) -> None:
        self.admission.pool.release(opened.sources)

    def release(self, opened: Opened) -> None:
        stop = opened.state.provenance.num_continuable
        self.admission.leave(opened.state, opened.table[:stop], self.depths(opened, stop))
        self.admission.pool.release(opened.table)


class NativeDesk(Desk):
    """The native engine's memory, over its own pool."""

    def __init__(self, num_pages: int) -> None:
        super().__init__()
        pool, layout = PagePool(num_pages, SIZE), StreamLayout.dense(1, 1)
        cache = KVCache(layout, 1, SIZE, 1, torch.int8, torch.device("cpu"))
        index = ReuseIndex(pool, MAX_DEPTH)
        self.admission = Admission(pool, index, PinnedDocuments(pool), make_cost_model())
        self.memory = Memory(self.admission, cache, max_prefill_tokens=1 << 30)

    def admit(self, question: Question) -> Opened | None:
        sampling = SamplingParams(max_tokens=1)
        policy, tokens = parse_policy(question.policy), list(question.tokens)
        sequence = SequenceState(
            0,
            Request(tokens, policy, sampling, question.namespace),
            policy,
            np.array(tokens, np.int64),
            BlockProvenance(scope_of(question.namespace)),
            Sampler(sampling),
            IncrementalText(None),
        )
        sequence.shared = tuple(map(scope_of, SHARED[question.namespace]))
        if not self.memory.admit(sequence, idle=False):
            return None
        table = sequence.pages.pages[0].tolist()
        plan, sources = sequence.admitted_plan, list(self.memory._pinned[sequence])
        kept = (plan.prefix | plan.in_place)[::SIZE].tolist()
        hits = {block: table[block] for block, is_hit in enumerate(kept) if is_hit}
        versions = self.admission.pool.versions_of(sources)
        return Opened(question, sequence, plan, table, hits, sources, versions)

    def depths(self, opened: Opened, num_blocks: int) -> np.ndarray:
        found: np.ndarray = opened.state.depths(num_blocks)
        return found

    def register(self, opened: Opened) -> None:
        opened.state.num_computed = len(opened.question.tokens)
        self.memory.register(opened.state)

    def unpin(self, opened: Opened) -> None:
        self.memory.unpin_sources(opened.state)

    def release(self, opened: Opened) -> None:
        self.memory.release(opened.state)


def opened_of(question: Question, state: Any, reuse: Reuse, table: list[int]) -> Opened:
    """A request that was admitted with this decision."""
    sources, versions = list(reuse.sources), reuse.versions
    return Opened(question, state, reuse.plan, table, dict(reuse.hits), sources, versions)


def prompts() -> st.SearchStrategy[tuple[int, ...]]:
    """Documents in any order between a few other tokens."""
    words = st.lists(st.integers(0, 2), max_size=6)
    pieces = st.lists(st.one_of(st.sampled_from(DOCUMENTS), words), min_size=1, max_size=5)
    return pieces.map(lambda found: (*[token for piece in found for token in piece], 7))


def exercise(desk: Desk, rng: np.random.Generator) -> Counter[str]:
    """Serve some hundred requests, one after the other; how often each kind of reuse happened."""
    counts, asked = Counter[str](), list[Question]()
    for _ in range(400):
        tokens = [int(token) for token in rng.integers(0, 3, rng.integers(7))]
        for number in rng.permutation(len(DOCUMENTS)):
            tokens += [*DOCUMENTS[number], *(int(token) for token in rng.integers(0, 3, 3))]
        policy, namespace = str(rng.choice(POLICIES)), str(rng.choice(sorted(SHARED)))
        if asked and rng.random() < 0.5:
            before = asked[rng.integers(len(asked))]
            tokens, policy, namespace = [*before.tokens, 7], before.policy, before.namespace
        asked = [*asked[-3:], Question(tuple(tokens[:80]), namespace, policy)]
        opened = desk.ask(asked[-1])
        assert opened is not None
        if not opened.is_computed:
            desk.compute(opened)
        owners = {desk.contents[page].namespace for page in opened.sources}
        counts["grafted"] += bool(opened.plan.graft_targets.numel())
        counts["continued"] += opened.state.continued is not None
        counts["in place"] += bool(opened.plan.in_place.any())
        counts["exact prefix"] += 0 in opened.hits and desk.contents[opened.hits[0]].is_exact
        counts["of another namespace"] += bool(owners - {namespace})
        counts["too deep"] += opened.state.report.too_deep_tokens > 0
        desk.end(opened)
    return counts


def check_waiting(desk: Desk) -> None:
    """A decision for which there is no room stays the same one until the prefix of its prompt or a
    source of it changes. Of 12 pages a request that runs holds half."""
    document = DOCUMENTS[1]
    for tokens in ((*document, 7), tuple(range(300, 323))):
        running = desk.ask(Question(tokens, "a", "full"))
        assert running is not None
        desk.compute(running)
        if tokens[0] < 300:
            desk.end(running)

    question = Question((0, 1, 2, 0, 1, *document, 7), "a", "naive")

    def decide() -> Reuse:
        assert desk.ask(question) is None
        return desk.waiting[question]

    first = decide()
    assert len(first.sources) == len(document) // SIZE
    assert decide() is first
    prefix = desk.ask(Question((*question.tokens[:SIZE], 7), "a", "full"))
    assert prefix is not None
    desk.compute(prefix)
    desk.end(prefix)
    second = decide()
    assert (len(first.hits), len(second.hits)) == (0, 1)
    assert decide() is second
    lost = second.sources[-1]
    desk.admission.pool.forget([lost])
    third = decide()
    assert third.matches
    assert lost not in third.sources


class AdmissionMachine(RuleBasedStateMachine):
    """Requests come, are computed and go in any order, over several pools at once or one.

    Attributes:
        make_desks: makes the hosts that all serve the same requests.
        are_equal: whether the hosts must decide the same: their pools reclaim nothing.
    """

    are_equal: ClassVar[bool] = False

    def __init__(self) -> None:
        super().__init__()
        self.desks = list(self.make_desks())
        self.asked: list[Question] = []

    def make_desks(self) -> Iterator[Desk]:
        raise NotImplementedError

    @rule(
        tokens=prompts(),
        namespace=st.sampled_from(sorted(SHARED)),
        policy=st.sampled_from(POLICIES),
        is_computed=st.booleans(),
    )
    def ask(self, tokens: tuple[int, ...], namespace: str, policy: str, is_computed: bool) -> None:
        self._ask(Question(tokens, namespace, policy), is_computed)

    @precondition(lambda self: self.asked)
    @rule(which=st.integers(0, 99), more=prompts(), policy=st.sampled_from([None, *POLICIES]))
    def go_on(self, which: int, more: tuple[int, ...], policy: str | None) -> None:
        """With the text of an earlier request, mostly as it was asked."""
        before = self.asked[which % len(self.asked)]
        tokens = (*before.tokens, *more)[:80]
        self._ask(Question(tokens, before.namespace, policy or before.policy), True)

    @precondition(lambda self: any(desk.waiting for desk in self.desks))
    @rule(which=st.integers(0, 99), is_computed=st.booleans())
    def ask_again(self, which: int, is_computed: bool) -> None:
        """For a request that waits with its decision; pages were reclaimed since."""
        waiting = [question for desk in self.desks for question in desk.waiting]
        self._ask(waiting[which % len(waiting)], is_computed)

    @precondition(lambda self: self.desks[0].open)
    @rule(which=st.integers(0, 99))
    def compute(self, which: int) -> None:
        for desk in self.desks:
            opened = desk.open[which % len(desk.open)]
            if not opened.is_computed:
                desk.compute(opened)

    @precondition(lambda self: self.desks[0].open)
    @rule(which=st.integers(0, 99))
    def end(self, which: int) -> None:
        for desk in self.desks:
            desk.end(desk.open[which % len(desk.open)])

    @invariant()
    def pages_have_the_references_of_the_open_requests(self) -> None:
        for desk in self.desks:
            held, pool = desk.counts(), desk.admission.pool
            assert {page: pool.ref_count(page) for page in held} == dict(held)
            assert pool.num_used == len(held)

    @invariant()
    def pinned_sources_hold_what_they_were_chosen_for(self) -> None:
        for desk in self.desks:
            for opened in desk.open:
                if not opened.is_computed:
                    where = np.array(opened.sources, np.int64)
                    assert desk.admission.pool.is_live(where, opened.versions).all()

    def teardown(self) -> None:
        for desk in self.desks:
            while desk.open:
                desk.end(desk.open[-1])
            assert desk.admission.pool.num_used == 0

    def _ask(self, question: Question, is_computed: bool) -> None:
        self.asked.append(question)
        answers = [desk.ask(question) for desk in self.desks]
        if self.are_equal:
            assert len({decision_of(opened) for opened in answers}) == 1
        for desk, opened in zip(self.desks, answers, strict=True):
            if is_computed and opened is not None and not opened.is_computed:
                desk.compute(opened)


def decision_of(opened: Opened | None) -> Hashable:
    """What was decided, without page numbers."""
    assert opened is not None, "the pool is large"
    plan, state, continued = opened.plan, opened.state, opened.state.continued
    report = state.report
    return (
        tuple(plan.kinds.tolist()),
        tuple(plan.graft_targets.tolist()),
        tuple(plan.graft_shifts.tolist()),
        continued and (continued.first_block, continued.depths, continued.grafted),
        state.provenance.depth,
        state.provenance.first_approximate,
        (report.too_deep_tokens, report.estimated_full_s, report.estimated_reuse_s),
    )
