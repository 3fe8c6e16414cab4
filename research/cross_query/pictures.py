"""Pictures of an experiment: speed against reuse, ablations, boundary KL (needs matplotlib)."""

from collections.abc import Sequence
from pathlib import Path
from statistics import median

import matplotlib as mpl
import numpy as np
from matplotlib import pyplot as plt

from kvgraft_lab.evaluate.plots import COLOURS, STYLE
from research.cross_query.conditions import NONE, SWEPT, name_of
from research.cross_query.divergence import DivergenceRow
from research.cross_query.figures import episodes, paired, summarise
from research.cross_query.hypotheses import KL
from research.cross_query.runner import PLAIN, StepRow

mpl.use("Agg")
_NAMES = {
    "reused_share": "L_reuse, share of layers",
    "halo_tokens": "h, tokens",
    "tau": "tau",
    "context_tokens": "W, tokens",
}


def write_pictures(
    rows: Sequence[StepRow], divergences: Sequence[DivergenceRow], directory: Path
) -> list[Path]:
    """All pictures for which there is something to show; of plain episodes."""
    directory.mkdir(parents=True, exist_ok=True)
    plain = [row for row in rows if row.variation == PLAIN]
    near = [row for row in divergences if row.variation == PLAIN and row.accepted]
    with mpl.rc_context(STYLE):
        figures = {
            "speed": _speed(plain) if plain else None,
            "ablations": _ablations(plain) if plain else None,
            "boundary": _boundary(near) if near else None,
        }
        found = []
        for name, figure in figures.items():
            if figure is not None:
                found.append(directory / f"agents_{name}.png")
                figure.savefig(found[-1])
                plt.close(figure)
        return found


def _speed(rows: Sequence[StepRow]) -> plt.Figure:
    """Times as fast as `none` against what is reused: small dots are episodes, large ones their
    medians."""
    figure, axes = plt.subplots(figsize=(6.4, 4.2))
    ran = episodes(rows)
    shown = [key for key in ran if key[1] != NONE]
    for number, key in enumerate(shown):
        pairs = paired(ran[key], ran.get((key[0], NONE), ()))
        x, y = (
            [mine.reused for mine, _ in pairs],
            [none.seconds / mine.seconds for mine, none in pairs],
        )
        colour = COLOURS[number % len(COLOURS)]
        axes.scatter(x, y, s=8, alpha=0.35, color=colour, linewidths=0)
        if pairs:
            axes.scatter(median(x), median(y), s=48, color=colour, label=key[1])
    axes.axhline(1.0, color="grey", linewidth=1, linestyle="--")
    axes.xaxis.set_major_formatter(mpl.ticker.PercentFormatter(1.0, decimals=0))
    axes.set_xlabel("tokens reused in an episode")
    axes.set_ylabel("none's seconds / condition's")
    axes.legend(fontsize=8, loc="center left", bbox_to_anchor=(1.02, 0.5))
    return figure


def _ablations(rows: Sequence[StepRow]) -> plt.Figure | None:
    """A panel for each option with at least two values: success and work."""
    found = {one.condition: one for one in summarise(rows)}
    swept = {
        option: points
        for option, values in SWEPT.items()
        if len(
            points := [
                (value, found[n]) for value in values if (n := name_of(option, value)) in found
            ]
        )
        > 1
    }
    if not swept:
        return None
    figure, grid = plt.subplots(
        1, len(swept), figsize=(3.4 * len(swept), 3.2), sharey=True, squeeze=False
    )
    for axes, (option, points) in zip(grid[0], swept.items(), strict=True):
        x = [value for value, _ in points]
        spread = [
            [one.success - one.low for _, one in points],
            [one.high - one.success for _, one in points],
        ]
        axes.errorbar(
            x, [one.success for _, one in points], spread, marker="o", capsize=3, label="success"
        )
        axes.plot(x, [one.computed for _, one in points], marker="s", label="computed")
        axes.plot(x, [one.grafted for _, one in points], marker="^", label="grafted")
        axes.set_xlabel(_NAMES[option])
        axes.set_xticks(x)
    grid[0][0].legend(fontsize=8)
    return figure


def _boundary(rows: Sequence[DivergenceRow]) -> plt.Figure:
    """How many accepted segments stay below a KL."""
    figure, axes = plt.subplots(figsize=(6.4, 3.6))
    for number, condition in enumerate(dict.fromkeys(row.condition for row in rows)):
        values = np.sort(
            [one.final for row in rows if row.condition == condition for one in row.accepted]
        )
        shares = np.arange(1, len(values) + 1) / len(values)
        axes.plot(
            np.maximum(values, 1e-8), shares, color=COLOURS[number % len(COLOURS)], label=condition
        )
    axes.axvline(KL, color="grey", linewidth=1, linestyle="--")
    axes.set_xscale("log")
    axes.set_xlabel("mean KL of a segment's boundary tokens, nats")
    axes.set_ylabel("accepted segments")
    axes.yaxis.set_major_formatter(mpl.ticker.PercentFormatter(1.0, decimals=0))
    axes.legend(fontsize=8)
    return figure
