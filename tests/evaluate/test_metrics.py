import math

import pytest
import torch

from kvgraft.evaluate.metrics import contains_all, contains_any, exact_match, f1, first_token, kv_deviation


@pytest.mark.parametrize(
    ("score", "answer", "expected", "value"),
    [
        (exact_match, "The Turin.", ["turin"], 1.0),
        (exact_match, "turin rome", ["turin"], 0.0),
        (contains_all, "17, 42 and 90", ["42", "17"], 1.0),
        (contains_all, "17", ["42", "17"], 0.5),
        (contains_all, "170", ["17"], 0.0),  # whole words only
        (contains_any, "it is turin", ["rome", "Turin"], 1.0),
        (contains_any, "", ["rome"], 0.0),
        (f1, "the big red dog", ["big dog"], 2 * 2 / (3 + 2)),  # the article does not count
        (f1, "a b b", ["b b c"], 2 * 2 / (2 + 3)),
        (f1, "x", ["y", "x"], 1.0),
        (f1, "", ["y"], 0.0),
        (f1, "dog dog", ["dog"], 2 / 3),
    ],
)
def test_text_scores(score, answer: str, expected: list[str], value: float):
    assert score(answer, expected) == pytest.approx(value)


def test_distances_of_the_first_token():
    truth = torch.tensor([0.0, math.log(3.0)])  # probabilities 1/4, 3/4
    ours = torch.tensor([math.log(3.0), 0.0])
    found = first_token(ours, truth)
    assert found["kl"] == pytest.approx(0.25 * math.log(1 / 3) + 0.75 * math.log(3))
    assert (found["top1"], found["top10"]) == (0.0, 1.0)
    same = first_token(truth + 5, truth)
    assert same["kl"] == pytest.approx(0, abs=1e-12)
    assert same["top1"] == 1.0
    generator = torch.Generator().manual_seed(0)
    a, b = torch.randn(2, 50, generator=generator)
    shared = set(a.argsort()[-10:].tolist()) & set(b.argsort()[-10:].tolist())
    assert first_token(a, b)["top10"] == len(shared) / 10
    expected = torch.nn.functional.kl_div(a.double().log_softmax(0), b.double().softmax(0), reduction="sum")
    assert first_token(a, b)["kl"] == pytest.approx(float(expected))


def test_kv_deviation_is_relative_and_per_token():
    truth = torch.ones(3, 2, 4)
    ours = truth.clone()
    ours[1] *= 3
    assert kv_deviation(ours, truth).tolist() == pytest.approx([0, 2, 0])
