from collections import Counter
from itertools import pairwise

import pytest

from kvgraft.guard.sampling import Sampling

KINDS = {"often": 30_000, "at times": 3000, "seldom": 300}


@pytest.mark.parametrize("share", [0.01, 0.1, 0.25, 1.0])
def test_every_kind_has_its_share(share: float):
    sampling, chosen = Sampling(share, seed=0), Counter[str]()
    for kind, count in KINDS.items():
        chosen[kind] = sum(sampling.draw() and sampling.choose(kind) for _ in range(count))
    for kind, count in KINDS.items():
        assert chosen[kind] == pytest.approx(share * count, abs=4 * (share * count) ** 0.5)


def test_of_those_that_were_drawn_every_fourth_of_a_kind_is_scored():
    sampling = Sampling(0.1, seed=1)
    chosen = [sampling.choose("a") for _ in range(400)]
    places = [place for place, one in enumerate(chosen) if one]
    assert sum(chosen) == 100
    assert {after - before for before, after in pairwise(places)} == {4}


@pytest.mark.parametrize("share", [0.01, 0.1, 0.25, 1.0])
def test_as_many_try_as_are_scored_and_never_more_than_a_tenth(share: float):
    sampling, count = Sampling(share, seed=2), 30_000
    trials = sum(sampling.draw() and sampling.tries() for _ in range(count))
    assert trials == pytest.approx(min(share, 0.1) * count, rel=0.2)


def test_nothing_is_drawn_of_no_share():
    assert not any(Sampling(0.0, seed=0).draw() for _ in range(1000))


@pytest.mark.parametrize("wrong", [-0.1, 1.5, float("nan")])
def test_what_is_no_share_is_refused(wrong: float):
    with pytest.raises(ValueError, match="guard"):
        Sampling(wrong)
