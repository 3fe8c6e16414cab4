"""Files that an evaluation writes line by line, so that it can resume after any interruption."""

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any, TypeVar

import msgspec

from kvgraft import __version__

Line = TypeVar("Line")


def read_lines(path: Path, kind: type[Line]) -> list[Line]:
    """Return the lines of a JSON file, or none if there is no file. An incomplete last line is
    removed from the file.
    """
    if not path.exists():
        return []
    text = path.read_bytes()
    whole = text[: text.rfind(b"\n") + 1]
    if len(whole) < len(text):
        path.write_bytes(whole)
    return [msgspec.json.decode(line, type=kind) for line in whole.splitlines()]


def check_config(path: Path, config: Mapping[str, Any]) -> None:
    """Write the settings of an evaluation with our version, or compare them with the existing file.

    Raises:
        ValueError: they differ; the message names the differences.
    """
    config = {"kvgraft": __version__, **config}
    if not path.exists():
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(json.dumps(config, indent=2) + "\n")
        return

    found = json.loads(path.read_text())
    if differing := [
        key for key in sorted(config.keys() | found.keys()) if config.get(key) != found.get(key)
    ]:
        changes = "; ".join(
            f"{key} was {found.get(key)!r}, is {config.get(key)!r}" for key in differing
        )
        raise ValueError(
            f"{path.parent} holds an evaluation with other settings ({changes}): choose another "
            "directory"
        )
