import pytest

from kvgraft.guard.target import Target, as_share


@pytest.mark.parametrize(
    ("text", "measure", "share"), [("flips=0.01", "flips", 0.01), ("kl=.05", "kl", 0.05)]
)
def test_a_target_is_a_share(text: str, measure: str, share: float):
    target = Target.parse(text)
    assert (target.measure, target.share) == (measure, pytest.approx(share))
    assert Target.parse(str(target)) == target


@pytest.mark.parametrize(
    "wrong", ["", "flips", "0.01", "flips=", "flips=x", "flips=0", "kl=1", "kl=nan", "loglik=0.1"]
)
def test_another_target_is_refused(wrong: str):
    with pytest.raises(ValueError, match=f"got {wrong!r}"):
        Target.parse(wrong)


def test_a_great_kl_counts_as_the_greatest():
    assert as_share("kl", {"answer_kl": 0.25, "flips": 0.5}) == 0.25
    assert as_share("kl", {"answer_kl": 7.0, "flips": 0.5}) == 1.0
    assert as_share("flips", {"answer_kl": 7.0, "flips": 0.5}) == 0.5
