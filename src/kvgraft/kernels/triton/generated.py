"""Triton kernels whose source was generated (`decode/codegen.py`)."""

import sys
from collections.abc import Sequence
from functools import cache
from importlib.abc import ExecutionLoader
from importlib.util import module_from_spec, spec_from_loader
from itertools import count
from typing import Any

import torch
from torch import Tensor

from kvgraft.kernels.triton.workload import plan_work
from kvgraft.kernels.workload import Lengths

_numbers = count()


class _Loader(ExecutionLoader):
    """Loader of a module from a text. Triton and tracebacks ask it for the lines."""

    def __init__(self, text: str) -> None:
        self._text = text

    def get_source(self, fullname: str) -> str:
        return self._text

    def get_filename(self, fullname: str) -> str:
        return f"{fullname}.py"


def generated(
    text: str,
    name: str,
    tensors: Sequence[Tensor],
    blocks: tuple[Tensor, Lengths],
    tile: int,
    heads: int,
) -> None:
    """See `kvgraft.kernels.dispatch.generated`."""
    arguments, grid = list[Any](tensors), len(tensors[0])
    if tile:
        table, lengths = blocks
        work = lengths.work(tile, 1, plan_work)
        arguments += [table, table.stride(0), lengths.counts, work.chunks, work.programs, heads]
        grid = work.num_programs
    _kernel(text, name)[(grid,)](
        *arguments, *(step for tensor in tensors for step in tensor.stride()), num_warps=8
    )


def generated_choice(
    text: str, name: str, tensors: Sequence[Tensor], blocks: tuple[Tensor, Tensor, int], width: int
) -> tuple[Tensor, Tensor]:
    """See `kvgraft.kernels.dispatch.generated_choice`."""
    table, tokens, num_blocks = blocks
    count, device = len(tokens), tokens.device
    scores = torch.empty(count, num_blocks, dtype=torch.float32, device=device)
    tables = torch.empty(count, width, dtype=torch.int64, device=device)
    lengths = torch.empty(count, dtype=torch.int64, device=device)
    _kernel(text, name)[(count,)](
        *tensors, table, tokens, scores, tables, lengths, table.stride(0), num_blocks,
        *(step for tensor in tensors for step in tensor.stride()), num_warps=8,
    )  # fmt: skip
    return tables, lengths


@cache
def _kernel(text: str, name: str) -> Any:
    """Return the function `name` of a module with this text."""
    loader = _Loader(text)
    spec = spec_from_loader(f"{__name__}_{next(_numbers)}", loader)
    if spec is None:
        raise ImportError(f"{name} was generated and cannot be loaded")
    module = sys.modules[spec.name] = module_from_spec(spec)
    loader.exec_module(module)
    return getattr(module, name)
