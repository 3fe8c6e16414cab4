"""Files of a trace: finding them, their formats, and their lines."""

import re
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

import msgspec

from kvgraft_lab.traffic.records import (
    ALLOWED,
    BadLine,
    LoggedAnswer,
    LoggedRequest,
    parse_record,
)
from kvgraft_lab.traffic.vllm_log import is_log, read_log

# suffixes of the files that are read in a directory
SUFFIXES = (".json", ".jsonl", ".log", ".ndjson", ".txt")
_BEGINS_OBJECT = re.compile(r"\{\s*\"")
_BEGINS_ARRAY = re.compile(r"\s*\[\s*\{\s*\"")
Line = tuple[str, LoggedRequest | LoggedAnswer | BadLine]


@dataclass(frozen=True)
class TraceFile:
    """A file, and default sessions for its requests.

    Attributes:
        path: path of the file.
        session: session of requests that name none.
        text_session: the same for a text file; all texts of a directory share it.
    """

    path: Path
    session: str
    text_session: str


def find_files(paths: Sequence[Path]) -> tuple[list[TraceFile], list[Path]]:
    """Return the files to read, in order of their names, and the files in directories with another
    suffix.

    Raises:
        FileNotFoundError: a path does not exist, or a directory has no file to read.
    """
    files: list[TraceFile] = []
    left_out: list[Path] = []

    for path in paths:
        if not path.exists():
            raise FileNotFoundError(f"no such file or directory: {path}")
        inside = (
            sorted(found for found in path.rglob("*") if found.is_file())
            if path.is_dir()
            else [path]
        )
        chosen = (
            [found for found in inside if found.suffix in SUFFIXES] if path.is_dir() else inside
        )
        if not chosen:
            raise FileNotFoundError(f"{path} has no file named *{', *'.join(SUFFIXES)}")
        left_out += sorted(set(inside) - set(chosen))
        root = path if path.is_dir() else path.parent
        files += [
            TraceFile(found, str(found.relative_to(root)), found.parent.name or ".")
            for found in chosen
        ]

    names = Counter(file.session for file in files)
    return [
        file
        if names[file.session] == 1
        else TraceFile(file.path, str(file.path), str(file.path.parent))
        for file in files
    ], left_out


def read_file(file: TraceFile) -> Iterator[tuple[str, Line]]:
    """Yield the place of each line in a file, and its content."""
    try:
        text = file.path.read_text(encoding="utf-8-sig")
    except UnicodeDecodeError as error:
        yield (
            file.session,
            (str(file.path), BadLine(f"is no UTF-8 text: {error.reason} at byte {error.start}")),
        )
        return

    lines = text.split("\n")  # JSON may contain other line ends
    whole = _decode(text)
    if isinstance(whole, list):
        for number, item in enumerate(whole, 1):
            for said in _records(item):
                yield file.session, (f"{file.path}, item {number}", said)
    elif _is_jsonl(file.path, lines):
        for number, line in enumerate(lines, 1):
            if line.strip():
                for said in _parse(line):
                    yield file.session, (f"{file.path}, line {number}", said)
    elif isinstance(whole, dict) or file.path.suffix == ".json" or _BEGINS_ARRAY.match(text):
        for said in _parse(text):
            yield file.session, (str(file.path), said)
    elif file.path.suffix == ".log" or is_log(text):
        for number, said in read_log(lines):
            yield file.session, (f"{file.path}, line {number}", said)
    else:
        yield (
            file.text_session,
            (str(file.path), LoggedRequest(text) if text.strip() else BadLine("has no text")),
        )


def _is_jsonl(path: Path, lines: Sequence[str]) -> bool:
    """Return whether a file is JSON by lines: by its suffix, or because its first line is a JSON
    value, or the start of an object but not the file's.
    """
    first = next((line.strip() for line in lines if line.strip()), "")
    if path.suffix in (".jsonl", ".ndjson") or isinstance(_decode(first), dict | str):
        return True
    return _BEGINS_OBJECT.match(first) is not None and not isinstance(
        _decode("\n".join(lines)), dict
    )


def _decode(text: str) -> object:
    """Return the value of a JSON text, or None if it is not JSON."""
    try:
        return msgspec.json.decode(text)
    except msgspec.DecodeError:
        return None


def _parse(line: str) -> Sequence[LoggedRequest | LoggedAnswer | BadLine]:
    try:
        value = msgspec.json.decode(line)
    except msgspec.DecodeError as error:
        return [BadLine(f"is not JSON ({error}): {ALLOWED}")]
    return _records(value)


def _records(value: object) -> Sequence[LoggedRequest | LoggedAnswer | BadLine]:
    try:
        return parse_record(value)
    except BadLine as error:
        return [error]
