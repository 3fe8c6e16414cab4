"""Triton kernels whose source was generated (`decode/codegen.py`)."""

import sys
from collections.abc import Sequence
from functools import cache
from importlib.abc import ExecutionLoader
from importlib.util import module_from_spec, spec_from_loader
from itertools import count
from typing import Any

import triton
from torch import Tensor

_numbers = count()


class _Loader(ExecutionLoader):
    """Of a module that is a text; Triton and tracebacks ask it for the lines."""

    def __init__(self, text: str) -> None:
        self._text = text

    def get_source(self, fullname: str) -> str:
        return self._text

    def get_filename(self, fullname: str) -> str:
        return f"{fullname}.py"


def generated(text: str, name: str, tensors: Sequence[Tensor], blocks: tuple[Tensor, Tensor] | None, tile: int) -> None:
    """See `kvgraft.kernels.dispatch.generated`."""
    arguments: list[Any] = list(tensors)
    grid: tuple[int, ...] = (len(tensors[0]),)
    if blocks is not None:
        table, counts = blocks
        arguments += [table, table.stride(0), counts]
        grid = (len(table), triton.cdiv(table.shape[1], tile))
    _kernel(text, name)[grid](*arguments, *(step for tensor in tensors for step in tensor.stride()))


@cache
def _kernel(text: str, name: str) -> Any:
    """What a module of this text defines by this name."""
    loader = _Loader(text)
    spec = spec_from_loader(f"{__name__}_{next(_numbers)}", loader)
    if spec is None:
        raise ImportError(f"{name} was generated and cannot be loaded")
    module = sys.modules[spec.name] = module_from_spec(spec)
    loader.exec_module(module)
    return getattr(module, name)
