"""Commands of the package kvgraft-lab, or what to install for them."""

from importlib.metadata import entry_points
from typing import Any

import typer
from typer.core import TyperGroup

from kvgraft.models import LABORATORY

COMMANDS = (
    "demo", "analyze", "calibrate", "compare", "inspect", "eval", "layers", "profile-heads",
    "profile-layers", "profile-costs", "flow", "fleet simulate",
)  # fmt: skip


class CommandGroup(TyperGroup):
    """Commands of the product, then those of the laboratory."""

    def list_commands(self, ctx: Any) -> list[str]:
        """Return the names in the order of `kvgraft --help`."""
        return sorted(super().list_commands(ctx), key=COMMANDS.__contains__)

    def get_command(self, ctx: Any, cmd_name: str) -> Any:
        """Return a command, or None. Raise ValueError if it needs the laboratory."""
        command = super().get_command(ctx, cmd_name)
        if command is None:
            require_laboratory(cmd_name)
        return command


def require_laboratory(command: str) -> None:
    """Raise ValueError, with what to install, if a command that is missing is the laboratory's."""
    if command in COMMANDS:
        raise ValueError(f"`kvgraft {command}` is part of {LABORATORY}")


def add_commands(app: typer.Typer) -> None:
    """Add the laboratory's commands. Without the package, `kvgraft --help` names them."""
    found = entry_points(group="kvgraft.commands")
    for entry in found:
        entry.load()
    if not found:
        app.info.epilog = f"{', '.join(COMMANDS)} are part of {LABORATORY}"
