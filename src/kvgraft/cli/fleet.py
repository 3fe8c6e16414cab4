"""Commands about several servers behind one address."""

import os
from typing import Any

import typer
from typer.core import TyperGroup

from kvgraft.cli.laboratory import require_laboratory
from kvgraft.cli.options import app

RUN = "run"


class _RunsModels(TyperGroup):
    """`kvgraft fleet MODEL` is `kvgraft fleet run MODEL`, and has its help."""

    def parse_args(self, ctx: Any, args: list[str]) -> Any:
        if args and args[0] in self.commands:
            return super().parse_args(ctx, args)
        if args:
            require_laboratory(f"fleet {args[0]}")
        return super().parse_args(ctx, [RUN, *args])


fleet_app = typer.Typer(
    name="fleet", help="Several servers behind one address: docs/fleet.md.", cls=_RunsModels
)
app.add_typer(fleet_app)


@fleet_app.command(
    RUN,
    context_settings={
        "allow_extra_args": True,
        "ignore_unknown_options": True,
        "help_option_names": [],
    },
)
def run_fleet(context: typer.Context) -> None:
    """`kvgraft fleet MODEL --replicas N`: servers behind one address, by Ray Serve."""
    from kvgraft.fleet.options import make_parser, read_command

    if {"-h", "--help"} & set(context.args):
        print(make_parser().format_help(), end="")
        return

    # or lines of servers would be left out; read when Ray is imported
    os.environ.setdefault("RAY_DEDUP_LOGS", "0")
    # errors in the options are reported before Ray is imported
    options, address = read_command(context.args)
    from kvgraft.fleet.application import run

    run(options, address)
