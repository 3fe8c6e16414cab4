"""Explanation of a flow: caches, operators with their shapes, groups, and bytes moved."""

from collections.abc import Sequence
from dataclasses import dataclass
from math import prod
from pathlib import Path

from rich.console import Group, RenderableType
from rich.table import Table
from rich.text import Text

from kvgraft.decode.codegen import cache_source, source_of
from kvgraft.decode.flow import Program
from kvgraft.decode.graph import Value
from kvgraft.decode.planner import Group as Fused
from kvgraft.decode.planner import Template, plan, unfused
from kvgraft.decode.shapes import describe
from kvgraft.decode.vtensor import NumBlocks


@dataclass(frozen=True)
class OperatorLine:
    """One operator of a flow.

    Attributes:
        group: number of the kernel that computes it; None in forward_cache.
    """

    stage: str
    name: str
    operator: str
    inputs: tuple[str, ...]
    shape: str
    group: int | None
    template: str
    place: str
    code: str


@dataclass(frozen=True)
class Explanation:
    """Result of `kvgraft flow explain`.

    Attributes:
        flow: name of the flow.
        stateful: True if steps change what later steps choose.
        caches: shapes for one block.
        cache_share: bytes of the caches, as a share of those of keys and values.
        lines: operators.
        selects: maximum number of blocks that a step attends to.
        context: tokens of the sequence for which bytes are counted, for one KV head.
        fused, unfused: bytes that the indexer reads and writes as planned, and operator by
            operator.
        attended, dense: bytes of keys and values that the step reads, and that dense attention
            reads.
        sources: Triton sources of the kernels that are generated for CUDA.
    """

    flow: str
    stateful: bool
    caches: dict[str, tuple[int, ...]]
    cache_share: float
    lines: tuple[OperatorLine, ...]
    selects: int
    context: int
    fused: int
    unfused: int
    attended: int
    dense: int
    sources: dict[str, str]


def explain(program: Program, kept: int, context: int, itemsize: int = 4) -> Explanation:
    """Explain a flow for a sequence of `context` tokens.

    Args:
        kept: numbers that the pool stores per token and KV head.
        itemsize: bytes of a number.
    """
    blocks, per_block = context // program.block_size, program.block_size * kept
    attended = program.most if program.reaches(context) else blocks
    groups = plan(program)
    return Explanation(
        flow=program.flow.name,
        stateful=program.is_stateful,
        caches=dict(program.caches),
        cache_share=sum(map(prod, program.caches.values())) / per_block,
        lines=tuple(_lines(program, groups)),
        selects=program.most,
        context=context,
        fused=_moved(groups, blocks, itemsize),
        unfused=_moved(unfused(program), blocks, itemsize),
        attended=attended * per_block * itemsize,
        dense=blocks * per_block * itemsize,
        sources=_sources(program, groups),
    )


def _sources(program: Program, groups: Sequence[Fused]) -> dict[str, str]:
    found = {
        f"{n} {group.template.value}": group
        for n, group in enumerate(groups)
        if group.template != Template.SPECIAL
    }
    sources = {name: source_of(group) for name, group in found.items()}
    sources["forward_cache"] = cache_source(program)
    return {name: source.text for name, source in sources.items() if source is not None}


def _moved(groups: Sequence[Fused], blocks: int, itemsize: int) -> int:
    return sum(group.bytes_moved(blocks, itemsize) for group in groups)


def _lines(program: Program, groups: Sequence[Fused]) -> list[OperatorLine]:
    group_of = {value: number for number, group in enumerate(groups) for value in group.values}
    names: dict[Value, str] = {}

    def called(given: Value | float) -> str:
        if not isinstance(given, Value):
            return f"{given:g}"
        return names.get(given) or given.name

    lines = []
    for stage, values in (("forward_cache", program.cache), ("forward_indexer", program.indexer)):
        for value in values:
            names[value] = f"%{len(names)}"
            stored = [name for name, found in program.stores.items() if found is value]
            group = group_of.get(value)
            lines.append(
                OperatorLine(
                    stage,
                    names[value] + "".join(f" = {name}" for name in stored),
                    value.made_by.name,
                    (
                        *map(called, value.inputs),
                        *(f"{name}={_option(x)}" for name, x in value.options.items()),
                    ),
                    describe(value.shape),
                    group,
                    "" if group is None else groups[group].template.value,
                    f"{Path(value.line.path).name}:{value.line.number}",
                    value.line.code,
                )
            )
    return lines


def _option(value: object) -> str:
    if isinstance(value, tuple):
        return f"({', '.join(str(x) if isinstance(x, NumBlocks) else f'{x:g}' for x in value)})"
    return str(value)


def render(found: Explanation) -> RenderableType:
    """Return the explanation for a terminal."""
    table = Table("kernel", "", "operator", "shape", "line", title=found.flow, title_justify="left")
    before = ""
    for line in sorted(found.lines, key=lambda line: -1 if line.group is None else line.group):
        kernel = line.stage if line.group is None else f"{line.group} {line.template}"
        call = f"{line.operator}({', '.join(line.inputs)})"
        table.add_row("" if kernel == before else kernel, line.name, call, line.shape, line.place)
        before = kernel

    caches = ", ".join(f"{name} {list(shape)}" for name, shape in found.caches.items()) or "none"
    text = (
        f"caches for a block: {caches} ({found.cache_share:.1%} of its keys and values)"
        f"{'; keeps state: requests share no pages' if found.stateful else ''}\n"
        f"one step, one KV head, {found.context} tokens: the indexer moves {_size(found.fused)} "
        f"({_size(found.unfused)} operator by operator), attention reads {_size(found.attended)} "
        "in at most "
        f"{found.selects} blocks; dense attention would read {_size(found.dense)}"
    )
    return Group(table, Text(text))


def _size(count: int) -> str:
    return f"{count / 1024:.1f} KiB" if count < 1 << 20 else f"{count / 2**20:.1f} MiB"
