"""Which of several engines a prompt goes to."""

import asyncio
from types import SimpleNamespace

import numpy as np
import pytest

from kvgraft.server.engine_choice import MANY_TOKENS, EngineChoice, PromptText

RANDOM = np.random.default_rng(1)
FIRST, SECOND, THIRD = (RANDOM.integers(0, 32000, 2000).tolist() for _ in range(3))
QUESTION = RANDOM.integers(0, 32000, 40).tolist()


class Server:
    """A choice among engines, and the requests whose answers have not ended."""

    def __init__(self, *, pool_tokens: int = 100_000, grafts: bool = True) -> None:
        self.unfinished: dict[str, SimpleNamespace] = {}
        self.choice = EngineChoice(2, pool_tokens, self.unfinished, grafts=grafts)
        self._number = 0

    def send(
        self,
        tokens: list[int],
        *salts: str,
        adapter: str = "",
        grafts: bool = True,
        given: int | None = None,
        ends: bool = True,
    ) -> int:
        """The engine of a request, which ends at once or stays in prefill."""
        name = str(self._number)
        self._number += 1
        self.unfinished[name] = SimpleNamespace(is_prefilling=True)
        making = PromptText.of(tokens, salts or ("mine",), adapter, grafts=grafts)
        engine = self.choice.choose(name, asyncio.run(making), given)
        if ends:
            del self.unfinished[name]
        return engine


@pytest.fixture
def server() -> Server:
    return Server()


def test_a_prompt_goes_to_the_engine_that_has_read_its_text_at_any_position(server: Server):
    assert [server.send(FIRST), server.send(SECOND)] == [0, 1], "the one given least"
    assert server.send([*QUESTION, *SECOND]) == 1
    assert server.send([*QUESTION, *FIRST]) == 0
    assert server.send([*SECOND[-900:], *FIRST[:300]]) == 1, "more of it is known there"


def test_text_of_other_namespaces_does_not_attract_a_prompt(server: Server):
    server.send(FIRST, "theirs", given=1)
    assert server.send(FIRST, "mine") == 0
    assert server.send(FIRST, "theirs") == 1


def test_a_shared_namespace_attracts_the_prompts_that_may_read_it(server: Server):
    server.send(FIRST, "wiki", given=1)
    assert server.send([*QUESTION, *FIRST], "mine", "wiki") == 1
    other = Server()
    other.send(FIRST, "wiki", given=1)
    other.send(SECOND, "theirs", given=0)
    assert other.send(FIRST, "mine", "wiki") == 1, "as a graft"
    assert other.send([*SECOND, *FIRST], "theirs", "wiki") == 0, "a prefix is worth more"


def test_new_text_goes_to_the_engine_with_the_shortest_queue(server: Server):
    assert server.send(FIRST, ends=False) == 0
    assert server.send(SECOND, ends=False) == 1
    server.unfinished["0"].is_prefilling = False
    assert server.send(THIRD) == 0, "its prompt is computed, so nothing waits"
    server.unfinished["0"].is_prefilling = True
    server.unfinished["1"].is_prefilling = False
    assert server.send(THIRD[::-1]) == 1


def test_an_engine_with_far_more_requests_than_the_others_gets_no_more(server: Server):
    """Though it alone has read their text."""
    server.send(FIRST, given=0)
    loads = [0, 0]
    for number in range(24):
        engine = server.send([*FIRST, *QUESTION[:number]], ends=False)
        for state in server.unfinished.values():
            state.is_prefilling = False
        loads[engine] += 1
        if engine == 1:
            break
    assert loads == [5, 1], "5 > 1.5 * 2.5 + 1, and 4 > 1.5 * 2 + 1 is not so"


def test_text_of_another_adapter_does_not_attract_a_prompt(server: Server):
    server.send(FIRST, adapter="sql", given=1)
    assert server.send(FIRST) == 0
    assert server.send(FIRST, adapter="sql") == 1


@pytest.mark.parametrize(
    ("grafts", "is_shadow", "engine"), [(True, False, 0), (False, False, 1), (True, True, 1)]
)
def test_a_request_that_must_not_graft_goes_to_its_prefix(
    grafts: bool, is_shadow: bool, engine: int
):
    server = Server(grafts=not is_shadow)
    server.send([*SECOND, *FIRST], given=0)
    server.send(FIRST[:400], given=1)
    assert server.send(FIRST, grafts=grafts) == engine


def test_new_text_uses_all_engines_also_when_their_pools_are_full():
    server = Server(pool_tokens=500)
    texts = [RANDOM.integers(0, 32000, 1000).tolist() for _ in range(12)]
    engines = [server.send(text) for text in texts]
    assert engines.count(0) == engines.count(1) == 6
    assert {server.send(QUESTION[:5]) for _ in range(4)} == {0, 1}, "also without a fingerprint"


def test_a_long_prompt_is_compared_in_a_thread(server: Server):
    long = RANDOM.integers(0, 32000, MANY_TOKENS + 1).tolist()
    server.send(long, given=1)
    assert server.send([*QUESTION, *long]) == 1


def test_what_has_ended_or_was_reset_counts_no_more(server: Server):
    server.send(FIRST, given=1, ends=False)
    server.unfinished.clear()
    server.send(SECOND, given=0)
    assert server.send(FIRST) == 1
    server.choice.clear()
    assert server.send(FIRST) == 0
    assert not server.choice._sent or set(server.choice._sent) == {"3"}


def test_an_engine_forgets_what_its_pool_cannot_hold():
    server = Server(pool_tokens=1500)
    server.send(FIRST, given=1)
    server.send(SECOND, given=1)
    assert server.send(FIRST) == 0


def test_prompts_without_tokens_are_spread_too(server: Server):
    assert {server.send([], ends=False) for _ in range(2)} == {0, 1}


@pytest.mark.parametrize(("tokens", "expected"), [(1600, 1600), (None, 1600)])
def test_the_pool_is_that_of_one_engine(tokens: int | None, expected: int):
    cache = SimpleNamespace(kv_cache_size_tokens=tokens, num_gpu_blocks=400, block_size=16)
    client = SimpleNamespace(
        vllm_config=SimpleNamespace(cache_config=cache),
        engine_core=SimpleNamespace(core_engines=[b"0"]),
        output_processor=SimpleNamespace(request_states={}),
    )
    assert EngineChoice.of(client) is None, "one engine"
    client.engine_core.core_engines = [b"0", b"1", b"2", b"3"]
    choice = EngineChoice.of(client)
    assert choice is not None
    assert choice.num_engines == 4
    assert [contents._capacity for contents in choice._contents] == [expected * 4 // 128] * 4
