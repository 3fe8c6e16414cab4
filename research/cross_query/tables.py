"""What an experiment says, as tables for the terminal."""

from collections.abc import Sequence
from math import isnan

from rich.console import Group, RenderableType
from rich.table import Table
from rich.text import Text

from research.cross_query.figures import Figures
from research.cross_query.reruns import RerunStability
from research.cross_query.runner import PLAIN
from research.cross_query.verdict import FAILS, HOLDS, Verdict

_WIDTHS = {"condition": 14, "claim": 20}  # least ones; in 80 columns nothing that counts is cut off
_COLOURS = {HOLDS: "green", FAILS: "red"}


def render_figures(found: Sequence[Figures]) -> RenderableType:
    """A table for each variation, a line for each condition; JSON has more."""
    tables: dict[str, Table] = {}
    for one in found:
        if one.variation not in tables:
            tables[one.variation] = table = _table("condition", right=(
                "success", "reused", "work", "FLOPs", "faster", "rejected",
            ))  # fmt: skip
            table.title = f"{one.variation}, {one.episodes} episodes"
        reused = f"({one.matched:.0%})" if one.matched else f"{one.prefix + one.grafted:.0%}"
        tables[one.variation].add_row(
            one.condition, f"{one.success:.3f} ± {(one.high - one.low) / 2:.2f}", reused,
            f"{one.computed:.0%}",
            _share(one.flops), "-" if isnan(one.faster) else f"{one.faster:.2f}x",
            _share(one.rejected),
        )  # fmt: skip
    legend = (
        "reused: grafts and exact hits, of prompt tokens (what is only counted); work: (token, "
        "layer) pairs, of those "
        "of full recomputation, probes included; faster: median over episodes, against none; "
        "rejected: of what a probe "
        "has seen"
    )
    return Group(*tables.values(), Text(legend))


def render_verdicts(found: Sequence[Verdict]) -> RenderableType:
    """A line for each verdict; the figures beside it are under its claim."""
    table = _table("", "claim", "condition", right=("value", "verdict"))
    table.columns[2].max_width = _WIDTHS["condition"]
    for one in found:
        beside = ", ".join(
            f"{name} {_number(value)}" for name, value in {"n": one.count, **one.details}.items()
        )
        interval = "-" if isnan(one.low) else f"{one.low:.2g} to {one.high:.2g}"
        table.add_row(
            one.hypothesis, Text(f"{one.claim}\n").append(beside, style="dim"),
            one.condition if one.variation in ("-", PLAIN) else f"{one.condition}, {one.variation}",
            f"{_number(one.value)}\n{interval}",
            Text(one.verdict, style=_COLOURS.get(one.verdict, "yellow")).append(f"\n{one.bar}",
            style="default"),
        )  # fmt: skip
    return table


def render_reruns(found: Sequence[RerunStability]) -> RenderableType:
    """A line for each variation and condition."""
    table = _table("condition", right=("runs", "distance", "from none", "entropy", "success"))
    for one in found:
        spread = "" if isnan(one.low) else f" ± {(one.high - one.low) / 2:.3f}"
        table.add_row(
            one.condition if one.variation == PLAIN else f"{one.condition}, {one.variation}",
            f"{one.episodes} x {one.reruns}", f"{one.distance:.3f}{spread}",
            "-" if one.from_none is None else f"{one.from_none:.3f}", f"{one.entropy:.3f}",
            f"{one.success:.3f}",
        )  # fmt: skip
    legend = (
        "runs: episodes and reruns; distance: Levenshtein's between reruns, as a share; from none: "
        "to the rerun with "
        "equal draws and no reuse; entropy: of the answers to a step, in nats"
    )
    return Group(table, Text(legend))


def _table(*left: str, right: Sequence[str]) -> Table:
    table = Table()
    for name in left:
        table.add_column(name, overflow="fold", min_width=_WIDTHS.get(name))
    for name in right:
        table.add_column(name, justify="right", no_wrap=True)
    return table


def _share(value: float) -> str:
    return "-" if isnan(value) else f"{value:.0%}"


def _number(value: float | str) -> str:
    return value if isinstance(value, str) else "-" if isnan(value) else f"{value:.3g}"
