"""Reading anew: what is known only approximately becomes exact."""

from pathlib import Path

import numpy as np
import pytest
import torch

from kvgraft import Engine, Request, Result, SamplingParams
from models import VOCAB_SIZE

SIZE = 16
TOLERANCE = 1e-5


def words(count: int, seed: int) -> list[int]:
    return np.random.default_rng(seed).integers(3, VOCAB_SIZE, count).tolist()


KNOWN, NEW = words(6 * SIZE, 1), words(8 * SIZE, 2)


@pytest.fixture
def engine(model_dirs: dict[str, Path]) -> Engine:
    return Engine(model_dirs["qwen3"], dtype="float32", poison_dropped_pages=True)


def ask(engine: Engine, prompt: list[int], policy: str = "naive", namespace: str = "a") -> Result:
    sampling = SamplingParams(max_tokens=1, ignore_eos=True)
    return engine.generate([Request(prompt, policy, sampling, namespace)])[0]


def use(engine: Engine, times: int, namespace: str = "a", seed: int = 0) -> list[int]:
    """Read NEW behind a graft, and graft it so often elsewhere; the depths of what came of it."""
    ask(engine, KNOWN, "full", namespace)
    ask(engine, [*words(SIZE, seed + 10), *KNOWN, *NEW], namespace=namespace)
    prompts = [
        [*words(5, seed + 20 + time), *NEW, *words(9, seed + 40 + time)] for time in range(times)
    ]
    return [ask(engine, prompt, namespace=namespace).report.depth for prompt in prompts]


def test_after_reading_anew_prompts_graft_what_a_lone_reading_gives(
    engine: Engine, model_dirs: dict[str, Path]
):
    assert use(engine, 2) == [2, 2]
    assert engine.idle_refresh(1000) == len(NEW)
    report = ask(engine, [*words(5, 60), *NEW, *words(9, 61)]).report
    assert report.depth == 1
    assert report.grafted_tokens >= len(NEW)
    alone = Engine(model_dirs["qwen3"], dtype="float32")
    ask(alone, NEW, "full")
    for mine, expected in zip(kv_of(engine), kv_of(alone), strict=True):
        torch.testing.assert_close(mine, expected, rtol=TOLERANCE, atol=TOLERANCE)
    engine.check()


def kv_of(engine: Engine, namespace: str = "a") -> list[torch.Tensor]:
    """Keys and values of the new text, where they are exact."""
    pages = engine.memory.lookup.find_prefix(NEW, engine.scope_of(namespace))
    assert len(pages) == len(NEW) // SIZE
    slots = (torch.tensor(pages)[:, None] * SIZE + torch.arange(SIZE)).flatten()
    return [engine.memory.cache.keys[:, slots], engine.memory.cache.values[:, slots]]


def test_nothing_is_read_that_is_exact_or_not_used_or_too_long(engine: Engine):
    use(engine, 0)
    assert engine.idle_refresh(1000) == 0, "it was not grafted"
    ask(engine, [*words(5, 60), *NEW])
    assert engine.idle_refresh(len(NEW) - 1) == 0
    assert engine.idle_refresh(len(NEW)) == len(NEW)
    for seed in range(3):
        ask(engine, [*words(7, 70 + seed), *NEW])
    assert engine.idle_refresh(1000) == 0, "it is exact now"
    with pytest.raises(ValueError, match="max_tokens"):
        engine.idle_refresh(-1)


def test_nothing_is_read_while_requests_run(engine: Engine):
    use(engine, 2)
    events = engine.stream(
        [Request(words(20, 5), sampling=SamplingParams(max_tokens=3, ignore_eos=True))]
    )
    next(events)
    assert engine.idle_refresh(1000) == 0
    events.close()
    assert engine.idle_refresh(1000) == len(NEW)


def test_a_text_stays_in_its_namespace(engine: Engine):
    use(engine, 2, "a")
    use(engine, 2, "b", seed=100)
    assert engine.idle_refresh(len(NEW)) == len(NEW), "of one of them"
    depths = [
        ask(engine, [*words(5, 60), *NEW], namespace=name).report.depth for name in ("a", "b", "c")
    ]
    assert sorted(depths) == [0, 1, 2]
    assert depths[2] == 0, "nothing is known there"


def test_a_text_that_others_may_graft_is_read_in_the_namespace_that_it_is_of(engine: Engine):
    use(engine, 0, "wiki")
    sampling = SamplingParams(max_tokens=1, ignore_eos=True)
    for seed in range(2):
        prompt = [*words(5, 20 + seed), *NEW]
        engine.generate(
            [
                Request(
                    prompt, "naive", sampling, "mine", shared_namespaces=("wiki",), remember=False
                )
            ]
        )
    assert engine.idle_refresh(1000) == len(NEW)
    assert len(kv_of(engine, "wiki")) == 2
    assert engine.memory.lookup.find_prefix(NEW, engine.scope_of("mine")) == []


def test_nothing_is_read_for_which_there_is_no_room(engine: Engine):
    use(engine, 2)
    pool = engine.memory.pool
    held = list(pool._free)[: pool.num_free - len(NEW) // SIZE + 1]
    pool.acquire(held)
    assert engine.idle_refresh(1000) == 0
    pool.release(held)
    assert engine.idle_refresh(1000) == len(NEW)
