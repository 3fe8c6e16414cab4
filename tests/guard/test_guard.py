import logging

import pytest

from kvgraft.guard.breaker import Level
from kvgraft.guard.guard import MOST_POLICIES, Guard, with_larger_budget
from kvgraft.guard.target import Target
from kvgraft.prefill.policies import parse_policy

SPREAD, NAIVE = parse_policy("spread"), parse_policy("naive")
GOOD, BAD = {"flips": 0.0, "answer_kl": 0.001}, {"flips": 0.4, "answer_kl": 3.0}


def score(guard: Guard, distances: dict[str, float], count: int, policy=SPREAD, tenant: str = "a") -> list[Level]:
    """Requests until so many have been scored; the levels of those."""
    levels: list[Level] = []
    while len(levels) < count:
        ticket = guard.admit(policy)
        if ticket.level is Level.EXACT:
            levels.append(ticket.level)
        elif guard.chooses(ticket, depth=1, grafted_share=0.9):
            levels.append(ticket.level)
            guard.add(ticket, tenant, distances)
    return levels


def test_bounds_are_kept_by_policy_and_by_tenant():
    guard = Guard(0.5, seed=0)
    score(guard, GOOD, 100, SPREAD, "a")
    score(guard, BAD, 50, NAIVE, "b")
    view = guard.view()
    spread, naive = (view["policies"][str(policy)]["as_asked"] for policy in (SPREAD, NAIVE))
    assert (spread["answers"], naive["answers"]) == (100, 50)
    assert spread["flips"]["mean"] == 0
    assert spread["flips"]["high"] < naive["flips"]["low"] < 0.4 < naive["flips"]["high"]
    assert spread["kl"]["mean"] == pytest.approx(0.001)
    assert naive["kl"]["mean"] == 1.0, "of an answer that is further away 1 nat counts"
    assert view["tenants"]["a"] == spread
    assert view["tenants"]["b"] == naive
    assert view["share_reached"] == pytest.approx(0.5, abs=0.02)
    assert guard.view("a") == {**view, "policies": {}, "tenants": {"a": spread}}
    assert guard.view("c")["tenants"]["c"]["answers"] == 0


def test_without_a_target_nothing_trips():
    guard = Guard(1.0, seed=0)
    assert set(score(guard, BAD, 200)) == {Level.AS_ASKED}


def test_a_breaker_is_of_one_policy(caplog: pytest.LogCaptureFixture):
    told = []
    guard = Guard(1.0, Target.parse("flips=0.01"), seed=0, on_transition=lambda *one: told.append(one))
    with caplog.at_level(logging.WARNING, "kvgraft"):
        score(guard, BAD, 100)
    assert guard.level(str(SPREAD)) is Level.EXACT
    assert guard.level(str(NAIVE)) is Level.AS_ASKED
    assert set(score(guard, GOOD, 100, NAIVE)) == {Level.AS_ASKED}
    assert [(policy, one.after) for policy, one in told] == [(str(SPREAD), Level.EXACT)]
    assert "as_asked to exact: alarm after" in caplog.text


def test_kl_can_be_the_target():
    guard = Guard(1.0, Target.parse("kl=0.05"), seed=0)
    score(guard, {"flips": 0.0, "answer_kl": 0.5}, 100, NAIVE)
    assert guard.level(str(NAIVE)) is Level.EXACT


def test_who_is_not_guarded_gets_what_he_asks_for():
    guard = Guard(1.0, Target.parse("flips=0.01"), seed=0)
    score(guard, BAD, 100, NAIVE)
    assert guard.admit(NAIVE).level is Level.EXACT
    assert guard.admit(NAIVE, guarded=False).level is Level.AS_ASKED


def test_policies_that_nobody_names_any_more_are_forgotten_but_for_tripped_ones():
    guard = Guard(1.0, Target.parse("flips=0.01"), seed=0)
    score(guard, BAD, 100, NAIVE)
    for number in range(2 * MOST_POLICIES):
        guard.admit(parse_policy(f"spread:recompute_share={0.001 * (number + 1):.3f}"))
    assert len(guard.view()["policies"]) == MOST_POLICIES
    assert guard.level(str(NAIVE)) is Level.EXACT


def test_as_many_bad_policies_as_are_remembered():
    guard = Guard(1.0, Target.parse("flips=0.01"), seed=0)
    for number in range(MOST_POLICIES + 2):
        score(guard, BAD, 60, parse_policy(f"epic:start_tokens={number + 1}"))
        assert len(guard.view()["policies"]) <= MOST_POLICIES


@pytest.mark.parametrize(
    ("policy", "larger"),
    [
        ("spread:recompute_share=0.02", "spread:recompute_share=0.08"),
        ("sparsex:recompute_share=0.5", "sparsex:recompute_share=1.0"),
        ("spread:recompute_share=1.0", None),
        ("naive", None),
        ("epic", None),
    ],
)
def test_larger_budgets(policy: str, larger: str | None):
    expected = None if larger is None else parse_policy(larger)
    assert with_larger_budget(parse_policy(policy)) == expected
