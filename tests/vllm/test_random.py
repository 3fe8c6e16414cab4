"""Anything at any time in a small pool: whatever the grafted requests do, exact ones stay exact,
and nothing leaks."""

from collections import Counter
from collections.abc import Iterator
from dataclasses import replace

import numpy as np
import pytest
from engines import EVERYTHING, NAIVE, NUM_BLOCKS, OFF, Ask
from hosts import Host
from processes import HostProcess
from traffic import EVERY_WAY, LONG, SALTS, SHORT, WANT_EXACT, Options, Traffic

from kvgraft.core.segmentation import Similarity

RECOMPUTED: list[Options] = [
    OFF,
    EVERYTHING,
    {"policy": "sparsex", "boundary_layers": 0, "recompute_share": 1.0},
]
APPROXIMATE: list[Options] = [None, NAIVE, {"policy": "sparsex", "boundary_layers": 1}]
DEPTHS = range(5)
BETWEEN_RESETS = 50  # requests of mixed traffic
FEWEST = 4  # what may come less often than this may be missing by chance
LEAST = {  # of ten thousand mixed requests, by what they were or had
    "turn of a conversation": 3000,
    "asked before": 300,
    "went on with approximate KV": 40,
    "began with exact KV": 1000,
    "edited document": 700,
    "graft of a near-duplicate": 100,
    **{f"options {options}": 500 for options in WANT_EXACT},
    **{f"options {options}": 40 for options in EVERY_WAY},
    **{f"namespace {salt}": 500 for salt in SALTS},
    **{f"up to {size} tokens": 500 for size in (200, 400, 2048)},
    **{f"max_depth {depth}": 1000 for depth in DEPTHS},
    **{f"depth {depth}": least for depth, least in enumerate((2000, 500, 50, 10, 1))},
    **{
        f"outcome {outcome}": 40
        for outcome in ("grafted", "continued", "prefix_only", "miss", "off")
    },
    "aborted": 100,
    "aborted in its recovery": 50,
    "reset": 150,
    "reset refused, since requests run": 30,
    "preemption": 20,
    "eviction": 10_000,
    "exact answer": 2000,
}


@pytest.fixture
def similar_host(host: Host, monkeypatch: pytest.MonkeyPatch) -> Iterator[Host]:
    """An engine that finds near-duplicates, too, and whose greatest depth a test may change."""
    eligibility, index = host.side.intake.eligibility, host.known.index
    monkeypatch.setattr(eligibility, "_default", replace(eligibility._default, match_similar=True))
    monkeypatch.setattr(index, "cuts", (Similarity(), []))
    monkeypatch.setattr(index, "max_depth", index.max_depth)
    index.clear()
    yield host
    host.abandon()


def check(host: Host, plain: HostProcess, traffic: Traffic, num_requests: int) -> None:
    host.settle()
    assert host.problems() == []
    assert host.num_preemptions > 0
    assert host.num_evictions > NUM_BLOCKS
    assert (
        traffic.counts["outcome grafted"] + traffic.counts["outcome continued"] > num_requests / 5
    )
    assert traffic.counts["aborted in its recovery"] > 0
    asks, answers = zip(*traffic.ended, strict=True)
    truth = plain.ask(*[Ask(ask.prompt, max_tokens=ask.max_tokens) for ask in asks])
    wrong = [
        ask
        for ask, mine, theirs in zip(asks, answers, truth, strict=True)
        if mine.tokens != theirs.tokens
    ]
    assert not wrong, (
        f"{len(wrong)} of {len(asks)} exact answers are wrong, first {wrong[0].options}"
    )
    again = [Ask(ask.prompt, OFF, salt, ask.max_tokens) for ask in asks[-10:] for salt in SALTS[1:]]
    assert [answer.tokens for answer in host.ask(*again)] == [
        answer.tokens for answer in truth[-10:] for _ in SALTS[1:]
    ]


def random_traffic(host: Host, plain: HostProcess, seed: int, num_requests: int) -> None:
    """So many, and more until one has been preempted (at most four times as many)."""
    traffic = Traffic(
        host, np.random.default_rng(seed), RECOMPUTED, APPROXIMATE, LONG, (1, 4, 20, 60, 150)
    )
    traffic.run(num_requests)
    for _ in range(3):
        if not host.num_preemptions:
            traffic.run(num_requests)
    check(host, plain, traffic, num_requests)


@pytest.mark.parametrize("seed", [1, pytest.param(2, marks=pytest.mark.soak)])
def test_random_traffic(host: Host, plain: HostProcess, seed: int):
    random_traffic(host, plain, seed, num_requests=80)


@pytest.mark.soak
@pytest.mark.parametrize("seed", range(10, 20))
def test_random_traffic_at_length(host: Host, plain: HostProcess, seed: int):
    random_traffic(host, plain, seed, num_requests=500)


@pytest.mark.parametrize(
    "num_requests",
    [pytest.param(250, marks=pytest.mark.slow), pytest.param(10_000, marks=pytest.mark.soak)],
)
def test_of_mixed_requests_those_that_want_exact_kv_are_as_plain_vllm_answers_them(
    similar_host: Host, plain: HostProcess, num_requests: int
):
    """But for the last bit: on some CPUs sums of one request and of many are in another order.
    Every policy and every greatest depth beside them, none goes short."""
    host, lengths = similar_host, (1, 2, 4, 8, 60)
    traffic = Traffic(
        host, np.random.default_rng(0), WANT_EXACT, EVERY_WAY, SHORT, lengths, most_alive=16
    )
    for number in range(num_requests // BETWEEN_RESETS):
        traffic.reset(max_depth=DEPTHS[number % len(DEPTHS)])
        traffic.run(BETWEEN_RESETS)
    host.settle()
    assert host.problems() == []
    counts = traffic.counts | Counter(
        {
            "preemption": host.num_preemptions,
            "eviction": host.num_evictions,
            "exact answer": len(traffic.ended),
        }
    )
    for what, count in sorted(counts.items()):
        print(f"{count:8} {what}")
    expected = {what: least * num_requests / 10_000 for what, least in LEAST.items()}
    rare = {
        what: counts[what] for what, least in expected.items() if counts[what] < least >= FEWEST
    }
    assert not rare, f"too few of {num_requests} requests"
    logprobs: set[float] = set()
    for ask, answer in traffic.ended:
        report = answer.report
        assert (report["grafted_tokens"], report["continued_tokens"], report["depth"]) == (0, 0, 0)
        [truth] = plain.ask(Ask(ask.prompt, max_tokens=ask.max_tokens, logprobs=True))
        assert answer.tokens == truth.tokens, f"{ask.options} in {ask.salt}"
        assert answer.logprobs == pytest.approx(truth.logprobs, abs=1e-5), (
            f"{ask.options} in {ask.salt}"
        )
        logprobs.update(truth.logprobs)
    assert len(logprobs) > len(traffic.ended) / 2, "they were compared"
