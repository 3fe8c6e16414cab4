import math

import numpy as np
import pytest
import torch

from kvgraft.evaluate.metrics import contains_all, contains_any, exact_match, f1, first_token, interval, kv_deviation


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


def test_interval_holds_the_mean_and_draws_clusters_whole():
    rng = np.random.default_rng(1)
    means = rng.random(40)
    values = [float(rng.random() < m) for m in means for _ in range(4)]
    alone = interval(values, range(len(values)))
    clustered = interval(values, [place // 4 for place in range(len(values))])
    for low, high in (alone, clustered):
        assert low < np.mean(values) < high
    assert interval([1.0] * 8, range(8)) == (1.0, 1.0)
    copies = [value for value in values[::4] for _ in range(4)]  # four times the same answer is one answer
    low, high = interval(copies, [place // 4 for place in range(len(copies))])
    narrow = interval(copies, range(len(copies)))
    assert high - low > 1.5 * (narrow[1] - narrow[0])
    assert clustered == interval(values, [place // 4 for place in range(len(values))])
