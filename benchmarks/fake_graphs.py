"""CUDA graphs of a device that is not there (`fake_device`).

While a graph is captured, launches are recorded and nothing is computed; a replay computes them on
the CPU, with what the same tensors hold then, and with the numbers that were their arguments when
they were captured. Memory that the graph made for itself is filled with NaN before each replay, so
that nothing outlives one."""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.utils._pytree import tree_leaves

GARBAGE = 255  # in every byte: NaN, or -1


@dataclass(frozen=True)
class Launch:
    """One launch.

    Attributes:
        run: compute it, with what its tensors hold.
        given: its arguments, tensors as they lie on the CPU.
    """

    name: str
    run: Callable[[], Any]
    given: Any


class FakeGraph:
    """Stands in for `torch.cuda.CUDAGraph`.

    Args:
        replays: is called with what computes all launches.

    Attributes:
        launches: in order.
        memory: that was allocated while it was captured.
    """

    def __init__(self, replays: Callable[[Callable[[], None]], None]) -> None:
        self.launches: list[Launch] = []
        self.memory: list[Tensor] = []
        self._replays = replays

    def replay(self) -> None:
        """Compute all launches."""
        self._replays(self._compute)

    def _compute(self) -> None:
        for tensor in self.memory:
            tensor.untyped_storage().fill_(GARBAGE)  # type: ignore[attr-defined]
        for launch in self.launches:
            launch.run()

    def allocate(self, tensor: Tensor) -> Tensor:
        """Have its memory."""
        self.memory.append(tensor)
        return tensor

    def write(self, name: str, run: Callable[[], Any], given: Any) -> None:
        """Record a launch that writes to tensors that are there."""
        self.launches.append(Launch(name, run, given))

    def make(self, name: str, run: Callable[[], Any], given: Any) -> Any:
        """Record a launch that makes its results, which have no meaning yet."""
        result = run()
        made = [self.allocate(leaf) for leaf in tree_leaves(result) if isinstance(leaf, Tensor)]

        def again() -> None:
            for tensor, new in zip(made, tree_leaves(run()), strict=True):
                tensor.copy_(new)

        self.launches.append(Launch(name, again, given))
        return result

    @property
    def signature(self) -> list[tuple[str, tuple[Any, ...]]]:
        """All launches with all of their arguments: numbers, and of tensors their form and where
        they lie, which of memory that the graph made is its number."""
        made = {
            tensor.untyped_storage().data_ptr(): number for number, tensor in enumerate(self.memory)
        }
        return [
            (one.name, tuple(_described(leaf, made) for leaf in tree_leaves(one.given)))
            for one in self.launches
        ]


def _described(leaf: Any, made: dict[int, int]) -> Any:
    if not isinstance(leaf, Tensor):
        return (
            leaf
            if isinstance(leaf, int | float | str | torch.dtype | None)
            else type(leaf).__name__
        )
    begin = leaf.untyped_storage().data_ptr()
    place = f"made {made[begin]}" if begin in made else f"at {begin:x}"
    return place, leaf.dtype, tuple(leaf.shape), leaf.stride(), leaf.storage_offset()
