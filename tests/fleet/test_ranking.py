"""Which server a prompt goes to."""

from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from kvgraft.core.costs import Costs
from kvgraft.core.expected_prefill import expect
from kvgraft.core.fingerprints import Fingerprints
from kvgraft.core.keys import scope_digest
from kvgraft.fleet.ranking import SILENCE, Ranking, ReplicaReport
from kvgraft.fleet.replica import FASTEST, SLOWEST, LatencyCalibration
from kvgraft.fleet.router_view import GRACE, pack

SCOPE = scope_digest("", "")
COSTS = Costs(pass_s=0.004, token_s=1 / 8000, pair_s=0.0, copy_s=2.5e-6)
RANDOM = np.random.default_rng(1)
FIRST, SECOND, THIRD = (Fingerprints.of(RANDOM.bytes(8000), SCOPE) for _ in range(3))
IDLE = {"a": 0, "b": 0, "c": 0}


class Clock:
    now = 100.0

    def __call__(self) -> float:
        return self.now


@pytest.fixture
def clock() -> Clock:
    return Clock()


def report(*texts: Fingerprints, waiting_s: float = 0.0, pace: float = 1.0) -> ReplicaReport:
    """Of a server that has read these, each on its own."""
    held, begun = ([text.values for text in texts], [text.chain() for text in texts])
    empty = [np.zeros(0, np.uint64)]
    return ReplicaReport(
        pack(np.concatenate(held + empty)),
        pack(np.concatenate(begun + empty)),
        waiting_s,
        COSTS,
        pace=pace,
    )


def ranking_of(clock: Clock, *, grafts: bool = True, **reports: ReplicaReport) -> Ranking[str]:
    ranking = Ranking[str](clock=clock, grafts=grafts)
    for server, said in reports.items():
        ranking.hear(server, said)
    return ranking


def test_who_holds_the_text_comes_first(clock: Clock):
    ranking = ranking_of(clock, a=report(), b=report(FIRST), c=report(SECOND))
    asked = Fingerprints.joined([SECOND, FIRST, FIRST])
    ranked = ranking.rank(asked, IDLE)
    assert ranked.informed
    assert ranked.servers == ["b", "c", "a"], "two thirds, one third, nothing"
    assert ranked.known_tokens == pytest.approx(4000, rel=0.1)


def test_a_prefix_aware_router_sees_beginnings_alone(clock: Clock):
    reports = {"a": report(), "b": report(FIRST), "c": report(SECOND)}
    asked = Fingerprints.joined([SECOND, FIRST, FIRST])
    assert ranking_of(clock, grafts=False, **reports).rank(asked, IDLE).servers[0] == "c"
    unseen = Fingerprints.joined([THIRD, FIRST])
    assert ranking_of(clock, grafts=False, **reports).rank(unseen, IDLE).known_tokens == 0


def test_a_beginning_has_no_gap():
    """One bit that is set by chance behind text that nobody has read makes no prompt a known
    one."""
    known = np.zeros((3, len(FIRST.values)), bool)
    known[1, -1] = True
    known[2, : len(FIRST.values) // 2] = True
    found = expect(FIRST, known, known, COSTS, work=0.15)
    assert found.prefix_tokens[:2].tolist() == [0, 0]
    assert found.prefix_tokens[2] == FIRST.places[len(FIRST.values) // 2 - 1] / 4
    assert found.grafted_tokens[1] <= 64 / 4


def test_the_holder_comes_first_only_while_waiting_is_shorter_than_the_gain(clock: Clock):
    gain = 2000 / 8000  # seconds, about
    for waiting_s, best in ((0.7 * gain, "b"), (1.3 * gain, "a")):
        ranking = ranking_of(clock, a=report(), b=report(FIRST, waiting_s=waiting_s))
        assert ranking.rank(FIRST, {"a": 0, "b": 0}).servers[0] == best


@pytest.mark.parametrize(("least_s", "best"), [(0.0, "a"), (0.5, "b")])
def test_known_text_counts_more_when_all_have_to_wait(clock: Clock, least_s: float, best: str):
    """A second that is not computed is one that nobody behind has to wait."""
    later = 1.3 * 2000 / 8000  # than what is gained at the holder
    ranking = ranking_of(
        clock, a=report(waiting_s=least_s), b=report(FIRST, waiting_s=least_s + later)
    )
    assert ranking.rank(FIRST, {"a": 1, "b": 1}).servers[0] == best


def test_costs_may_be_nothing(clock: Clock):
    free = replace(report(), costs=Costs(0.0, 0.0, 0.0, 0.0))
    ranking = ranking_of(clock, a=free, b=replace(free, waiting_s=1.0))
    with np.errstate(all="raise"):
        assert ranking.rank(FIRST, {"a": 1, "b": 1}).servers == ["a", "b"]


def test_what_waits_is_read_while_time_passes(clock: Clock):
    ranking = ranking_of(clock, a=report(), b=report(FIRST, waiting_s=2.0))
    assert ranking.rank(FIRST, {"a": 0, "b": 0}).servers[0] == "a"
    clock.now += 2.0
    assert ranking.rank(FIRST, {"a": 0, "b": 0}).servers[0] == "b"


def test_a_report_of_what_was_sent_from_here_and_has_been_answered_since_keeps_nobody_waiting(
    clock: Clock,
):
    ranking = ranking_of(clock, a=report(), b=report())
    for text in (FIRST, SECOND, THIRD):
        ranking.sent("b", text)
        ranking.hear("b", report(waiting_s=0.25, pace=4.0))
        assert ranking.rank(text, {"a": 0, "b": 1}).servers[0] == "a"
        assert ranking.rank(text, {"a": 0, "b": 0}).servers[0] == "b"
    ranking.hear("b", report(waiting_s=2.0))
    assert ranking.rank(FIRST, {"a": 0, "b": 0}).servers[0] == "a", "others have sent that"


def test_a_report_made_before_the_last_answer_keeps_nobody_waiting(clock: Clock):
    ranking = ranking_of(clock, a=report(), b=report())
    for text in (FIRST, SECOND):
        ranking.sent("b", text)
        assert ranking.rank(text, {"a": 0, "b": 0}).servers[0] == "b", "it has been answered"
        ranking.hear("b", report(FIRST, waiting_s=0.25, pace=4.0))
        assert ranking.rank(text, {"a": 0, "b": 0}).servers[0] == "b"
    ranking.hear("b", report(FIRST, waiting_s=0.25, pace=4.0))
    assert ranking.rank(FIRST, {"a": 0, "b": 0}).servers[0] == "a", "others have sent that"


@pytest.mark.parametrize("pace", [0.5, 1.0, 4.0])
def test_what_waits_is_read_at_the_pace_of_the_server(clock: Clock, pace: float):
    ranking = ranking_of(clock, a=report(pace=pace), b=report(FIRST, pace=pace))
    for text in (SECOND, THIRD):
        ranking.sent("b", text)  # half a second at pace 1, and a holder is sooner by a quarter
    clock.now += 0.15 * pace
    assert ranking.rank(FIRST, {"a": 1, "b": 1}).servers[0] == "a"
    clock.now += 0.25 * pace
    assert ranking.rank(FIRST, {"a": 1, "b": 1}).servers[0] == "b"


def test_a_server_that_was_slow_once_gets_prompts_all_the_same(clock: Clock):
    ranking = ranking_of(clock, a=report(), b=report(pace=50.0), c=report())
    first = {ranking.rank(SECOND, IDLE).servers[0] for _ in range(40)}
    assert first == {"a", "b", "c"}


@given(given=st.lists(st.tuples(st.floats(0.001, 100), st.floats(0.001, 100)), min_size=1))
def test_a_pace_lies_between_the_slowest_and_the_fastest_prompt(given: list[tuple[float, float]]):
    pace = LatencyCalibration()
    assert pace.value == 1.0
    for expected_s, real_s in given:
        pace.add(expected_s, real_s)
    ratios = [real_s / expected_s for expected_s, real_s in given]
    assert (
        min(ratios) * 0.999 <= pace.value <= max(ratios) * 1.001
        or not FASTEST < pace.value < SLOWEST
    )
    for _ in range(200):
        pace.add(0.1, 0.3)
    assert pace.value == pytest.approx(3.0, rel=1e-2)


def test_what_was_sent_waits_there_and_is_known_there(clock: Clock):
    ranking = ranking_of(clock, a=report(), b=report())
    ranking.sent("b", FIRST)
    assert ranking.rank(SECOND, {"a": 0, "b": 1}).servers[0] == "a", "b has to read the first"
    assert ranking.rank(FIRST, {"a": 0, "b": 0}).servers[0] == "b", (
        "it has, whatever it was expected to take"
    )
    clock.now += 1.0
    assert ranking.rank(FIRST, {"a": 0, "b": 0}).servers[0] == "b", (
        "it has read it, and did not say so yet"
    )
    ranking.hear("b", report())
    assert ranking.rank(FIRST, {"a": 0, "b": 0}).known_tokens > 0, (
        "what it says is older than what was sent"
    )
    clock.now += GRACE + 1
    ranking.hear("b", report())
    assert ranking.rank(FIRST, {"a": 0, "b": 0}).known_tokens == 0


def test_who_says_nothing_holds_nothing(clock: Clock):
    ranking = ranking_of(clock, b=report(FIRST))
    clock.now += SILENCE - 1
    ranking.hear("a", report())
    assert ranking.rank(FIRST, IDLE).servers[0] == "b"
    clock.now += 2
    ranked = ranking.rank(FIRST, IDLE)
    assert (ranked.known_tokens, ranked.informed) == (0, True)
    clock.now += SILENCE
    assert not ranking.rank(FIRST, IDLE).informed


def test_nothing_is_noted_of_who_says_nothing(clock: Clock):
    """Paired: of who does, until it is heard next."""
    ranking = ranking_of(clock, a=report())
    ranking.sent("a", FIRST)
    assert len(ranking._text._sent["a"]) == 1
    clock.now += SILENCE + 1
    for _ in range(100):
        ranking.sent("a", FIRST)
    assert len(ranking._text._sent["a"]) == 1
    ranking.hear("a", report())
    assert not ranking._text._sent["a"]


def test_who_is_gone_is_forgotten(clock: Clock):
    ranking = ranking_of(clock, a=report(), b=report(FIRST))
    ranking.forget("b")
    ranking.forget("never heard of")
    assert ranking.rank(FIRST, IDLE).known_tokens == 0
    ranking.hear("b", report())
    assert ranking.rank(FIRST, IDLE).known_tokens == 0, "it came back without its text"
    ranking.sent("never heard of", FIRST)


def test_without_reports_the_least_loaded_come_first(clock: Clock):
    ranked = ranking_of(clock).rank(FIRST, {"a": 2, "b": 0, "c": 1})
    assert (ranked.servers, ranked.informed) == (["b", "c", "a"], False)


def test_equal_servers_take_turns(clock: Clock):
    ranking = ranking_of(clock, a=report(), b=report(), c=report())
    assert {ranking.rank(FIRST, IDLE).servers[0] for _ in range(60)} == set(IDLE)


@settings(max_examples=60, deadline=None)
@given(
    st.lists(st.integers(0, 30), min_size=1, max_size=12),
    st.integers(0, 11),
    st.sampled_from([1.0, 1.5, 3.0]),
)
def test_nobody_gets_more_than_the_bound_and_everybody_is_ranked(
    loads: list[int], holder: int, imbalance: float
):
    clock = Clock()
    ranking, in_flight = Ranking[int](clock=clock, imbalance=imbalance), dict(enumerate(loads))
    for server in in_flight:
        ranking.hear(server, report(FIRST) if server == holder else report())
    ranked = ranking.rank(FIRST, in_flight).servers
    assert sorted(ranked) == list(in_flight)
    over = [in_flight[server] > imbalance * np.mean(loads) + 1 for server in ranked]
    assert over == sorted(over), "those with too much come last"
    if holder in in_flight and not over[ranked.index(holder)]:
        assert ranked[0] == holder


@pytest.mark.parametrize("imbalance", [0.5, float("nan")])
def test_an_impossible_bound_is_refused(imbalance: float):
    with pytest.raises(ValueError, match="must be at least 1"):
        Ranking[str](imbalance=imbalance)


def test_a_report_is_the_same_behind_a_wire():
    said = report(FIRST, waiting_s=1.5)
    assert ReplicaReport.of(said.as_stats()) == said
