"""Which of several engines a prompt goes to."""

from types import SimpleNamespace

import numpy as np
import pytest

from kvgraft.server.engine_choice import EngineChoice

RANDOM = np.random.default_rng(1)
FIRST, SECOND, THIRD = (RANDOM.integers(0, 32000, 2000).tolist() for _ in range(3))
QUESTION = RANDOM.integers(0, 32000, 40).tolist()


class Server:
    """A choice among engines, and the requests whose answers have not ended."""

    def __init__(self, num_engines: int = 2, pool_tokens: int = 100_000) -> None:
        self.unfinished: dict[str, SimpleNamespace] = {}
        self.choice = EngineChoice(num_engines, pool_tokens, self.unfinished)
        self._number = 0

    def send(
        self, tokens: list[int], *salts: str, given: int | None = None, ends: bool = True
    ) -> int:
        """The engine of a request, which ends at once or stays in prefill."""
        name = str(self._number)
        self._number += 1
        self.unfinished[name] = SimpleNamespace(is_prefilling=True)
        engine = self.choice.choose(name, tokens, salts or ("mine",), given)
        if ends:
            del self.unfinished[name]
        return engine


@pytest.fixture
def server() -> Server:
    return Server()


def test_a_prompt_goes_to_the_engine_that_has_read_its_text_at_any_position(server: Server):
    assert [server.send(FIRST), server.send(SECOND)] == [0, 1], "the pool that holds less"
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
    assert Server().send([*QUESTION, *FIRST], "mine") == 0


def test_new_text_goes_to_the_engine_with_the_shortest_queue(server: Server):
    assert server.send(FIRST, ends=False) == 0
    assert server.send(SECOND, ends=False) == 1
    assert server.send(THIRD[:500], ends=False) in (0, 1)
    server.unfinished["0"].is_prefilling = False
    assert server.send(THIRD) == 0, "its prompt is computed, so nothing waits"


def test_an_engine_with_far_more_requests_than_the_others_gets_no_more(server: Server):
    engines = [server.send([*FIRST, *QUESTION[:n]], ends=False) for n in range(12)]
    for state in server.unfinished.values():
        state.is_prefilling = False
    assert 1 in engines
    loads = [engines.count(0), engines.count(1)]
    for _ in range(12):
        loads[server.send(FIRST, ends=False)] += 1
        server.unfinished[str(server._number - 1)].is_prefilling = False
    assert max(loads) <= 1.5 * sum(loads) / 2 + 2


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


def test_one_engine_needs_no_choice():
    config = SimpleNamespace(parallel_config=SimpleNamespace(data_parallel_size=1))
    assert EngineChoice.of(SimpleNamespace(vllm_config=config)) is None
    config = SimpleNamespace(
        parallel_config=SimpleNamespace(data_parallel_size=4),
        cache_config=SimpleNamespace(num_gpu_blocks=400, block_size=16),
    )
    client = SimpleNamespace(
        vllm_config=config, output_processor=SimpleNamespace(request_states={})
    )
    choice = EngineChoice.of(client)
    assert choice is not None
    assert choice.num_engines == 4
