"""Sparse attention of decode steps: the names that authors of flows import (docs/flows.md)."""

from kvgraft.decode.flow import Caches, Flow, Selection
from kvgraft.decode.graph import FlowError, Value
from kvgraft.decode.ops import *  # noqa: F403  # the operators of a language
from kvgraft.decode.ops import __all__ as _operators

__all__ = ["Caches", "Flow", "FlowError", "Selection", "Value", *_operators]
