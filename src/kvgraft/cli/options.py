"""Shared parts of commands: the application, options, loading and printing."""

from pathlib import Path
from tempfile import TemporaryFile
from typing import TYPE_CHECKING, Annotated, Any

import msgspec
import typer
from rich.console import Console

from kvgraft import __version__
from kvgraft.cli.laboratory import CommandGroup
from kvgraft.engine.options import EngineOptions
from kvgraft.models import find_model
from kvgraft.setting_schema import declarations

if TYPE_CHECKING:
    from rich.console import RenderableType

    from kvgraft.engine.engine import Engine

app = typer.Typer(
    name="kvgraft",
    cls=CommandGroup,
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
)
MODEL_HELP = "Hugging Face model directory, or a name: `kvgraft models list`."
ModelOption = Annotated[Path, typer.Option("--model", help=MODEL_HELP, show_default="bundled")]
ModelArgument = Annotated[
    Path, typer.Argument(metavar="[MODEL]", help=MODEL_HELP, show_default="bundled")
]
JsonOption = Annotated[bool, typer.Option("--json", help="Print JSON instead of tables.")]
ENGINE = declarations(EngineOptions)
KV_GIB: float = ENGINE["kv_gib"].default
DtypeOption = Annotated[str | None, typer.Option(help=ENGINE["dtype"].summary)]
DeviceOption = Annotated[str, typer.Option(help=ENGINE["device"].summary)]
KvOption = Annotated[float, typer.Option("--kv-gib", help=ENGINE["kv_gib"].summary)]
HeadMapOption = Annotated[
    Path | None,
    typer.Option(
        "--head-map", help=ENGINE["head_map"].summary, show_default="heads.json of the model"
    ),
]
HeadPagingOption = Annotated[
    bool,
    typer.Option("--head-paging", help=ENGINE["head_paging"].summary),
]
ChatOption = Annotated[
    bool | None,
    typer.Option(
        help="Write prompts of real text in the chat template of the model.",
        show_default="if it has one",
    ),
]
ScoresOnlyOption = Annotated[
    bool,
    typer.Option("--scores-only", help="Do not measure answers along that of full: half the time."),
]
OrderNoiseOption = Annotated[
    bool,
    typer.Option(
        "--order-noise", help="Also ask full with the reused segments in other orders: the unit."
    ),
]
console = Console()
progress_console = Console(stderr=True)


def _print_version(wanted: bool) -> None:
    if wanted:
        print(f"kvgraft {__version__}")
        raise typer.Exit


@app.callback()
def _main(
    version: Annotated[
        bool,
        typer.Option(
            "--version", callback=_print_version, is_eager=True, help="Print the version."
        ),
    ] = False,
) -> None:
    """Reuse the KV cache of any text a model has already read, at any position, in any order."""


def find(model: Path) -> Path:
    """Return the directory of a model. A known model that is not here yet is downloaded."""
    return find_model(model, fetch=True)


def load(model: Path, **settings: Any) -> "Engine":
    """Return the native engine. A status line is shown while the weights load."""
    model = find(model)
    from kvgraft.engine.engine import Engine

    with progress_console.status(f"loading {model.name}"):
        return Engine(model, **settings)


def print_json(value: Any) -> None:
    """Print dataclasses, structs and plain values as JSON."""
    print(msgspec.json.format(msgspec.json.encode(value), indent=2).decode())


def show(value: Any, table: "RenderableType", *, as_json: bool) -> None:
    """Print a result: as JSON, or as its table."""
    if as_json:
        print_json(value)
    else:
        console.print(table)


def check_output(path: Path | None, option: str = "--out") -> None:
    """Check before the work starts that an output file can be written. None means no output.

    Raises:
        OSError: there is no such directory, or no file can be written there; the message names the
            option.
    """
    if path is None:
        return
    if not path.parent.is_dir():
        raise FileNotFoundError(f"{path}: there is no directory {path.parent}")
    if path.is_dir():
        raise IsADirectoryError(f"{path} is a directory: name a file")

    try:
        if path.is_file():
            path.open("ab").close()
        elif not path.exists():
            TemporaryFile(dir=path.parent).close()
    except OSError as error:
        raise PermissionError(
            f"{path} cannot be written ({error.strerror}): name another file with {option}"
        ) from error
