"""Commands of the package kvgraft-lab, or what to install for them."""

from importlib.metadata import entry_points
from typing import Any

import typer

GROUP = "kvgraft.commands"
INSTALL = "pip install ./lab in a checkout of KVGraft"
# Commands that `kvgraft --help` lists without the package.
COMMANDS = {
    "demo": "RAG, chat and agents on a small model.",
    "analyze": "What reuse would give to recorded traffic.",
    "calibrate": "Which policy suits a model and your texts.",
    "compare": "One prompt under several policies.",
    "inspect": "One prompt as an HTML page.",
    "eval": "Quality and speed of policies on task suites.",
    "layers": "Which layer of a model finds a needle.",
    "profile-heads": "Which KV heads of a model need the whole context.",
    "profile-layers": "Which layers of a model agree on what is important.",
    "profile-costs": "How long this machine takes to compute and to graft.",
    "flow": "Sparse decode attention as programs.",
}


def add_commands(app: typer.Typer) -> None:
    """Add the laboratory's commands; without the package, commands that say what to install."""
    found = list(entry_points(group=GROUP))
    for entry in found:
        entry.load()
    if not found:
        for name, purpose in COMMANDS.items():
            _add_missing(app, name, purpose)


def _add_missing(app: typer.Typer, name: str, purpose: str) -> None:
    settings: dict[str, Any] = {"allow_extra_args": True, "ignore_unknown_options": True}

    @app.command(name, help=f"{purpose} Needs kvgraft-lab.", context_settings=settings)
    def missing() -> None:
        raise ValueError(f"`kvgraft {name}` needs the package kvgraft-lab: {INSTALL}")
