"""The hypotheses H1 to H4 of cross-query segment reuse, decided from what was measured."""

from collections.abc import Iterable, Iterator, Mapping, Sequence
from math import nan
from statistics import mean, median

import numpy as np
from msgspec.structs import replace

from kvgraft_lab.evaluate.statistics import (
    bootstrap,
    bootstrap_share,
    holm,
    mcnemar,
    rank_correlation,
)
from research.cross_query.conditions import CONDITIONS, NONE, PROBE_OFF, SWEPT, name_of
from research.cross_query.divergence import DivergenceRow
from research.cross_query.figures import EpisodeRun, episodes, paired
from research.cross_query.runner import Series, StepRow
from research.cross_query.verdict import Verdict, judge

LATENCY, AIM = 0.8, 0.5  # of none's
POINT = 0.01  # of success
KL = 0.1  # nats
LESS = 0.01  # nats by which the worst must be lower with fallbacks
PRECISION = 0.7
HALO = 8
_P = "McNemar p"

_Runs = Mapping[tuple[str, str], Sequence[EpisodeRun]]


def judge_speed(rows: Iterable[StepRow]) -> list[Verdict]:
    """H1: latency of an episode, and success, of every condition against `none`. p of success is
    corrected for the number of conditions, variation by variation."""
    ran, found = episodes(rows), []
    for (variation, condition), mine in ran.items():
        pairs = paired(mine, ran.get((variation, NONE), ()))
        if condition != NONE and pairs:
            found += [
                _latency(variation, condition, pairs, ran),
                _success("H1", variation, condition, pairs),
            ]
    return [
        verdict
        for variation in dict.fromkeys(key[0] for key in ran)
        for verdict in _corrected(found, variation)
    ]


def _corrected(found: Sequence[Verdict], variation: str) -> Iterator[Verdict]:
    """The verdicts of a variation, in order, their p with Holm's correction beside it."""
    mine = [verdict for verdict in found if verdict.variation == variation]
    tested = [float(verdict.details[_P]) for verdict in mine if _P in verdict.details]
    corrected = iter(holm(tested))
    for verdict in mine:
        yield (
            replace(verdict, details={**verdict.details, f"{_P}, Holm": next(corrected)})
            if _P in verdict.details
            else verdict
        )


def _latency(
    variation: str, condition: str, pairs: Sequence[tuple[EpisodeRun, EpisodeRun]], ran: _Runs
) -> Verdict:
    ratios, series = (
        [mine.seconds / none.seconds for mine, none in pairs],
        [mine.series for mine, _ in pairs],
    )
    low, high = bootstrap(ratios, series, np.median)
    prefix = paired([mine for mine, _ in pairs], ran.get((variation, "prefix"), ()))
    details: dict[str, float | str] = {
        f"at most {AIM}": judge(low, high, below=AIM),
        "to first tokens": median(mine.ttft_s / none.ttft_s for mine, none in pairs),
        "against prefix": median(mine.seconds / other.seconds for mine, other in prefix)
        if prefix
        else nan,
    }
    return Verdict(
        "H1", "latency of an episode, of none's", condition, variation, median(ratios), low, high,
        f"<= {LATENCY}",
        judge(low, high, below=LATENCY), len(pairs), details,
    )  # fmt: skip


def _success(
    hypothesis: str, variation: str, condition: str, pairs: Sequence[tuple[EpisodeRun, EpisodeRun]]
) -> Verdict:
    """Rounds of one episode are one pair each; in McNemar's test, too."""
    differences = [float(mine.success) - float(none.success) for mine, none in pairs]
    low, high = bootstrap_share(differences, [mine.series for mine, _ in pairs], least=-1.0)
    lost, won = differences.count(-1.0), differences.count(1.0)
    details: dict[str, float | str] = {
        "success": mean(mine.success for mine, _ in pairs), "none": mean(none.success for _,
        none in pairs),
        "lost": lost, "won": won, _P: mcnemar(lost, won),
    }  # fmt: skip
    return Verdict(
        hypothesis, "success, beyond none's", condition, variation, mean(differences), low, high,
        f">= -{POINT}",
        judge(low, high, above=-POINT), len(pairs), details,
    )  # fmt: skip


def judge_boundaries(rows: Sequence[DivergenceRow]) -> list[Verdict]:
    """H2: KL of boundary tokens of accepted segments, for the paper's method with halos of at most
    8 tokens."""
    return [
        _boundary(variation, condition, mine)
        for (variation, condition), mine in _grouped(rows).items()
        if (policy := CONDITIONS[condition].similar) is not None and policy.halo_tokens <= HALO
        and any(row.accepted for row in mine)
    ]  # fmt: skip


def _boundary(variation: str, condition: str, rows: Sequence[DivergenceRow]) -> Verdict:
    values, series = zip(
        *((one.final, row.series) for row in rows for one in row.accepted), strict=True
    )
    low, high = bootstrap(values, series)
    tried = [one for row in rows for one in row.segments if one.reused and one.trusting is not None]
    probed = [
        (one.probed, one.trusting)
        for one in tried
        if one.probed is not None and one.trusting is not None
    ]
    rejected = [one for one in tried if not one.accepted]
    details: dict[str, float | str] = {
        "accepted": len(values) / len(tried), "95th percentile": float(np.percentile(values, 95)),
        "worst token": max(one.worst or 0.0 for row in rows for one in row.accepted),
        "accepted above": mean(value > KL for value in values),
        "rejected below": mean((one.trusting or 0.0) <= KL for one in rejected)
        if rejected
        else nan,
        "probe against truth": rank_correlation([one for one, _ in probed], [one for _,
        one in probed]),
    }  # fmt: skip
    return Verdict(
        "H2", "mean boundary KL of accepted segments, nats", condition, variation, mean(values),
        low, high, f"< {KL}",
        judge(low, high, below=KL), len(values), details,
    )  # fmt: skip


def judge_retrieval(rows: Sequence[DivergenceRow]) -> list[Verdict]:
    """H3: precision of proposals, over tau: by alignment, and by the true KL of what is grafted of
    them."""
    sweep, found = [name_of("tau", tau) for tau in SWEPT["tau"]], []
    for (variation, condition), mine in sorted(_grouped(rows).items(), key=lambda item: item[0][0]):
        if condition not in sweep:
            continue
        known = sum(row.known for row in mine)
        recall = sum(row.covered for row in mine) / known if known else nan
        right = [(float(one.is_right), row.series) for row in mine for one in row.proposals]
        near = [
            (float(one.kl <= KL), row.series)
            for row in mine
            for one in row.proposals
            if one.kl is not None
        ]
        for claim, values in (
            ("half of its tokens in order", right),
            (f"grafts within {KL} nats", near),
        ):
            if values:
                found.append(_precision(variation, condition, claim, values, recall))
    return found


def _precision(
    variation: str,
    condition: str,
    claim: str,
    values: Sequence[tuple[float, object]],
    recall: float,
) -> Verdict:
    shares, series = zip(*values, strict=True)
    low, high = bootstrap_share(shares, series)
    similarity = CONDITIONS[condition].similarity
    tau = similarity.tau if similarity else nan
    return Verdict(
        "H3", f"precision: {claim}", condition, variation, mean(shares), low, high,
        f"> {PRECISION}",
        judge(low, high, above=PRECISION), len(shares), {"tau": tau,
        "recall of known text": recall},
    )  # fmt: skip


def judge_fallbacks(rows: Iterable[StepRow], divergences: Sequence[DivergenceRow]) -> list[Verdict]:
    """H4, the second half: with the probe, success, and whether the worst KL is lower, in every
    variation. That it is lower does not make it small: no verdict says that fallbacks cap it."""
    return [*_success_with_fallbacks(rows), *_divergence_with_fallbacks(divergences)]


def _success_with_fallbacks(rows: Iterable[StepRow]) -> Iterator[Verdict]:
    ran = episodes(rows)
    for (variation, condition), mine in ran.items():
        pairs = paired(mine, ran.get((variation, NONE), ()))
        if condition == "similar" and pairs:
            verdict = _success("H4", variation, condition, pairs)
            off = paired(mine, ran.get((variation, PROBE_OFF), ()))
            gained = (
                mean(float(one.success) - float(other.success) for one, other in off)
                if off
                else nan
            )
            yield replace(verdict, details={**verdict.details, "beyond probe off": gained})


def _divergence_with_fallbacks(rows: Sequence[DivergenceRow]) -> Iterator[Verdict]:
    for (variation, condition), mine in _grouped(rows).items():
        if condition != "similar":
            continue
        series = list(dict.fromkeys(row.series for row in mine))
        worst = [_worst(mine, one) for one in series]
        lower = [trusting - final for final, trusting in worst]
        low, high = bootstrap(lower, series)
        details: dict[str, float | str] = {
            "worst, nats": max(final for final, _ in worst), "probe off": max(trusting for _,
            trusting in worst),
            "mean": mean(row.kl for row in mine),
            "mean, probe off": mean(row.trusting for row in mine),
            "same best token": mean(row.agrees for row in mine),
            "same best token, probe off": mean(row.trusting_agrees for row in mine),
        }  # fmt: skip
        yield Verdict(
            "H4", "worst divergence is lower with fallbacks, by nats", condition, variation,
            mean(lower), low, high,
            f">= {LESS}", judge(low, high, above=LESS), len(mine), details,
        )  # fmt: skip


def _worst(rows: Iterable[DivergenceRow], series: Series) -> tuple[float, float]:
    """As it is, and before anything was rejected."""
    mine = [row for row in rows if row.series == series]
    return max(row.kl for row in mine), max(row.trusting for row in mine)


def _grouped(rows: Iterable[DivergenceRow]) -> dict[tuple[str, str], list[DivergenceRow]]:
    """By (variation, condition)."""
    found: dict[tuple[str, str], list[DivergenceRow]] = {}
    for row in rows:
        found.setdefault((row.variation, row.condition), []).append(row)
    return found
