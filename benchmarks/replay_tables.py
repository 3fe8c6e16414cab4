"""What a replay found: totals, ratios by session, tokens by kind from turn to turn; as tables,
picture and JSON."""

import math
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import numpy as np
from rich.table import Table

from kvgraft_lab.evaluate.statistics import Estimate, bootstrap
from load import Outcome, Spread, Summary
from replay_traffic import Replayed
from tables import markdown_table

KINDS = ("prefix", "continued", "grafted", "fresh")
COLOURS = {"prefix": "#3f7fd0", "continued": "#2a9fb8", "grafted": "#2f9e6e", "fresh": "#a9b2c0"}
SHOWN = 5  # requests with less of a prefix than plain, by name


@dataclass(frozen=True)
class TurnRow:
    """All sessions' n-th requests. Shares are of their prompt tokens; times are medians.

    Attributes:
        plain: what plain vLLM found in its prefix cache.
        kinds: what ours found, and what it computed, by kind.
        recomputed: of what ours grafted, computed again.
    """

    turn: int
    requests: int
    prompt_tokens: float
    plain: float
    kinds: dict[str, float]
    recomputed: float
    plain_ttft_s: float
    ours_ttft_s: float

    @property
    def reused(self) -> float:
        """What ours did not compute, or computed only in part."""
        return sum(self.kinds[kind] for kind in KINDS[:-1])

    @classmethod
    def of(cls, turn: int, pairs: Sequence[tuple[Outcome, Outcome]]) -> "TurnRow":
        """The row of these requests, (plain, ours) each."""
        tokens = sum(ours.prompt_tokens for _, ours in pairs)
        reports = [report_of(ours) for _, ours in pairs]
        shares = {
            kind: sum(r[f"{kind}_tokens"] for r in reports) / tokens
            for kind in (*KINDS, "recomputed")
        }
        recomputed = shares.pop("recomputed")
        plain = sum(p.cached_tokens for p, _ in pairs) / sum(p.prompt_tokens for p, _ in pairs)
        ttft = [Spread.of([pair[side].ttft_s for pair in pairs]).median for side in (0, 1)]
        return cls(turn, len(pairs), tokens / len(pairs), plain, shares, recomputed, *ttft)


@dataclass(frozen=True)
class Violation:
    """A request of which ours has fewer exact and continued tokens than plain vLLM has of a
    prefix."""

    session: str
    turn: int
    plain: int
    ours: int


def report_of(ours: Outcome) -> Mapping[str, Any]:
    """What KVGraft says of a prompt.

    Raises:
        RuntimeError: it says nothing.
    """
    if ours.report is None:
        raise RuntimeError("an answer of our server carries no report")
    return ours.report


def turn_rows(replayed: Sequence[Replayed]) -> list[TurnRow]:
    """First requests, second requests, and so on."""
    longest = max((len(session.pairs) for session in replayed), default=0)
    by_turn = [
        [session.pairs[n] for session in replayed if len(session.pairs) > n] for n in range(longest)
    ]
    return [TurnRow.of(number, pairs) for number, pairs in enumerate(by_turn, 1)]


def all_turns(replayed: Sequence[Replayed]) -> TurnRow:
    """All requests as one row, of turn 0.

    Raises:
        ValueError: there is none that both servers answered.
    """
    pairs = [pair for session in replayed for pair in session.pairs]
    if not pairs:
        raise ValueError("no request was answered by both servers")
    return TurnRow.of(0, pairs)


def violations(replayed: Sequence[Replayed]) -> list[Violation]:
    """Every one, in order; only requests with equal prompts can be compared."""
    found = [
        Violation(session.name, turn, plain.cached_tokens, _prefix(ours))
        for session in replayed
        for turn, (plain, ours) in enumerate(session.pairs, 1)
    ]
    return [one for one in found if one.ours < one.plain]


def _prefix(ours: Outcome) -> int:
    report = report_of(ours)
    return report["prefix_tokens"] + report["continued_tokens"]


def ttft_ratio(replayed: Sequence[Replayed]) -> Estimate:
    """Total TTFT of a session, ours / plain: the geometric mean over sessions, and its 95 %
    interval."""
    sums = [
        [sum(pair[side].ttft_s for pair in s.pairs) for side in (0, 1)] for s in replayed if s.pairs
    ]
    logs = [math.log(ours / plain) for plain, ours in sums]
    low, high = bootstrap(logs)
    return Estimate(math.exp(float(np.mean(logs))), math.exp(low), math.exp(high))


def summaries(replayed: Sequence[Replayed]) -> dict[str, Summary]:
    """All requests of plain and of ours. Their seconds and rates mean nothing: each server paused
    for the other."""
    plain = [outcome for session in replayed for outcome in session.plain.outcomes]
    return {
        "plain": Summary.of(plain),
        "ours": Summary.of([o for s in replayed for o in s.ours.outcomes]),
    }


def latencies_of(found: Mapping[str, Summary]) -> Table:
    """Percentiles of both servers."""
    table = markdown_table(["", *found, "ours / plain"], title="latencies")
    for name, of in (("TTFT", lambda s: s.ttft_s), ("inter-token", lambda s: s.gap_s)):
        for what in ("median", "p95", "p99"):
            plain, ours = (getattr(of(found[side]), what) for side in ("plain", "ours"))
            table.add_row(
                f"{name} {what} ms",
                f"{1e3 * plain:.1f}",
                f"{1e3 * ours:.1f}",
                f"{ours / plain:.2f}",
            )
    for side, summary in found.items():
        for why, count in summary.errors.items():
            table.add_row(f"errors of {side}", f"{count} {why}")
    return table


def kinds_of(rows: Sequence[TurnRow], total: TurnRow) -> Table:
    """Tokens by kind, from turn to turn."""
    columns = ["turn", "tokens", "plain", *KINDS, "recomputed"]
    table = markdown_table(
        columns, title="plain: in its prefix cache; ours by kind: shares of the prompt"
    )
    for row in (*rows, total):
        shares = (row.plain, *(row.kinds[kind] for kind in KINDS), row.recomputed)
        table.add_row(
            str(row.turn or "all"),
            f"{row.prompt_tokens:.0f}",
            *(f"{share:.3f}" for share in shares),
        )
    return table


def turns_of(rows: Sequence[TurnRow], total: TurnRow) -> Table:
    """What is reused and how long it takes, from turn to turn."""
    columns = ["turn", "requests", "plain reuses", "ours reuses", "plain ms", "ours ms"]
    table = markdown_table(columns, title="share reused; median TTFT")
    for row in (*rows, total):
        times = (f"{1e3 * row.plain_ttft_s:.1f}", f"{1e3 * row.ours_ttft_s:.1f}")
        table.add_row(
            str(row.turn or "all"),
            str(row.requests),
            f"{row.plain:.3f}",
            f"{row.reused:.3f}",
            *times,
        )
    return table


@dataclass(frozen=True)
class Prediction:
    """What a server in shadow mode said, and what a live one did with the same requests.

    Attributes:
        graftable, grafted: shares of all prompt tokens.
        expected_saving_s, estimated_s: seconds of prefill that grafts save, as the server in shadow
            mode and the live one expect.
        saved_s: time to first token of the one less that of the other, over the requests that the
            live one grafted.
    """

    graftable: float
    grafted: float
    expected_saving_s: float
    estimated_s: float
    saved_s: float

    @classmethod
    def of(cls, replayed: Sequence[Replayed]) -> "Prediction":
        """From requests whose first server discovers."""
        pairs = [
            (one, report_of(one), two, report_of(two)) for s in replayed for one, two in s.pairs
        ]
        tokens = sum(one.prompt_tokens for one, *_ in pairs)
        live = [(one, two, did) for one, _, two, did in pairs if did["grafted_tokens"]]
        return cls(
            sum(would["shadow_graftable_tokens"] for _, would, *_ in pairs) / tokens,
            sum(did["grafted_tokens"] for *_, did in pairs) / tokens,
            sum(_saved(would) for _, would, *_ in pairs if would["shadow_graftable_tokens"]),
            sum(_saved(did) for *_, did in live),
            sum(one.ttft_s - two.ttft_s for one, two, _ in live),
        )

    @property
    def line(self) -> str:
        """All of it."""
        return (
            f"would graft {self.graftable:.1%} of the tokens and save "
            f"{self.expected_saving_s:.2f} s; the live server grafted {self.grafted:.1%}, expected "
            f"to save {self.estimated_s:.2f} s and saved {self.saved_s:.2f} s"
        )


def _saved(report: Mapping[str, Any]) -> float:
    full, reuse = report["estimated_full_s"], report["estimated_reuse_s"]
    return 0.0 if full is None or reuse is None else float(full - reuse)


def lines_of_replay(replayed: Sequence[Replayed], own_answers: bool) -> list[str]:
    """What stands below the tables: the ratio, the check, sessions that ended early.

    Raises:
        ValueError: no request was answered by both servers.
    """
    ratio, count = ttft_ratio(replayed), sum(len(session.pairs) for session in replayed)
    sessions = sum(bool(session.pairs) for session in replayed)
    lines = [
        f"total TTFT of a session, ours / plain: {ratio.value:.3f} (95 % {ratio.low:.3f} to "
        f"{ratio.high:.3f}; "
        f"geometric mean of {sessions} sessions)"
    ]
    if own_answers:
        lines.append(
            "prefixes were not compared: with own answers the two servers get different prompts"
        )
    else:
        broken = violations(replayed)
        shown = [f"{v.session} request {v.turn} ({v.ours} < {v.plain})" for v in broken[:SHOWN]]
        more = [f"{len(broken) - SHOWN} more"] if len(broken) > SHOWN else []
        where = f": {', '.join(shown + more)}" if broken else ""
        lines.append(
            f"less exact and continued than plain's prefix: {len(broken)} of {count} "
            f"requests{where}"
        )
    return lines + endings(replayed)


def endings(replayed: Sequence[Replayed]) -> list[str]:
    """Which sessions ended before their last request, and why."""
    lines = []
    for session in replayed:
        ends = {"plain": session.plain.ended, "ours": session.ours.ended}
        told = {"both": ends["plain"]} if ends["plain"] == ends["ours"] else ends
        lines += [f"{session.name} was cut ({side}): {why}" for side, why in told.items() if why]
    return lines


def as_json(replayed: Sequence[Replayed], own_answers: bool) -> dict[str, Any]:
    """All of it, with every request."""
    return {
        "latencies": {
            side: _latency_json(summary) for side, summary in summaries(replayed).items()
        },
        "ttft_ratio": asdict(ttft_ratio(replayed)),
        "turns": [asdict(row) for row in turn_rows(replayed)],
        "all": asdict(all_turns(replayed)),
        "violations": None
        if own_answers
        else [asdict(violation) for violation in violations(replayed)],
        "sessions": [_session_json(session) for session in replayed],
    }


def _latency_json(summary: Summary) -> dict[str, Any]:
    return {name: asdict(getattr(summary, name)) for name in ("ttft_s", "gap_s")} | {
        "errors": summary.errors
    }


def _session_json(session: Replayed) -> dict[str, Any]:
    sides = {"plain": session.plain, "ours": session.ours}
    ended = {side: run.ended for side, run in sides.items()}
    requests = {side: [_request_json(o) for o in run.outcomes] for side, run in sides.items()}
    return {
        "name": session.name,
        "kind": session.kind,
        "recorded": session.requests,
        "ended": ended,
        **requests,
    }


def _request_json(outcome: Outcome) -> dict[str, Any]:
    shown = {
        "start_s": outcome.start_s,
        "ttft_s": outcome.ttft_s if outcome.first_s is not None else None,
        "prompt_tokens": outcome.prompt_tokens, "output_tokens": outcome.output_tokens,
        "cached_tokens": outcome.cached_tokens, "error": outcome.error,
    }  # fmt: skip
    kinds = [f"{kind}_tokens" for kind in (*KINDS, "recomputed")]
    report = outcome.report or {}
    return shown | {
        name: report[name] for name in (*kinds, "outcome", "reason", "depth") if name in report
    }


def draw(rows: Sequence[TurnRow], path: Path) -> None:
    """Tokens by kind from turn to turn, beside what plain vLLM finds; and both servers' TTFT."""
    from matplotlib import pyplot as plt
    from matplotlib import rc_context
    from matplotlib.ticker import MaxNLocator

    from kvgraft_lab.evaluate.plots import STYLE, save

    turns = [row.turn for row in rows]
    with rc_context(STYLE):
        figure, (tokens, times) = plt.subplots(1, 2, figsize=(10.4, 4.0))
        bottom = np.zeros(len(rows))
        for kind in KINDS:
            heights = np.array([row.kinds[kind] for row in rows])
            tokens.bar(turns, heights, bottom=bottom, color=COLOURS[kind], label=kind)
            bottom += heights
        tokens.plot(
            turns, [row.plain for row in rows], "o-", color="black", label="plain vLLM: prefix"
        )
        tokens.set(xlabel="request of a session", ylabel="share of the prompt", ylim=(0, 1))
        tokens.legend(loc="lower center", bbox_to_anchor=(0.5, 1.0), ncols=3)
        times.plot(
            turns, [1e3 * row.plain_ttft_s for row in rows], "o-", color="black", label="plain vLLM"
        )
        times.plot(
            turns,
            [1e3 * row.ours_ttft_s for row in rows],
            "o-",
            color=COLOURS["grafted"],
            label="KVGraft",
        )
        times.set(xlabel="request of a session", ylabel="median TTFT, ms", ylim=(0, None))
        times.legend(loc="lower center", bbox_to_anchor=(0.5, 1.0), ncols=2)
        for axes in (tokens, times):
            axes.xaxis.set_major_locator(MaxNLocator(integer=True))
        save(figure, path)
