"""The command that shows what reuse does."""

from importlib.util import find_spec
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from kvgraft.cli.options import (
    KV_GIB,
    DeviceOption,
    DtypeOption,
    JsonOption,
    KvOption,
    ModelOption,
    app,
    console,
    find,
    load,
    print_json,
    progress_console,
)
from kvgraft.cli.progress import progress_bar
from kvgraft.prefill import DEFAULT_POLICY
from kvgraft_lab.testbed import MODEL_DIR

if TYPE_CHECKING:
    from kvgraft.engine.engine import Engine
    from kvgraft_lab.evaluate.passages import Reading


@app.command()
def demo(
    model: ModelOption = MODEL_DIR,
    as_json: JsonOption = False,
    dtype: DtypeOption = "float32",
    device: DeviceOption = "cpu",
    kv_gib: KvOption = KV_GIB,
    seed: Annotated[
        int | None, typer.Option(help="Seed of the scenarios.", show_default="0")
    ] = None,
    items: Annotated[
        int | None, typer.Option(help="Items per scenario, four prompts each.", show_default="8")
    ] = None,
    policy: Annotated[
        list[str] | None,
        typer.Option(
            help="Beside full (repeatable).",
            show_default=f"naive, sparsex, {DEFAULT_POLICY}; texts: as generate",
        ),
    ] = None,
    serve: Annotated[
        bool | None,
        typer.Option(
            "--serve/--no-serve",
            help="Also start the server and ask it.",
            show_default="if vLLM is here",
        ),
    ] = None,
    code: Annotated[
        Path | None,
        typer.Option(
            metavar="DIR",
            help="Directory of a Python package, such as your own: a --model for code completes "
            "calls in it.",
            show_default="texts",
        ),
    ] = None,
) -> None:
    """RAG, chat and agents on the bundled model, then its server; with a --model that chats,
    questions about texts, or calls in your own code to complete."""
    from kvgraft.policies import parse_policy
    from kvgraft_lab.evaluate.completions import completions
    from kvgraft_lab.evaluate.demo import POLICIES
    from kvgraft_lab.evaluate.passages import WORLD

    policies = ("full", *(policy or POLICIES[1:]))
    for name in policies:
        parse_policy(name)
    if code and model == MODEL_DIR:
        raise ValueError("--code needs a --model that chats, such as one of Qwen2.5-Coder")
    reading = completions(code) if code else WORLD
    model = find(model)
    engine = load(model, dtype=dtype, device=device, kv_gib=kv_gib, policies=policies)
    if model != MODEL_DIR and engine.tokenizer.chat_template:
        for flag, value in (("--seed", seed), ("--items", items), ("--serve", serve)):
            if value is not None:
                raise ValueError(
                    f"{flag} is about the scenarios: a model with a chat template is asked about "
                    "texts"
                )
        named = engine.profile.policy if engine.profile else DEFAULT_POLICY
        _show_reading(engine, reading, ("full", *(policy or [named])), as_json)
        return
    if code:
        raise ValueError(f"--code needs a model with a chat template, and {model} has none")
    _show_scenarios(engine, policies, seed or 0, 8 if items is None else items, serve, as_json)


def _show_scenarios(
    engine: "Engine",
    policies: tuple[str, ...],
    seed: int,
    items: int,
    serve: bool | None,
    as_json: bool,
) -> None:
    from kvgraft_lab.evaluate import demo as demonstration

    with progress_bar(progress_console, "demo") as on_progress:
        report = demonstration.run_demo(
            engine, seed=seed, items=items, policies=policies, on_progress=on_progress
        )
    if not as_json:
        console.print(demonstration.render(report))
    served = None
    if serve or (serve is None and find_spec("vllm") is not None):
        from kvgraft_lab.evaluate import serving  # needs the packages of kvgraft[serve]

        with progress_bar(progress_console, "server (takes half a minute to start)") as on_progress:
            served = serving.run_serving_demo(seed=seed, on_progress=on_progress)
        if not as_json:
            console.print(serving.render(served))
    if as_json:
        print_json({"engine": report, "server": served})


def _show_reading(
    engine: "Engine", reading: "Reading", policies: tuple[str, ...], as_json: bool
) -> None:
    from kvgraft_lab.evaluate.reading import render, run_reading_demo

    with progress_bar(progress_console, "reading and answering") as on_progress:
        report = run_reading_demo(engine, reading, policies=policies, on_progress=on_progress)
    if as_json:
        print_json(report)
    else:
        console.print(render(report))
