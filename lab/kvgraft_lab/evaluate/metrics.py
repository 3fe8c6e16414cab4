"""Scores of an answer's text, and the deviation of KV from full recomputation."""

import re
import string
from collections import Counter
from collections.abc import Callable, Mapping, Sequence

from rapidfuzz import fuzz
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


def line_match(answer: str, expected: Sequence[str]) -> float:
    """Return 1 if the first line of the answer is an expected line of code, else 0. White space
    does not count (RepoBench).
    """
    return float(_first_line(answer) in map(_first_line, expected))


def edit_similarity(answer: str, expected: Sequence[str]) -> float:
    """Return the greatest edit similarity, from 0 to 1, of the answer's first line with an expected
    line of code (RepoBench, CrossCodeEval).
    """
    return max(fuzz.ratio(_first_line(answer), _first_line(text)) for text in expected) / 100


SCORES: Mapping[str, Callable[[str, Sequence[str]], float]] = {
    "contains_all": contains_all, "contains_any": contains_any, "f1": f1,
    "exact_match": exact_match, "line_match": line_match, "edit_similarity": edit_similarity,
    "calls": match_calls,
}  # fmt: skip


def kv_deviation(ours: Tensor, truth: Tensor) -> Tensor:
    """Return ||ours - truth|| / ||truth|| of each token over heads and dimensions: [n, H, d] twice
    -> float32 [n].
    """
    distance = (ours.float() - truth.float()).flatten(1).norm(dim=1)
    return distance / truth.float().flatten(1).norm(dim=1).clamp(min=1e-12)


def _first_line(text: str) -> str:
    """Return the first line that is not empty, without white space."""
    lines = (line.strip() for line in text.splitlines())
    return "".join(next(filter(None, lines), "").split())


def _occurs(text: str, answer: str) -> bool:
    return f" {normalise(text)} " in f" {normalise(answer)} "


def _f1(answer: list[str], expected: list[str]) -> float:
    if not answer or not expected:
        return float(answer == expected)
    shared = sum((Counter(answer) & Counter(expected)).values())
    return 2 * shared / (len(answer) + len(expected))
