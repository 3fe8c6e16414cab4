"""Figure of an analysis (needs matplotlib)."""

from collections.abc import Mapping, Sequence
from pathlib import Path

import matplotlib as mpl
import numpy as np
from matplotlib import pyplot as plt
from matplotlib.axes import Axes

from kvgraft_lab.evaluate.plots import STYLE, save
from kvgraft_lab.traffic.analysis import KVGRAFT, Analysis, PoolCounts
from kvgraft_lab.traffic.origins import TokenCounts

mpl.use("Agg")
# colours are those of a server's page
KINDS = {
    "prefix": "#3f7fd0",
    "continued": "#2a9fb8",
    "grafted": "#2f9e6e",
    "near-duplicate": "#e29a2d",
    "new": "#a9b2c0",
}


def draw(analysis: Analysis, path: Path) -> None:
    """Draw all sides, turns under KVGraft, and hits by size of the pool if there are several."""
    by_turn = {group.name: group.sides[KVGRAFT] for group in analysis.turns}
    several = len(analysis.pools) > 1

    with mpl.rc_context(STYLE):
        figure, grid = plt.subplots(
            1, 2 + several, figsize=(4.6 * (2 + several), 3.8), layout="constrained"
        )
        _bars(grid[0], analysis.largest.sides, "all prompts")
        _bars(grid[1], by_turn, "kvgraft, by turn of a session")
        grid[0].set_ylabel("share of prompt tokens")
        if several:
            _pools(grid[2], analysis.pools)
        figure.legend(
            *grid[0].get_legend_handles_labels(),
            loc="outside lower center",
            ncols=len(KINDS),
            fontsize=9,
        )
        save(figure, path)


def _bars(axes: Axes, counts: Mapping[str, TokenCounts], title: str) -> None:
    shares = np.array([_shares(one) for one in counts.values()])  # [bars, kinds]
    below = np.cumsum(shares, axis=1) - shares
    for number, (kind, colour) in enumerate(KINDS.items()):
        axes.bar(
            range(len(counts)), shares[:, number], 0.8, below[:, number], color=colour, label=kind
        )
    axes.set_xticks(range(len(counts)), list(counts), rotation=30 if len(counts) > 8 else 0)
    axes.set_ylim(0, 1)
    axes.yaxis.set_major_formatter(mpl.ticker.PercentFormatter(1.0, decimals=0))
    axes.grid(visible=False)
    axes.set_title(title, fontsize=10)


def _pools(axes: Axes, pools: Sequence[PoolCounts]) -> None:
    for side in pools[0].sides:
        counts = [pool.sides[side] for pool in pools]
        axes.plot([one.share(one.known) for one in counts], marker="o", markersize=4, label=side)
    axes.set_xticks(
        range(len(pools)),
        ["unlimited" if pool.tokens is None else f"{pool.tokens:,}" for pool in pools],
    )
    axes.set_ylim(0, 1)
    axes.yaxis.set_major_formatter(mpl.ticker.PercentFormatter(1.0, decimals=0))
    axes.set_title("tokens found, by tokens of the pool", fontsize=10)
    axes.legend(fontsize=8)


def _shares(counts: TokenCounts) -> list[float]:
    kinds = (counts.prefix, counts.continued, sum(counts.grafted), counts.similar, counts.new)
    return [counts.share(tokens) for tokens in kinds]
