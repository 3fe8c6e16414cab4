import logging

import pytest

from kvgraft.core.matches import DEEP
from kvgraft.guard.breaker import Level
from kvgraft.guard.guard import Guard, with_larger_budget
from kvgraft.guard.target import Target
from kvgraft.policies import parse_policy

SPREAD, NAIVE = parse_policy("spread"), parse_policy("naive")
GOOD, BAD = {"flips": 0.0, "answer_kl": 0.001}, {"flips": 0.4, "answer_kl": 3.0}


def score(
    guard: Guard, distances: dict[str, float], count: int, policy=SPREAD, tenant: str = "a"
) -> list[Level]:
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


def test_sessions_whose_depth_grows_without_end_are_few_kinds_of_answers():
    guard = Guard(0.25, seed=0)
    for depth in range(400):
        guard.chooses(guard.admit(SPREAD), depth, grafted_share=0.9)
    assert len(guard._sampling._due) == DEEP + 1


def test_bounds_are_kept_by_policy_and_by_tenant():
    guard = Guard(0.5, seed=0)
    score(guard, GOOD, 100, SPREAD, "a")
    score(guard, BAD, 50, NAIVE, "b")
    view = guard.view()
    spread, naive = (view["policies"][policy.name]["as_asked"] for policy in (SPREAD, NAIVE))
    assert (spread["answers"], naive["answers"]) == (100, 50)
    assert spread["flips"]["mean"] == 0
    assert spread["flips"]["high"] < naive["flips"]["low"] < 0.4 < naive["flips"]["high"]
    assert spread["kl"]["mean"] == pytest.approx(0.001)
    assert naive["kl"]["mean"] == 1.0, "of an answer that is further away 1 nat counts"
    assert view["tenants"]["a"] == spread
    assert view["tenants"]["b"] == naive
    assert view["share_reached"] == pytest.approx(0.5, abs=0.02)
    assert guard.view("a") == {
        **view,
        "share_reached": None,
        "policies": {},
        "tenants": {"a": spread},
    }
    assert guard.view("c")["tenants"]["c"]["answers"] == 0


def test_without_a_target_nothing_trips():
    guard = Guard(1.0, seed=0)
    assert set(score(guard, BAD, 200)) == {Level.AS_ASKED}


def test_a_breaker_is_of_one_policy(caplog: pytest.LogCaptureFixture):
    told = []
    guard = Guard(
        1.0, Target.parse("flips=0.01"), seed=0, on_transition=lambda *one: told.append(one)
    )
    with caplog.at_level(logging.WARNING, "kvgraft"):
        score(guard, BAD, 100)
    assert guard.policy_view("spread")["level"] == "exact"
    assert guard.admit(NAIVE).level is Level.AS_ASKED
    assert set(score(guard, GOOD, 100, NAIVE)) == {Level.AS_ASKED}
    assert [(policy, one.after) for policy, one in told] == [("spread", Level.EXACT)]
    assert "policy spread: from level as_asked to level exact: alarm, " in caplog.text


def test_kl_can_be_the_target():
    guard = Guard(1.0, Target.parse("kl=0.05"), seed=0)
    score(guard, {"flips": 0.0, "answer_kl": 0.5}, 100, NAIVE)
    assert guard.admit(NAIVE).level is Level.EXACT


def test_who_is_not_guarded_gets_what_he_asks_for():
    guard = Guard(1.0, Target.parse("flips=0.01"), seed=0)
    score(guard, BAD, 100, NAIVE)
    assert guard.admit(NAIVE).level is Level.EXACT
    assert guard.admit(NAIVE, guarded=False).level is Level.AS_ASKED


def test_what_clients_make_up_is_guarded_by_method_and_the_default_policy_on_its_own():
    guard = Guard(1.0, Target.parse("flips=0.01"), default=SPREAD, seed=0)
    for number in range(100):
        score(guard, BAD, 3, parse_policy(f"spread:recompute_share={0.5 + 0.001 * number:.3f}"))
        score(guard, GOOD, 1)
    known = guard.view()["policies"]
    assert list(known) == ["spread", "spread (default)"]
    assert known["spread (default)"]["as_asked"]["answers"] == 100
    assert known["spread"]["level"] == "exact"
    assert guard.admit(parse_policy("spread:recompute_share=0.9")).level is Level.EXACT
    assert guard.admit(SPREAD).level is Level.AS_ASKED


def test_what_cannot_be_watched_does_not_try():
    now = 0.0
    guard = Guard(1.0, Target.parse("flips=0.01"), seed=0, clock=lambda: now)
    score(guard, BAD, 20, NAIVE)
    now = 10_000.0
    tickets = [guard.admit(NAIVE, can_be_watched=False) for _ in range(500)]
    assert {(ticket.level, ticket.is_watched) for ticket in tickets} == {(Level.EXACT, False)}
    trials = [ticket for ticket in (guard.admit(NAIVE) for _ in range(500)) if ticket.is_trial]
    assert 25 < len(trials) < 85, "a tenth of all, although every answer is scored"


def test_a_larger_budget_is_what_is_answered_with():
    guard = Guard(1.0, Target.parse("flips=0.1"), seed=0)
    while (ticket := guard.admit(SPREAD)).level is Level.AS_ASKED:
        score(guard, BAD, 1)
    assert (ticket.level, ticket.name) == (Level.LARGER_BUDGET, "spread")
    assert ticket.policy == with_larger_budget(SPREAD)


def test_trials_are_all_scored_and_no_part_of_the_bounds():
    now = 0.0
    guard = Guard(0.1, Target.parse("flips=0.01"), seed=0, clock=lambda: now)
    score(guard, BAD, 20, NAIVE)
    before = guard.view()
    now = 10_000.0
    tickets = [guard.admit(NAIVE) for _ in range(1000)]
    trials = [ticket for ticket in tickets if ticket.is_trial]
    assert 60 < len(trials) < 140, "as many as are scored"
    assert {ticket.level for ticket in trials} == {Level.AS_ASKED}
    for ticket in trials:
        assert guard.chooses(ticket, 1, 0.9)
        guard.add(ticket, "a", GOOD)
    asked = [guard.admit(NAIVE, guarded=False) for _ in range(2000)]
    assert sum(guard.chooses(ticket, 1, 0.9) for ticket in asked) == pytest.approx(200, abs=50), (
        "not more than else"
    )
    after = guard.view()
    assert guard.admit(NAIVE).level is Level.AS_ASKED, "the trial has passed"
    assert after["policies"]["naive"]["as_asked"] == before["policies"]["naive"]["as_asked"]
    assert after["tenants"] == before["tenants"]


@pytest.mark.parametrize(
    ("policy", "larger"),
    [
        ("spread:recompute_share=0.02", "spread:recompute_share=0.08"),
        ("sparsex:recompute_share=0.5", "sparsex:recompute_share=1.0"),
        ("spread:recompute_share=1.0", None),
        (
            "auto:same_context=naive,new_context=spread:recompute_share=0.02",
            "spread:recompute_share=0.08",
        ),
        ("naive", None),
        ("epic", None),
    ],
)
def test_larger_budgets(policy: str, larger: str | None):
    expected = None if larger is None else parse_policy(larger)
    assert with_larger_budget(parse_policy(policy)) == expected
