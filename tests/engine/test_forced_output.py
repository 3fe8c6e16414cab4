"""Answers that a request gives: what the model thinks of each token, over KV chosen by the prompt
alone."""

from collections.abc import Sequence
from pathlib import Path

import numpy as np
import pytest
import torch
from torch import Tensor

from kvgraft import Engine, Request, RequestError, Result, SamplingParams
from kvgraft.policies import parse_policy
from kvgraft_lab.evaluate.recording import Recorded
from models import VOCAB_SIZE

TOLERANCE = 1e-4  # of float32 logits of order 1 to 5
EVERYTHING = "sparsex:recompute_share=1.0"
FAMILIES = ("llama", "mistral", "qwen3", "qwen3_moe", "deepseek_v3")


def tokens(count: int, seed: int) -> list[int]:
    return np.random.default_rng(seed).integers(3, VOCAB_SIZE, count).tolist()


DOCUMENT, ANSWER = tokens(120, 1), tokens(9, 2)
PROMPT = [*tokens(30, 3), *DOCUMENT, *tokens(12, 4)]


@pytest.fixture(scope="module")
def engines(model_dirs: dict[str, Path]) -> dict[str, Engine]:
    return {
        family: Engine(model_dirs[family], dtype="float32", poison_dropped_pages=True)
        for family in FAMILIES
    }


@pytest.fixture
def engine(engines: dict[str, Engine]) -> Engine:
    engines["qwen3"].clear_cache()
    return engines["qwen3"]


def ask(engine: Engine, policy: object, answer: Sequence[int] = (), **fields: object) -> Result:
    sampling = SamplingParams(max_tokens=max(1, len(answer)), ignore_eos=True)
    request = Request(
        PROMPT, policy, sampling, remember=False, return_logits=True, forced_output=answer, **fields
    )  # type: ignore[arg-type]
    [result] = engine.generate([request])
    return result


def read(engine: Engine) -> None:
    """Make the document known, behind other text."""
    engine.generate(
        [Request([*tokens(20, 5), *DOCUMENT], "full", SamplingParams(1, ignore_eos=True))]
    )


def forward(model_dir: Path) -> Tensor:
    """What transformers says at the places of the answer, in one pass over prompt and answer: [9,
    V]."""
    from transformers import AutoModelForCausalLM

    model = AutoModelForCausalLM.from_pretrained(model_dir, dtype=torch.float32)
    with torch.inference_mode():
        return model(torch.tensor([[*PROMPT, *ANSWER]])).logits[0, len(PROMPT) - 1 : -1]


def distance(result: Result, expected: Tensor) -> float:
    assert result.logits is not None
    assert result.logits.shape == expected.shape
    return float((result.logits - expected).abs().max())


@pytest.mark.parametrize("family", FAMILIES)
def test_scores_are_those_of_one_pass_over_prompt_and_answer(
    engines: dict[str, Engine], model_dirs: dict[str, Path], family: str
):
    engine, expected = engines[family], forward(model_dirs[family])
    engine.clear_cache()
    full = ask(engine, "full", ANSWER)
    assert full.token_ids == ANSWER
    assert distance(full, expected) < TOLERANCE
    read(engine)
    again, naive = ask(engine, EVERYTHING, ANSWER), ask(engine, "naive", ANSWER)
    assert again.report.grafted_tokens == naive.report.grafted_tokens >= 100
    assert distance(again, expected) < TOLERANCE
    assert distance(naive, expected) > 0.01


@pytest.mark.parametrize(
    "policy", ["naive", "epic", "sparsex", "cacheblend", "transitive", "spread"]
)
def test_the_policy_chooses_by_the_prompt_alone(engine: Engine, policy: str):
    read(engine)
    alone, given = (Recorded(parse_policy(policy)) for _ in range(2))
    results = ask(engine, alone), ask(engine, given, ANSWER)
    assert torch.equal(alone.record.computed, given.record.computed)
    assert torch.equal(results[0].first_logits, results[1].first_logits)  # type: ignore[arg-type]
    assert results[1].report.prompt_tokens == len(PROMPT)
    assert results[0].report.grafted_tokens == results[1].report.grafted_tokens >= 100


def test_an_answer_of_its_own_has_the_same_logits_when_it_is_given(engine: Engine):
    sampling = SamplingParams(max_tokens=12, ignore_eos=True)
    [own] = engine.generate([Request(PROMPT, "full", sampling, remember=False, return_logits=True)])
    [given] = engine.generate(
        [
            Request(
                PROMPT,
                "full",
                sampling,
                remember=False,
                return_logits=True,
                forced_output=own.token_ids,
            )
        ]
    )
    assert own.logits is not None
    assert given.logits is not None
    assert own.token_ids == given.token_ids == own.logits.argmax(-1).tolist()
    assert torch.equal(own.logits, given.logits)
    assert own.text == given.text


def test_behind_what_is_given_the_model_goes_on_by_itself(engine: Engine):
    sampling = SamplingParams(max_tokens=12, ignore_eos=True)
    [whole] = engine.generate(
        [Request([*PROMPT, *ANSWER], "full", SamplingParams(3, ignore_eos=True))]
    )
    given, other = engine.generate(
        [
            Request(PROMPT, "full", sampling, forced_output=ANSWER),
            Request(PROMPT, "full", sampling, forced_output=tokens(5, 8)),
        ]
    )
    assert given.token_ids == [*ANSWER, *whole.token_ids]
    assert other.token_ids[:5] == tokens(5, 8)
    assert (given.finish_reason, given.logits) == ("length", None)


def test_a_given_end_of_sequence_ends_the_answer(engine: Engine):
    [end, *_] = engine.config.eos_token_ids
    request = Request(
        PROMPT,
        "full",
        SamplingParams(9),
        return_logits=True,
        forced_output=[*ANSWER[:3], end, *ANSWER[:2]],
    )
    [result] = engine.generate([request])
    assert (result.finish_reason, result.token_ids) == ("eos", [*ANSWER[:3], end])
    assert result.logits is not None
    assert len(result.logits) == 4


def test_what_is_given_crosses_over_with_the_prompt(engine: Engine, tmp_path: Path):
    request = Request(PROMPT, "full", SamplingParams(12, ignore_eos=True), forced_output=ANSWER)
    [expected] = engine.generate([request])
    engine.prefill(request, tmp_path / "payload")
    assert engine.resume(tmp_path / "payload").token_ids == expected.token_ids


@pytest.mark.parametrize(
    ("answer", "message"),
    [
        (
            [3, VOCAB_SIZE],
            rf"forced_output must be token ids in 0\.\.{VOCAB_SIZE - 1}, got \[3, {VOCAB_SIZE}\]",
        ),
        ([-1], r"forced_output must be token ids in 0\.\.\d+, got \[-1\]"),
        ([True], r"forced_output must be token ids in 0\.\.\d+, got \[True\]"),
        ("w3", r"forced_output must be token ids in 0\.\.\d+, got w3"),
        ([3] * 5, "forced_output has 5 tokens, but max_tokens is 4"),
    ],
)
def test_what_cannot_be_an_answer_is_refused(engine: Engine, answer: object, message: str):
    with pytest.raises(RequestError, match=message):
        engine.generate([Request(PROMPT, "full", SamplingParams(4), forced_output=answer)])  # type: ignore[arg-type]
