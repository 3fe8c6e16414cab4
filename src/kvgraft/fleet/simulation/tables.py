"""A simulated fleet in a terminal."""

import numpy as np
from rich import box
from rich.console import Group
from rich.table import Table
from rich.text import Text

from kvgraft.fleet.simulation.study import ONE_SERVER, FleetRow, FleetStudy, Quantiles

HEADS = (
    "servers", "router", "reused,\n%", "prefix", "grafted", "of one\nserver", "TTFT, s:\nP50", "\nP95", "\nP99",
    "imbal-\nance", "sketches,\nKB/s", "a server,\nKB/s", "stale, s:\nP50", "\nP99", "router, ms:\nP50", "\nP99",
)  # fmt: skip
BOUND = f"{ONE_SERVER}: all prompts in one pool as large as those of all servers together; its times say nothing"


def render(study: FleetStudy) -> Group:
    """What was simulated, and a row for each router and number of servers."""
    table = Table(box=box.SIMPLE_HEAD, padding=(0, 1, 0, 0))
    for number, head in enumerate(HEADS):
        justify = "left" if number == 1 else "right"
        table.add_column(head, justify=justify, no_wrap=True, vertical="bottom")  # type: ignore[arg-type]
    for row in study.rows:
        is_last = row.router == ONE_SERVER
        table.add_row(*cells(row), style="dim" if is_last else "", end_section=is_last)
    return Group(Text(headline(study), style="dim"), table, Text(BOUND, style="dim"))


def headline(study: FleetStudy) -> str:
    """What was simulated."""
    settings = study.settings
    return (
        f"{study.requests:,} requests ({study.traffic}), {study.prompt_tokens:,.0f} tokens a prompt, the first "
        f"{settings.warm_up:.0%} not counted; {study.how_rated}; a server reads {_speed(study)}; pools "
        f"of {settings.pool_tokens:,} tokens, sketches every {settings.period_s:g} s, {settings.delay_s:g} s late"
    )


def cells(row: FleetRow) -> list[str]:
    """As in `HEADS`."""
    sketches = row.sketch_bytes_s
    return [
        f"{row.servers}",
        row.router,
        *(f"{100 * share:.1f}" for share in (row.reused, row.prefix, row.grafted)),
        f"{row.of_bound:.3f}",
        *_quantiles(row.ttft_s, "p50", "p95", "p99", digits=2),
        "" if row.imbalance is None else f"{row.imbalance:.2f}",
        *(["", ""] if not sketches else [f"{sketches / 1000:.1f}", f"{sketches / 1000 / row.servers:.2f}"]),
        *_quantiles(row.staleness_s, "p50", "p99", digits=2),
        *_quantiles(row.routing_ms, "p50", "p99", digits=2),
    ]


def _speed(study: FleetStudy) -> str:
    """Of a prompt as long as they are on average."""
    tokens = study.prompt_tokens
    return f"{tokens / float(study.settings.costs.computing(tokens, np.array(tokens**2 / 2))):,.0f} tokens a second"


def _quantiles(found: Quantiles | None, *names: str, digits: int) -> list[str]:
    return ["" if found is None else f"{getattr(found, name):.{digits}f}" for name in names]
