"""Commands of the agents' experiment: run it, measure divergences, decide the hypotheses, compare reruns."""

from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from kvgraft.cli.options import (
    DeviceOption,
    DtypeOption,
    JsonOption,
    ModelOption,
    app,
    console,
    print_json,
    progress_console,
)
from kvgraft.evaluate.progress import progress_bar
from kvgraft.testbed import MODEL_DIR

if TYPE_CHECKING:
    from kvgraft.evaluate.agents.runner import Settings

agents_app = typer.Typer(
    name="agents", help="ReAct agents that reuse what they have read: docs/evaluation.md.", no_args_is_help=True
)
app.add_typer(agents_app)
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


@agents_app.command("run")
def run_agents(
    suite: SuiteOption = "qa,tools",
    seeds: SeedsOption = "0",
    episodes: EpisodesOption = 10,
    conditions: ConditionsOption = "main",
    out: OutOption = Path("agents"),
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
    from kvgraft.evaluate.agents.figures import summarise
    from kvgraft.evaluate.agents.runner import ROWS, run
    from kvgraft.evaluate.agents.tables import render_figures

    settings = _settings(suite, seeds, conditions, variation, approximate_sources, episodes, pages, rounds, sampling)
    with progress_bar(progress_console, "running agents") as on_progress:
        rows = run(settings, model, out, on_progress, dtype=dtype, device=device)
    found = summarise(rows)
    if as_json:
        print_json(found)
        return
    console.print(render_figures(found))
    console.print(f"[dim]{out}: {ROWS}[/dim]", soft_wrap=True)


@agents_app.command()
def kl(
    suite: SuiteOption = "qa,tools",
    seeds: SeedsOption = "0",
    episodes: EpisodesOption = 10,
    conditions: ConditionsOption = "similar",
    out: OutOption = Path("agents"),
    variation: VariationOption = "plain",
    approximate_sources: ApproximateOption = True,
    pages: PagesOption = 4096,
    model: ModelOption = MODEL_DIR,
    dtype: DtypeOption = "float32",
    device: DeviceOption = "cpu",
    as_json: JsonOption = False,
) -> None:
    """Measure the true KL of every step, at the boundaries of its segments and of its next token; nothing is timed."""
    from kvgraft.evaluate.agents import divergence, verdicts
    from kvgraft.evaluate.agents.tables import render_verdicts

    settings = _settings(suite, seeds, conditions, variation, approximate_sources, episodes, pages)
    with progress_bar(progress_console, "measuring") as on_progress:
        rows = divergence.measure(settings, model, out, on_progress, dtype=dtype, device=device)
    found = [*verdicts.judge_boundaries(rows), *verdicts.judge_retrieval(rows), *verdicts.judge_fallbacks((), rows)]
    if as_json:
        print_json(found)
        return
    console.print(render_verdicts(found))
    console.print(f"[dim]{out}: {divergence.ROWS}[/dim]", soft_wrap=True)


@agents_app.command("verdicts")
def decide(
    directory: DirectoryArgument,
    plot: Annotated[Path | None, typer.Option(help="Also draw speed, ablations and boundary KL there.")] = None,
    model: ModelOption = MODEL_DIR,
    as_json: JsonOption = False,
) -> None:
    """Decide H1 to H4 of cross-query segment reuse from what `run` and `kl` have measured."""
    from kvgraft.engine.config import load_config
    from kvgraft.evaluate.agents import divergence, numerics, verdicts
    from kvgraft.evaluate.agents.figures import summarise
    from kvgraft.evaluate.agents.runner import ROWS, read_rows
    from kvgraft.evaluate.agents.tables import render_figures, render_verdicts

    rows, measured, config = read_rows(directory), divergence.read_rows(directory), load_config(model)
    if not rows and not measured:
        raise ValueError(f"{directory} holds no experiment: neither {ROWS} nor {divergence.ROWS}")
    figures = summarise(rows)
    found = [
        *verdicts.judge_speed(rows), *verdicts.judge_boundaries(measured), *verdicts.judge_retrieval(measured),
        *numerics.judge_reindexing(config.rope, config.max_position), *verdicts.judge_fallbacks(rows, measured),
    ]  # fmt: skip
    pictures = []
    if plot is not None:
        from kvgraft.evaluate.agents.pictures import write_pictures  # matplotlib takes a second to load

        pictures = write_pictures(rows, measured, plot)
    if as_json:
        print_json({"figures": figures, "verdicts": found, "pictures": [str(path) for path in pictures]})
        return
    console.print(render_figures(figures))
    console.print(render_verdicts(found))
    if pictures:
        console.print(f"[dim]{plot}: {', '.join(path.name for path in pictures)}[/dim]", soft_wrap=True)


@agents_app.command()
def stability(
    suite: SuiteOption = "qa,tools",
    seeds: SeedsOption = "0",
    episodes: EpisodesOption = 5,
    conditions: ConditionsOption = "none,similar,transitive",
    out: OutOption = Path("agents-stability"),
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
    from kvgraft.evaluate.agents.reruns import compare
    from kvgraft.evaluate.agents.runner import ROWS, run
    from kvgraft.evaluate.agents.tables import render_wavering

    if reruns < 2:
        raise ValueError(f"--reruns must be at least 2, got {reruns}")
    settings = _settings(suite, seeds, conditions, variation, approximate_sources, episodes, pages, reruns, "paper")
    with progress_bar(progress_console, "running agents") as on_progress:
        rows = run(settings, model, out, on_progress, dtype=dtype, device=device)
    found = compare(rows)
    if as_json:
        print_json(found)
        return
    console.print(render_wavering(found))
    console.print(f"[dim]{out}: {ROWS}[/dim]", soft_wrap=True)


def _settings(
    suite: str, seeds: str, conditions: str, variation: str, approximate_sources: bool, episodes: int, pages: int,
    rounds: int = 1, sampling: str = "greedy",
) -> "Settings":  # fmt: skip
    from kvgraft.evaluate.agents.conditions import find_conditions
    from kvgraft.evaluate.agents.runner import Settings

    chosen = tuple(replace(one, approximate_sources=approximate_sources) for one in find_conditions(conditions))
    return Settings(_split(suite), _parse_seeds(seeds), chosen, episodes, rounds, _split(variation), sampling, pages)


def _split(text: str) -> tuple[str, ...]:
    return tuple(part.strip() for part in text.split(",") if part.strip())


def _parse_seeds(text: str) -> tuple[int, ...]:
    try:
        ends = [[int(end) for end in part.split("-")] for part in _split(text)]
        return tuple(seed for first, *last in ends for seed in range(first, (*last, first)[0] + 1))
    except ValueError:
        raise ValueError(f"seeds must be numbers or ranges (0-4), separated by commas, got {text!r}") from None
