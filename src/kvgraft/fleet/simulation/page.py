"""A simulated fleet as a self-contained HTML page."""

from importlib.resources import files

import jinja2

from kvgraft import __version__
from kvgraft.fleet.simulation.study import ONE_SERVER, FleetStudy
from kvgraft.fleet.simulation.tables import BOUND, HEADS, cells, headline


def render_page(study: FleetStudy) -> str:
    """The table of a terminal, with a bar of what is reused in each row."""
    template = files("kvgraft.fleet.simulation").joinpath("fleet.html.j2").read_text(encoding="utf-8")
    rows = [
        {"cells": cells(row), "prefix": row.prefix, "grafted": row.grafted, "is_bound": row.router == ONE_SERVER}
        for row in study.rows
    ]
    return (
        jinja2.Environment(autoescape=True)
        .from_string(template)
        .render(
            headline=headline(study),
            bound=BOUND,
            version=__version__,
            heads=[head.replace("-\n", "").replace("\n", " ") for head in HEADS],
            rows=rows,
        )
    )
