"""Command about recorded traffic."""

from pathlib import Path
from typing import TYPE_CHECKING, Annotated, NoReturn

import typer

from kvgraft.cli.options import JsonOption, app, check_output, console, find, progress_console, show
from kvgraft.cli.progress import progress_bar

if TYPE_CHECKING:
    from kvgraft_lab.traffic.analysis import Analysed

UNITS = {"K": 10**3, "M": 10**6, "G": 10**9}


@app.command()
def analyze(
    trace: Annotated[
        list[Path],
        typer.Argument(
            metavar="TRACE...",
            help="Files or directories: OpenAI requests as JSONL, vLLM's log, texts.",
        ),
    ],
    tokenizer: Annotated[
        Path | None,
        typer.Option(
            help="Directory of the tokenizer, or a model's name.", show_default="pieces of words"
        ),
    ] = None,
    pool: Annotated[
        str, typer.Option(help="Tokens that the KV pool holds, by commas: 500K,4M,unlimited.")
    ] = "unlimited",
    per_session: Annotated[
        bool, typer.Option("--per-session", help="Every session has a cache of its own.")
    ] = False,
    match: Annotated[str, typer.Option(help="exact, or similar: near-duplicates, too.")] = "exact",
    max_depth: Annotated[
        int | None,
        typer.Option(help="Of what is grafted from: 0 is exact KV only.", show_default="no limit"),
    ] = None,
    costs: Annotated[
        str,
        typer.Option(
            help=(
                "Decide what to graft: tokens, or a file of profile-costs, which gives seconds, "
                "too."
            )
        ),
    ] = "tokens",
    block_size: Annotated[int, typer.Option(help="Tokens of a block.")] = 16,
    skip_bad_lines: Annotated[
        bool, typer.Option("--skip-bad-lines", help="Go on without lines that cannot be read.")
    ] = False,
    plot: Annotated[Path | None, typer.Option(help="Draw it, as PNG.")] = None,
    html: Annotated[Path | None, typer.Option(help="Write a page with all requests.")] = None,
    as_json: JsonOption = False,
) -> None:
    """What reuse would give to recorded traffic: tokens by where their KV comes from. No model is
    needed."""
    check_outputs(plot, html)
    pools = [parse_pool(part) for part in pool.split(",")]
    from kvgraft.core.costs import find_costs
    from kvgraft.core.matches import MAX_DEPTH
    from kvgraft.core.segmentation import parse_match
    from kvgraft_lab.traffic.analysis import analyse
    from kvgraft_lab.traffic.replay import ReplaySettings
    from kvgraft_lab.traffic.tables import render
    from kvgraft_lab.traffic.tokens import open_tokens
    from kvgraft_lab.traffic.trace import read_trace

    reader = open_tokens(None if tokenizer is None else find(tokenizer))
    depth, similarity = MAX_DEPTH if max_depth is None else max_depth, parse_match(match)
    settings = ReplaySettings(
        block_size,
        depth,
        find_costs(costs, refuse_measuring),
        similarity=similarity,
        anchors=reader.anchors,
    )
    with progress_bar(progress_console, "reading") as on_progress:
        traced = read_trace(trace, reader, skip_bad_lines=skip_bad_lines, on_progress=on_progress)
    with progress_bar(progress_console, "replaying") as on_progress:
        analysed = analyse(
            traced,
            settings,
            pools,
            per_session=per_session,
            tokenizer=reader.name,
            on_progress=on_progress,
        )
    show(analysed.analysis, render(analysed.analysis), as_json=as_json)
    _write(analysed, html, plot)
    written = [str(path) for path in (html, plot) if path is not None]
    if written and not as_json:
        console.print(f"[dim]{', '.join(written)}[/dim]", soft_wrap=True)


def _write(analysed: "Analysed", html: Path | None, plot: Path | None) -> None:
    """Write the page and the figure, if requested."""
    if html is not None:
        from kvgraft_lab.traffic.page import render_page

        html.write_text(render_page(analysed), encoding="utf-8")
    if plot is not None:
        from kvgraft_lab.traffic.picture import draw  # matplotlib takes a second to load

        draw(analysed.analysis, plot)


def parse_pool(text: str) -> int | None:
    """Return the tokens of a pool; None has no limit."""
    text = text.strip()
    if text == "unlimited":
        return None
    number, unit = (text[:-1], UNITS[text[-1].upper()]) if text[-1:].upper() in UNITS else (text, 1)
    try:
        tokens = round(float(number) * unit)
    except (ValueError, OverflowError):
        tokens = 0
    if tokens < 1:
        raise ValueError(f"--pool {text!r}: must be tokens, as 500000, 500K or 4M, or unlimited")
    return tokens


def check_outputs(plot: Path | None, html: Path | None) -> None:
    """Check before the work starts that the output files can be written."""
    check_output(plot, "--plot")
    check_output(html, "--html")
    if plot is not None and plot.suffix != ".png":
        raise ValueError(f"--plot {plot}: must end in .png")


def refuse_measuring() -> NoReturn:
    """Refuse to measure costs, because that needs a model."""
    raise ValueError(
        "--costs measured: no model runs here; give tokens, or a file that profile-costs has "
        "written"
    )
