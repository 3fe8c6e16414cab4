"""Commands about flows: list them, explain one, and measure them."""

from pathlib import Path
from typing import Annotated

import typer
from rich.table import Table

from kvgraft.cli.options import (
    DeviceOption,
    DtypeOption,
    JsonOption,
    ModelOption,
    app,
    console,
    find,
    load,
    print_json,
    progress_console,
)
from kvgraft.cli.progress import progress_bar
from kvgraft_lab.testbed import MODEL_DIR

flows_app = typer.Typer(
    name="flow", help="Sparse decode attention as programs: docs/flows.md.", no_args_is_help=True
)
app.add_typer(flows_app)
FlowArgument = Annotated[
    str,
    typer.Argument(
        metavar="FLOW", help="quest, quest:topk_blocks=64, my.py, my.py:name:topk_blocks=64"
    ),
]
BlockOption = Annotated[int, typer.Option(help="Tokens of a block: of a page of the host.")]


@flows_app.command("list")
def list_flows(as_json: JsonOption = False) -> None:
    """All flows that have a name here."""
    from kvgraft.flows import FLOWS

    said = {name: " ".join((flow.__doc__ or "").split()) for name, flow in FLOWS.items()}
    if as_json:
        print_json(said)
        return
    table = Table("flow", "blocks are chosen by")
    for name, text in said.items():
        table.add_row(name, text)
    console.print(table)


@flows_app.command("explain")
def explain_flow(
    flow: FlowArgument,
    model: ModelOption = MODEL_DIR,
    block: BlockOption = 16,
    context: Annotated[
        int, typer.Option(help="Tokens of the sequence that bytes are counted for.")
    ] = 32768,
    triton: Annotated[
        bool, typer.Option(help="Print the source of its kernels for CUDA, too.")
    ] = False,
    as_json: JsonOption = False,
) -> None:
    """Trace a flow, or say at which line it is wrong; show its operators, kernels, caches and
    bytes."""
    from kvgraft.decode.flow import trace
    from kvgraft.engine.config import load_config
    from kvgraft.flows import parse_flow
    from kvgraft_lab.evaluate import explain

    chosen, config = parse_flow(flow), load_config(find(model))
    if chosen is None:
        raise ValueError("dense attention is no flow")
    program = trace(chosen, block, config.head_dim, config.group)
    explanation = explain.explain(program, config.head_dim * (1 if config.latent else 2), context)
    if as_json:
        print_json(explanation)
    else:
        console.print(explain.render(explanation))
        for name, source in explanation.sources.items() if triton else ():
            typer.echo(f"\n# {name}\n{source}", nl=False)


@flows_app.command("bench")
def bench_flows(
    flows: Annotated[
        list[str], typer.Argument(metavar="FLOW...", help="Names, with options, or files; or all.")
    ],
    model: ModelOption = MODEL_DIR,
    out: Annotated[
        Path, typer.Option(help="Directory of the results; what it holds is not asked again.")
    ] = Path("flows"),
    length: Annotated[int, typer.Option(help="Tokens of a prompt.")] = 4096,
    scale: Annotated[int, typer.Option(help="Times as many texts.")] = 1,
    context: Annotated[
        int | None,
        typer.Option(
            help="Tokens at which decode steps are timed.", show_default="all that the model has"
        ),
    ] = None,
    seed: Annotated[int, typer.Option(help="Of the texts and questions.")] = 0,
    block: BlockOption = 16,
    dtype: DtypeOption = "float32",
    device: DeviceOption = "cpu",
    as_json: JsonOption = False,
) -> None:
    """Accuracy in stages (retrieval first, survivors go on) and decode throughput: JSON, a table, a
    Pareto plot."""
    from kvgraft.flows import DENSE, FLOWS
    from kvgraft_lab.evaluate import flows as judging
    from kvgraft_lab.evaluate.decoding import speedups
    from kvgraft_lab.evaluate.plots import write_pareto  # matplotlib takes a second to load

    wanted = [*FLOWS] if flows == ["all"] else flows
    engine = load(model, dtype=dtype, device=device, block_size=block)
    context = engine.max_length if context is None else context
    if not 2 < context <= engine.max_length:
        raise ValueError(
            f"--context must be from 3 to {engine.max_length}, the positions of this model, got "
            f"{context}"
        )
    with progress_bar(progress_console, "answering") as on_progress:
        rows = judging.evaluate(
            engine, wanted, out, seed=seed, length=length, scale=scale, on_progress=on_progress
        )
    with progress_console.status("timing decode steps"):
        speed = speedups(engine, [DENSE, *wanted], context - 2)
    summaries = judging.summarise(rows, speed)
    picture = write_pareto(summaries, judging.frontier(summaries), out)
    (out / "flows.json").write_text(judging.as_json(summaries))
    if as_json:
        print_json(summaries)
        return
    console.print(judging.render(summaries))
    console.print(f"[dim]{out}: {judging.ROWS}, flows.json, {picture.name}[/dim]", soft_wrap=True)
