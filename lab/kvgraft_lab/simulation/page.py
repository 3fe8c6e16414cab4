"""A simulated fleet as a self-contained HTML page."""

from importlib.resources import files

import jinja2

from kvgraft import __version__
from kvgraft_lab.simulation.study import ONE_SERVER, FleetStudy
from kvgraft_lab.simulation.tables import (
    BOUND,
    REUSE,
    ROUTING,
    headline,
    reuse_cells,
    routing_cells,
)


def render_page(study: FleetStudy) -> str:
    """The tables of a terminal, with a bar of what is reused in each row."""
    template = files("kvgraft_lab.simulation").joinpath("fleet.html.j2").read_text(encoding="utf-8")
    reuse = [
        {
            "cells": reuse_cells(row),
            "prefix": row.prefix,
            "grafted": row.grafted,
            "is_bound": row.router == ONE_SERVER,
        }
        for row in study.rows
    ]
    routing = [
        {"cells": routing_cells(row), "is_last": row.router == study.settings.routers[-1]}
        for row in study.rows
        if row.router != ONE_SERVER
    ]
    values = {
        "headline": headline(study),
        "bound": BOUND,
        "version": __version__,
        "reuse_heads": _flat(REUSE),
        "reuse": reuse,
        "routing_heads": _flat(ROUTING),
        "routing": routing,
    }
    return jinja2.Environment(autoescape=True).from_string(template).render(values)


def _flat(heads: tuple[str, ...]) -> list[str]:
    """Without line breaks."""
    return [head.replace("-\n", "").replace("\n", " ") for head in heads]
