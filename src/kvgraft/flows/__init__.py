"""Flows by name.

A new flow is one file and one line here. Users can also load flows from their own Python file,
which may hold several.
"""

import importlib.util
import re
from collections.abc import Mapping
from functools import lru_cache
from pathlib import Path

from kvgraft.decode.flow import Flow
from kvgraft.flows.block_topk import BlockTopK
from kvgraft.flows.double_sparse import DoubleSparse
from kvgraft.flows.h2o import H2O
from kvgraft.flows.nsa import NSABlockTopK
from kvgraft.flows.quest import Quest
from kvgraft.flows.streaming import Streaming
from kvgraft.methods import make, parse

_NAMED: tuple[type[Flow], ...] = (BlockTopK, Quest, DoubleSparse, NSABlockTopK, H2O, Streaming)
FLOWS = {flow.name: flow for flow in _NAMED}
# dense attention, without a flow
DENSE = "dense"
_FILE = re.compile(r"(?P<path>.+?\.py)(:(?P<rest>.*))?")


def parse_flow(text: str) -> Flow | None:
    """Return the flow that a text names, or None for `dense`.

    The text is `name:option=value,...`, `path.py`, or `path.py:name` if the file has several flows.
    Options follow a file after a colon (`path.py:name:topk_blocks=64`).

    Raises:
        ValueError: an unknown flow or option (the message lists the known ones), a value out of
            range, or a file without flows.
        FileNotFoundError: no such file.
    """
    if found := _FILE.fullmatch(text):
        return _from_file(found["path"], found["rest"] or "")
    name, options = parse("flow", text)
    if name == DENSE:
        if options:
            raise ValueError(f"flow {DENSE!r} has no options, got {text!r}")
        return None
    if name not in FLOWS:
        known = f"{', '.join(sorted(FLOWS))}, or give a file (my_flow.py, my_flow.py:name)"
        raise ValueError(f"unknown flow {name!r}: choose from {known}")
    return make("flow", FLOWS, name, options)


def with_default(text: str, option: str, value: int) -> str:
    """Return the text of a flow with an option added, unless the text sets it."""
    file = _FILE.fullmatch(text)
    behind = (file["rest"] or "") if file else text
    if f"{option}=" in behind:
        return text
    return f"{text}{',' if '=' in behind else ':'}{option}={value}"


def _from_file(path: str, rest: str) -> Flow:
    """Return a flow of a file; `rest` holds its name, options, both, or neither."""
    flows = load_flows(Path(path))
    first, _, behind = rest.partition(":")
    chosen, options = ("", rest) if "=" in first else (first, behind)
    if not chosen and len(flows) > 1:
        raise ValueError(
            f"{path} has several flows: name one ({path}:{next(iter(flows))}) of {', '.join(flows)}"
        )
    name, given = parse(f"flow of {path}", f"{chosen or next(iter(flows))}:{options}")
    return make(f"flow of {path}", flows, name, given)


def load_flows(path: Path) -> Mapping[str, type[Flow]]:
    """Return the flows of a Python file by name.

    The file runs with all rights of this process. It runs again only after it has changed.

    Raises:
        FileNotFoundError: no such file.
        ValueError: the file has no flow, or it cannot be run.
    """
    if not path.is_file():
        raise FileNotFoundError(f"there is no file of flows {path}")
    found = path.stat()
    return _run(path, (found.st_mtime_ns, found.st_size))


@lru_cache(maxsize=64)
def _run(path: Path, stamp: tuple[int, int]) -> Mapping[str, type[Flow]]:
    """Run a file of flows; `stamp` (modification time and size) makes a changed file run again."""
    spec = importlib.util.spec_from_file_location(f"kvgraft_flows_{path.stem}", path)
    if spec is None or spec.loader is None:
        raise ValueError(f"{path} is no Python file")

    module = importlib.util.module_from_spec(spec)
    try:
        spec.loader.exec_module(module)
    except Exception as error:
        raise ValueError(f"{path} cannot be run: {type(error).__name__}: {error}") from error

    classes = [x for x in vars(module).values() if isinstance(x, type) and issubclass(x, Flow)]
    flows = {
        flow.name: flow
        for flow in classes
        if flow.__module__ == module.__name__ and getattr(flow, "name", None)
    }
    if not flows:
        raise ValueError(f"{path} has no flow: a class that inherits from Flow and has a name")

    return flows
