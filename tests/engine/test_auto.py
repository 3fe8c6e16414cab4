"""The policy `auto`: each prompt is recovered by the policy for its context."""

from pathlib import Path

import numpy as np
import pytest
import torch

from kvgraft import Engine, Request, Result, SamplingParams
from models import VOCAB_SIZE

CHOICES = {"same": "naive", "new": "spread:recompute_share=0.2/start_tokens=2"}
AUTO = f"auto:same_context={CHOICES['same']},new_context={CHOICES['new']}"
ANSWER = SamplingParams(max_tokens=2, ignore_eos=True)


def tokens(count: int, seed: int) -> list[int]:
    return np.random.default_rng(seed).integers(3, VOCAB_SIZE, count).tolist()


FIRST, SECOND = tokens(160, 1), tokens(160, 2)
READ = [*tokens(20, 3), *FIRST, *SECOND]
MOVED = [*tokens(29, 4), *FIRST, *SECOND, *tokens(9, 5)]
SWAPPED = [*tokens(29, 4), *SECOND, *FIRST, *tokens(9, 5)]


def chose(result: Result) -> str:
    """The context whose policy recovered a prompt."""
    return {"naive": "same", "spread": "new"}[str(result.report.recovered_by).split(":")[0]]


@pytest.fixture
def engine(model_dirs: dict[str, Path]) -> Engine:
    engine = Engine(model_dirs["qwen3"], dtype="float32", poison_dropped_pages=True)
    engine.generate([Request(READ, "full", ANSWER)])
    return engine


def ask(
    engine: Engine, *prompts: list[int], policy: str = AUTO, remember: bool = False
) -> list[Result]:
    return engine.generate(
        [Request(one, policy, ANSWER, return_logits=True, remember=remember) for one in prompts]
    )


@pytest.mark.parametrize(("prompt", "context"), [(MOVED, "same"), (SWAPPED, "new")])
def test_a_prompt_is_recovered_by_the_policy_for_its_context(
    engine: Engine, prompt: list[int], context: str
):
    [auto] = ask(engine, prompt)
    chosen, other = (
        ask(engine, prompt, policy=CHOICES[name].replace("/", ","))[0]
        for name in (context, {"same": "new", "new": "same"}[context])
    )
    assert torch.equal(auto.first_logits, chosen.first_logits)  # type: ignore[arg-type]
    assert not torch.equal(auto.first_logits, other.first_logits)  # type: ignore[arg-type]
    assert auto.report.policy == "auto"
    assert chose(auto) == context
    assert chosen.report.recovered_by is None


def test_the_choice_does_not_depend_on_other_prompts(engine: Engine):
    together = ask(engine, MOVED, SWAPPED, MOVED)
    assert [chose(one) for one in together] == ["same", "new", "same"]
    for prompt, one in zip((MOVED, SWAPPED, MOVED), together, strict=True):
        [alone] = ask(engine, prompt)
        assert alone.token_ids == one.token_ids
        torch.testing.assert_close(one.first_logits, alone.first_logits, rtol=1e-4, atol=1e-4)


def test_text_that_was_grafted_before_is_recovered_with_care(engine: Engine):
    """Else what the first graft left out would stay for the rest of a conversation."""
    [first] = ask(engine, MOVED, remember=True)
    [again] = ask(engine, [*tokens(40, 6), *MOVED[10:]], remember=True)
    assert chose(first) == "same"
    assert again.report.grafted_tokens > 300
    assert (again.report.depth, chose(again)) == (2, "new")


def test_new_text_that_looks_like_the_known_one_is_another_context(engine: Engine):
    """Values in similar documents are told apart only if they were read together."""
    changed = [token if place % 9 else 3 + place % 40 for place, token in enumerate(FIRST[:30])]
    for before, context in (tokens(30, 7), "same"), (changed, "new"):
        [one] = ask(engine, [*before, *FIRST, *SECOND, *tokens(9, 5)])
        assert (one.report.grafted_tokens > 300, chose(one)) == (True, context)


def test_without_grafts_there_is_no_choice(engine: Engine):
    [new, known] = ask(engine, tokens(60, 8), [*READ, *tokens(5, 9)])
    assert new.report.recovered_by is None
    assert (known.report.grafted_tokens, known.report.recovered_by) == (0, None)
    everything = "auto:same_context=epic:start_tokens=9999,new_context=epic:start_tokens=9999"
    for prompt in (MOVED, SWAPPED):
        exact, all_of_it = (ask(engine, prompt, policy=name)[0] for name in ("full", everything))
        torch.testing.assert_close(exact.first_logits, all_of_it.first_logits, rtol=1e-4, atol=1e-4)
