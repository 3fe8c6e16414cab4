"""The agents' experiment: run it, measure divergences, decide the hypotheses, compare reruns."""

import inspect
from collections.abc import Callable
from dataclasses import dataclass, fields, replace
from functools import wraps
from pathlib import Path
from typing import Annotated, Any

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
from kvgraft.cli.progress import progress_bar
from kvgraft_lab.testbed import MODEL_DIR
from research.cross_query.conditions import ANY_DEPTH, find_conditions
from research.cross_query.figures import summarise
from research.cross_query.runner import ROWS, ExperimentSettings, StepRow, read_rows, run

app = typer.Typer(
    name="python -m research.cross_query",
    help="ReAct agents that reuse what they have read: docs/evaluation.md.",
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
)
_KEYWORD = inspect.Parameter.KEYWORD_ONLY
DirectoryArgument = Annotated[
    Path, typer.Argument(metavar="DIR", help="What `run`, `kl` or `stability` wrote.")
]


@dataclass(frozen=True)
class Experiment:
    """What all commands take that ask a model."""

    suite: Annotated[str, typer.Option(help="By commas: qa, tools.")] = "qa,tools"
    seeds: Annotated[str, typer.Option(help="By commas; ranges as 0-4.")] = "0"
    episodes: Annotated[int, typer.Option(help="Of each suite and seed.")] = 10
    conditions: Annotated[
        str, typer.Option(help="By commas; main, ablations and all are groups.")
    ] = "main"
    out: Annotated[
        Path, typer.Option(help="Directory of the results; one that holds a part is continued.")
    ] = Path("results/agents/main")
    variation: Annotated[
        str, typer.Option(help="How prompts nearly repeat, by commas: plain, adversarial.")
    ] = "plain"
    max_depth: Annotated[int, typer.Option(help="Of what is grafted from; 0 is exact KV.")] = (
        ANY_DEPTH
    )
    pages: Annotated[int, typer.Option(help="Pages of each condition's KV pool.")] = 4096
    model: ModelOption = MODEL_DIR
    dtype: DtypeOption = "float32"
    device: DeviceOption = "cpu"

    def settings(self, rounds: int = 1, sampling: str = "greedy") -> ExperimentSettings:
        """Each seed so many times, with answers drawn so."""
        found = find_conditions(self.conditions)
        chosen = tuple(replace(one, max_depth=self.max_depth) for one in found)
        return ExperimentSettings(
            _split(self.suite), _parse_seeds(self.seeds), chosen, self.episodes, rounds,
            _split(self.variation),
            sampling, self.pages,
        )  # fmt: skip

    def run(self, settings: ExperimentSettings) -> list[StepRow]:
        """All episodes, while a bar shows how far they are."""
        with progress_bar(progress_console, "running agents") as on_progress:
            return run(
                settings, self.model, self.out, on_progress, dtype=self.dtype, device=self.device
            )


def _with_experiment(**defaults: object) -> Callable[[Callable[..., None]], Callable[..., None]]:
    """Make options of a command's first parameter, an `Experiment`; the defaults are the command's
    own."""

    def decorate(command: Callable[..., None]) -> Callable[..., None]:
        signature = inspect.signature(command)
        _, *own = signature.parameters.values()
        shared = [
            inspect.Parameter(
                one.name, _KEYWORD, default=defaults.get(one.name, one.default), annotation=one.type
            )
            for one in fields(Experiment)
        ]
        options = [*shared, *(one.replace(kind=_KEYWORD) for one in own)]

        @wraps(command)
        def expanded(**given: Any) -> None:
            experiment = Experiment(**{one.name: given.pop(one.name) for one in shared})
            command(experiment, **given)

        expanded.__signature__ = signature.replace(parameters=options)  # type: ignore[attr-defined]
        expanded.__annotations__ = {one.name: one.annotation for one in options}
        return expanded

    return decorate


@app.command("run")
@_with_experiment()
def run_agents(
    experiment: Experiment,
    rounds: Annotated[
        int, typer.Option(help="Times that each seed is run, with empty caches.")
    ] = 1,
    sampling: Annotated[
        str, typer.Option(help="greedy, or paper: temperature 0.2, top-p 0.95.")
    ] = "greedy",
    as_json: JsonOption = False,
) -> None:
    """Run episodes under conditions in turn: one line of JSON for each step, and a table."""
    from research.cross_query.tables import render_figures

    found = summarise(experiment.run(experiment.settings(rounds, sampling)))
    if as_json:
        print_json(found)
        return
    console.print(render_figures(found))
    console.print(f"[dim]{experiment.out}: {ROWS}[/dim]", soft_wrap=True)


@app.command()
@_with_experiment(conditions="similar")
def kl(experiment: Experiment, as_json: JsonOption = False) -> None:
    """Measure the true KL of every step, at the boundaries of its segments and of its next token;
    nothing is timed."""
    from research.cross_query import divergence, hypotheses
    from research.cross_query.tables import render_verdicts

    settings, out = experiment.settings(), experiment.out
    with progress_bar(progress_console, "measuring") as on_progress:
        rows = divergence.measure(
            settings,
            experiment.model,
            out,
            on_progress,
            dtype=experiment.dtype,
            device=experiment.device,
        )
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
    plot: Annotated[
        Path | None, typer.Option(help="Also draw speed, ablations and boundary KL there.")
    ] = None,
    model: ModelOption = MODEL_DIR,
    as_json: JsonOption = False,
) -> None:
    """Decide H1 to H4 of cross-query segment reuse from what `run` and `kl` have measured."""
    from kvgraft.engine.config import load_config
    from research.cross_query import divergence, hypotheses, numerics
    from research.cross_query.tables import render_figures, render_verdicts

    rows, measured, config = (
        read_rows(directory),
        divergence.read_rows(directory),
        load_config(model),
    )
    if not rows and not measured:
        raise ValueError(f"{directory} holds no experiment: neither {ROWS} nor {divergence.ROWS}")
    figures = summarise(rows)
    found = [
        *hypotheses.judge_speed(rows), *hypotheses.judge_boundaries(measured),
        *hypotheses.judge_retrieval(measured),
        *numerics.judge_reindexing(config.rope, config.max_position),
        *hypotheses.judge_fallbacks(rows, measured),
    ]  # fmt: skip
    pictures = []
    if plot is not None:
        # matplotlib takes a second to load
        from research.cross_query.pictures import write_pictures

        pictures = write_pictures(rows, measured, plot)
    if as_json:
        print_json(
            {"figures": figures, "verdicts": found, "pictures": [str(path) for path in pictures]}
        )
        return
    console.print(render_figures(figures))
    console.print(render_verdicts(found))
    if pictures:
        console.print(
            f"[dim]{plot}: {', '.join(path.name for path in pictures)}[/dim]", soft_wrap=True
        )


@app.command()
@_with_experiment(
    episodes=5, conditions="none,similar,transitive", out=Path("results/agents/stability")
)
def stability(
    experiment: Experiment,
    reruns: Annotated[
        int, typer.Option(help="Of every episode, each with empty caches and draws of its own.")
    ] = 5,
    as_json: JsonOption = False,
) -> None:
    """How much sampled answers differ from rerun to rerun, with reuse and without."""
    from research.cross_query.reruns import compare
    from research.cross_query.tables import render_reruns

    if reruns < 2:
        raise ValueError(f"--reruns must be at least 2, got {reruns}")
    found = compare(experiment.run(experiment.settings(reruns, "paper")))
    if as_json:
        print_json(found)
        return
    console.print(render_reruns(found))
    console.print(f"[dim]{experiment.out}: {ROWS}[/dim]", soft_wrap=True)


def _split(text: str) -> tuple[str, ...]:
    return tuple(part.strip() for part in text.split(",") if part.strip())


def _parse_seeds(text: str) -> tuple[int, ...]:
    try:
        ends = [[int(end) for end in part.split("-")] for part in _split(text)]
        return tuple(seed for first, *last in ends for seed in range(first, (*last, first)[0] + 1))
    except ValueError:
        raise ValueError(
            f"seeds must be numbers or ranges (0-4), separated by commas, got {text!r}"
        ) from None


if __name__ == "__main__":
    raise SystemExit(run_command(app))
