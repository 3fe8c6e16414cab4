"""A simulated fleet as a picture (needs matplotlib)."""

from pathlib import Path

import matplotlib as mpl
from matplotlib import pyplot as plt
from matplotlib.axes import Axes

from kvgraft_lab.evaluate.plots import STYLE, save
from kvgraft_lab.simulation.study import ONE_SERVER, FleetRow, FleetStudy

mpl.use("Agg")
COLOURS = {
    "random": "#a9b0b8",
    "least-loaded": "#7f9fd6",
    "prefix-aware": "#f2b96b",
    "segment-aware": "#5aa65a",
    ONE_SERVER: "#555555",
}


def draw(study: FleetStudy, path: Path) -> None:
    """What is reused, and seconds to the first token (half of the requests, and all but five of a
    hundred), by number of servers."""
    with mpl.rc_context(STYLE):
        figure, (shares, seconds) = plt.subplots(1, 2, figsize=(9.6, 3.9), layout="constrained")
        for router, colour in COLOURS.items():
            rows = [row for row in study.rows if row.router == router]
            line = "--" if router == ONE_SERVER else "-"
            _line(shares, rows, [row.reused for row in rows], router, color=colour, linestyle=line)
            timed = [row for row in rows if row.ttft_s is not None]
            for name, style in (("p50", "-"), ("p95", ":")):
                values = [getattr(row.ttft_s, name) for row in timed]
                _line(
                    seconds,
                    timed,
                    values,
                    f"{router}, {name.upper()}",
                    color=colour,
                    linestyle=style,
                )
        shares.set_ylim(0, 1)
        shares.yaxis.set_major_formatter(mpl.ticker.PercentFormatter(1.0, decimals=0))
        shares.set_title("prompt tokens that are reused", fontsize=10)
        seconds.set_ylim(bottom=0)
        seconds.set_title("seconds to the first token: P50, dotted: P95", fontsize=10)
        for axes in (shares, seconds):
            axes.set_xscale("log", base=2)
            axes.minorticks_off()
            axes.set_xticks(study.settings.servers, list(map(str, study.settings.servers)))
            axes.set_xlabel("servers")
        figure.legend(
            *shares.get_legend_handles_labels(),
            loc="outside lower center",
            ncols=len(COLOURS),
            fontsize=9,
        )
        save(figure, path)


def _line(
    axes: Axes, rows: list[FleetRow], values: list[float], label: str, *, color: str, linestyle: str
) -> None:
    if rows:
        servers = [row.servers for row in rows]
        axes.plot(
            servers, values, marker="o", markersize=4, label=label, color=color, linestyle=linestyle
        )
