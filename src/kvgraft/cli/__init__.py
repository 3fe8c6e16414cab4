"""The `kvgraft` command: thin wrappers around the engine, the servers and the store.

Commands import their dependencies when they run. Importing torch and transformers takes seconds,
and `--help` does not need them.
"""

import sys
from collections.abc import Callable
from typing import Any

import msgspec
import typer

from kvgraft.cli import fleet, generate, models, serve, store  # noqa: F401  # their commands
from kvgraft.cli.laboratory import add_commands
from kvgraft.cli.options import app

# exit code of a command that Ctrl-C has ended
INTERRUPTED = 130

add_commands(app)


def main() -> None:
    """Run the command line. An error that users can fix is one line on stderr and exit code 2,
    never a traceback.
    """
    raise SystemExit(run(app))


def run(command: Callable[..., Any], arguments: list[str] | None = None) -> int:
    """Run a command line, and return its exit code."""
    try:
        code = command(args=arguments, standalone_mode=False)
    except typer.Exit as stop:
        code = stop.exit_code
    except (typer.Abort, KeyboardInterrupt):
        code = INTERRUPTED
    except (ValueError, OSError, MemoryError, msgspec.MsgspecError, typer.TyperException) as error:
        text = error.format_message() if hasattr(error, "format_message") else str(error)
        if text.strip():  # `kvgraft` alone has printed its help
            print(f"kvgraft: {' '.join(text.split())}", file=sys.stderr)
        return 2

    # typer turns KeyboardInterrupt into this code
    if code == INTERRUPTED:
        print("aborted", file=sys.stderr)
    return code if isinstance(code, int) else 0


__all__ = ["app", "main", "run"]
