"""The agents' experiment: run it, measure divergences, decide the hypotheses, compare reruns."""

from dataclasses import replace
from pathlib import Path
from typing import Annotated

import typer

from kvgraft.cli import run as run_command
from kvgraft.cli.options import (
    DeviceOption,
    DtypeOption,
    JsonOption,
    ModelOption,
    console,
    print_json,
    progress_console,
)
from kvgraft.evaluate.progress import progress_bar
from kvgraft.testbed import MODEL_DIR
from research.cross_query.conditions import find_conditions
from research.cross_query.figures import summarise
from research.cross_query.runner import ROWS, ExperimentSettings, read_rows, run

app = typer.Typer(
    name="python -m research.cross_query",
    help="ReAct agents that reuse what they have read: docs/evaluation.md.",
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
)
SuiteOption = Annotated[str, typer.Option(help="By commas: qa, tools.")]
SeedsOption = Annotated[str, typer.Option(help="By commas; ranges as 0-4.")]
EpisodesOption = Annotated[int, typer.Option(help="Of each suite and seed.")]
ConditionsOption = Annotated[str, typer.Option(help="By commas; main, ablations and all are groups.")]
OutOption = Annotated[Path, typer.Option(help="Directory of the results; one that holds a part is continued.")]
VariationOption = Annotated[str, typer.Option(help="How prompts nearly repeat, by commas: plain, adversarial.")]
PagesOption = Annotated[int, typer.Option(help="Pages of each condition's KV pool.")]
ApproximateOption = Annotated[
    bool, typer.Option("--approximate-sources/--no-approximate-sources", help="Graft what was computed after a graft.")
]
DirectoryArgument = Annotated[Path, typer.Argument(metavar="DIR", help="What `run`, `kl` or `stability` wrote.")]


@app.command("run")
def run_agents(
    suite: SuiteOption = "qa,tools",
    seeds: SeedsOption = "0",
    episodes: EpisodesOption = 10,
    conditions: ConditionsOption = "main",
    out: OutOption = Path("results/agents/main"),
    rounds: Annotated[int, typer.Option(help="Times that each seed is run, with empty caches.")] = 1,
    variation: VariationOption = "plain",
    sampling: Annotated[str, typer.Option(help="greedy, or paper: temperature 0.2, top-p 0.95.")] = "greedy",
    approximate_sources: ApproximateOption = True,
    pages: PagesOption = 4096,
    model: ModelOption = MODEL_DIR,
    dtype: DtypeOption = "float32",
    device: DeviceOption = "cpu",
    as_json: JsonOption = False,
) -> None:
    """Run episodes under conditions in turn: one line of JSON for each step, and a table."""
    from research.cross_query.tables import render_figures

    settings = _settings(suite, seeds, conditions, variation, approximate_sources, episodes, pages, rounds, sampling)
    with progress_bar(progress_console, "running agents") as on_progress:
        rows = run(settings, model, out, on_progress, dtype=dtype, device=device)
    found = summarise(rows)
    if as_json:
        print_json(found)
        return
    console.print(render_figures(found))
    console.print(f"[dim]{out}: {ROWS}[/dim]", soft_wrap=True)


@app.command()
def kl(
    suite: SuiteOption = "qa,tools",
    seeds: SeedsOption = "0",
    episodes: EpisodesOption = 10,
    conditions: ConditionsOption = "similar",
    out: OutOption = Path("results/agents/main"),
    variation: VariationOption = "plain",
    approximate_sources: ApproximateOption = True,
    pages: PagesOption = 4096,
    model: ModelOption = MODEL_DIR,
    dtype: DtypeOption = "float32",
    device: DeviceOption = "cpu",
    as_json: JsonOption = False,
) -> None:
    """Measure the true KL of every step, at the boundaries of its segments and of its next token; nothing is timed."""
    from research.cross_query import divergence, hypotheses
    from research.cross_query.tables import render_verdicts

    settings = _settings(suite, seeds, conditions, variation, approximate_sources, episodes, pages)
    with progress_bar(progress_console, "measuring") as on_progress:
        rows = divergence.measure(settings, model, out, on_progress, dtype=dtype, device=device)
    found = [
        *hypotheses.judge_boundaries(rows),
        *hypotheses.judge_retrieval(rows),
        *hypotheses.judge_fallbacks((), rows),
    ]
    if as_json:
        print_json(found)
        return
    console.print(render_verdicts(found))
    console.print(f"[dim]{out}: {divergence.ROWS}[/dim]", soft_wrap=True)


@app.command("verdicts")
def decide(
    directory: DirectoryArgument,
    plot: Annotated[Path | None, typer.Option(help="Also draw speed, ablations and boundary KL there.")] = None,
    model: ModelOption = MODEL_DIR,
    as_json: JsonOption = False,
) -> None:
    """Decide H1 to H4 of cross-query segment reuse from what `run` and `kl` have measured."""
    from kvgraft.engine.config import load_config
    from research.cross_query import divergence, hypotheses, numerics
    from research.cross_query.tables import render_figures, render_verdicts

    rows, measured, config = read_rows(directory), divergence.read_rows(directory), load_config(model)
    if not rows and not measured:
        raise ValueError(f"{directory} holds no experiment: neither {ROWS} nor {divergence.ROWS}")
    figures = summarise(rows)
    found = [
        *hypotheses.judge_speed(rows), *hypotheses.judge_boundaries(measured), *hypotheses.judge_retrieval(measured),
        *numerics.judge_reindexing(config.rope, config.max_position), *hypotheses.judge_fallbacks(rows, measured),
    ]  # fmt: skip
    pictures = []
    if plot is not None:
        from research.cross_query.pictures import write_pictures  # matplotlib takes a second to load

        pictures = write_pictures(rows, measured, plot)
    if as_json:
        print_json({"figures": figures, "verdicts": found, "pictures": [str(path) for path in pictures]})
        return
    console.print(render_figures(figures))
    console.print(render_verdicts(found))
    if pictures:
        console.print(f"[dim]{plot}: {', '.join(path.name for path in pictures)}[/dim]", soft_wrap=True)


@app.command()
def stability(
    suite: SuiteOption = "qa,tools",
    seeds: SeedsOption = "0",
    episodes: EpisodesOption = 5,
    conditions: ConditionsOption = "none,similar,transitive",
    out: OutOption = Path("results/agents/stability"),
    reruns: Annotated[int, typer.Option(help="Of every episode, each with empty caches and draws of its own.")] = 5,
    variation: VariationOption = "plain",
    approximate_sources: ApproximateOption = True,
    pages: PagesOption = 4096,
    model: ModelOption = MODEL_DIR,
    dtype: DtypeOption = "float32",
    device: DeviceOption = "cpu",
    as_json: JsonOption = False,
) -> None:
    """How much sampled answers differ from rerun to rerun, with reuse and without."""
    from research.cross_query.reruns import compare
    from research.cross_query.tables import render_reruns

    if reruns < 2:
        raise ValueError(f"--reruns must be at least 2, got {reruns}")
    settings = _settings(suite, seeds, conditions, variation, approximate_sources, episodes, pages, reruns, "paper")
    with progress_bar(progress_console, "running agents") as on_progress:
        rows = run(settings, model, out, on_progress, dtype=dtype, device=device)
    found = compare(rows)
    if as_json:
        print_json(found)
        return
    console.print(render_reruns(found))
    console.print(f"[dim]{out}: {ROWS}[/dim]", soft_wrap=True)


def _settings(
    suite: str, seeds: str, conditions: str, variation: str, approximate_sources: bool, episodes: int, pages: int,
    rounds: int = 1, sampling: str = "greedy",
) -> ExperimentSettings:  # fmt: skip
    chosen = tuple(replace(one, approximate_sources=approximate_sources) for one in find_conditions(conditions))
    return ExperimentSettings(
        _split(suite), _parse_seeds(seeds), chosen, episodes, rounds, _split(variation), sampling, pages
    )


def _split(text: str) -> tuple[str, ...]:
    return tuple(part.strip() for part in text.split(",") if part.strip())


def _parse_seeds(text: str) -> tuple[int, ...]:
    try:
        ends = [[int(end) for end in part.split("-")] for part in _split(text)]
        return tuple(seed for first, *last in ends for seed in range(first, (*last, first)[0] + 1))
    except ValueError:
        raise ValueError(f"seeds must be numbers or ranges (0-4), separated by commas, got {text!r}") from None


if __name__ == "__main__":
    raise SystemExit(run_command(app))
