"""Task suites by name, or from a file in a public format."""

from pathlib import Path
from typing import Protocol

from kvgraft.evaluate.tasks.files import load_suite
from kvgraft.evaluate.tasks.generated import GENERATED
from kvgraft.evaluate.tasks.items import PATTERNS, Ask, Item, Pattern, Shape


class TaskSuite(Protocol):
    """Whatever can give two-phase items."""

    @property
    def name(self) -> str: ...

    @property
    def description(self) -> str: ...

    @property
    def tasks(self) -> tuple[str, ...]: ...

    def items(self, seed: int, count: int, shape: Shape) -> tuple[Item, ...]: ...


def find_suites(names: str) -> tuple[TaskSuite, ...]:
    """Suites from their names or files, separated by commas; `all` is every generated one.

    Raises:
        ValueError, FileNotFoundError: an unknown name, or a file that cannot be read; the message says what is allowed.
    """
    found: list[TaskSuite] = []
    for name in filter(None, (part.strip() for part in names.split(","))):
        if name == "all":
            found += GENERATED.values()
        elif name in GENERATED:
            found.append(GENERATED[name])
        elif "/" in name or Path(name).suffix:
            found.append(load_suite(Path(name)))
        else:
            raise ValueError(f"unknown suite {name!r}: choose from all, {', '.join(GENERATED)}, or give a file")
    if not found:
        raise ValueError(f"suite {names!r} names none: choose from all, {', '.join(GENERATED)}, or give a file")
    return tuple({suite.name: suite for suite in found}.values())


__all__ = ["GENERATED", "PATTERNS", "Ask", "Item", "Pattern", "Shape", "TaskSuite", "find_suites", "load_suite"]
