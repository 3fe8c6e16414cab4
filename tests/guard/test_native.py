from pathlib import Path
from random import Random

import pytest
from torch import Tensor

from kvgraft import Engine, Request, Result, SamplingParams
from kvgraft.guard.native import score
from models import VOCAB_SIZE

DOCUMENT = [Random(1).randrange(3, VOCAB_SIZE) for _ in range(96)]
PROMPT = [*range(3, 30), *DOCUMENT, 5, 6, 7]
SAMPLING = SamplingParams(max_tokens=6, ignore_eos=True)


@pytest.fixture
def engine(model_dirs: dict[str, Path]) -> Engine:
    engine = Engine(model_dirs["llama"], dtype="float32", costs="tokens")
    engine.generate([Request(DOCUMENT)])
    return engine


def ask(engine: Engine, policy: str, **options) -> tuple[Request, Result]:
    request = Request(PROMPT, policy, SAMPLING, return_logits=True, **options)
    [result] = engine.generate([request])
    return request, result


def exact_first(engine: Engine) -> Tensor:
    """Logits [V] of the answer's first token on exact KV."""
    [exact] = engine.generate([Request(PROMPT, "full", SAMPLING, "first", return_logits=True)])
    assert exact.logits is not None
    return exact.logits[0]


def test_the_distance_of_an_exact_answer_is_nothing(engine: Engine):
    found = score(engine, *ask(engine, "sparsex:recompute_share=1.0"))
    assert found["answer_kl"] < 1e-6
    assert found["flips"] == 0
    assert abs(found["loglik"]) < 1e-4


def test_the_distance_of_an_approximate_answer_is_along_its_own_tokens(engine: Engine):
    request, result = ask(engine, "naive")
    assert result.report.grafted_tokens
    found = score(engine, request, result)
    assert found["answer_kl"] > 1e-6
    [truth] = engine.generate(
        [Request([*PROMPT, *result.token_ids[:-1]], "full", SAMPLING, "other", return_logits=True)]
    )
    assert truth.logits is not None
    assert result.logits is not None
    probability = result.logits[-1].log_softmax(-1), truth.logits[0].log_softmax(-1)
    last = (probability[1].exp() * (probability[1] - probability[0])).sum()
    assert float(last) <= 6 * found["answer_kl"] + 1e-6, "the last of six places"
    probabilities = [logits.log_softmax(-1) for logits in (result.logits[0], exact_first(engine))]
    first = (probabilities[1].exp() * (probabilities[1] - probabilities[0])).sum()
    assert found["kl"] == pytest.approx(float(first), rel=1e-3, abs=1e-7)
    assert found["answer_kl"] >= (float(first) + float(last)) / 6 - 1e-6


def test_what_was_computed_to_score_is_exact_and_known(engine: Engine):
    score(engine, *ask(engine, "naive"))
    _, again = ask(engine, "naive")
    assert (again.report.outcome, again.report.depth) == ("prefix_only", 0)


def test_nothing_is_known_of_what_is_not_to_be_remembered(engine: Engine):
    score(engine, *ask(engine, "naive", remember=False))
    _, again = ask(engine, "naive")
    assert again.report.outcome == "grafted"


def test_an_answer_without_logits_is_refused(engine: Engine):
    request = Request(PROMPT, "naive", SAMPLING)
    [result] = engine.generate([request])
    with pytest.raises(ValueError, match="return_logits"):
        score(engine, request, result)
