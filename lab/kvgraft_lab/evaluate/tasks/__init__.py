"""Task suites by name, or from a file in a public format."""

from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Protocol

from kvgraft_lab.evaluate.tasks.alike import make_alike
from kvgraft_lab.evaluate.tasks.code import make_code
from kvgraft_lab.evaluate.tasks.edits import make_edits
from kvgraft_lab.evaluate.tasks.files import load_suite
from kvgraft_lab.evaluate.tasks.generated import GENERATED
from kvgraft_lab.evaluate.tasks.items import PATTERNS, Ask, Item, Pattern, Shape, Suite
from kvgraft_lab.evaluate.tasks.retrieval import make_retrieval
from kvgraft_lab.evaluate.tasks.texts import SPLITS, check_split


class TaskSuite(Protocol):
    """Suite of two-phase items."""

    @property
    def name(self) -> str: ...

    @property
    def description(self) -> str: ...

    @property
    def tasks(self) -> tuple[str, ...]: ...

    @property
    def real_text(self) -> bool: ...

    def items(self, seed: int, count: int, shape: Shape) -> tuple[Item, ...]: ...


def _make_docs(split: str) -> Suite:
    from kvgraft_lab.evaluate.tasks.docs import make_docs  # torch takes a second to load

    return make_docs(split)


# suites of real text that any model which reads English can be asked
ENGLISH = "docs,alike"
# suites of real text by name
REAL: Mapping[str, Callable[[str], Suite]] = {
    "docs": _make_docs,
    "alike": make_alike,
    "code": make_code,
    "retrieval": make_retrieval,
    "edits": make_edits,
}


def find_suites(names: str, split: str = "all") -> tuple[TaskSuite, ...]:
    """Return suites by names or files, separated by commas; `all` is every generated one.

    Args:
        split: split of suites of real text, see `texts.in_split`.

    Raises:
        ValueError, FileNotFoundError: an unknown name, a file that cannot be read, or a split of a
            generated suite; the message says what is allowed.
    """
    check_split(split)
    found: list[TaskSuite] = []
    for name in filter(None, (part.strip() for part in names.split(","))):
        if name == "all":
            found += GENERATED.values()
        elif name in GENERATED:
            found.append(GENERATED[name])
        elif name in REAL:
            found.append(REAL[name](split))
        elif "/" in name or Path(name).suffix:
            found.append(load_suite(Path(name), split))
        else:
            raise ValueError(f"unknown suite {name!r}: choose from {_choices()}")
    if not found:
        raise ValueError(f"suite {names!r} names none: choose from {_choices()}")
    if split != "all" and (generated := [suite.name for suite in found if not suite.real_text]):
        raise ValueError(
            f"split {split}: what is generated has none, as {', '.join(generated)}; choose another "
            "seed"
        )
    return tuple({suite.name: suite for suite in found}.values())


def _choices() -> str:
    return f"all, {', '.join((*GENERATED, *REAL))}, or give a file"


__all__ = [
    "ENGLISH",
    "GENERATED",
    "PATTERNS",
    "SPLITS",
    "Ask",
    "Item",
    "Pattern",
    "Shape",
    "TaskSuite",
    "find_suites",
    "load_suite",
]
