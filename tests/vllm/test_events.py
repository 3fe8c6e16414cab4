"""KV cache events: a router that believes them finds every block that it was told of, and exact KV in it."""

from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass, field
from types import SimpleNamespace
from typing import Any

import pytest
from engines import BLOCK, NAIVE, OFF, Ask, words
from hosts import Host

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
        assert len(event.token_ids) == size * len(event.block_hashes) == size * len(event.extra_keys)
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
    return {tuple(text[at : at + BLOCK]) for text in texts for at in range(0, len(text) - BLOCK + 1, BLOCK)}


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
    cached = {block.block_hash for block in host.manager.block_pool.blocks if block.block_hash is not None}
    hidden = {key for key, *_ in host.side._continuing._known._blocks.values()}
    assert len([block_hash for block_hash in cached if bytes(block_hash[:32]) not in hidden]) == len(+router.held)
    assert len(cached) > len(+router.held)


def test_approximate_sources_are_not_told(host: Host, router: Router, monkeypatch: pytest.MonkeyPatch):
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
    host.step_until(lambda: name in host.outputs and len(host.outputs[name].outputs[0].token_ids) >= 40)
    request = host.request(name)
    host.scheduler.running.remove(request)
    host.scheduler._preempt_request(request, 0.0)
    host.finish(name)
    assert router.texts == blocks_of(OPENING, DOCUMENT, GRAFTED[: NUM_EXACT * BLOCK])
