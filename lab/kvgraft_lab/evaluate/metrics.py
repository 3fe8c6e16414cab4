"""Scores of an answer's text, and the deviation of KV from full recomputation."""

import re
import string
from collections import Counter
from collections.abc import Callable, Mapping, Sequence

from torch import Tensor

from kvgraft_lab.evaluate.calls import match_calls


def normalise(text: str) -> str:
    """Return text in lower case, without punctuation, articles and extra white space (SQuAD;
    LongBench; RULER).
    """
    text = "".join(
        " " if character in string.punctuation else character for character in text.lower()
    )
    return " ".join(re.sub(r"\b(a|an|the)\b", " ", text).split())


def exact_match(answer: str, expected: Sequence[str]) -> float:
    """Return 1 if the answer is one of the expected texts, else 0."""
    return float(normalise(answer) in map(normalise, expected))


def contains_all(answer: str, expected: Sequence[str]) -> float:
    """Return the share of expected texts that occur in the answer as whole words (RULER's
    string_match_all).
    """
    return sum(_occurs(text, answer) for text in expected) / len(expected)


def contains_any(answer: str, expected: Sequence[str]) -> float:
    """Return 1 if one of the expected texts occurs in the answer as whole words, else 0 (RULER's
    string_match_part).
    """
    return float(any(_occurs(text, answer) for text in expected))


def f1(answer: str, expected: Sequence[str]) -> float:
    """Return the greatest token F1 with one of the expected texts (SQuAD, HotpotQA, LongBench,
    LoCoMo).
    """
    return max(_f1(normalise(answer).split(), normalise(text).split()) for text in expected)


SCORES: Mapping[str, Callable[[str, Sequence[str]], float]] = {
    "contains_all": contains_all, "contains_any": contains_any, "f1": f1,
    "exact_match": exact_match,
    "calls": match_calls,
}  # fmt: skip


def kv_deviation(ours: Tensor, truth: Tensor) -> Tensor:
    """Return ||ours - truth|| / ||truth|| of each token over heads and dimensions: [n, H, d] twice
    -> float32 [n].
    """
    distance = (ours.float() - truth.float()).flatten(1).norm(dim=1)
    return distance / truth.float().flatten(1).norm(dim=1).clamp(min=1e-12)


def _occurs(text: str, answer: str) -> bool:
    return f" {normalise(text)} " in f" {normalise(answer)} "


def _f1(answer: list[str], expected: list[str]) -> float:
    if not answer or not expected:
        return float(answer == expected)
    shared = sum((Counter(answer) & Counter(expected)).values())
    return 2 * shared / (len(answer) + len(expected))
