"""What nobody can find any more makes room at once, so that vLLM's cache holds what can be
reused."""

from collections import OrderedDict
from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import pytest
from engines import BLOCK, NAIVE, NUM_BLOCKS, OFF, Ask, words
from hosts import Host

DOCUMENT = words(6 * BLOCK, 1)
PROMPT = words(10, 2) + DOCUMENT + words(40, 3)
CONDENSE = {"policy": "condense", "kept_share": 0.5}


@dataclass
class Findable:
    """The block hashes under which vLLM itself finds what was asked, and what the index can
    find."""

    host: Host
    hashes: set[bytes] = field(default_factory=set)

    def add(self, tokens: list[int], salt: str | None = None) -> None:
        """A text that somebody may ask again."""
        from vllm import SamplingParams
        from vllm.v1.core.kv_cache_utils import get_request_block_hasher
        from vllm.v1.request import Request

        hasher = (
            self.host.engine.engine_core.engine_core.request_block_hasher
            or get_request_block_hasher(BLOCK)
        )
        request = Request(
            "findable",
            tokens,
            SamplingParams(max_tokens=1),
            None,
            block_hasher=hasher,
            cache_salt=salt,
        )
        self.hashes |= {bytes(block_hash) for block_hash in request.block_hashes}

    def ask(self, ask: Ask) -> Any:
        """Ask, and note what was asked and answered."""
        [answer] = self.host.ask(ask)
        self.add([*ask.prompt, *answer.tokens], ask.salt)
        return answer

    def lost(self) -> list[int]:
        """Free blocks that vLLM keeps as if somebody could find them."""
        entries = self.host.known.index.segments.blocks.entries
        held = np.flatnonzero(entries._held)
        named = set(entries.page[held[entries.live(held)]].tolist())
        pool = self.host.manager.block_pool.blocks
        cached = [block for block in pool if block.block_hash is not None and not block.ref_cnt]
        hashes = self.hashes | self.host.continuable()
        return [
            b.block_id
            for b in cached
            if bytes(b.block_hash[:32]) not in hashes and b.block_id not in named
        ]


@pytest.fixture
def findable(host: Host) -> Findable:
    """Has read the document."""
    found = Findable(host)
    found.ask(Ask(DOCUMENT, OFF))
    return found


@pytest.mark.parametrize("options", [NAIVE, CONDENSE], ids=str)
def test_what_nobody_can_go_on_with_is_given_up_with_its_request(
    host: Host, findable: Findable, options: dict[str, Any]
):
    answer = findable.ask(Ask(PROMPT, options, max_tokens=3 * BLOCK))
    assert answer.grafted
    assert findable.lost() == []
    hidden = 0 if options == CONDENSE else (len(PROMPT) + len(answer.tokens) - 1) // BLOCK
    assert len(host.continuable()) == hidden
    assert len(host.blocks_with_content()) == 6 + hidden, "the document itself stays"
    assert findable.ask(Ask(words(9, 4) + DOCUMENT, NAIVE)).grafted == len(DOCUMENT) - 1


def test_aborted_requests_leave_nothing(host: Host, findable: Findable):
    for num_steps in (1, 2, 8, 20):
        name = host.add(Ask(PROMPT, NAIVE, max_tokens=100))
        for _ in range(num_steps):
            host.step()
        host.abort(name)
        host.settle()
        assert findable.lost() == []


@pytest.mark.parametrize("options", [NAIVE, CONDENSE], ids=str)
@pytest.mark.parametrize("aborted", [False, True])
def test_a_preempted_request_finds_its_own_blocks_and_leaves_none(
    host: Host, findable: Findable, options: dict[str, Any], aborted: bool
):
    name = host.add(Ask(PROMPT, options, max_tokens=100))
    host.step_until(
        lambda: name in host.outputs and len(host.outputs[name].outputs[0].token_ids) >= 40
    )
    request = host.request(name)
    host.scheduler.running.remove(request)
    host.scheduler._preempt_request(request, 0.0)
    assert findable.lost(), "these are its own, and it may come back for them"
    if aborted:
        host.abort(name)
        host.settle()
    else:
        host.finish(name)
    assert findable.lost() == []


def test_what_a_preempted_request_hides_anew_is_given_up_at_once(host: Host, findable: Findable):
    """Another document becomes known meanwhile, so that it is grafted from an earlier place on."""
    other = words(3 * BLOCK, 5)
    prompt = words(40, 6) + other + DOCUMENT
    name = host.add(Ask(prompt, NAIVE, max_tokens=70))
    host.step_until(
        lambda: name in host.outputs and len(host.outputs[name].outputs[0].token_ids) >= 40
    )
    blocks = host.manager.get_block_ids(host.request(name).request_id)[0]
    request = host.request(name)
    host.scheduler.running.remove(request)
    host.scheduler._preempt_request(request, 0.0)
    host.scheduler.waiting.remove_requests([request])
    host.evict(blocks[1:3])
    findable.ask(Ask(other, OFF))
    host.scheduler.waiting.prepend_request(request)
    host.finish(name)
    findable.add(prompt)
    assert findable.lost() == []


def test_approximate_sources_stay_and_what_is_no_source_goes(
    host: Host, findable: Findable, monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.setattr(host.known.index, "max_depth", 1)
    prompt = PROMPT + words(70, 8)
    findable.ask(Ask(prompt, NAIVE, max_tokens=2 * BLOCK))
    assert len(host.blocks_with_content()) > 6
    assert findable.ask(Ask(words(3, 7) + prompt[5:], NAIVE)).grafted > len(DOCUMENT) + 70
    for seed in range(6):  # more of the same than the index takes sources of
        findable.ask(Ask(words(11 + seed, 20 + seed) + DOCUMENT + words(40, 3), NAIVE))
    assert findable.lost() == []


def zipf(num_documents: int, num_requests: int, seed: int) -> list[int]:
    weights = 1 / np.arange(1, num_documents + 1) ** 0.9
    return (
        np.random.default_rng(seed)
        .choice(num_documents, num_requests, p=weights / weights.sum())
        .tolist()
    )


def ideally_reused(order: Iterable[int], sizes: list[int], room: int) -> list[int]:
    """Blocks that an LRU cache of whole documents would give to each request."""
    held: OrderedDict[int, int] = OrderedDict()
    found = []
    for document in order:
        found.append(held.pop(document, 0))
        held[document] = sizes[document]
        while sum(held.values()) > room:
            held.popitem(last=False)
    return found


def test_a_long_run_of_grafts_reuses_nearly_as_much_as_an_ideal_cache(host: Host):
    findable, num_requests = Findable(host), 160
    sizes = [4 + number % 5 for number in range(18)]  # 108 blocks for a pool of 95
    texts = [words(size * BLOCK, 100 + number) for number, size in enumerate(sizes)]
    order, reused = zipf(len(texts), num_requests, seed=1), []
    for number, document in enumerate(order):
        opening = words(5 + number % 20, 1000 + number)
        answer = findable.ask(
            Ask(opening + texts[document] + words(9, 2000 + number), NAIVE, max_tokens=1)
        )
        reused.append(-(-answer.grafted // BLOCK))
        assert findable.lost() == []
    half = num_requests // 2
    ideal = ideally_reused(order, sizes, NUM_BLOCKS - max(sizes) - 2)
    assert sum(reused[half:]) >= 0.9 * sum(ideal[half:])
