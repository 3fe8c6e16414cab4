"""Command that simulates a fleet."""

from dataclasses import astuple, replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from kvgraft.cli.fleet import fleet_app
from kvgraft.cli.options import JsonOption, console, find, progress_console, show
from kvgraft.cli.progress import progress_bar
from kvgraft_lab.commands.traffic import check_outputs, parse_pool, refuse_measuring

if TYPE_CHECKING:
    from kvgraft.core.costs import Costs
    from kvgraft_lab.simulation.generated import TrafficShape
    from kvgraft_lab.simulation.study import FleetStudy
    from kvgraft_lab.simulation.traffic import Traffic
    from kvgraft_lab.traffic.trace import RequestTrace

# default speed of one prefill, without measurements
TOKENS_PER_SECOND = 8000.0
# maximum number of servers
MOST = 1024
ROUTERS = "random,least-loaded,prefix-aware,segment-aware"


@fleet_app.command()
def simulate(
    trace: Annotated[
        list[Path] | None,
        typer.Argument(
            metavar="[TRACE...]", help="Recorded requests, as `kvgraft analyze` reads them."
        ),
    ] = None,
    generated: Annotated[
        str, typer.Option(help="Instead of a trace: rag, chat or mixed.", show_default=False)
    ] = "",
    servers: Annotated[str, typer.Option(help="How many, by commas.")] = "2,8",
    routers: Annotated[str, typer.Option(help="By commas.")] = ROUTERS,
    pool: Annotated[
        str, typer.Option(help="Tokens that the KV pool of each server holds.")
    ] = "100K",
    costs: Annotated[
        str, typer.Option(help="Seconds of a prefill: tokens, or a file of profile-costs.")
    ] = "tokens",
    tokens_per_second: Annotated[
        float | None,
        typer.Option(
            help="Of a prefill, with --costs tokens.", show_default=f"{TOKENS_PER_SECOND:g}"
        ),
    ] = None,
    rate: Annotated[
        float | None,
        typer.Option(help="Requests a second of the whole fleet.", show_default="a load of .7"),
    ] = None,
    period: Annotated[float, typer.Option(help="Seconds between two sketches of a server.")] = 2.0,
    delay: Annotated[float, typer.Option(help="Seconds until a sketch is known.")] = 0.2,
    requests: Annotated[
        int | None,
        typer.Option(
            help="How many.", show_default="100 a server, 4,000 to 100,000; all of a trace"
        ),
    ] = None,
    warm_up: Annotated[
        float, typer.Option(help="Share of the requests, the first, that is not counted.")
    ] = 0.2,
    documents: Annotated[
        int | None, typer.Option(help="Of the generated corpus.", show_default="2000")
    ] = None,
    question: Annotated[
        int | None, typer.Option(help="New tokens of generated prompts.", show_default="32")
    ] = None,
    seed: Annotated[int, typer.Option(help="Of generated requests and times.", min=0)] = 0,
    tokenizer: Annotated[
        Path | None, typer.Option(help="Of a trace.", show_default="pieces of words")
    ] = None,
    per_session: Annotated[
        bool, typer.Option("--per-session", help="Sessions of a trace share no text.")
    ] = False,
    skip_bad_lines: Annotated[
        bool, typer.Option("--skip-bad-lines", help="Of a trace: go on without them.")
    ] = False,
    plot: Annotated[Path | None, typer.Option(help="Draw it, as PNG.")] = None,
    html: Annotated[Path | None, typer.Option(help="Write a page.")] = None,
    as_json: JsonOption = False,
) -> None:
    """What routers would make of traffic: reuse and times of up to a thousand servers. No model is
    needed."""
    check_outputs(plot, html)
    if bool(trace) == bool(generated):
        raise ValueError("name files of a trace, or --generated rag, chat or mixed")
    _check_positive(rate=rate, requests=requests, tokens_per_second=tokens_per_second)
    from kvgraft_lab.simulation.study import StudySettings, compare
    from kvgraft_lab.simulation.traffic import GeneratedTraffic, RecordedTraffic

    priced = _priced(costs, tokens_per_second)
    settings = StudySettings(
        _numbers(servers), _names(routers), _tokens(pool), priced, period, delay, warm_up=warm_up
    )
    traffic: Traffic
    if trace:
        _refuse("of --generated traffic", documents=documents, question=question)
        recorded = _read(trace, tokenizer, skips=skip_bad_lines)
        traffic = RecordedTraffic(recorded, requests, rate, priced, seed, per_session)
    else:
        _refuse(
            "of a trace",
            tokenizer=tokenizer,
            per_session=per_session,
            skip_bad_lines=skip_bad_lines,
        )
        traffic = GeneratedTraffic(
            generated, _shape(generated, documents, question), requests, rate, priced, seed
        )
    with progress_bar(progress_console, "simulating") as on_progress:
        study = compare(settings, traffic, on_progress=on_progress)
    _write(study, html, plot, as_json=as_json)


def _read(paths: list[Path], tokenizer: Path | None, *, skips: bool) -> "RequestTrace":
    from kvgraft_lab.traffic.tokens import open_tokens
    from kvgraft_lab.traffic.trace import read_trace

    reader = open_tokens(None if tokenizer is None else find(tokenizer))
    with progress_bar(progress_console, "reading") as on_progress:
        return read_trace(paths, reader, skip_bad_lines=skips, on_progress=on_progress)


def _shape(kind: str, documents: int | None, question: int | None) -> "TrafficShape":
    """Return the shape of generated traffic, with the given values in place of the defaults."""
    from kvgraft_lab.simulation.generated import KINDS

    if kind not in KINDS:
        raise ValueError(f"--generated {kind!r}: must be {', '.join(KINDS)}")
    given = {"documents": documents, "question_tokens": question}
    return replace(
        KINDS[kind], **{name: value for name, value in given.items() if value is not None}
    )


def _priced(costs: str, tokens_per_second: float | None) -> "Costs":
    """Return costs in seconds. Costs in tokens are converted."""
    from kvgraft.core.costs import TOKENS, Costs, find_costs

    found = find_costs(costs, refuse_measuring)
    if found is not TOKENS and tokens_per_second is not None:
        raise ValueError(
            f"--tokens-per-second: --costs {costs} says already how long a prefill takes"
        )
    return (
        found
        if found is not TOKENS
        else Costs(*(v / (tokens_per_second or TOKENS_PER_SECOND) for v in astuple(TOKENS)))
    )


def _numbers(servers: str) -> tuple[int, ...]:
    """Return the numbers of servers."""
    found = tuple(int(part) if part.strip().isdecimal() else 0 for part in servers.split(","))
    if not all(1 <= number <= MOST for number in found):
        raise ValueError(f"--servers {servers!r}: must be numbers from 1 to {MOST}, as 8 or 8,64")
    return found


def _names(routers: str) -> tuple[str, ...]:
    return tuple(name.strip() for name in routers.split(","))


def _tokens(pool: str) -> int:
    tokens = parse_pool(pool)
    if tokens is None:
        raise ValueError("--pool unlimited: a server has a pool of some size")
    return tokens


def _check_positive(**given: float | None) -> None:
    for name, value in given.items():
        if value is not None and not 0 < value < float("inf"):
            raise ValueError(f"--{name.replace('_', '-')} is {value}, must be more than 0")


def _refuse(what: str, **given: object) -> None:
    """Raise an error for options that would have no effect."""
    for name, value in given.items():
        if value not in (None, False):
            raise ValueError(f"--{name.replace('_', '-')} is {what}")


def _write(study: "FleetStudy", html: Path | None, plot: Path | None, *, as_json: bool) -> None:
    """Print the table or JSON, then write the page and the figure if requested."""
    from kvgraft_lab.simulation.tables import render

    show(study, render(study), as_json=as_json)
    if html is not None:
        from kvgraft_lab.simulation.page import render_page

        html.write_text(render_page(study), encoding="utf-8")
    if plot is not None:
        from kvgraft_lab.simulation.picture import draw  # matplotlib takes a second to load

        draw(study, plot)
    written = [str(path) for path in (html, plot) if path is not None]
    if written and not as_json:
        console.print(f"[dim]{', '.join(written)}[/dim]", soft_wrap=True)
