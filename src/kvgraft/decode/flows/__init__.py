"""The flows by name. A new flow is one file and one line here, or a file of the user's."""

import importlib.util
from collections.abc import Mapping
from pathlib import Path

from kvgraft.decode.flow import Flow
from kvgraft.decode.flows.block_topk import BlockTopK
from kvgraft.decode.flows.channels import ChannelQuest, ChannelTopK
from kvgraft.decode.flows.double_sparse import DoubleSparse
from kvgraft.decode.flows.h2o import H2O
from kvgraft.decode.flows.nsa import NSABlockTopK
from kvgraft.decode.flows.proposed import PROPOSED
from kvgraft.decode.flows.quest import Quest
from kvgraft.decode.flows.streaming import Streaming
from kvgraft.methods import make, parse

_CLASSIC: tuple[type[Flow], ...] = (
    BlockTopK,
    Quest,
    DoubleSparse,
    NSABlockTopK,
    H2O,
    Streaming,
    ChannelTopK,
    ChannelQuest,
)
FLOWS = {flow.name: flow for flow in (*_CLASSIC, *PROPOSED)}
RENAMED = {"k": ("topk_blocks",)}  # options by the names that they had before 0.2
DENSE = "dense"  # no flow: everything is attended to


def parse_flow(text: str) -> Flow | None:
    """A flow from `name:option=value,...`, or `path.py`, `path.py@name` for those of a file; None for `dense`.

    Raises:
        ValueError: an unknown flow or option (the message lists the known ones), a value out of range, or a file
            without flows.
        FileNotFoundError: no such file.
    """
    name, options = parse("flow", text)
    if name == DENSE:
        if options:
            raise ValueError(f"flow {DENSE!r} has no options, got {text!r}")
        return None
    path, _, own = name.partition("@")
    if not path.endswith(".py"):
        return make("flow", FLOWS, name, options, RENAMED)
    flows = load_flows(Path(path))
    if not own and len(flows) > 1:
        raise ValueError(f"{path} has several flows: choose one of {', '.join(f'{path}@{flow}' for flow in flows)}")
    return make(f"flow of {path}", flows, own or next(iter(flows)), options, RENAMED)


def load_flows(path: Path) -> Mapping[str, type[Flow]]:
    """The flows of a Python file by name. The file is run: it can do whatever its author wants.

    Raises:
        FileNotFoundError: no such file.
        ValueError: it has none, or it cannot be run.
    """
    if not path.is_file():
        raise FileNotFoundError(f"there is no file of flows {path}")
    spec = importlib.util.spec_from_file_location(f"kvgraft_flows_{path.stem}", path)
    if spec is None or spec.loader is None:
        raise ValueError(f"{path} is no Python file")
    module = importlib.util.module_from_spec(spec)
    try:
        spec.loader.exec_module(module)
    except Exception as error:
        raise ValueError(f"{path} cannot be run: {type(error).__name__}: {error}") from error
    own = [x for x in vars(module).values() if isinstance(x, type) and issubclass(x, Flow)]
    flows = {flow.name: flow for flow in own if flow.__module__ == module.__name__ and getattr(flow, "name", None)}
    if not flows:
        raise ValueError(f"{path} has no flow: a class that inherits from Flow and has a name")
    return flows
