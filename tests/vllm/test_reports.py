"""What a client is told about its request, and what the metrics say of all of them, is what
happened."""

from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import Any, ClassVar

import pytest
from engines import (
    BLOCK,
    EVERYTHING,
    NAIVE,
    OFF,
    Answer,
    Ask,
    as_answer,
    as_prompt,
    as_sampling,
    words,
)
from hosts import Host

from kvgraft.policies import DEFAULT_POLICY, POLICIES
from kvgraft.prefill.context import Hidden, Policy, PrefillContext
from kvgraft.vllm.patches.reports import StoppedReports

DOCUMENT, OPENING = words(300, 1), words(100, 2)
KINDS = ("prefix", "grafted", "fresh")


@dataclass(frozen=True)
class Failing(Policy):
    """Fails at once."""

    name: ClassVar[str] = "failing"

    def recover(self, ctx: PrefillContext) -> Hidden:
        raise RuntimeError("a policy's own bug")


@dataclass(frozen=True)
class Doubting(Policy):
    """Trusts no segment of less than 200 tokens."""

    name: ClassVar[str] = "doubting"

    def recover(self, ctx: PrefillContext) -> Hidden:
        ctx.graft(range(ctx.num_layers))
        segments = ctx.plan.segments
        short = segments[ctx.plan.grafted].bincount() < 200
        doubted = ctx.plan.grafted & short[segments.clamp(0, len(short) - 1)]
        ctx.reject(doubted)
        return ctx.run(range(ctx.num_layers), ctx.embed(ctx.plan.fresh | doubted))


@pytest.fixture(autouse=True)
def _policies(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(POLICIES, Failing.name, Failing)
    monkeypatch.setitem(POLICIES, Doubting.name, Doubting)


def check_consistent(answer: Answer, prompt: list[int]) -> None:
    """Kinds, spans and vLLM's own count tell the same."""
    report = answer.report
    counts: Counter[str] = Counter()
    position = 0
    for start, stop, kind in report["spans"]:
        assert start == position < stop
        counts[kind] += stop - start
        position = stop
    assert position == report["prompt_tokens"] == len(prompt)
    assert {kind: counts[kind] for kind in KINDS} == {
        kind: report[f"{kind}_tokens"] for kind in KINDS
    }
    assert answer.cached == report["prefix_tokens"] + report["grafted_tokens"]
    assert (report["reason"] is None) == (report["grafted_tokens"] > 0)
    assert 0 < report["computed_share"] <= 1
    assert report["recomputed_tokens"] <= report["grafted_tokens"]


@pytest.mark.parametrize(
    "options", [NAIVE, EVERYTHING, OFF, None, {"topk": 0.5}, {"policy": "failing"}], ids=str
)
@pytest.mark.parametrize("opening", [[], OPENING], ids=["", "prefix"])
def test_reports_are_consistent(host: Host, options: dict[str, Any] | None, opening: list[int]):
    host.read(OPENING, DOCUMENT)
    prompt = opening + words(20, 3) + DOCUMENT[:200] + words(9, 4) + DOCUMENT[150:] + words(2, 5)
    [answer] = host.ask(Ask(prompt, options))
    check_consistent(answer, prompt)
    assert answer.report["prefix_tokens"] == len(opening) // BLOCK * BLOCK


def test_shares_and_stages(host: Host):
    host.read(DOCUMENT)
    prompt = words(20, 3) + DOCUMENT
    naive, sparsex, everything = (
        host.ask(Ask(prompt, options))[0].report
        for options in (NAIVE, {"policy": "sparsex", "boundary_layers": 2}, EVERYTHING)
    )
    fresh = 320 - 288
    assert naive["computed_share"] == fresh / 320
    assert (
        naive["recomputed_tokens"],
        everything["recomputed_tokens"],
        everything["computed_share"],
    ) == (0, 288, 1.0)
    recomputed = sparsex["recomputed_tokens"]
    assert 64 < recomputed < 288
    assert sparsex["computed_share"] == pytest.approx((320 + 3 * (fresh + recomputed)) / (4 * 320))
    assert set(naive["stages"]) == {"match", "align", "sparse"}
    assert set(sparsex["stages"]) == {"match", "align", "dense", "select", "sparse"}
    assert all(seconds > 0 for seconds in sparsex["stages"].values())


REASONS: list[tuple[list[int], Any, str]] = [
    (words(20, 3) + DOCUMENT, OFF, "off"),
    (words(200, 4), NAIVE, "no_known_text"),
    (words(20, 3), NAIVE, "too_short"),
    (words(20, 5) + DOCUMENT[:33] + words(20, 6), NAIVE, "too_short"),
    (words(20, 5) + DOCUMENT[:40] + words(20, 6), NAIVE, "too_little_known"),
    (words(9, 7) + DOCUMENT[:80] + words(900, 7), NAIVE, "too_little_known"),
    (words(20, 3) + DOCUMENT, {"policy": "full"}, "policy_full"),
    (words(20, 3) + DOCUMENT, {"policy": "nothing"}, "invalid_params"),
    (words(20, 3) + DOCUMENT, {"more": 1}, "invalid_params"),
    (words(20, 3) + DOCUMENT, {"topk": "all"}, "invalid_params"),
    (words(20, 3) + DOCUMENT, {"topk": float("nan")}, "invalid_params"),
    (words(20, 3) + DOCUMENT, {"reuse": ["off"]}, "invalid_params"),
    (words(20, 3) + DOCUMENT, {"policy": {"sparsex": 1}}, "invalid_params"),
    (words(20, 3) + DOCUMENT, {"namespace": "\ud800"}, "invalid_params"),
    (words(20, 3) + DOCUMENT, {"reuse": "off", "policy": "failing"}, "off"),
    (words(20, 3) + DOCUMENT, {"policy": "failing"}, "error"),
]


@pytest.mark.parametrize(
    ("prompt", "options", "reason"), REASONS, ids=[f"{r}-{str(o)[:30]}" for _, o, r in REASONS]
)
def test_reasons(host: Host, prompt: list[int], options: Any, reason: str):
    host.read(DOCUMENT)
    host.stats.reset()
    [answer] = host.ask(Ask(prompt, options))
    assert answer.report["reason"] == reason
    check_consistent(answer, prompt)
    if reason == "error":
        assert host.stats.data["kvgraft:fallbacks_total"] == {"error": 1}
    else:
        assert host.stats.data["kvgraft:misses_total"] == {reason: 1}
        assert "kvgraft:fallbacks_total" not in host.stats.data


@pytest.mark.parametrize("unknown", [4, 200])
def test_a_prompt_that_begins_with_a_prefix_hit_is_no_miss(host: Host, unknown: int):
    host.read(DOCUMENT)
    host.stats.reset()
    [answer] = host.ask(Ask(DOCUMENT[:288] + words(unknown, 8), NAIVE))
    assert (answer.report["prefix_tokens"], answer.report["fresh_tokens"]) == (288, unknown)
    assert answer.report["outcome"] == "prefix_only"
    assert answer.report["reason"] == ("too_short" if unknown == 4 else "no_known_text")
    assert host.stats.data["kvgraft:requests_total"] == {"prefix_only": 1}
    assert "kvgraft:misses_total" not in host.stats.data


@pytest.mark.parametrize(
    "params", [{"kvgraft": 5}, {"kvgraft": None}, {"kvgraft": []}, {"kvgraft": "off"}], ids=str
)
def test_parameters_of_a_wrong_type_cost_only_the_reuse(host: Host, params: dict[str, Any]):
    host.read(DOCUMENT)
    name = host.add(Ask(words(20, 3) + DOCUMENT), extra_args={"kv_transfer_params": params})
    [answer] = host.finish(name)
    assert (answer.grafted, answer.report["reason"]) == (0, "invalid_params")


@pytest.mark.parametrize("params", [None, {}, {"kvgraft": {}}, {"remote_engine_id": "x"}], ids=str)
def test_without_parameters_the_default_policy_applies(host: Host, params: dict[str, Any] | None):
    host.read(DOCUMENT)
    extra = None if params is None else {"kv_transfer_params": params}
    [answer] = host.finish(host.add(Ask(words(20, 3) + DOCUMENT), extra_args=extra))
    assert answer.grafted == 288
    assert answer.report["policy"].startswith(DEFAULT_POLICY)


def test_a_report_names_the_profile_that_named_its_policy(
    host: Host, monkeypatch: pytest.MonkeyPatch
):
    eligibility = host.side.intake.eligibility
    monkeypatch.setattr(eligibility, "_default", replace(eligibility._default, profile="0123abcd"))
    host.read(DOCUMENT)
    answers = host.ask(Ask(words(20, 3) + DOCUMENT), Ask(words(20, 4) + DOCUMENT, NAIVE))
    assert [answer.report["profile"] for answer in answers] == ["0123abcd", None]


def test_metrics_add_up_to_the_reports(host: Host):
    host.read(OPENING, DOCUMENT)
    host.stats.reset()
    prompts = [words(20, seed) + DOCUMENT + words(seed, 9) for seed in range(3, 6)]
    prompts += [
        OPENING + DOCUMENT,
        OPENING + words(50, 10),
        words(20, 11),
        words(30, 12) + DOCUMENT,
    ]
    options = [
        NAIVE,
        EVERYTHING,
        {"policy": "sparsex", "boundary_layers": 1},
        NAIVE,
        NAIVE,
        NAIVE,
        OFF,
    ]
    answers = host.ask(
        *[Ask(prompt, option) for prompt, option in zip(prompts, options, strict=True)]
    )
    host.settle()
    reports = [answer.report for answer in answers]
    for kind in (*KINDS, "recomputed"):
        assert host.count("tokens_total", kind) == sum(
            report[f"{kind}_tokens"] for report in reports
        ), kind
    outcomes = {"grafted": 4, "prefix_only": 1, "miss": 1, "off": 1}
    assert host.stats.data["kvgraft:requests_total"] == outcomes
    assert [report["grafted_tokens"] > 0 for report in reports] == [True] * 4 + [False] * 3
    missed = [report["reason"] for report in reports if report["outcome"] in ("miss", "off")]
    assert host.stats.data["kvgraft:misses_total"] == Counter(missed)
    for stage in ("align", "dense", "select", "sparse"):
        seconds = host.stats.data["kvgraft:stage_seconds"][stage]
        assert sorted(seconds) == sorted(
            r["stages"][stage] for r in reports if stage in r["stages"]
        )


def test_an_idle_engine_is_shown_as_idle(host: Host):
    host.ask(Ask(DOCUMENT, OFF), Ask(OPENING, OFF))
    host.settle()
    assert host.known.pool.num_used == 0
    shown = host.stats.data["kvgraft:pool_blocks"]
    assert shown == {"used": 0, "free": host.known.pool.num_free, "pinned": 0}
    assert host.count("index_entries") == len(host.known.index)


def test_what_a_probe_rejects_is_reported_of_each_request_and_counted(host: Host):
    """Of two that are recovered together."""
    host.read(DOCUMENT, OPENING)
    host.stats.reset()
    mixed = words(20, 3) + DOCUMENT + words(50, 4) + OPENING + words(9, 5)
    one, other = host.ask(
        Ask(mixed, {"policy": "doubting"}), Ask(words(30, 6) + DOCUMENT, {"policy": "doubting"})
    )
    assert one.report["counts"] == {
        "rejected_tokens": one.report["recomputed_tokens"],
        "rejected_segments": 1,
    }
    assert len(OPENING) - BLOCK < one.report["recomputed_tokens"] <= len(OPENING)
    assert (other.report["counts"], other.grafted) == ({}, 288)
    assert host.stats.data["kvgraft:fallbacks_total"] == {"probe": 1}
    assert host.stats.data["kvgraft:requests_total"] == {"grafted": 2}


def test_metrics_do_not_count_grafts_that_were_given_up(host: Host):
    host.read(DOCUMENT)
    host.stats.reset()
    prompt = words(20, 3) + DOCUMENT
    host.ask(Ask(prompt, {"policy": "failing"}))
    assert host.stats.data["kvgraft:fallbacks_total"] == {"error": 1}
    assert host.count("tokens_total", "grafted") == 0
    assert host.count("tokens_total", "fresh") == len(prompt)
    assert host.count("requests_total", "grafted") == 0


def test_a_graft_after_a_preemption_is_reported(host: Host):
    """The answer is approximate from then on; its report must not call it exact."""
    prompt = words(50, 2) + DOCUMENT
    name = host.add(Ask(prompt, NAIVE, max_tokens=5))
    host.step_until(lambda: name in host.outputs)
    host.preempt(name, lambda: host.read(DOCUMENT))
    [answer] = host.finish(name)
    report = answer.report
    assert host.side.admission.pool.hit_counts.sum() > 0  # it did graft
    assert (report["grafted_tokens"], report["reason"]) == (288, None)
    assert sum(report[f"{kind}_tokens"] for kind in KINDS) == report["prompt_tokens"] == len(prompt)


@pytest.fixture
def front_end(host: Host) -> Iterator[StoppedReports]:
    """What a server has before vLLM's output processor."""
    processor = host.engine.output_processor
    yield StoppedReports(processor)
    del processor.process_outputs


def stopping(host: Host, ask: Ask) -> dict[str, Any]:
    """A stop string that ends an answer in its midst."""
    [answer] = host.ask(ask)
    return {"stop": [f"w{answer.tokens[len(answer.tokens) // 2]}"], "detokenize": True}


@pytest.mark.parametrize(
    "options",
    [NAIVE, OFF, {"policy": "failing"}, {"policy": "condense", "kept_share": 0.5}],
    ids=str,
)
@pytest.mark.parametrize("num_document_blocks", [4, 9])
def test_the_report_goes_ahead_of_a_stop_string(
    host: Host, front_end: StoppedReports, options: dict[str, Any], num_document_blocks: int
):
    """Also where the prompt, or its recovery, takes several steps."""
    host.read(DOCUMENT[: num_document_blocks * BLOCK])
    ask = Ask(words(20, 3) + DOCUMENT + words(9, 4), options, max_tokens=40)
    stop = stopping(host, ask)
    host.forget()
    host.read(DOCUMENT[: num_document_blocks * BLOCK])
    name = host.add(ask, **stop)
    [answer] = host.finish(name)
    assert len(answer.tokens) < 40
    host.settle()
    host.forget()
    host.read(DOCUMENT[: num_document_blocks * BLOCK])
    [truth] = host.ask(Ask(ask.prompt, options, max_tokens=1))
    varying = {"stages": answer.report["stages"]}
    assert answer.report == truth.report | varying
    assert set(varying["stages"]) == set(truth.report["stages"])
    assert len(front_end) == 0
    assert not host.side.reporting.early._due


def test_it_is_sent_once(host: Host, front_end: StoppedReports):
    name = host.add(
        Ask(words(20, 3), OFF, max_tokens=30), stop=["nothing like it"], detokenize=True
    )
    host.step_until(lambda: name in host.outputs)
    host.step()
    assert host.request(name).trace_headers is None
    assert len(front_end) == 1
    host.finish(name)


def test_many_spans_are_cut_off(host: Host):
    pieces = [words(BLOCK, seed) for seed in range(35)]
    host.read(*pieces)
    prompt = [
        token for number, piece in enumerate(pieces) for token in [*words(3, 100 + number), *piece]
    ]
    [answer] = host.ask(Ask(prompt, NAIVE))
    assert len(answer.report["spans"]) == 64
    assert answer.grafted == 35 * BLOCK - 1


def test_llm_generate_reports_an_answer_that_a_stop_string_ends(
    host: Host, front_end: StoppedReports
):
    host.read(DOCUMENT)
    ask = Ask(words(20, 3) + DOCUMENT, NAIVE, max_tokens=40)
    stop = stopping(host, ask)
    [output] = host.llm.generate([as_prompt(ask)], [as_sampling(ask, **stop)], use_tqdm=False)
    answer = as_answer(output)
    assert 0 < len(answer.tokens) < 40
    assert (answer.report["outcome"], answer.report["continued_tokens"]) == ("continued", 9 * BLOCK)
