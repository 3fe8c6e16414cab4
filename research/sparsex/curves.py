"""Quality against work: a curve for each way to choose what is computed anew."""

from collections.abc import Mapping, Sequence
from pathlib import Path

import matplotlib as mpl
from matplotlib import pyplot as plt

from kvgraft_lab.evaluate.plots import COLOURS, STYLE, WORK, draw_full, save
from kvgraft_lab.evaluate.runner import EvalRow
from kvgraft_lab.evaluate.summaries import summarise


def write_curves(
    rows: Sequence[EvalRow], directory: Path, families: Mapping[str, Sequence[str]]
) -> Path:
    """Quality against work, one line for each family of policies (one method with more and more
    work)."""
    found = {summary.policy: summary for summary in summarise(rows, "all")}
    with mpl.rc_context(STYLE):
        figure, axes = plt.subplots(figsize=(7.2, 4.6))
        draw_full(axes, found["full"])
        for number, (family, policies) in enumerate(families.items()):
            points = [found[policy] for policy in policies]
            axes.plot(
                [p.work for p in points], [p.score for p in points], marker="o", markersize=4,
                linewidth=1.3,
                color=COLOURS[number % len(COLOURS)], label=family,
            )  # fmt: skip
        axes.set_xlabel(WORK)
        axes.set_ylabel("score")
        axes.xaxis.set_major_formatter(mpl.ticker.PercentFormatter(1.0, decimals=0))
        axes.legend(fontsize=8, loc="center left", bbox_to_anchor=(1.06, 0.5))
        return save(figure, directory / "quality_curves.png")
