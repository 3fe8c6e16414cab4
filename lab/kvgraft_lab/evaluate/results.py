"""Results of an evaluation as tables for the terminal, Markdown and CSV."""

import csv
from collections.abc import Callable, Iterable, Sequence
from dataclasses import asdict
from io import StringIO
from math import isnan
from pathlib import Path

from rich.console import Group, RenderableType
from rich.table import Table
from rich.text import Text

from kvgraft.prefill import DEFAULT_POLICY
from kvgraft_lab.evaluate.runner import EvalRow
from kvgraft_lab.evaluate.scoring import ANSWER_TOKENS, ORDER_NOISE
from kvgraft_lab.evaluate.statistics import Estimate, holm, paired_difference, paired_p
from kvgraft_lab.evaluate.summaries import GROUPINGS, Summary, summarise


def scores_table(summaries: Iterable[Summary]) -> list[list[str]]:
    """Return header and lines of scores by policy and group.

    The smaller set becomes the columns. Each cell is `score ± half the interval`.
    """
    cells = {(s.policy, s.group): with_spread(s) for s in summaries}
    policies, groups = (list(dict.fromkeys(key[place] for key in cells)) for place in (0, 1))
    by_policy = [
        ["", *groups],
        *([policy, *(cells.get((policy, g), "") for g in groups)] for policy in policies),
    ]
    if len(policies) > len(groups):
        return by_policy
    return [list(column) for column in zip(*by_policy, strict=True)]


def with_spread(summary: Summary, digits: int = 3) -> str:
    """Return the score with half its interval, if it has one."""
    half = (summary.high - summary.low) / 2
    return f"{summary.score:.{digits}f}" + ("" if isnan(half) else f" ± {half:.{digits}f}")


def overview_table(summaries: Sequence[Summary]) -> list[list[str]]:
    """Return header and lines, with one line of all main figures per policy."""
    kl_tokens = max((s.kl_tokens for s in summaries), default=0)
    header = [
        "policy", "score", "95 %", "of full", "beyond full", "same", "F1", "EM", "kept", "KV MiB",
        "redone", "work", "FLOPs",
        "TTFT ms", "faster", "KL", "top-1",
        f"answer KL, top {kl_tokens}" if kl_tokens else "answer KL",
        "KL 95 %", "flips",
        "log-lik.", "/ noise", "/ noise 95 %",
    ]  # fmt: skip
    lines = [
        [s.policy, f"{s.score:.3f}", "-" if isnan(s.low) else f"{s.low:.3f}-{s.high:.3f}",
         f"{s.of_full:.3f}", _beyond(s), f"{s.same_answer:.0%}", f"{s.f1:.3f}",
         f"{s.exact_match:.3f}", f"{s.kept:.1%}", f"{s.kv_mib:.1f}" if s.kv_mib else "-",
         f"{s.recomputed:.1%}",
         f"{s.work:.1%}", _known(s.flops, ".1%"), f"{s.ttft_ms:.1f}", f"{s.speedup:.2f}",
         _known(s.kl, ".3f"), _known(s.top1, ".3f"), _known(s.answer_kl.value, ".4f"),
         _between(s.answer_kl, ".4f"),
         _known(s.flips.value, ".1%"), _known(s.loglik.value, "+.3f"), _known(s.kl_per_noise.value,
         ".2f"),
         _between(s.kl_per_noise, ".2f")]
        for s in summaries
    ]  # fmt: skip
    return [header, *lines]


# figures that are paired prompt by prompt: getter and format
PAIRED: dict[str, tuple[Callable[[EvalRow], float], str]] = {
    "score": (lambda row: row.score, "+.3f"),
    "answer KL": (lambda row: row.answer.distances["answer_kl"], "+.4f"),
}


def paired_table(rows: Sequence[EvalRow], reference: str, what: str = "score") -> list[list[str]]:
    """Return header and lines: the difference of every other policy from the reference on the same
    prompts.

    A line has the difference, its 95 % interval, and p (permutations by item; Holm's correction for
    the number of lines).

    Raises:
        ValueError: no answers under the reference.
    """
    of, form = PAIRED[what]
    by_policy: dict[str, dict[tuple[str, int], float]] = {}
    for row in rows:
        by_policy.setdefault(row.policy, {})[row.cluster, row.number] = of(row)

    if reference not in by_policy:
        raise ValueError(
            f"no answers under {reference!r}: there are those of {', '.join(by_policy)}"
        )

    theirs = by_policy.pop(reference)
    pairs = [([mine[key] for key in theirs], list(theirs.values())) for mine in by_policy.values()]
    clusters = [cluster for cluster, _ in theirs]
    differences = [paired_difference(*pair, clusters) for pair in pairs]
    corrected = holm([paired_p(*pair, clusters) for pair in pairs])
    lines = [
        [
            policy,
            f"{d.value:{form}}",
            "-" if isnan(d.low) else f"{d.low:{form}} to {d.high:{form}}",
            f"{p:.3f}",
        ]
        for policy, d, p in zip(by_policy, differences, corrected, strict=True)
    ]
    return [["policy", f"{what} less that of {reference}", "95 %", "p, corrected"], *lines]


def _beyond(summary: Summary) -> str:
    if summary.policy == "full" or isnan(summary.beyond_low):
        return "-"
    return f"{summary.beyond_low:+.3f} to {summary.beyond_high:+.3f}"


def _between(estimate: Estimate, form: str) -> str:
    return "-" if isnan(estimate.low) else f"{estimate.low:{form}}-{estimate.high:{form}}"


def _known(value: float, form: str) -> str:
    """Return a formatted figure, or `-` if the host does not report it."""
    return "-" if isnan(value) else format(value, form)


LEGEND = (
    "score: mean by the tasks' own metrics; beyond full: 95 % interval of the difference from "
    "full, prompt by prompt; same: answers that are full's, word for word; "
    "kept: tokens of the prompt in the cache when the answer begins; KV: most that keys and values "
    "took at a time; "
    "redone: grafted tokens computed again in the last layer; work: (token, layer) pairs computed "
    "beyond the fresh "
    "tokens, as a share of the grafted ones, probes included; FLOPs: of the "
    "whole prefill, of full's; faster: median ratio of time to first token; KL, top-1: first token "
    "against full; "
    f"answer KL, flips, log-lik.: means over the first {ANSWER_TOKENS} tokens of full's own "
    "answer: KL(full || policy) "
    "in nats (top n: of the n most likely tokens, all others as one), places where the best token "
    "is another, how much "
    f"likelier the token is than under full; {ORDER_NOISE}: full, with the reused segments in "
    "other orders; "
    "/ noise: answer KL divided by that"
)


def render(rows: Sequence[EvalRow]) -> RenderableType:
    """Return an overview, and scores by pattern and suite (by task if there is only one), narrow
    enough for a terminal.
    """
    summaries = summarise(rows, "all")
    overview = overview_table(summaries)
    left_out: tuple[str, ...] = (
        "95 %", "beyond full", "F1", "EM", "TTFT ms", "KL", "top-1", "KL 95 %", "log-lik.",
        "/ noise 95 %",
    )  # fmt: skip
    left_out += () if any(row.policy == ORDER_NOISE for row in rows) else ("/ noise",)
    left_out += () if any(summary.kept < 1 for summary in summaries) else ("kept", "KV MiB")
    kept = [place for place, name in enumerate(overview[0]) if name not in left_out]
    tables = [_rich("all tasks", *([line[place] for place in kept] for line in overview))]

    for name in ("suite" if len({row.suite for row in rows}) > 1 else "task", "pattern"):
        table = scores_table(summarise(rows, name))
        tables.append(
            _rich(
                f"score by {name}", *([cell.partition(" ±")[0] for cell in line] for line in table)
            )
        )

    return Group(*tables, Text(LEGEND, style="dim"))


def write_tables(rows: Sequence[EvalRow], directory: Path, command: str) -> None:
    """Write `tables.md`, with every grouping and the pairs with the default policy, and a CSV file
    per grouping.
    """
    parts = [f"# Evaluation\n\n`{command}`\n\n{LEGEND}.\n"]
    for name in GROUPINGS:
        summaries = summarise(rows, name)
        parts.append(f"## By {name}\n" if name != "all" else "## All tasks\n")
        header, *lines = scores_table(summaries) if name != "all" else overview_table(summaries)
        parts.append(_markdown(header, lines))
        text = StringIO()
        records = [_flat(summary) for summary in summaries]
        writer = csv.DictWriter(text, list(records[0]))
        writer.writeheader()
        writer.writerows(records)
        (directory / f"by_{name.replace(' ', '_')}.csv").write_text(text.getvalue())

    if any(row.policy == DEFAULT_POLICY for row in rows):
        parts.append(f"## Beside {DEFAULT_POLICY}, the default, prompt by prompt\n")
        for what in (
            PAIRED if all("answer_kl" in row.answer.distances for row in rows) else ("score",)
        ):
            header, *lines = paired_table(rows, DEFAULT_POLICY, what)
            parts.append(_markdown(header, lines))

    (directory / "tables.md").write_text("\n".join(parts))


def _flat(summary: Summary) -> dict[str, object]:
    """Return the fields for a CSV file. An estimate becomes its value and the ends of its
    interval.
    """
    found: dict[str, object] = {}
    for name, value in asdict(summary).items():
        if isinstance(value, dict):
            found |= {
                name: value["value"],
                f"{name}_low": value["low"],
                f"{name}_high": value["high"],
            }
        else:
            found[name] = value
    return found


def _markdown(header: list[str], lines: list[list[str]]) -> str:
    rows = [header, ["---"] * len(header), *lines]
    return "\n".join("| " + " | ".join(row) + " |" for row in rows) + "\n"


def _rich(title: str, header: list[str], *lines: list[str]) -> Table:
    table = Table(title=title, title_justify="left", pad_edge=False, collapse_padding=True)
    for number, name in enumerate(header):
        table.add_column(_broken(name), justify="right" if number else "left", overflow="fold")
    for line in lines:
        table.add_row(_broken(line[0]), *line[1:])
    return table


def _broken(policy: str) -> str:
    """Return a policy's name with one option per line."""
    return policy.replace(":", ":\n").replace(",", ",\n")
