"""A simulated fleet in a terminal."""

import numpy as np
from rich import box
from rich.console import Group
from rich.table import Table
from rich.text import Text

from kvgraft_lab.simulation.study import ONE_SERVER, FleetRow, FleetStudy, Quantiles

REUSE = (
    "servers", "router", "reused,\n%", "prefix", "grafted", "of one\nserver", "TTFT, s:\nP50",
    "\nP95", "\nP99",
)  # fmt: skip
ROUTING = (
    "servers", "router", "imbal-\nance", "sketches,\nKB/s", "each,\nKB/s", "stale,\ns: P50",
    "\nP99",
    "router,\nms: P50", "\nP99",
)  # fmt: skip
BOUND = (
    f"{ONE_SERVER}: all prompts in one pool as large as those of all servers together; its times "
    "say nothing"
)


def render(study: FleetStudy) -> Group:
    """What was simulated; what each router reuses with each number of servers, and what it
    takes."""
    reuse, routing = _table(REUSE), _table(ROUTING)
    for row in study.rows:
        is_last = row.router == ONE_SERVER
        reuse.add_row(*reuse_cells(row), style="dim" if is_last else "", end_section=is_last)
        if not is_last:
            routing.add_row(
                *routing_cells(row), end_section=row.router == study.settings.routers[-1]
            )
    return Group(Text(headline(study), style="dim"), reuse, Text(BOUND, style="dim"), routing)


def _table(heads: tuple[str, ...]) -> Table:
    table = Table(box=box.SIMPLE_HEAD, padding=(0, 1, 0, 0), pad_edge=False)
    for head in heads:
        table.add_column(
            head, justify="left" if head == "router" else "right", no_wrap=True, vertical="bottom"
        )
    return table


def headline(study: FleetStudy) -> str:
    """What was simulated."""
    settings = study.settings
    return (
        f"{study.requests:,} requests ({study.traffic}), {study.prompt_tokens:,.0f} tokens a "
        "prompt, the first "
        f"{settings.warm_up:.0%} not counted; {study.how_rated}; a server reads {_speed(study)}; "
        "pools "
        f"of {settings.pool_tokens:,} tokens, sketches every {settings.period_s:g} s, "
        f"{settings.delay_s:g} s late"
    )


def reuse_cells(row: FleetRow) -> list[str]:
    """As in `REUSE`."""
    shares = (f"{100 * share:.1f}" for share in (row.reused, row.prefix, row.grafted))
    return [
        f"{row.servers}",
        row.router,
        *shares,
        f"{row.of_bound:.3f}",
        *_quantiles(row.ttft_s, "p50", "p95", "p99"),
    ]


def routing_cells(row: FleetRow) -> list[str]:
    """As in `ROUTING`."""
    each = (row.sketch_bytes_s or 0.0) / 1000
    return [
        f"{row.servers}",
        row.router,
        "" if row.imbalance is None else f"{row.imbalance:.2f}",
        *([f"{each:,.1f}", f"{each / row.servers:.2f}"] if each else ["", ""]),
        *_quantiles(row.staleness_s, "p50", "p99"),
        *_quantiles(row.routing_ms, "p50", "p99"),
    ]


def _speed(study: FleetStudy) -> str:
    """Of a prompt as long as they are on average."""
    tokens = study.prompt_tokens
    return (
        f"{tokens / float(study.settings.costs.computing(tokens, np.array(tokens**2 / 2))):,.0f} "
        "tokens a second"
    )


def _quantiles(found: Quantiles | None, *names: str) -> list[str]:
    return ["" if found is None else f"{getattr(found, name):.2f}" for name in names]
