"""What the rows of an evaluation say: tables for the terminal, Markdown and CSV."""

import csv
from collections.abc import Callable, Iterable, Sequence
from dataclasses import asdict, dataclass, fields
from io import StringIO
from math import isnan
from pathlib import Path
from statistics import mean, median

from rich.console import Group, RenderableType
from rich.table import Table
from rich.text import Text

from kvgraft.evaluate.hosts import Answer
from kvgraft.evaluate.runner import EvalRow
from kvgraft.evaluate.statistics import bootstrap, holm, paired_difference, paired_p
from kvgraft.prefill import DEFAULT_POLICY


@dataclass(frozen=True)
class Summary:
    """Some rows of one policy. Shares are of 1.

    Attributes:
        group: what the rows have in common.
        score, low, high: mean score by the tasks' own metrics, with its 95 % bootstrap interval (drawn by item; NaN of
            a single one).
        of_full: score divided by that of `full` on the same prompts.
        beyond_full, beyond_low, beyond_high: mean of the differences from `full`, prompt by prompt, with its interval.
        exact_match, f1: means of these.
        reused: grafted tokens of the prompt tokens.
        recomputed: of the grafted tokens, computed again in the last layer.
        work: grafted (token, layer) pairs computed, probes included, of all grafted ones: what is computed beyond the
            fresh tokens.
        flops: floating-point operations of prefill, of those of `full` on the same prompts; NaN where nobody counts.
            `ffn_flops` are those of FFNs, of full's there, `attention_flops` all others, of full's.
        kept: of the prompt's tokens, in the cache when the answer begins.
        promoted: heads that were promoted to see everything, mean per prompt.
        kv_mib: most that keys and values took at a time, mean per prompt.
        ttft_ms: median time to the first token; `speedup`: median over prompts of full's divided by this one's.
        kl, top1, top10, cosine: of the first token against `full`; NaN where the host tells no logits.
        fallbacks: prompts whose grafts were not used.
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


GROUPINGS: dict[str, Callable[[EvalRow], str]] = {
    "all": lambda row: "all",
    "suite": lambda row: row.suite,
    "task": lambda row: f"{row.suite}/{row.task}",
    "length": lambda row: str(row.length),
    "pattern": lambda row: row.pattern,
    "across segments": lambda row: "facts in several segments" if row.crosses else "facts in one segment",
}


def summarise(rows: Sequence[EvalRow], grouping: str) -> list[Summary]:
    """One summary for each group and policy, in the order in which they appear."""
    group_of = GROUPINGS[grouping]
    full = {(row.cluster, row.number): row for row in rows if row.policy == "full"}
    groups: dict[tuple[str, str], list[EvalRow]] = {}
    for row in rows:
        groups.setdefault((group_of(row), row.policy), []).append(row)
    order = list(dict.fromkeys(group for group, _ in groups))
    ranked = sorted(groups, key=lambda key: (order.index(key[0]), list(groups).index(key)))
    return [_summary(group, policy, groups[group, policy], full) for group, policy in ranked]


def _summary(group: str, policy: str, rows: Sequence[EvalRow], full: dict[tuple[str, int], EvalRow]) -> Summary:
    scores = [row.score for row in rows]
    clusters = [row.cluster for row in rows]
    low, high = bootstrap(scores, clusters)
    truth = [full[row.cluster, row.number] for row in rows]
    beyond = paired_difference(scores, [row.score for row in truth], clusters)
    answers = [row.answer for row in rows]
    grafted = sum(answer.grafted for answer in answers)
    extra = sum(max(0.0, answer.computed * answer.prompt - answer.fresh) for answer in answers if answer.grafted)

    def share(count: Callable[[Answer], int]) -> float:
        return sum(map(count, answers)) / (sum(count(row.answer) for row in truth) or float("nan"))

    def distance(name: str) -> float:
        return mean(answer.distances.get(name, float("nan")) for answer in answers)

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
        speedup=median(f.answer.ttft_s / row.answer.ttft_s for f, row in zip(truth, rows, strict=True)),
        kl=distance("kl"),
        top1=distance("top1"),
        top10=distance("top10"),
        cosine=distance("cosine"),
        fallbacks=sum(answer.fallback is not None for answer in answers) if policy != "full" else 0,
    )


def _kept(answer: Answer) -> float:
    if "kept_tokens" not in answer.counts:
        return 1.0
    return (answer.counts["kept_tokens"] + answer.fresh) / answer.prompt


def scores_table(summaries: Iterable[Summary]) -> list[list[str]]:
    """Header and lines: policies and groups, the fewer as columns; each cell is `score ± half the interval`."""
    cells = {(s.policy, s.group): with_spread(s) for s in summaries}
    policies, groups = (list(dict.fromkeys(key[place] for key in cells)) for place in (0, 1))
    by_policy = [["", *groups], *([policy, *(cells.get((policy, g), "") for g in groups)] for policy in policies)]
    if len(policies) > len(groups):
        return by_policy
    return [list(column) for column in zip(*by_policy, strict=True)]


def with_spread(summary: Summary, digits: int = 3) -> str:
    """The score and half its interval, if it has one."""
    half = (summary.high - summary.low) / 2
    return f"{summary.score:.{digits}f}" + ("" if isnan(half) else f" ± {half:.{digits}f}")


def overview_table(summaries: Iterable[Summary]) -> list[list[str]]:
    """Header and lines: a line for each policy, with all that one wants to know at a glance."""
    header = [
        "policy", "score", "95 %", "of full", "beyond full", "F1", "EM", "kept", "KV MiB", "redone", "work", "FLOPs",
        "TTFT ms", "faster", "KL", "top-1",
    ]  # fmt: skip
    lines = [
        [s.policy, f"{s.score:.3f}", "-" if isnan(s.low) else f"{s.low:.3f}-{s.high:.3f}",
         f"{s.of_full:.3f}", _beyond(s), f"{s.f1:.3f}",
         f"{s.exact_match:.3f}", f"{s.kept:.1%}", f"{s.kv_mib:.1f}" if s.kv_mib else "-", f"{s.recomputed:.1%}",
         f"{s.work:.1%}", _known(s.flops, ".1%"), f"{s.ttft_ms:.1f}", f"{s.speedup:.2f}",
         _known(s.kl, ".3f"), _known(s.top1, ".3f")]
        for s in summaries
    ]  # fmt: skip
    return [header, *lines]


def paired_table(rows: Sequence[EvalRow], reference: str) -> list[list[str]]:
    """Header and lines: the score of every other policy less that of the reference on the same prompts, its 95 %
    interval, and p (permutations by item; Holm's correction for the number of lines).

    Raises:
        ValueError: nothing was answered under the reference.
    """
    by_policy: dict[str, dict[tuple[str, int], float]] = {}
    for row in rows:
        by_policy.setdefault(row.policy, {})[row.cluster, row.number] = row.score
    if reference not in by_policy:
        raise ValueError(f"no answers under {reference!r}: there are those of {', '.join(by_policy)}")
    theirs = by_policy.pop(reference)
    pairs = [([mine[key] for key in theirs], list(theirs.values())) for mine in by_policy.values()]
    clusters = [cluster for cluster, _ in theirs]
    differences = [paired_difference(*pair, clusters) for pair in pairs]
    corrected = holm([paired_p(*pair, clusters) for pair in pairs])
    lines = [
        [policy, f"{d.value:+.3f}", "-" if isnan(d.low) else f"{d.low:+.3f} to {d.high:+.3f}", f"{p:.3f}"]
        for policy, d, p in zip(by_policy, differences, corrected, strict=True)
    ]
    return [["policy", f"score less that of {reference}", "95 %", "p, corrected"], *lines]


def _beyond(summary: Summary) -> str:
    if summary.policy == "full" or isnan(summary.beyond_low):
        return "-"
    return f"{summary.beyond_low:+.3f} to {summary.beyond_high:+.3f}"


def _known(value: float, form: str) -> str:
    """`-` for what the host does not tell."""
    return "-" if isnan(value) else format(value, form)


LEGEND = (
    "score: mean by the tasks' own metrics; beyond full: 95 % interval of the difference from full, prompt by prompt; "
    "kept: tokens of the prompt in the cache when the answer begins; KV: most that keys and values took at a time; "
    "redone: grafted tokens computed again in the last layer; work: (token, layer) pairs computed beyond the fresh "
    "tokens, as a share of the grafted ones, probes included; FLOPs: of the "
    "whole prefill, of full's; faster: median ratio of time to first token; KL, top-1: first token against full"
)


def render(rows: Sequence[EvalRow]) -> RenderableType:
    """An overview and the scores by suite (by task if there is but one) and pattern, narrow enough for a terminal."""
    overview = overview_table(summarise(rows, "all"))
    left_out = ("95 %", "beyond full", "F1", "EM", "TTFT ms", "top-1")
    kept = [place for place, name in enumerate(overview[0]) if name not in left_out]
    tables = [_rich("all tasks", *([line[place] for place in kept] for line in overview))]
    for name in ("suite" if len({row.suite for row in rows}) > 1 else "task", "pattern"):
        table = scores_table(summarise(rows, name))
        tables.append(_rich(f"score by {name}", *([cell.partition(" ±")[0] for cell in line] for line in table)))
    return Group(*tables, Text(LEGEND, style="dim"))


def write_tables(rows: Sequence[EvalRow], directory: Path, command: str) -> None:
    """`tables.md` with every grouping and what the default policy is paired with, and a CSV file for each grouping."""
    parts = [f"# Evaluation\n\n`{command}`\n\n{LEGEND}.\n"]
    for name in GROUPINGS:
        summaries = summarise(rows, name)
        parts.append(f"## By {name}\n" if name != "all" else "## All tasks\n")
        header, *lines = scores_table(summaries) if name != "all" else overview_table(summaries)
        parts.append(_markdown(header, lines))
        text = StringIO()
        writer = csv.DictWriter(text, [field.name for field in fields(Summary)])
        writer.writeheader()
        writer.writerows(asdict(summary) for summary in summaries)
        (directory / f"by_{name.replace(' ', '_')}.csv").write_text(text.getvalue())
    if any(row.policy == DEFAULT_POLICY for row in rows):
        header, *lines = paired_table(rows, DEFAULT_POLICY)
        parts += [f"## Beside {DEFAULT_POLICY}, the default, prompt by prompt\n", _markdown(header, lines)]
    (directory / "tables.md").write_text("\n".join(parts))


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
    """One option a line, where there are any."""
    return policy.replace(":", ":\n").replace(",", ",\n")
