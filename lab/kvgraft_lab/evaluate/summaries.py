"""Summaries of an evaluation's rows by policy: means, intervals, and distances in units of order
noise.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from math import isnan, nan
from statistics import mean, median
from typing import Any

from kvgraft_lab.evaluate.hosts import Answer
from kvgraft_lab.evaluate.runner import EvalRow
from kvgraft_lab.evaluate.scoring import ORDER_NOISE
from kvgraft_lab.evaluate.statistics import (
    Estimate,
    bootstrap,
    bootstrap_share,
    paired_difference,
    paired_ratio,
)

ByPrompt = Mapping[tuple[str, int], EvalRow]  # cluster and number: one of its rows
Interval = Callable[[Sequence[float], Sequence[str]], tuple[float, float]]
UNKNOWN = Estimate(nan, nan, nan)


@dataclass(frozen=True)
class Summary:
    """Summary of some rows of one policy. Shares are fractions of 1.

    Attributes:
        group: common property of the rows.
        score, low, high: mean score by the tasks' own metrics, with its 95 % bootstrap interval
            (drawn by item; NaN for a single item).
        of_full: score divided by that of `full` on the same prompts.
        beyond_full, beyond_low, beyond_high: mean difference from `full`, prompt by prompt, with
            its interval.
        same_answer: share of answers that are `full`'s, word for word.
        exact_match, f1: means of these scores.
        reused: grafted tokens as a share of the prompt tokens.
        recomputed: share of the grafted tokens that were recomputed in the last layer.
        work: computed (token, layer) pairs beyond the fresh tokens, probes included, as a share of
            all grafted pairs.
        flops: floating-point operations of prefill, divided by those of `full` on the same prompts;
            NaN where they are not counted.
        ffn_flops: the same for FFNs only.
        attention_flops: the same for all other operations.
        kept: share of the prompt's tokens in the cache when the answer begins.
        promoted: mean number of heads per prompt that were promoted to see all tokens.
        kv_mib: peak memory of keys and values, mean per prompt.
        ttft_ms: median time to the first token.
        speedup: median over prompts of full's time divided by this policy's.
        kl, top1, top10, cosine: distances of the first token from `full`; NaN if the host does not
            report them.
        fallbacks: prompts whose grafts were not used.
        answer_kl, flips, loglik: means of these distances along full's own answer, see
            `metrics.along`.
        kl_per_noise: `answer_kl` divided by that of order noise on the same prompts; NaN without
            order noise.
        kl_tokens: number of most likely tokens over which divergences are computed, with all others
            as one token; 0 is the whole vocabulary.
    """

    group: str
    policy: str
    prompts: int
    score: float
    low: float
    high: float
    of_full: float
    beyond_full: float
    beyond_low: float
    beyond_high: float
    same_answer: float
    exact_match: float
    f1: float
    reused: float
    recomputed: float
    work: float
    flops: float
    ffn_flops: float
    attention_flops: float
    kept: float
    promoted: float
    kv_mib: float
    ttft_ms: float
    speedup: float
    kl: float
    top1: float
    top10: float
    cosine: float
    fallbacks: int
    answer_kl: Estimate
    flips: Estimate
    loglik: Estimate
    kl_per_noise: Estimate
    kl_tokens: int


GROUPINGS: dict[str, Callable[[EvalRow], str]] = {
    "all": lambda row: "all",
    "suite": lambda row: row.suite,
    "task": lambda row: f"{row.suite}/{row.task}",
    "length": lambda row: str(row.length),
    "pattern": lambda row: row.pattern,
    "across segments": lambda row: (
        "facts in several segments" if row.crosses else "facts in one segment"
    ),
}


def summarise(rows: Sequence[EvalRow], grouping: str) -> list[Summary]:
    """Return one summary for each group and policy, in the order of their first rows."""
    group_of = GROUPINGS[grouping]
    full, noise = (
        {(row.cluster, row.number): row for row in rows if row.policy == policy}
        for policy in ("full", ORDER_NOISE)
    )
    groups: dict[tuple[str, str], list[EvalRow]] = {}
    for row in rows:
        groups.setdefault((group_of(row), row.policy), []).append(row)
    order = list(dict.fromkeys(group for group, _ in groups))
    ranked = sorted(groups, key=lambda key: (order.index(key[0]), list(groups).index(key)))
    return [_summary(group, policy, groups[group, policy], full, noise) for group, policy in ranked]


def _summary(
    group: str, policy: str, rows: Sequence[EvalRow], full: ByPrompt, noise: ByPrompt
) -> Summary:
    """Summarise the rows of one policy in one group."""
    scores = [row.score for row in rows]
    clusters = [row.cluster for row in rows]
    low, high = bootstrap(scores, clusters)
    truth = [full[row.cluster, row.number] for row in rows]
    beyond = paired_difference(scores, [row.score for row in truth], clusters)
    answers = [row.answer for row in rows]
    grafted = sum(answer.grafted for answer in answers)
    extra = sum(
        max(0.0, answer.computed * answer.prompt - answer.fresh)
        for answer in answers
        if answer.grafted
    )

    def share(count: Callable[[Answer], int]) -> float:
        return sum(map(count, answers)) / (sum(count(row.answer) for row in truth) or nan)

    def distance(name: str) -> float:
        return mean(answer.distances.get(name, nan) for answer in answers)

    return Summary(
        group=group,
        policy=policy,
        prompts=len(rows),
        score=mean(scores),
        low=low,
        high=high,
        of_full=mean(scores) / max(1e-9, mean(row.score for row in truth)),
        beyond_full=beyond.value,
        beyond_low=beyond.low,
        beyond_high=beyond.high,
        same_answer=mean(
            row.answer.text == f.answer.text for row, f in zip(rows, truth, strict=True)
        ),
        exact_match=mean(row.exact_match for row in rows),
        f1=mean(row.f1 for row in rows),
        reused=grafted / sum(answer.prompt for answer in answers),
        recomputed=sum(answer.recomputed for answer in answers) / max(1, grafted),
        work=extra / max(1, grafted),
        flops=share(lambda answer: answer.flops),
        ffn_flops=share(lambda answer: answer.ffn_flops),
        attention_flops=share(lambda answer: answer.flops - answer.ffn_flops),
        kept=mean(_kept(answer) for answer in answers),
        promoted=mean(answer.counts.get("promoted_heads", 0) for answer in answers),
        kv_mib=mean(answer.kv_bytes for answer in answers) / 2**20,
        ttft_ms=1000 * median(answer.ttft_s for answer in answers),
        speedup=median(
            f.answer.ttft_s / row.answer.ttft_s for f, row in zip(truth, rows, strict=True)
        ),
        kl=distance("kl"),
        top1=distance("top1"),
        top10=distance("top10"),
        cosine=distance("cosine"),
        fallbacks=sum(answer.fallback is not None for answer in answers) if policy != "full" else 0,
        **_along(rows, noise),
    )


def _along(rows: Sequence[EvalRow], noise: ByPrompt) -> dict[str, Any]:
    """Return the fields of a summary about distances along full's answer."""
    clusters = [row.cluster for row in rows]
    kl, flips, loglik = (_distances(rows, name) for name in ("answer_kl", "flips", "loglik"))
    unit = _distances(
        [noise[row.cluster, row.number] for row in rows if (row.cluster, row.number) in noise],
        "answer_kl",
    )
    return {
        "answer_kl": _estimate(kl, clusters),
        "flips": _estimate(flips, clusters, bootstrap_share),
        "loglik": _estimate(loglik, clusters),
        "kl_per_noise": paired_ratio(kl, unit, clusters)
        if len(kl) == len(unit) == len(rows)
        else UNKNOWN,
        "kl_tokens": max(row.answer.kl_tokens for row in rows),
    }


def _distances(rows: Sequence[EvalRow], name: str) -> list[float]:
    """Return a distance of all rows, or an empty list if one row lacks it."""
    values = [row.answer.distances.get(name, nan) for row in rows]
    return [] if any(map(isnan, values)) else values


def _estimate(
    values: Sequence[float], clusters: Sequence[str], interval: Interval = bootstrap
) -> Estimate:
    return Estimate(mean(values), *interval(values, clusters)) if values else UNKNOWN


def _kept(answer: Answer) -> float:
    if "kept_tokens" not in answer.counts:
        return 1.0
    return (answer.counts["kept_tokens"] + answer.fresh) / answer.prompt
