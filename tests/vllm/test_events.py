"""KV cache events: a router that believes them finds every block that it was told of, and exact KV
in it."""

from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass, field
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from engines import BLOCK, NAIVE, OFF, Ask, words
from hosts import Host
from test_exactness import TOLERANCE, kv_while_decoding
from traffic import EVERY_WAY, SHORT, WANT_EXACT, Traffic
from vllm.sampling_params import SamplingParams
from vllm.v1.core.kv_cache_utils import get_block_hash, maybe_convert_block_hash
from vllm.v1.request import Request

OPENING, DOCUMENT = words(3 * BLOCK, 1), words(300, 2)
GRAFTED = OPENING + words(40, 3) + DOCUMENT + words(50, 4)
CONDENSED = words(70, 5) + DOCUMENT + words(90, 6)
CONDENSE = {"policy": "condense", "kept_share": 0.25}
NUM_EXACT = 4  # blocks of GRAFTED before the one in which the graft begins


@dataclass
class Router:
    """Keeps what the events say.

    Attributes:
        told: of every block that was ever told: parent, tokens, extra keys.
        held: how many blocks have that hash now.
    """

    told: dict[Any, tuple[Any, ...]] = field(default_factory=dict)
    held: Counter[Any] = field(default_factory=Counter)
    num_removed: int = 0

    def publish(self, batch: Any) -> None:
        """What vLLM's scheduler calls."""
        for event in batch.events:
            kind = type(event).__name__
            if kind == "BlockStored":
                self._store(event)
            elif kind == "BlockRemoved":
                self.num_removed += 1
                for block_hash in event.block_hashes:
                    assert self.held[block_hash] > 0, "removed, and was never stored"
                    self.held[block_hash] -= 1
            else:
                assert kind == "AllBlocksCleared"
                self.held.clear()

    def shutdown(self) -> None:
        """Nothing to end."""

    def _store(self, event: Any) -> None:
        parent, size = event.parent_block_hash, event.block_size
        assert event.block_hashes
        assert (
            len(event.token_ids) == size * len(event.block_hashes) == size * len(event.extra_keys)
        )
        assert parent is None or parent in self.told
        for place, block_hash in enumerate(event.block_hashes):
            tokens = tuple(event.token_ids[place * size : (place + 1) * size])
            self.told[block_hash] = (parent, tokens, event.extra_keys[place])
            self.held[block_hash] += 1
            parent = block_hash

    @property
    def texts(self) -> set[tuple[int, ...]]:
        """The tokens of all blocks that are held."""
        return {self.told[block_hash][1] for block_hash in +self.held}


@pytest.fixture
def router(host: Host, monkeypatch: pytest.MonkeyPatch) -> Iterator[Router]:
    router = Router()
    monkeypatch.setattr(host.manager.block_pool, "enable_kv_cache_events", True)
    monkeypatch.setattr(host.scheduler, "kv_event_publisher", router)
    yield router
    host.abandon()
    host.manager.take_events()


def blocks_of(*texts: list[int]) -> set[tuple[int, ...]]:
    return {
        tuple(text[at : at + BLOCK])
        for text in texts
        for at in range(0, len(text) - BLOCK + 1, BLOCK)
    }


def forget(host: Host, router: Router) -> None:
    """The engine tells of a reset with its next step, and so does this."""
    host.forget()
    router.publish(SimpleNamespace(events=host.manager.take_events()))


def plain_events(host: Host, router: Router, *asks: Ask) -> dict[Any, tuple[Any, ...]]:
    """What vLLM tells of these requests without reuse; nothing is known afterwards."""
    host.ask(*[Ask(ask.prompt, OFF, ask.salt, max_tokens=1) for ask in asks])
    forget(host, router)
    told = dict(router.told)
    assert not router.held
    router.told.clear()
    return told


@pytest.mark.parametrize("salt", [None, "a tenant"])
def test_grafts_and_condensed_prompts_are_told_up_to_their_last_exact_block(
    host: Host, router: Router, salt: str | None
):
    asks = [Ask(GRAFTED, NAIVE, salt, max_tokens=80), Ask(CONDENSED, CONDENSE, salt, max_tokens=80)]
    plain = plain_events(host, router, Ask(OPENING, OFF, salt), Ask(DOCUMENT, OFF, salt), *asks)
    host.read(OPENING, DOCUMENT, salt=salt)
    answers = host.ask(*asks)
    host.settle()
    assert all(answer.grafted for answer in answers)
    assert router.told.items() <= plain.items()
    assert router.texts == blocks_of(OPENING, DOCUMENT, GRAFTED[: NUM_EXACT * BLOCK])


def test_what_is_removed_was_told_and_the_rest_is_kept(host: Host, router: Router):
    """In a pool that is too small for all."""
    for number in range(24):
        document = words(6 * BLOCK, 100 + number)
        host.read(document)
        host.ask(Ask(words(40, number) + document + words(9, number), NAIVE, max_tokens=40))
        host.ask(Ask(words(40, 50 + number) + document + words(70, number), CONDENSE))
    host.settle()
    assert router.num_removed > 20
    cached = {
        block.block_hash for block in host.manager.block_pool.blocks if block.block_hash is not None
    }
    hidden = {key for key, *_ in host.side.admission.approximate._blocks.values()}
    assert len(
        [block_hash for block_hash in cached if bytes(block_hash[:32]) not in hidden]
    ) == len(+router.held)
    assert len(cached) > len(+router.held)


def test_approximate_sources_are_not_told(
    host: Host, router: Router, monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.setattr(host.known.index, "max_depth", 1)
    host.read(OPENING, DOCUMENT)
    for _ in range(2):
        host.ask(Ask(GRAFTED, NAIVE, max_tokens=80))
        assert router.texts == blocks_of(OPENING, DOCUMENT, GRAFTED[: NUM_EXACT * BLOCK])
    assert len(host.blocks_with_content()) > len(+router.held)


def test_after_a_reset_events_go_on_as_before(host: Host, router: Router):
    for _ in range(2):
        host.read(OPENING, DOCUMENT)
        host.ask(Ask(GRAFTED, NAIVE, max_tokens=40))
        assert router.texts == blocks_of(OPENING, DOCUMENT, GRAFTED[: NUM_EXACT * BLOCK])
        forget(host, router)
        assert not router.held


def test_a_preempted_request_tells_of_its_exact_blocks_alone(host: Host, router: Router):
    host.read(OPENING, DOCUMENT)
    name = host.add(Ask(GRAFTED, NAIVE, max_tokens=90))
    host.step_until(
        lambda: name in host.outputs and len(host.outputs[name].outputs[0].token_ids) >= 40
    )
    request = host.request(name)
    host.scheduler.running.remove(request)
    host.scheduler._preempt_request(request, 0.0)
    host.finish(name)
    assert router.texts == blocks_of(OPENING, DOCUMENT, GRAFTED[: NUM_EXACT * BLOCK])


@pytest.mark.parametrize(
    "num_requests",
    [pytest.param(100, marks=pytest.mark.slow), pytest.param(2000, marks=pytest.mark.soak)],
)
def test_of_a_whole_run_exact_blocks_alone_are_told(
    host: Host, router: Router, monkeypatch: pytest.MonkeyPatch, num_requests: int
):
    """Each under the hash of its text in its namespace, and what is held at the end has the KV of
    full prefill."""
    publish, seen = router.publish, set[int]()

    def publish_and_look(batch: Any) -> None:
        publish(batch)
        found = approximate_pages(host)
        assert found.isdisjoint(told_pages(host, router).values())
        seen.update(found)

    monkeypatch.setattr(router, "publish", publish_and_look)
    monkeypatch.setattr(host.known.index, "max_depth", 4)  # which traffic changes
    traffic = Traffic(
        host, np.random.default_rng(3), WANT_EXACT, EVERY_WAY, SHORT, (1, 8, 60), most_alive=16
    )
    for max_depth in (4, 0, 1, 4):
        traffic.reset(max_depth)
        traffic.run(num_requests // 4)
    host.settle()
    assert min(len(seen), len(router.told), router.num_removed, host.num_preemptions) > 0
    pages, chains = told_pages(host, router), [*told_chains(router)]
    assert pages.keys() == (+router.held).keys()
    keys, values = host.read_kv(host.slots_of(pages.values()))
    rows = {
        block_hash: slice(BLOCK * row, BLOCK * (row + 1)) for row, block_hash in enumerate(pages)
    }
    for number, (salt, tokens, block_hashes) in enumerate(chains):
        hasher = host.engine.engine_core.engine_core.request_block_hasher
        exact = Request("", tokens, SamplingParams(), None, cache_salt=salt, block_hasher=hasher)
        assert [*map(maybe_convert_block_hash, exact.block_hashes)] == block_hashes
        if held := [block for block, block_hash in enumerate(block_hashes) if block_hash in pages]:
            truth = kv_while_decoding(host, [*tokens, 5], OFF, salt=f"nobody {number}")[:2]
            for block in held:
                where, row = slice(BLOCK * block, BLOCK * (block + 1)), rows[block_hashes[block]]
                for told, right in zip((keys, values), truth, strict=True):
                    torch.testing.assert_close(
                        told[:, row], right[:, where], atol=TOLERANCE, rtol=0
                    )


def approximate_pages(host: Host) -> set[int]:
    """Those that hold or follow grafts in some living request."""
    side, blocks_of = host.side, host.manager.get_block_ids
    states = side._requests.values()
    return {
        page
        for state in states
        for page in blocks_of(state.id)[0][side._masking.first_block(state) :]
    }


def told_pages(host: Host, router: Router) -> dict[Any, int]:
    """Where a router would find the blocks that it believes to be there."""
    pool = host.manager.block_pool.blocks
    cached = {
        maybe_convert_block_hash(get_block_hash(b.block_hash)): b.block_id
        for b in pool
        if b.block_hash
    }
    return {block_hash: page for block_hash, page in cached.items() if router.held[block_hash] > 0}


def told_chains(router: Router) -> Iterator[tuple[str | None, list[int], list[Any]]]:
    """Every text of which blocks were told up to its end: its namespace, its tokens, the hashes of
    its blocks."""
    for last in router.told.keys() - {parent for parent, *_ in router.told.values()}:
        block_hashes: list[Any] = []
        tokens: list[int] = []
        before, extra_keys = last, None
        while before is not None:
            block_hashes.append(before)
            before, block, extra_keys = router.told[before]
            tokens[:0] = block
        yield (extra_keys[0] if extra_keys else None), tokens, block_hashes[::-1]
