"""Figures of evaluations and of layers (needs matplotlib)."""

from collections import defaultdict
from collections.abc import Mapping, Sequence
from math import isnan
from pathlib import Path

import matplotlib as mpl
import numpy as np
from matplotlib import pyplot as plt
from matplotlib.axes import Axes
from matplotlib.figure import Figure

from kvgraft.kv.heads import HeadClass, HeadMap
from kvgraft.policies.profile import PolicyProfile
from kvgraft_lab.evaluate.flows import FlowScore
from kvgraft_lab.evaluate.runner import EvalRow
from kvgraft_lab.evaluate.scoring import ORDER_NOISE
from kvgraft_lab.evaluate.summaries import Summary, summarise

mpl.use("Agg")
STYLE = {
    "font.size": 10, "axes.spines.top": False, "axes.spines.right": False, "axes.grid": True,
    "grid.alpha": 0.25,
    "figure.dpi": 110, "savefig.bbox": "tight", "legend.frameon": False,
}  # fmt: skip
WORK = "grafted token x layer work done again"
FLOPS = "floating-point operations of prefill, of full's"
# nats; below this value the scale of divergences is linear
LEAST_KL = 1e-3
_TAB20 = plt.get_cmap("tab20").colors
COLOURS = (*_TAB20[::2], *_TAB20[1::2])  # ten strong colours, then the ten lighter ones


def write_plots(rows: Sequence[EvalRow], directory: Path) -> list[Path]:
    """Draw quality against time and work, distance from full against FLOPs, and quality by task,
    length and pattern.

    Quality against memory is drawn if policies differ in memory. Groupings with one group only are
    left out.
    """
    policies = list(dict.fromkeys(row.policy for row in rows))
    colours = {policy: COLOURS[number % len(COLOURS)] for number, policy in enumerate(policies)}
    overall = summarise(rows, "all")

    with mpl.rc_context(STYLE):
        figures = {
            "ttft": _scatter(overall, colours, "speedup", "time to first token: full / policy"),
            "work": _scatter(overall, colours, "work", WORK),
        }
        if not any(isnan(summary.answer_kl.value) for summary in overall):
            figures["kl"] = _divergences({"": overall})
            if len({row.pattern for row in rows}) > 1:
                figures["kl_pattern"] = _divergences(_by_group(summarise(rows, "pattern")))
        if len({round(summary.kv_mib, 1) for summary in overall}) > 1:
            figures["memory"] = _scatter(
                overall, colours, "kv_mib", "most memory of keys and values, MiB"
            )
        for name in ("task", "length", "pattern"):
            summaries = summarise(rows, name)
            if len({summary.group for summary in summaries}) > 1:
                figures[name] = _bars(summaries, colours, name)
        return [save(figure, directory / f"quality_{name}.png") for name, figure in figures.items()]


def _by_group(summaries: Sequence[Summary]) -> dict[str, list[Summary]]:
    found = defaultdict[str, list[Summary]](list)
    for summary in summaries:
        found[summary.group].append(summary)
    return found


def draw_full(axes: Axes, full: Summary) -> None:
    """Draw a line at the score of full recomputation."""
    _draw_level(axes, full.score, "full")


def _draw_level(axes: Axes, value: float, name: str) -> None:
    axes.axhline(value, color="grey", linewidth=1, linestyle="--" if name == "full" else ":")
    axes.annotate(
        name,
        (1.0, value),
        xycoords=("axes fraction", "data"),
        xytext=(8, -3),
        textcoords="offset points",
    )


def _scatter(
    summaries: Sequence[Summary], colours: dict[str, tuple[float, ...]], across: str, label: str
) -> Figure:
    figure, axes = plt.subplots(figsize=(6.4, 4.2))
    for summary in summaries:
        if summary.policy == "full":
            draw_full(axes, summary)
            continue
        if summary.policy == ORDER_NOISE:
            _draw_level(axes, summary.score, ORDER_NOISE)
            continue
        x, score = getattr(summary, across), summary.score
        error = [[score - summary.low], [summary.high - score]]
        axes.errorbar(
            x, score, error, fmt="o", color=colours[summary.policy], capsize=3, label=summary.policy
        )

    axes.set_xlabel(label)
    axes.set_ylabel("score (95 % interval)")
    axes.set_ylim(max(0.0, float(np.nanmin([(s.low, s.score) for s in summaries])) - 0.15), 1.03)
    axes.margins(x=0.15)
    if across == "work":
        axes.xaxis.set_major_formatter(mpl.ticker.PercentFormatter(1.0, decimals=0))

    axes.legend(fontsize=8, loc="center left", bbox_to_anchor=(1.1, 0.5))
    return figure


def _divergences(panels: Mapping[str, Sequence[Summary]]) -> Figure:
    """Draw KL along full's answer against FLOPs, with one panel per group. Variants of one policy
    are joined.

    Order noise is drawn too, if it was measured.
    """
    columns = min(3, len(panels))
    shape = -(-len(panels) // columns), columns
    size = (6.4, 4.2) if len(panels) == 1 else (3.6 * shape[1], 3.0 * shape[0])
    figure, grid = plt.subplots(*shape, figsize=size, squeeze=False, sharey=True)
    for axes, (group, summaries) in zip(grid.flat, panels.items(), strict=False):
        _divergence(axes, summaries)
        axes.set_title(group if len(panels) > 1 else "", fontsize=10)

    for axes in list(grid.flat)[len(panels) :]:
        axes.set_visible(False)

    figure.supylabel("KL(full || policy) along full's answer, nats", fontsize=10)
    figure.supxlabel(FLOPS if _counted(next(iter(panels.values()))) else WORK, fontsize=10)
    figure.tight_layout()
    grid[0, 0].set_ylim(bottom=0)
    handles, labels = grid[0, 0].get_legend_handles_labels()
    figure.legend(handles, labels, fontsize=8, loc="center left", bbox_to_anchor=(1.0, 0.5))
    return figure


def _divergence(axes: Axes, summaries: Sequence[Summary]) -> None:
    across, methods = (
        "flops" if _counted(summaries) else "work",
        defaultdict[str, list[Summary]](list),
    )
    for summary in summaries:
        if summary.policy == ORDER_NOISE:
            axes.axhline(
                summary.answer_kl.value, color="grey", linestyle=":", linewidth=1, label=ORDER_NOISE
            )
        elif summary.policy != "full":
            methods[summary.policy.partition(":")[0]].append(summary)

    for number, (name, found) in enumerate(methods.items()):
        found.sort(key=lambda summary: getattr(summary, across))
        kl = np.array(
            [(one.answer_kl.value, one.answer_kl.low, one.answer_kl.high) for one in found]
        )
        axes.errorbar(
            [getattr(summary, across) for summary in found], kl[:, 0], [kl[:, 0] - kl[:, 1], kl[:,
            2] - kl[:, 0]],
            fmt="o-", markersize=4, linewidth=1, elinewidth=0.7, capsize=2,
            color=COLOURS[number % len(COLOURS)],
            label=name if len(found) > 1 else found[0].policy,
        )  # fmt: skip

    axes.set_yscale("symlog", linthresh=LEAST_KL)
    axes.margins(x=0.15)
    axes.xaxis.set_major_formatter(mpl.ticker.PercentFormatter(1.0))


def _counted(summaries: Sequence[Summary]) -> bool:
    """Return whether the host counts floating-point operations."""
    return not any(isnan(summary.flops) for summary in summaries if summary.policy != ORDER_NOISE)


def write_calibration(profile: PolicyProfile, path: Path) -> Path:
    """Draw each policy's distance from full recomputation, in units of order noise, against its
    work.
    """
    unit = profile.order_noise[0] or 1.0
    with mpl.rc_context(STYLE):
        figure, axes = plt.subplots(figsize=(6.4, 4.2))
        _draw_level(axes, profile.order_noise[0] / unit, ORDER_NOISE)
        for number, one in enumerate(profile.tried):
            value, low, high = (figure / unit for figure in one.kl)
            chosen = one.policy in profile.chosen
            axes.errorbar(
                one.flops, value, [[value - low], [high - value]], fmt="*" if chosen else "o",
                markersize=12 if chosen else 6, color=COLOURS[number % len(COLOURS)], capsize=3,
                label=one.policy,
            )  # fmt: skip
        axes.set_xlabel(FLOPS)
        axes.set_ylabel("KL(full || policy) along full's answer, of order noise")
        axes.set_ylim(bottom=0)
        axes.margins(x=0.15)
        axes.xaxis.set_major_formatter(mpl.ticker.PercentFormatter(1.0, decimals=0))
        axes.legend(fontsize=8, loc="center left", bbox_to_anchor=(1.2, 0.5))
        return save(figure, path)


def _bars(summaries: Sequence[Summary], colours: dict[str, tuple[float, ...]], name: str) -> Figure:
    groups = list(dict.fromkeys(summary.group for summary in summaries))
    figure, axes = plt.subplots(figsize=(max(6.4, 0.9 * len(groups) + 2), 4.2))
    width = 0.84 / len(colours)

    for number, (policy, colour) in enumerate(colours.items()):
        mine = {summary.group: summary for summary in summaries if summary.policy == policy}
        found = [(place, mine[group]) for place, group in enumerate(groups) if group in mine]
        x = [place - 0.42 + width * (number + 0.5) for place, _ in found]
        errors = [[s.score - s.low for _, s in found], [s.high - s.score for _, s in found]]
        scores, thin = [s.score for _, s in found], {"elinewidth": 0.7}
        axes.bar(x, scores, width, yerr=errors, color=colour, label=policy, error_kw=thin)

    axes.set_xticks(
        range(len(groups)),
        [group.replace("/", "\n").replace("_", "\n") for group in groups],
        fontsize=9,
    )
    axes.set_xlabel(name)
    axes.set_ylabel("score (95 % interval)")
    axes.set_ylim(0, 1.05)
    axes.grid(axis="x", visible=False)
    axes.legend(
        ncols=min(4, len(colours)), loc="lower center", bbox_to_anchor=(0.5, 1.0), fontsize=9
    )
    return figure


def write_pareto(found: Sequence[FlowScore], best: Sequence[FlowScore], directory: Path) -> Path:
    """Draw accuracy against speed of flows. Flows on the Pareto frontier are joined, numbered and
    named.

    Flows that ended at an early stage are paler, because their score is of easier tasks.
    """
    last = max(len(one.passed) for one in found)
    with mpl.rc_context(STYLE):
        figure, axes = plt.subplots(figsize=(7.2, 4.8))
        for one in found:
            whole, on_it = len(one.passed) == last, one in best
            axes.scatter(
                one.faster, one.score, s=36 if on_it else 18, alpha=1.0 if whole else 0.3,
                color="tab:red" if on_it else "tab:blue" if whole else "grey",
            )  # fmt: skip
        axes.plot(
            [one.faster for one in best], [one.score for one in best], color="tab:red", linewidth=1
        )
        for number, one in enumerate(best, 1):
            axes.annotate(
                str(number),
                (one.faster, one.score),
                xytext=(0, 6),
                textcoords="offset points",
                fontsize=8,
                ha="center",
            )
        named = "\n".join(f"{number}  {one.flow}" for number, one in enumerate(best, 1))
        axes.text(1.02, 0.5, named, transform=axes.transAxes, fontsize=8, va="center")
        axes.set_xlabel("decode step: times as fast as dense attention")
        axes.set_ylabel("score")
        axes.set_ylim(-0.02, 1.05)
        axes.margins(x=0.2)
        return save(figure, directory / "flows.png")


def write_layers(panels: Sequence[tuple[str, np.ndarray, range]], path: Path) -> None:
    """Draw the most important tokens of each layer (SparseX Figures 5 and 6).

    Args:
        panels: title, bool [L, T] (token is among the layer's top), and the tokens of the needle.
    """
    with mpl.rc_context(STYLE | {"axes.grid": False}):
        figure, grid = plt.subplots(
            1, len(panels), figsize=(5.2 * len(panels), 3.4), sharey=True, squeeze=False
        )
        for axes, (title, chosen, needle) in zip(grid[0], panels, strict=True):
            _layer_panel(axes, title, chosen, needle)
        grid[0][0].set_ylabel("layer")
        save(figure, path)


def write_layer_profile(found: Mapping[str, np.ndarray], stable: Sequence[int], path: Path) -> None:
    """Draw for each data set how many texts agree with a layer on the most important block, and N*
    (SamKV Figure 8).
    """
    with mpl.rc_context(STYLE):
        figure, axes = plt.subplots(figsize=(6.4, 3.6))
        for layer in stable:
            label = "stable (N*)" if layer == stable[0] else None
            axes.axvspan(
                layer - 0.5, layer + 0.5, color="gold", alpha=0.35, linewidth=0, label=label
            )
        for number, (name, scores) in enumerate(found.items()):
            axes.plot(
                scores, marker="o", markersize=4, linewidth=1.3, color=COLOURS[number], label=name
            )
        axes.set_xlabel("layer")
        axes.set_ylabel("texts whose best block stands out")
        axes.yaxis.set_major_formatter(mpl.ticker.PercentFormatter(1.0, decimals=0))
        axes.xaxis.set_major_locator(mpl.ticker.MaxNLocator(integer=True))
        axes.legend(fontsize=8, loc="center left", bbox_to_anchor=(1.02, 0.5))
        save(figure, path)


def _layer_panel(axes: Axes, title: str, chosen: np.ndarray, needle: range) -> None:
    layers, places = chosen.nonzero()
    inside = (places >= needle.start) & (places < needle.stop)
    axes.axvspan(needle.start, needle.stop, color="gold", alpha=0.45, linewidth=0, label="needle")
    axes.scatter(places[~inside], layers[~inside], s=5, color="tab:blue", label="top tokens")
    axes.scatter(
        places[inside], layers[inside], s=14, color="tab:red", label="top tokens in the needle"
    )
    axes.set_title(title, fontsize=10)
    axes.set_xlabel("position in the prompt")
    axes.set_yticks(range(chosen.shape[0]))
    axes.legend(loc="upper center", bbox_to_anchor=(0.5, -0.2), ncols=3, fontsize=8)


def write_heads(head_map: HeadMap, path: Path) -> Path:
    """Draw all measurements by layer and KV head. Heads marked G and R keep all tokens."""
    layers, heads = len(head_map.classes), len(head_map.classes[0])
    measured = (
        ("attention outside sinks and window", head_map.far_mass), ("shift with the prefix",
        head_map.shift),
        ("effect of a window, KL in nats", head_map.effect),
    )  # fmt: skip
    panels = [(title, values) for title, values in measured if values]

    with mpl.rc_context(STYLE | {"axes.grid": False}):
        size = (len(panels) * (1.9 + 0.45 * max(heads, 4)), 1.6 + 0.3 * layers)
        figure, grid = plt.subplots(1, len(panels), figsize=size, sharey=True)
        for axes, (title, values) in zip(grid, panels, strict=True):
            image = axes.imshow(values, aspect="auto", cmap="YlOrRd", vmin=0)
            figure.colorbar(image, ax=axes)
            axes.set_title(title, fontsize=10)
            axes.set_xlabel("KV head")
            axes.set_xticks(range(heads))
            axes.tick_params(labelsize=8)
            for layer, classes in enumerate(head_map.classes):
                for head, found in enumerate(classes):
                    ink = "white" if values[layer][head] > 0.6 * image.get_clim()[1] else "black"
                    if found is not HeadClass.LOCAL:
                        axes.text(
                            head,
                            layer,
                            found[0].upper(),
                            ha="center",
                            va="center",
                            fontsize=8,
                            color=ink,
                        )
        grid[0].set_ylabel("layer")
        return save(figure, path)


def save(figure: Figure, path: Path) -> Path:
    """Write a figure to a file, and close it."""
    figure.savefig(path)
    plt.close(figure)
    return path
