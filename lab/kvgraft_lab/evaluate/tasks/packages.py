"""Documentation installed with Python and with packages that KVGraft needs: docstrings and
descriptions.

Files are parsed, never imported or run. Only prose is kept: no code, lists, tables or headings.
"""

import ast
import platform
import re
import sysconfig
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from functools import lru_cache
from importlib.metadata import distribution
from pathlib import Path

PYTHON = "python"
_MODULES = """
argparse bisect calendar collections/__init__ configparser contextlib csv datetime difflib doctest
email/message enum fractions ftplib functools heapq http/client http/cookiejar imaplib inspect
ipaddress json/__init__ json/decoder json/encoder logging/__init__ logging/handlers mailbox
optparse os pathlib pprint random sched selectors shlex shutil smtplib statistics string
subprocess tarfile tempfile textwrap threading timeit traceback turtle unittest/case
urllib/request uuid weakref zipfile
"""
# by distribution: files, relative to its packages; the description is read too
SOURCES: Mapping[str, tuple[str, ...]] = {
    PYTHON: tuple(f"{module}.py" for module in _MODULES.split()),
    "numpy": (
        "numpy/lib/_*_impl.py", "numpy/linalg/_linalg.py", "numpy/_core/fromnumeric.py",
        "numpy/_core/numeric.py",
    ),
    "scipy": (
        "scipy/stats/_morestats.py", "scipy/stats/_hypotests.py", "scipy/signal/_peak_finding.py",
        "scipy/spatial/distance.py", "scipy/cluster/hierarchy.py", "scipy/integrate/_quadrature.py",
        "scipy/ndimage/_filters.py", "scipy/linalg/_basic.py", "scipy/optimize/_minimize.py",
    ),
    "torch": (
        "torch/nn/modules/activation.py", "torch/nn/modules/batchnorm.py",
        "torch/nn/modules/loss.py",
        "torch/nn/modules/module.py", "torch/nn/modules/rnn.py", "torch/optim/lr_scheduler.py",
        "torch/optim/sgd.py",
        "torch/optim/optimizer.py", "torch/serialization.py", "torch/utils/data/dataloader.py",
    ),
    "jinja2": ("jinja2/environment.py", "jinja2/filters.py", "jinja2/loaders.py",
    "jinja2/runtime.py"),
    "rich": ("rich/console.py", "rich/progress.py", "rich/text.py"),
    "typer": (), "transformers": (), "tokenizers": (), "msgspec": (), "safetensors": (),
    "rapidfuzz": (),
}  # fmt: skip
# least and greatest number of characters of a sentence
SHORTEST, LONGEST = 25, 300
# markup around words, and the part of it that is kept
_MARKUP = tuple(
    (re.compile(pattern), kept)
    for pattern, kept in (
        (r"!\[[^\]]*\]\([^)]*\)", ""),
        (r"\[([^\]]*)\]\([^)]*\)", r"\1"),
        (r"\s*\[[\w,. ]+\]_", ""),
        (r":[\w:+]+:`[~!.]?([^`<]+?)(?:\s*<[^>]*>)?`", r"\1"),
        (r"`+([^`]*)`+_*", r"\1"),
        (r"\*{1,2}(\w[^*]*)\*{1,2}", r"\1"),
    )
)
_Named = ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef
_HEADING = re.compile(r"^.+\n([=\-~^#*])\1{2,}[ \t]*$", re.MULTILINE)
_NO_PROSE = re.compile(r"^(?:\s|>>>|\.\.|[-*+|#<=:>~@]|\d+[.)]\s)|::\s*$")
_SENTENCE_END = re.compile(r"(?<!e\.g\.)(?<!i\.e\.)(?<!etc\.)(?<=[.!?])\s+(?=[A-Z])")


@dataclass(frozen=True)
class Documentation:
    """Documentation in one file.

    Attributes:
        name: name of the file, without its version.
        sentences: (subject, a sentence about it), in order.
    """

    name: str
    sentences: tuple[tuple[str, str], ...]


def versions() -> str:
    """Return the names and versions of the documented packages."""
    packages = (f"{name} {distribution(name).version}" for name in SOURCES if name != PYTHON)
    return ", ".join([f"Python {platform.python_version()}", *packages])


@lru_cache(maxsize=1)
def read_documentation() -> tuple[Documentation, ...]:
    """Return all documentation. A repeated sentence is kept at its first place only."""
    seen: set[str] = set()
    found = []
    for name, sections in _files():
        fresh = []
        for title, sentence in sections:
            if sentence not in seen:
                seen.add(sentence)
                fresh.append((title, sentence))
        found.append(Documentation(name, tuple(fresh)))
    return tuple(found)


def docstrings(source: str) -> Iterator[tuple[str, str]]:
    """Yield (name, docstring) of a module, whose own name is empty, and of its public classes,
    functions and methods.
    """
    yield from _docstrings(ast.parse(source), ())


def prose(text: str) -> Iterator[str]:
    """Yield the sentences of all prose paragraphs in a docstring or a description."""
    text = re.sub(r"^```.*?^```", "", text, flags=re.DOTALL | re.MULTILINE)
    for paragraph in re.split(r"\n\s*\n", _HEADING.sub("\n", text)):
        lines = paragraph.strip("\n").splitlines()
        if any(map(_NO_PROSE.search, lines)):
            continue
        joined = " ".join(map(str.strip, lines))
        for pattern, kept in _MARKUP:
            joined = pattern.sub(kept, joined)
        yield from filter(_is_prose, _SENTENCE_END.split(joined))


def _files() -> Iterator[tuple[str, list[tuple[str, str]]]]:
    """Yield every file and every description: its name, and (subject, a sentence about it) in
    order.
    """
    for package, patterns in SOURCES.items():
        root = Path(
            sysconfig.get_path("stdlib")
            if package == PYTHON
            else str(distribution(package).locate_file(""))
        )
        for path in (path for pattern in patterns for path in sorted(root.glob(pattern))):
            file = path.relative_to(root)
            module = ".".join(file.with_suffix("").parts).removesuffix(".__init__")
            where = module if package == PYTHON else package
            titled = (
                (f"{name} ({where})" if name else module, text)
                for name, text in docstrings(path.read_text(encoding="utf-8"))
            )
            yield (
                f"{package}/{file.as_posix()}",
                [(title, one) for title, text in titled for one in prose(text)],
            )
        if package != PYTHON:
            description = str(distribution(package).metadata.json.get("description", ""))
            yield f"{package}/METADATA", [(package, sentence) for sentence in prose(description)]


def _docstrings(node: ast.Module | _Named, names: tuple[str, ...]) -> Iterator[tuple[str, str]]:
    if text := ast.get_docstring(node):
        yield ".".join(names), text
    if isinstance(node, ast.Module | ast.ClassDef):
        for child in node.body:
            if isinstance(child, _Named) and not child.name.startswith("_"):
                yield from _docstrings(child, (*names, child.name))


def _is_prose(sentence: str) -> bool:
    """Return whether a sentence is a whole sentence of words."""
    letters = sum(character.isalpha() or character == " " for character in sentence)
    whole = sentence[:1].isupper() and sentence[-1:] in (".", "!", "?")
    return whole and SHORTEST <= len(sentence) <= LONGEST and letters >= 0.85 * len(sentence)
