"""vFlow: a sparse attention as a Python class, written for one request (Vortex, section 3)."""

from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, ClassVar, cast

from kvgraft.decode.graph import SourceLine, Value, tracing
from kvgraft.decode.operators import Stage
from kvgraft.decode.shapes import describe, same_entries
from kvgraft.decode.vtensor import NumBlocks, Shape
from kvgraft.methods import require_at_least

Selection = Value | Sequence[int | NumBlocks]


class Caches:
    """Caches that a stage of a flow reads by name.

    `k` and `v` are the model's, [1, B, b, d]. The flow's own caches are [1, B, ...]: forward_cache
    assigns them, and forward_indexer changes them by Save only.
    """

    def __init__(self, shapes: Mapping[str, Shape], *, assigns: bool) -> None:
        self._values = {
            name: Value(shape, SourceLine.of_author(), name=name) for name, shape in shapes.items()
        }
        self._assigns = assigns
        self.assigned: dict[str, Value] = {}

    def __getitem__(self, name: str) -> Value:
        return self.assigned.get(name, self._given(name))

    def __setitem__(self, name: str, value: Any) -> None:
        line = SourceLine.of_author()
        if not self._assigns:
            raise line.error(f"forward_indexer cannot assign to the cache {name!r}: use Save")
        if name in ("k", "v"):
            raise line.error(f"{name!r} is the model's: a flow cannot assign to it")
        wanted = self._given(name).shape
        if not isinstance(value, Value) or not same_entries(value.shape, wanted):
            given = describe(value.shape) if isinstance(value, Value) else repr(value)
            raise line.error(f"the cache {name!r} was declared as {describe(wanted)}, not {given}")
        self.assigned[name] = value

    def _given(self, name: str) -> Value:
        if name not in self._values:
            raise SourceLine.of_author().error(
                f"there is no cache {name!r}: choose from {', '.join(self._values)}"
            )
        return self._values[name]


@dataclass(frozen=True)
class Flow(ABC):
    """A sparse attention. A flow always attends to the first block and the last two, and chooses
    among the others.

    Attributes:
        name: name of the flow for users.
        topk_blocks: blocks that the flow chooses for each KV head.
        layers_skip: layers that attend to all blocks; also one layer, or "none".
        from_tokens: sequences of fewer tokens attend to all blocks.

    Raises:
        ValueError: an option out of range.
    """

    name: ClassVar[str]
    FIRST: ClassVar[int] = 1
    LAST: ClassVar[int] = 2

    topk_blocks: int = 29
    layers_skip: tuple[int, ...] = (0,)
    from_tokens: int = 0

    def __post_init__(self) -> None:
        given: object = self.layers_skip
        layers = () if given == "none" else (given,) if isinstance(given, int) else given
        if not isinstance(layers, tuple) or not all(
            isinstance(layer, int) and layer >= 0 for layer in layers
        ):
            raise ValueError(
                f"layers_skip must be layers, such as 0 or 0+1, or none, got {given!r}"
            )
        object.__setattr__(self, "layers_skip", layers)
        require_at_least("topk_blocks", self.topk_blocks, 1)
        require_at_least("from_tokens", self.from_tokens, 0)

    def create_cache(self, block_size: int, head_dim: int) -> Mapping[str, tuple[int, ...]]:
        """Return the names of the flow's own caches, and the shape of each cache's entry for one
        block.
        """
        return {}

    def forward_cache(self, c: Caches) -> None:  # noqa: B027  # a flow without caches needs none
        """Assign the flow's own caches for a block. The result does not depend on the query."""

    @abstractmethod
    def forward_indexer(self, q: Value, c: Caches) -> Selection:
        """Choose the blocks to attend to.

        Args:
            q: queries [1, g, d] of a KV head.
            c: the caches.

        Returns:
            A selection (`topK`), or block numbers that are the same for every query. Numbers below
            0 count from the end; `c["k"].shape[1] - 1` is the last block.
        """


@dataclass(frozen=True, eq=False)
class Program:
    """A flow that has been traced for one geometry.

    Attributes:
        caches: shape of each cache's entry for one block, by name.
        cache: values of forward_cache.
        stores: the value that forward_cache assigns to each cache.
        indexer: values of forward_indexer.
        selection: result of forward_indexer.
        saved: caches that decode steps change.
    """

    flow: Flow
    block_size: int
    caches: Mapping[str, tuple[int, ...]]
    cache: Sequence[Value]
    stores: Mapping[str, Value]
    indexer: Sequence[Value]
    selection: Selection
    saved: frozenset[str]

    @property
    def most(self) -> int:
        """Maximum number of blocks that a step attends to.

        A sequence with no more blocks than this gets dense attention.
        """
        chosen = (
            self.selection.shape[1] if isinstance(self.selection, Value) else len(self.selection)
        )
        return self.flow.FIRST + cast(int, chosen) + self.flow.LAST

    @property
    def is_stateful(self) -> bool:
        """True if a step changes what later steps choose."""
        return bool(self.saved)

    @property
    def first_tokens(self) -> int:
        """Least number of tokens of a sequence that decodes sparsely.

        It has a block that the flow can leave out, and at least `from_tokens` tokens.
        """
        return max(self.most * self.block_size + 1, self.flow.from_tokens)

    def reaches(self, num_tokens: int) -> bool:
        """Return whether a sequence of this length decodes sparsely."""
        return num_tokens >= self.first_tokens


def trace(flow: Flow, block_size: int, head_dim: int, group: int) -> Program:
    """Trace a flow for a block size in tokens, a head size and `group` query heads per KV head.

    Raises:
        FlowError: the flow is invalid. Nothing has run yet.
    """
    declared = {
        name: tuple(shape) for name, shape in flow.create_cache(block_size, head_dim).items()
    }

    where = _line(flow, "create_cache")
    for name, shape in declared.items():
        if (
            name in ("q", "k", "v")
            or not shape
            or any(not isinstance(size, int) or size < 1 for size in shape)
        ):
            raise where.error(
                f"cache {name!r} of shape {shape}: sizes must be positive integers, and q, k, v "
                "are taken"
            )

    pool: dict[str, Shape] = {
        "k": (1, NumBlocks(), block_size, head_dim),
        "v": (1, NumBlocks(), block_size, head_dim),
    }
    pool |= {name: (1, NumBlocks(), *shape) for name, shape in declared.items()}

    with tracing(Stage.CACHE) as cached:
        c = Caches(pool, assigns=True)
        flow.forward_cache(c)

    missing = declared.keys() - c.assigned.keys()
    if missing:
        raise _line(flow, "forward_cache").error(
            f"forward_cache assigns nothing to the cache {min(missing)!r}"
        )

    with tracing(Stage.INDEXER) as indexed:
        query = Value((1, group, head_dim), _line(flow, "forward_indexer"), name="q")
        selection = flow.forward_indexer(query, Caches(pool, assigns=False))

    _check_selection(flow, selection)
    saved = frozenset(filter(None, (value.saves_to for value in indexed.values)))
    return Program(
        flow, block_size, declared, cached.values, c.assigned, indexed.values, selection, saved
    )


def _line(flow: Flow, method: str) -> SourceLine:
    """Return the line where the author defines a method."""
    code = getattr(type(flow), method).__code__
    return SourceLine(code.co_filename, code.co_firstlineno)


def _check_selection(flow: Flow, selection: Selection) -> None:
    """Raise a FlowError unless the result is a selection or a list of block numbers."""
    if isinstance(selection, Value):
        if not selection.selects:
            raise selection.line.error(
                "forward_indexer must end in a selection (topK, approxTopK, Union), not in scores"
            )
        return
    if not isinstance(selection, list | tuple) or not all(
        isinstance(block, int | NumBlocks) for block in selection
    ):
        raise _line(flow, "forward_indexer").error(
            "forward_indexer must return a selection (topK, approxTopK, Union) or a list of "
            f"blocks, got {selection!r}"
        )
