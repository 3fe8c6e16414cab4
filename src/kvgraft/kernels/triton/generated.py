"""Triton kernels whose source was generated (`decode/codegen.py`)."""

import linecache
from collections.abc import Sequence
from functools import cache
from itertools import count
from typing import Any

import triton
import triton.language as tl
from torch import Tensor

_numbers = count()


def generated(text: str, name: str, tensors: Sequence[Tensor], blocks: tuple[Tensor, Tensor] | None, tile: int) -> None:
    """See `kvgraft.kernels.dispatch.generated`."""
    arguments: list[Any] = list(tensors)
    grid: tuple[int, ...] = (len(tensors[0]),)
    if blocks is not None:
        table, counts = blocks
        arguments += [table, table.stride(0), counts]
        grid = (len(table), triton.cdiv(table.shape[1], tile))
    compiled(text, name)[grid](*arguments, *(step for tensor in tensors for step in tensor.stride()))


@cache
def compiled(text: str, name: str) -> Any:
    """The kernel of that name that a source text defines; Triton looks its lines up as those of a file."""
    path = f"<kvgraft generated {next(_numbers)}>"
    linecache.cache[path] = (len(text), None, text.splitlines(keepends=True), path)
    scope: dict[str, Any] = {"tl": tl, "__name__": path}
    exec(compile(text, path, "exec"), scope)  # noqa: S102  # made of operators and numbers, no text of a user's
    return triton.jit(scope[name])
