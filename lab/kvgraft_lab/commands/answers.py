"""Commands that answer one prompt under several policies."""

from pathlib import Path
from typing import Annotated

import typer

from kvgraft.cli.options import (
    KV_GIB,
    DeviceOption,
    DtypeOption,
    HeadMapOption,
    HeadPagingOption,
    JsonOption,
    KvOption,
    ModelOption,
    OrderNoiseOption,
    app,
    check_output,
    console,
    load,
    print_json,
    progress_console,
)
from kvgraft.cli.progress import progress_bar
from kvgraft_lab.testbed import MODEL_DIR


@app.command()
def compare(
    file: Annotated[
        Path,
        typer.Argument(help='{"read": \\[text, ...], "prompt": text, "policies": \\[...], ...}'),
    ],
    model: ModelOption = MODEL_DIR,
    dtype: DtypeOption = "float32",
    device: DeviceOption = "cpu",
    kv_gib: KvOption = KV_GIB,
    head_map: HeadMapOption = None,
    head_paging: HeadPagingOption = False,
    order_noise: OrderNoiseOption = False,
    as_json: JsonOption = False,
) -> None:
    """One prompt under several policies: time, tokens by kind, distance from full along its answer,
    text."""
    from kvgraft_lab.evaluate import compare as comparison

    case = comparison.load_case(file)
    settings = {"policies": case.policies, "head_map": head_map, "head_paging": head_paging}
    engine = load(model, dtype=dtype, device=device, kv_gib=kv_gib, **settings)
    with progress_bar(progress_console, "comparing") as on_progress:
        outcomes = comparison.run_compare(engine, case, on_progress, order_noise=order_noise)
    if as_json:
        print_json(outcomes)
    else:
        console.print(comparison.render(outcomes))


@app.command()
def inspect(
    file: Annotated[Path, typer.Argument(help="The input file of `kvgraft compare`.")],
    html: Annotated[Path, typer.Option(help="Where the page goes.")],
    model: ModelOption = MODEL_DIR,
    dtype: DtypeOption = "float32",
    device: DeviceOption = "cpu",
    kv_gib: KvOption = KV_GIB,
    head_map: HeadMapOption = None,
    head_paging: HeadPagingOption = False,
    as_json: JsonOption = False,
) -> None:
    """One prompt as an HTML page: every token by how it got its KV, scores by layer, stage times,
    answers."""
    from kvgraft_lab.evaluate import compare as comparison
    from kvgraft_lab.evaluate import inspect as inspection

    check_output(html, "--html")
    case = comparison.load_case(file)
    settings = {"policies": case.policies, "head_map": head_map, "head_paging": head_paging}
    engine = load(model, dtype=dtype, device=device, kv_gib=kv_gib, **settings)
    with progress_bar(progress_console, "inspecting") as on_progress:
        inspected = inspection.inspect(engine, case, on_progress)
    html.write_text(inspection.render_page(inspected), encoding="utf-8")
    if as_json:
        print_json(inspected)
    else:
        console.print(
            f"[dim]{html}: {len(inspected.tokens)} tokens, {len(inspected.policies)} "
            "policies[/dim]",
            soft_wrap=True,
        )
