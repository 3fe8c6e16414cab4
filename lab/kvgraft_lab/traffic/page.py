"""Self-contained HTML page of an analysis. Each request is a bar of its tokens' origins, in
order.
"""

import json
from importlib.resources import files
from typing import Any

import jinja2
from markupsafe import Markup

from kvgraft import __version__
from kvgraft_lab.traffic.analysis import KVGRAFT, Analysed, Analysis
from kvgraft_lab.traffic.origins import TokenCounts
from kvgraft_lab.traffic.tables import EVERYTHING, PRICED, headline, notes, pool_name


def render_page(analysed: Analysed) -> str:
    """Return the page. It needs no other files, names sessions, and holds no text of a prompt."""
    analysis = analysed.analysis
    sides = list(analysis.largest.sides)
    data = {
        "sides": [
            {"name": side, **_shares(counts)} for side, counts in analysis.largest.sides.items()
        ],
        "chosen": sides.index(KVGRAFT),
        "pools": [
            {
                "name": pool_name(pool.tokens),
                "new": [_shares(pool.sides[side])["new"] for side in sides],
            }
            for pool in analysis.pools
        ],
        "turns": [
            {
                "name": group.name,
                "requests": group.sides[KVGRAFT].requests,
                **_shares(group.sides[KVGRAFT]),
            }
            for group in analysis.turns
        ],
        "sessions": _sessions(analysed),
        "seconds": _seconds(analysis),
    }
    template = files("kvgraft_lab.traffic").joinpath("traffic.html.j2").read_text(encoding="utf-8")
    environment = jinja2.Environment(autoescape=True)
    # inside a script element only these characters could end it or start a comment
    safe = json.dumps(data).replace("<", "\\u003c").replace(">", "\\u003e").replace("&", "\\u0026")
    return environment.from_string(template).render(
        headline=headline(analysis),
        notes=notes(analysis),
        priced=PRICED,
        version=__version__,
        data=Markup(safe),  # noqa: S704
    )


def _shares(counts: TokenCounts) -> dict[str, float]:
    kinds = {
        "prefix": counts.prefix, "continued": counts.continued, "grafted": sum(counts.grafted),
        "similar": counts.similar, "new": counts.new,
    }  # fmt: skip
    return {name: round(counts.share(tokens), 4) for name, tokens in kinds.items()}


def _seconds(analysis: Analysis) -> dict[str, Any]:
    """Return rows of (name, seconds of full computation, seconds by side), all prompts first; no
    rows without costs.
    """
    groups = [
        ("all prompts", analysis.largest.seconds),
        *((one.name, one.seconds) for one in analysis.sessions),
    ]
    priced = [(name, seconds) for name, seconds in groups if seconds is not None]
    rows = [
        [name, round(seconds.full, 4), *(round(s, 4) for s in seconds.sides.values())]
        for name, seconds in priced
    ]
    return {"heads": [EVERYTHING, *analysis.largest.sides], "rows": rows}


def _sessions(analysed: Analysed) -> list[dict[str, Any]]:
    """Return sessions with their requests in order: origins and lengths of the stretches, by
    side.
    """
    sessions: dict[str, list[list[list[list[int]]]]] = {}
    for request, answers in zip(analysed.requests, analysed.answers, strict=True):
        stretches = [[one.origins.tolist(), one.lengths.tolist()] for one in answers]
        sessions.setdefault(request.session, []).append(stretches)
    return [{"name": name, "requests": requests} for name, requests in sessions.items()]
