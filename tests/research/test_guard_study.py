"""Damage done on purpose, and what the guard makes of streams of answers."""

import re
from random import Random

import pytest

from kvgraft import Engine
from kvgraft.guard.target import Target
from kvgraft.policies import parse_policy
from kvgraft_lab.evaluate.tasks import Shape, find_suites
from kvgraft_lab.testbed import MODEL_DIR
from research.guard import DAMAGES, HEALTHY, ScoredAnswer, answers, cases, stream

[SUITE] = find_suites("multidoc")
ITEM = SUITE.items(5, 1, Shape(512))[0]


@pytest.fixture(scope="module")
def engine() -> Engine:
    return Engine(MODEL_DIR, dtype="float32", continuation=False)


def test_texts_differ_by_one_word_of_as_many_tokens(engine: Engine):
    found = list(cases(engine, ITEM, Random(0)))
    assert {case.condition for case in found} == {HEALTHY, *DAMAGES}
    for case in found:
        assert bool(case.changed) == (case.condition in ("token", "fact"))
        for text, other in case.changed.items():
            assert len(engine.encode(text)) == len(engine.encode(other))
            differs = [(a, b) for a, b in zip(text.split(), other.split(), strict=True) if a != b]
            assert len(differs) == 1
            if case.condition == "fact":
                assert differs[0][0] in re.findall(r"\w+", " ".join(case.asks[0].answers))


def test_damage_shows_in_the_distances(engine: Engine):
    found = list(answers(engine, ITEM, parse_policy("spread"), "0", (HEALTHY, *DAMAGES)))
    kl = {
        condition: [row.distances["answer_kl"] for row in found if row.condition == condition]
        for condition in (HEALTHY, *DAMAGES)
    }
    assert all(kl.values())
    mean = {condition: sum(values) / len(values) for condition, values in kl.items()}
    assert mean[HEALTHY] < 0.1
    assert min(mean["shift"], mean["values"], mean["fact"]) > 10 * mean[HEALTHY]


@pytest.mark.parametrize(("flips", "acts"), [(0.0, False), (0.5, True)])
def test_a_stream_ends_with_exact_kv_if_its_answers_are_bad(flips: float, acts: bool):
    row = ScoredAnswer("needle", "alone", "any", 1, 0.9, {"flips": flips, "answer_kl": flips})
    found = stream([row], 0.1, Target.parse("flips=0.02"), 500, seed=0)
    assert (found.exact is not None) == (found.alarm is not None) == acts
    free = stream([row], 0.1, None, 500, seed=0)
    assert free.covers("flips", flips)
    assert free.bounds["flips"]["mean"] == pytest.approx(flips)
