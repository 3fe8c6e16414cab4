"""Command that starts a server, and prints information about one without starting it."""

import os
from typing import TYPE_CHECKING

import typer
from rich import box
from rich.table import Table
from rich.text import Text

from kvgraft.cli.options import app, show

if TYPE_CHECKING:
    from kvgraft.server.summary import ConfigurationSummary

PASSED_ON = {"allow_extra_args": True, "ignore_unknown_options": True, "help_option_names": []}


@app.command(context_settings=PASSED_ON)
def serve(context: typer.Context) -> None:
    """The OpenAI API by vLLM, with reuse: `kvgraft serve [MODEL] \\[any vLLM flag]`, see `kvgraft
    serve --help`."""
    from kvgraft.server.checks import check_arguments, help_text

    arguments = context.args
    if {"-h", "--help"} & set(arguments):
        print(help_text(), end="")
        return

    wants_summary = check_arguments(arguments).check
    # the logger of vLLM is made when it is imported; JSON must stand alone on stdout
    if wants_summary:
        os.environ["VLLM_LOGGING_STREAM"] = "ext://sys.stderr"
        os.environ.setdefault("VLLM_LOGGING_LEVEL", "ERROR")
    try:
        from kvgraft.server.serve import serve as run_server
        from kvgraft.server.serve import summarize
    except ImportError as error:
        if (error.name or "").partition(".")[0] != "vllm":
            raise
        raise ValueError(f"this version of vLLM is none that KVGraft knows: {error}") from error
    if not wants_summary:
        run_server(arguments)
        return
    summary = summarize(arguments)
    show(summary, _table(summary), as_json="--json" in arguments)


def _table(summary: "ConfigurationSummary") -> Table:
    table = Table("", "will be used", box=box.SIMPLE_HEAD, padding=(0, 1, 0, 0))
    for name, value in summary.uses.items():
        table.add_row(name, Text(value, overflow="fold"))
    for name, reason in summary.off.items():
        table.add_row(Text(name, style="dim"), Text(f"off: {reason}", style="dim", overflow="fold"))
    return table
