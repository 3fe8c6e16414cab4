"""Draw the tokens of a prompt by kind, from what `kvgraft serve` answered to it
(docs/quickstart.md).

python scripts/draw_tokens.py docs/examples/answer.json docs/images/tokens.png
"""

import json
import sys
from pathlib import Path
from typing import Any

from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.patches import Patch

COLOURS = {
    "prefix": "#3f7fd0", "continued": "#2a9fb8", "grafted": "#2f9e6e", "recomputed": "#e29a2d",
    "fresh": "#a9b2c0",
}  # fmt: skip
MEANING = {
    "prefix": "exact prefix hit",
    "continued": "continued: read behind the same text before",
    "grafted": "grafted: read before, at another position",
    "recomputed": "known, then recomputed",
    "fresh": "fresh: computed as ever",
}
ROWS = ("prefix caching alone,\nby position", "KVGraft,\nby position", "KVGraft,\nsorted by kind")
WIDTH, HEIGHT = 9.0, 3.0  # inches
BAR = 0.62


def draw(report: dict[str, Any]) -> Figure:
    """Three bars: what exact prefix caching alone reuses, what was reused where, and how many
    tokens of each kind."""
    total, prefix = report["prompt_tokens"], report["prefix_tokens"]
    counts = {kind: report[f"{kind}_tokens"] for kind in COLOURS}
    # those computed again are counted apart, first of the grafted tokens
    copied = max(0, counts["grafted"] - counts["recomputed"])
    counts["continued"] += counts["grafted"] - copied - counts["recomputed"]
    counts["grafted"] = copied
    figure = Figure(figsize=(WIDTH, HEIGHT), layout="constrained")
    axes = figure.subplots()
    _bar(axes, 2, [(0, prefix, "prefix"), (prefix, total, "fresh")])
    _bar(axes, 1, report["spans"])
    _bar(axes, 0, _stacked(counts), labelled=True)
    axes.set_yticks([2, 1, 0], ROWS)
    axes.set_xlim(0, total)
    axes.set_ylim(-0.45, 2.45)
    axes.set_xlabel(f"tokens of the prompt ({total})")
    axes.spines[["top", "right", "left"]].set_visible(False)
    axes.tick_params(axis="y", length=0)
    figure.legend(
        handles=[Patch(color=colour, label=MEANING[kind]) for kind, colour in COLOURS.items()],
        loc="outside upper center",
        ncols=2,
        frameon=False,
    )
    return figure


def _stacked(counts: dict[str, int]) -> list[tuple[int, int, str]]:
    """Spans one after the other, of so many tokens each."""
    spans, start = [], 0
    for kind in COLOURS:
        spans.append((start, start + counts[kind], kind))
        start += counts[kind]
    return spans


def _bar(axes: Axes, y: float, spans: list[tuple[int, int, str]], labelled: bool = False) -> None:
    for start, stop, kind in spans:
        axes.barh(
            y, stop - start, BAR, left=start, color=COLOURS[kind], edgecolor="white", linewidth=0.4
        )
        if labelled and stop > start:
            axes.text(
                (start + stop) / 2,
                y + BAR / 2 + 0.03,
                f"{stop - start}",
                ha="center",
                va="bottom",
                fontsize=8,
            )


if __name__ == "__main__":
    answer, picture = map(Path, sys.argv[1:])
    draw(json.loads(answer.read_text(encoding="utf-8"))["kv_transfer_params"]["kvgraft"]).savefig(
        picture, dpi=160
    )
