"""Simulated fleets: the same requests whatever routes them, and bounds that hold."""

from dataclasses import astuple, replace
from pathlib import Path

import numpy as np
import pytest

from chromium import Page
from kvgraft.core.costs import Costs
from kvgraft.core.fingerprints import Fingerprints
from kvgraft_lab.simulation.generated import KINDS, TrafficShape, generate
from kvgraft_lab.simulation.page import render_page
from kvgraft_lab.simulation.picture import draw
from kvgraft_lab.simulation.recorded import ANSWER_TOKENS, replayed, texts_of
from kvgraft_lab.simulation.run import ROUTERS, Arrival, FleetShape, Simulated, simulate
from kvgraft_lab.simulation.study import ONE_SERVER, FleetStudy, StudySettings, compare
from kvgraft_lab.simulation.traffic import GeneratedTraffic, RecordedTraffic
from kvgraft_lab.traffic.tokens import WordPieces
from kvgraft_lab.traffic.trace import RequestTrace, read_trace

COSTS = Costs(pass_s=0.004, token_s=1 / 8000, pair_s=0.0, copy_s=2.5e-6)
SHAPE = FleetShape(4, 60_000, COSTS)
TRAFFIC = replace(KINDS["mixed"], requests=250, rate=5.0, documents=400)


@pytest.fixture(scope="module")
def arrivals() -> list[Arrival]:
    return generate(TRAFFIC, seed=3)


@pytest.fixture(scope="module")
def found(arrivals: list[Arrival]) -> dict[str, Simulated]:
    return {router: simulate(arrivals, SHAPE, router) for router in ROUTERS}


def same(one: Simulated, other: Simulated) -> bool:
    """All but the time that this machine took."""
    pairs = zip(
        astuple(replace(one, routing_s=0)), astuple(replace(other, routing_s=0)), strict=True
    )
    return all(np.array_equal(a, b, equal_nan=True) for a, b in pairs)


@pytest.mark.parametrize("router", ROUTERS)
def test_a_simulation_can_be_repeated(router: str, found: dict[str, Simulated]):
    assert same(found[router], simulate(generate(TRAFFIC, seed=3), SHAPE, router))


@pytest.mark.parametrize("router", ROUTERS)
def test_every_request_is_answered_once(
    router: str, arrivals: list[Arrival], found: dict[str, Simulated]
):
    one, steps = found[router], []
    simulate(arrivals, SHAPE, router, on_step=lambda: steps.append(1))
    assert len(steps) == len(one.ttft_s) == len(arrivals)
    assert np.array_equal(one.prompt_tokens, [arrival.text.num_bytes / 4 for arrival in arrivals])
    assert (one.prefix_tokens + one.grafted_tokens <= one.prompt_tokens).all()
    least = COSTS.pass_s + COSTS.token_s  # something of each prompt is computed
    assert (one.ttft_s >= least).all()


def test_servers_read_one_prompt_after_the_other():
    [text] = [arrival.text for arrival in generate(replace(TRAFFIC, requests=1))]
    at_once = [
        Arrival(0.0, Fingerprints(text.places, text.values + np.uint64(k), text.num_bytes), 1)
        for k in range(3)
    ]
    ttft = simulate(at_once, replace(SHAPE, servers=1), "random").ttft_s
    assert ttft == pytest.approx(ttft[0] * np.array([1, 2, 3]))


def test_one_server_is_the_same_for_all_routers(arrivals: list[Arrival]):
    alone = replace(SHAPE, servers=1)
    first, *others = (simulate(arrivals, alone, router) for router in ROUTERS)
    for other in others:
        for name in ("ttft_s", "prefix_tokens", "grafted_tokens", "server"):
            assert np.array_equal(getattr(first, name), getattr(other, name))


def test_a_fleet_reuses_no_more_than_one_server_that_forgets_nothing(
    arrivals: list[Arrival], found: dict[str, Simulated]
):
    bound = simulate(arrivals, replace(SHAPE, servers=1, pool_tokens=10**9), "random")
    assert max(map(_reused, found.values())) <= _reused(bound)


def test_text_of_its_own_on_each_server_is_reused_there_alone():
    """Two conversations, in turn, each of which fills a pool."""
    rows = generate(TrafficShape(requests=2, documents=20, per_prompt=6, on_topic=0.0, topics=1))
    texts = [Fingerprints.joined([row.text, row.text]) for row in rows]
    turns = [Arrival(10.0 * number, texts[number % 2], 1) for number in range(10)]
    shape = replace(SHAPE, servers=2, pool_tokens=7500)
    reused = {
        router: _reused(simulate(turns, shape, router)) for router in ("random", "segment-aware")
    }
    assert reused["segment-aware"] > reused["random"] + 0.1


def _reused(one: Simulated) -> float:
    return float((one.prefix_tokens + one.grafted_tokens).sum() / one.prompt_tokens.sum())


def test_segment_aware_reuses_more_than_others(found: dict[str, Simulated]):
    reused = {router: _reused(one) for router, one in found.items()}
    assert (
        reused["segment-aware"]
        > reused["prefix-aware"]
        > max(reused["random"], reused["least-loaded"])
    )


def test_only_routers_that_listen_are_told(found: dict[str, Simulated]):
    for router, one in found.items():
        listens = router in ("prefix-aware", "segment-aware")
        assert (one.sketch_bytes > 0) == listens
        known = one.staleness_s[~np.isnan(one.staleness_s)]
        assert len(known) == (np.count_nonzero(~np.isnan(one.staleness_s)) if listens else 0)
        assert (known >= SHAPE.delay_s).all()
        assert (known <= SHAPE.period_s + SHAPE.delay_s + 1e-9).all()


def test_an_unchanged_sketch_is_not_counted_again(arrivals: list[Arrival]):
    once = simulate(arrivals[:1], SHAPE, "segment-aware")
    idle = Arrival(arrivals[0].at + 100, arrivals[0].text, 1)
    twice = simulate([arrivals[0], idle], SHAPE, "segment-aware")
    empty = 2 * SHAPE.servers * 20
    assert once.sketch_bytes < empty
    assert twice.sketch_bytes < once.sketch_bytes + 3 * len(arrivals[0].text.values) * 2 + empty, (
        "fifty periods passed"
    )


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"servers": 0}, "servers is 0"),
        ({"period_s": float("nan")}, "period_s"),
        ({"delay_s": -1}, "delay_s is -1"),
    ],
)
def test_a_fleet_of_impossible_shape_is_refused(change: dict[str, float], message: str):
    with pytest.raises(ValueError, match=message):
        replace(SHAPE, **change)


@pytest.mark.parametrize(
    "change", [{"turns": 0.5}, {"on_topic": 1.0}, {"documents": 7}, {"rate": 0}, {"pause_s": 0}]
)
def test_traffic_of_impossible_shape_is_refused(change: dict[str, float]):
    with pytest.raises(ValueError, match=f"{next(iter(change))} is|per_prompt is"):
        replace(KINDS["rag"], **change)


def test_generated_conversations_go_on():
    requests = generate(replace(KINDS["chat"], requests=300, rate=5.0))
    chains = [set(arrival.text.chain().tolist()) for arrival in requests]
    assert np.all(np.diff([arrival.at for arrival in requests]) >= 0)
    going_on = sum(
        any(earlier < chain for earlier in chains[:number]) for number, chain in enumerate(chains)
    )
    assert going_on > len(requests) / 3


# ---------------------------------------------------------------------------------------------------- recorded traffic


def trace_of(tmp_path: Path, *lines: str) -> RequestTrace:
    file = tmp_path / "trace.jsonl"
    file.write_text("\n".join(lines))
    return read_trace([file], WordPieces())


WORDS = " ".join(f"word{number * 7919 % 1000}" for number in range(600))


def test_recorded_prompts_share_what_they_share(tmp_path: Path):
    trace = trace_of(
        tmp_path,
        f'{{"prompt": "{WORDS}", "session": "a", "timestamp": 5}}',
        f'{{"prompt": "something new, then {WORDS}", "session": "b", "timestamp": 9}}',
    )
    one, other = texts_of(trace)
    assert one.num_bytes == 4 * len(trace.requests[0].tokens)
    assert np.isin(one.values, other.values).mean() > 0.9
    one, other = texts_of(trace, per_session=True)
    assert not np.isin(one.values, other.values).any()


def test_recorded_times_are_kept_or_scaled_or_made(tmp_path: Path):
    timed = trace_of(
        tmp_path, *(f'{{"prompt": "{WORDS}", "timestamp": {100 + at}}}' for at in (0, 4, 10))
    )
    texts = texts_of(timed)
    assert [arrival.at for arrival in replayed(timed, texts, None)] == [0, 4, 10]
    assert [arrival.at for arrival in replayed(timed, texts, 0.6)] == pytest.approx([0, 2, 5])
    untimed = trace_of(tmp_path, *[f'{{"prompt": "{WORDS}"}}'] * 3)
    with pytest.raises(ValueError, match="have no times"):
        replayed(untimed, texts, None)
    assert [a.at for a in replayed(untimed, texts, 2.0)] == [
        a.at for a in replayed(untimed, texts, 2.0)
    ]
    traffic = RecordedTraffic(untimed, 2, None, COSTS)
    assert len(traffic.arrivals(4)) == 2
    assert traffic.how_rated.startswith("a load of")
    assert RecordedTraffic(timed, None, None, COSTS).how_rated == "at their own times"


def test_answers_of_which_only_the_length_is_recorded_take_their_time(tmp_path: Path):
    line = '{"timestamp": 7, "input_length": 9, "output_length": 20, "hash_ids": [3]}'
    trace = trace_of(tmp_path, line, f'{{"prompt": "{WORDS}", "timestamp": 8}}')
    assert [arrival.decoded for arrival in replayed(trace, texts_of(trace), None)] == [
        20,
        ANSWER_TOKENS,
    ]


# --------------------------------------------------------------------------------------------------------- studies


@pytest.fixture(scope="module")
def study() -> FleetStudy:
    settings = StudySettings((2, 4), ("random", "segment-aware"), 60_000, COSTS)
    return compare(
        settings, GeneratedTraffic("rag", replace(KINDS["rag"], documents=300), 300, None, COSTS)
    )


def test_a_study_has_a_row_for_each(study: FleetStudy):
    routers = ["random", "segment-aware", ONE_SERVER]
    assert [(row.servers, row.router) for row in study.rows] == [
        (n, r) for n in (2, 4) for r in routers
    ]
    few, many = (row for row in study.rows if row.router == "segment-aware")
    assert many.rate == pytest.approx(2 * few.rate, rel=0.15)
    assert pytest.approx(few.rate / 2 * study.prompt_tokens / 8000, rel=0.15) == 0.7, (
        "that is the load"
    )
    for row in study.rows:
        assert 0 < row.reused < 1
        assert (row.ttft_s is None) == (row.router == ONE_SERVER)
        assert row.ttft_s is None or row.ttft_s.p50 <= row.ttft_s.p95 <= row.ttft_s.p99
        assert row.imbalance is None or 1 <= row.imbalance <= row.servers
    assert few.of_bound == pytest.approx(few.reused / study.rows[2].reused)


def test_progress_ends_at_its_end():
    settings, steps = StudySettings((1, 2), ("random",), 60_000, COSTS), []
    traffic = GeneratedTraffic("rag", KINDS["rag"], 20, 5.0, COSTS)
    compare(settings, traffic, on_progress=lambda done, total: steps.append((done, total)))
    assert steps == [(number, 80) for number in range(1, 81)]


def test_what_cannot_be_studied_is_refused():
    with pytest.raises(ValueError, match="no router 'best': there are random"):
        StudySettings((2,), ("best",), 60_000, COSTS)
    with pytest.raises(ValueError, match="warm_up is 1"):
        StudySettings((2,), ("random",), 60_000, COSTS, warm_up=1)
    settings = StudySettings((2,), ("random",), 2000, COSTS)
    with pytest.raises(ValueError, match="a pool of 2000 tokens: the longest prompt needs 3360"):
        compare(settings, GeneratedTraffic("rag", KINDS["rag"], 20, 5.0, COSTS))


def test_a_study_is_drawn(study: FleetStudy, tmp_path: Path):
    draw(study, tmp_path / "a.png")
    assert (tmp_path / "a.png").read_bytes().startswith(b"\x89PNG")


def test_the_page_fits_a_phone(study: FleetStudy, page: Page, tmp_path: Path):
    path = tmp_path / "page.html"
    path.write_text(render_page(study), encoding="utf-8")
    page.open(path.as_uri(), key=None, width=400)
    assert page.evaluate("document.documentElement.scrollWidth <= innerWidth")
    share = "document.querySelector('tbody tr').cells[3].getBoundingClientRect()"
    assert page.evaluate(f"{share}.right <= innerWidth"), "what is reused is seen without scrolling"
    assert page.complaints == []
