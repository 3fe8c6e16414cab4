"""Generated kernels against batched torch, on a device or in Triton's interpreter."""

from dataclasses import dataclass, field
from itertools import chain
from typing import ClassVar

import pytest
import torch
from torch import Tensor

from devices import CLOSE, DEVICE
from every_flow import EVERY_FLOW
from kvgraft.decode import ops
from kvgraft.decode.batch import Batch, tables
from kvgraft.decode.codegen import cache_source, source_of
from kvgraft.decode.executor import fill, select
from kvgraft.decode.flow import Caches, Flow, Program, Selection, trace
from kvgraft.decode.fused import choose, kernels_of
from kvgraft.decode.graph import Value
from kvgraft.decode.planner import Template, plan, plan_cache
from kvgraft.flows import FLOWS

LENGTHS = (9, 0, 4, 70)  # full blocks of the sequences; more than a program takes
GEOMETRIES = {"powers of two": (16, 32, 4), "others": (12, 24, 3)}  # block, head_dim, group


class Pool:
    """Pages of random keys and values, scattered, caches of a flow, and queries of sequences."""

    def __init__(self, program: Program, head_dim: int, group: int) -> None:
        random = torch.Generator().manual_seed(1)
        num_rows, size = sum(LENGTHS) + len(LENGTHS) + 2, program.block_size
        self.program = program
        self.query = torch.randn(len(LENGTHS), group, head_dim, generator=random).to(DEVICE)
        self.keys, self.values = torch.randn(2, num_rows, size, head_dim, generator=random).to(
            DEVICE
        )
        free = iter(torch.randperm(num_rows, generator=random).tolist())
        self.full = [[next(free) for _ in range(length)] for length in LENGTHS]
        poison = num_rows - 1
        rows = [[*own, next(free)] for own in self.full]
        width = max(map(len, rows))
        table = torch.tensor(
            [[*own, *[poison] * (width - len(own))] for own in rows], device=DEVICE
        )
        self.batch = Batch(table, torch.tensor([length * size + 1 for length in LENGTHS]), size)

    def run(self, implementation: str) -> tuple[dict[str, Tensor], list[set[int]]]:
        """The caches after two steps, and what the last has chosen."""
        caches, pool = self.filled(implementation)
        for query in (self.query.flip(2), self.query):
            found = select(
                self.program,
                plan(self.program),
                query,
                pool,
                self.batch,
                implementation=implementation,
            )
        return caches, [set(own[own >= 0].tolist()) for own in found]

    def filled(self, implementation: str) -> tuple[dict[str, Tensor], dict[str, Tensor]]:
        """The caches of the flow, alone and with keys and values."""
        rows = [*chain(*self.full)]
        shapes = {name: (len(self.keys), *shape) for name, shape in self.program.caches.items()}
        caches = {name: torch.full(shape, 9.0, device=DEVICE) for name, shape in shapes.items()}
        pool = {"k": self.keys, "v": self.values, **caches}
        fill(self.program, pool, torch.tensor(rows, device=DEVICE), implementation=implementation)
        return caches, pool


def check_fused(flow: Flow, geometry: tuple[int, int, int]) -> None:
    """Two kernels give the tables that the groups give one after the other."""
    block, head_dim, group = geometry
    pool = Pool(trace(flow, block, head_dim, group), head_dim, group)
    kernels = kernels_of(pool.program)
    assert kernels is not None
    (caches, own), (expected, theirs) = pool.filled("triton"), pool.filled("cpu")
    for query in (pool.query.flip(2), pool.query):
        found = choose(kernels, pool.program, query, own, pool.batch)
        chosen = select(
            pool.program, plan(pool.program), query, theirs, pool.batch, implementation="cpu"
        )
        wanted = tables(chosen, pool.batch, flow)
        assert torch.equal(found[1], wanted[1])
        for pages, best, count in zip(found[0], wanted[0], wanted[1].tolist(), strict=True):
            assert pages[: -(-count // block)].tolist() == best[: -(-count // block)].tolist()
    for name, cache in caches.items():
        torch.testing.assert_close(cache, expected[name], **CLOSE)


def check(flow: Flow, geometry: tuple[int, int, int]) -> None:
    block, head_dim, group = geometry
    pool = Pool(trace(flow, block, head_dim, group), head_dim, group)
    (caches, chosen), (expected, best) = pool.run("triton"), pool.run("cpu")
    for name, cache in caches.items():
        torch.testing.assert_close(cache, expected[name], **CLOSE)
    assert chosen == best


def missing(flow: Flow, geometry: tuple[int, int, int]) -> list[str]:
    """Operators of groups that batched torch must do."""
    program = trace(flow, *geometry)
    found = [
        (group, source_of(group))
        for group in plan(program)
        if group.template is not Template.SPECIAL
    ]
    if program.stores:
        found.append((plan_cache(program), cache_source(program)))
    return [
        value.made_by.name for group, source in found if source is None for value in group.values
    ]


@pytest.mark.parametrize("geometry", GEOMETRIES)
@pytest.mark.parametrize("name", EVERY_FLOW)
def test_a_flow_chooses_the_same(name: str, geometry: str):
    check(EVERY_FLOW[name](topk_blocks=2, layers_skip=()), GEOMETRIES[geometry])


@pytest.mark.parametrize("geometry", GEOMETRIES)
@pytest.mark.parametrize("name", EVERY_FLOW)
def test_two_kernels_choose_the_same(name: str, geometry: str):
    flow = EVERY_FLOW[name](topk_blocks=2, layers_skip=())
    if kernels_of(trace(flow, *GEOMETRIES[geometry])) is None:
        pytest.skip("computed group by group")
    check_fused(flow, GEOMETRIES[geometry])


def test_every_bundled_flow_is_two_kernels():
    for name, flow in FLOWS.items():
        for geometry in ((16, 32, 4), (16, 128, 2), (64, 128, 16)):
            assert (kernels_of(trace(flow(), *geometry)) is not None) == (name != "streaming")


@pytest.mark.parametrize("name", EVERY_FLOW)
def test_every_flow_is_generated_as_a_whole(name: str):
    for geometry in ((16, 32, 4), (16, 128, 2), (64, 128, 16)):
        assert not missing(EVERY_FLOW[name](), geometry)


@dataclass(frozen=True)
class Others(Flow):
    """What no flow of ours applies block by block."""

    name: ClassVar[str] = "others"
    weights: tuple[float, ...] = field(default=(0.5, -2.0, 1.0))

    def create_cache(self, block_size: int, head_dim: int) -> dict[str, tuple[int, ...]]:
        return {"mean": (head_dim,), "ones": (3,), "parts": (2, head_dim)}

    def forward_cache(self, c: Caches) -> None:
        c["mean"], c["ones"] = ops.Mean(c["k"], 2), ops.Fill(c["ones"], 1.5)
        c["parts"] = ops.MaxInterleave(c["v"], 2, c["v"].size(2) // 2)

    def forward_indexer(self, q: Value, c: Caches) -> Selection:
        x = ops.Conv1d(ops.Normalize(c["mean"], 2), self.weights, dim=2)
        x = ops.MaskSlice(x, 3, -2, dim=2, fill=0.25)
        x = ops.Softmax(
            ops.Add_Mul(ops.Reshape(x, (1, x.shape[1], 1, x.size(2))), 3.0, c["parts"]), 3
        )
        scores = ops.Max(ops.GeMM(x, q.T), 3)  # [1, B, 2, 1]
        return ops.topK(
            ops.Multiply(
                ops.Max(scores, 2), ops.Reshape(ops.Max(c["ones"], 2), (1, c["k"].shape[1], 1, 1))
            ),
            self.topk_blocks,
        )


@pytest.mark.parametrize("geometry", GEOMETRIES)
def test_operators_that_no_flow_applies(geometry: str):
    check(Others(topk_blocks=2), GEOMETRIES[geometry])
    # groups of six
    assert ("MaxInterleave" in missing(Others(), GEOMETRIES[geometry])) == (geometry == "others")


def test_no_text_of_an_author_gets_into_the_source():
    """Caches may have any name."""

    class Named(type(FLOWS["block_topk"]())):  # type: ignore[misc]
        def create_cache(self, block_size: int, head_dim: int) -> dict[str, tuple[int, ...]]:
            return {"x) + (": (head_dim,)}

        def forward_cache(self, c: Caches) -> None:
            c["x) + ("] = ops.Mean(c["k"], dim=2)

        def forward_indexer(self, q: Value, c: Caches) -> Selection:
            return ops.topK(ops.Max(ops.GeMM(c["x) + ("], q.T), dim=2), self.topk_blocks)

    check(Named(topk_blocks=2), GEOMETRIES["others"])


def test_what_does_not_fit_registers_is_left_to_torch():
    assert missing(FLOWS["double_sparse"](), (64, 4096, 16))
