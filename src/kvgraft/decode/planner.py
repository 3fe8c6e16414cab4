"""Plan of a step: operators with the same template are computed together (Vortex, 5.1).

Three templates:

- *Query*: needs no blocks, and runs once for each sequence.
- *Chunk*: works block by block. A chunk of blocks goes through all operators of a group while it is
in the CPU cache.
- *Special*: looks across blocks, and runs one operator at a time.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass
from enum import Enum

from kvgraft.decode.flow import Program
from kvgraft.decode.graph import Value
from kvgraft.decode.shapes import block_axis


class Template(Enum):
    """Execution of a group."""

    QUERY = "query"
    CHUNK = "chunk"
    SPECIAL = "special"


@dataclass(frozen=True)
class Group:
    """Operators that are computed together.

    Attributes:
        values: values of the group, in order.
        inputs: caches, the query, and values of other groups that it reads.
        outputs: values of the group that others need.
    """

    template: Template
    values: tuple[Value, ...]
    inputs: tuple[Value, ...]
    outputs: tuple[Value, ...]

    def bytes_moved(self, num_blocks: int, itemsize: int = 4) -> int:
        """Return the bytes of inputs and outputs for one sequence of `num_blocks` blocks."""
        return sum(size_of(value, num_blocks) for value in (*self.inputs, *self.outputs)) * itemsize


def size_of(value: Value, num_blocks: int) -> int:
    """Return the number of entries of a value for one sequence of `num_blocks` blocks."""
    return math.prod(size if isinstance(size, int) else num_blocks for size in value.shape)


def template_of(value: Value) -> Template:
    """Return the template that a value's operator needs."""
    operator = value.made_by
    shapes = [given.shape if isinstance(given, Value) else () for given in value.inputs]
    if operator.selects or value.saves_to or operator.crosses(*shapes, **value.options):
        return Template.SPECIAL
    return (
        Template.QUERY
        if all(block_axis(shape) is None for shape in (value.shape, *shapes))
        else Template.CHUNK
    )


def plan(program: Program) -> tuple[Group, ...]:
    """Return the groups of forward_indexer, in order.

    Each operator joins the earliest group of its template in which all its inputs are known.
    """
    members: list[tuple[Template, list[Value]]] = []
    made_in: dict[Value, int] = {}
    for value in program.indexer:
        template = template_of(value)
        known = [made_in[given] for given in value.inputs if given in made_in]

        first = max(known, default=0)
        joinable = range(first, len(members)) if template is not Template.SPECIAL else ()

        joined = next((number for number in joinable if members[number][0] is template), None)

        if joined is None:
            joined = len(members)
            members.append((template, []))
        members[joined][1].append(value)
        made_in[value] = joined
    return tuple(_group(template, values, _needed(values, program)) for template, values in members)


def unfused(program: Program) -> tuple[Group, ...]:
    """Return the groups of forward_indexer with one operator each."""
    return tuple(
        _group(template_of(value), [value], _needed([value], program)) for value in program.indexer
    )


def plan_cache(program: Program) -> Group:
    """Return the group of forward_cache; its outputs are the new entries of the caches."""
    return _group(Template.CHUNK, program.cache, tuple(program.stores.values()))


def _needed(values: Sequence[Value], program: Program) -> tuple[Value, ...]:
    """Return the values that other operators of forward_indexer read, or that remain after it."""
    own = set(values)
    needed = {given for value in program.indexer if value not in own for given in value.inputs} | {
        program.selection
    }
    return tuple(value for value in values if value in needed or value.saves_to)


def _group(template: Template, values: Sequence[Value], outputs: tuple[Value, ...]) -> Group:
    own = set(values)
    inputs = dict.fromkeys(
        given
        for value in values
        for given in value.inputs
        if isinstance(given, Value) and given not in own
    )
    return Group(template, tuple(values), tuple(inputs), outputs)
