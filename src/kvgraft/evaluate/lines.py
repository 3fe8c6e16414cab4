"""Files that an evaluation writes line by line, so that it can go on after any end."""

from pathlib import Path
from typing import TypeVar

import msgspec

Line = TypeVar("Line")


def read_lines(path: Path, kind: type[Line]) -> list[Line]:
    """The lines of a file of JSON, none if there is no file; a last one that a kill cut off is dropped from it, too."""
    if not path.exists():
        return []
    text = path.read_bytes()
    whole = text[: text.rfind(b"\n") + 1]
    if len(whole) < len(text):
        path.write_bytes(whole)
    return [msgspec.json.decode(line, type=kind) for line in whole.splitlines()]
