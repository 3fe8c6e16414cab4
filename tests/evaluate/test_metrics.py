import pytest
import torch

from kvgraft_lab.evaluate.metrics import contains_all, contains_any, exact_match, f1, kv_deviation


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


def test_kv_deviation_is_relative_and_per_token():
    truth = torch.ones(3, 2, 4)
    ours = truth.clone()
    ours[1] *= 3
    assert kv_deviation(ours, truth).tolist() == pytest.approx([0, 2, 0])
