"""Every operator is the PyTorch operator applied to each sequence, on every layout, and so it is in
a step of all."""

import math
from collections.abc import Callable
from dataclasses import dataclass
from itertools import chain
from typing import Any, ClassVar

import hypothesis.strategies as st
import pytest
import torch
from hypothesis import given
from torch import Tensor

from devices import CLOSE, DEVICE
from kvgraft.decode import ops
from kvgraft.decode.batch import Batch, tables
from kvgraft.decode.executor import select
from kvgraft.decode.flow import Caches, Flow, Selection, trace
from kvgraft.decode.graph import Value
from kvgraft.decode.operators import OPERATORS
from kvgraft.decode.planner import plan, unfused
from kvgraft.decode.vtensor import EntryLayout, VTensor
from kvgraft.kernels.dispatch import radix_topk
from properties import examples

SIZE = 4  # tokens of a block
# each case: the operator applied to tensors of a flow, and the same in PyTorch, on x, y [1, B, 4,
# 6] and q [1, 3, 6]
Case = tuple[Callable[..., Any], Callable[..., Tensor]]
CASES: dict[str, Case] = {
    "Mean": (lambda x, y, q: ops.Mean(x, 3), lambda x, y, q: x.mean(3, keepdim=True)),
    "Max": (lambda x, y, q: ops.Max(x, 2), lambda x, y, q: x.max(2, keepdim=True).values),
    "Min": (lambda x, y, q: ops.Min(x, -1), lambda x, y, q: x.min(3, keepdim=True).values),
    "L2Norm": (lambda x, y, q: ops.L2Norm(x, 2), lambda x, y, q: x.square().sum(2,
    keepdim=True).sqrt()),
    "Sum": (lambda x, y, q: ops.Sum(x, 3), lambda x, y, q: x.sum(3, keepdim=True)),
    "Mean over blocks": (lambda x, y, q: ops.Add(x, ops.Mean(x, 1)), lambda x, y, q: x + x.mean(1,
    keepdim=True)),
    "Max over blocks": (lambda x, y, q: ops.Add(x, ops.Max(x, 1)), lambda x, y, q: x + x.amax(1,
    keepdim=True)),
    "Min over blocks": (lambda x, y, q: ops.Add(x, ops.Min(x, 1)), lambda x, y, q: x + x.amin(1,
    keepdim=True)),
    "L2Norm over blocks": (
        lambda x, y, q: ops.Add(x, ops.L2Norm(x, 1)),
        lambda x, y, q: x + x.norm(dim=1, keepdim=True),
    ),
    "Sum over blocks": (lambda x, y, q: ops.Add(x, ops.Sum(x, 1)), lambda x, y, q: x + x.sum(1,
    keepdim=True)),
    "GeMM": (lambda x, y, q: ops.GeMM(x, ops.Transpose(q)), lambda x, y, q: x @ q[:,
    None].transpose(2, 3)),
    "GeMM over blocks": (
        lambda x, y, q: ops.GeMM(flat(y), ops.GeMM(ops.Transpose(flat(x)), flat(y))),
        lambda x, y, q: y.flatten(2) @ (x.flatten(2).transpose(1, 2) @ y.flatten(2)),
    ),
    "Multiply": (lambda x, y, q: ops.Multiply(x, y), lambda x, y, q: x * y),
    "Add": (lambda x, y, q: ops.Add(x, 2.0), lambda x, y, q: x + 2),
    "Maximum": (lambda x, y, q: ops.Maximum(x, y), lambda x, y, q: torch.where(x > y, x, y)),
    "Minimum": (lambda x, y, q: ops.Minimum(x, 0.1), lambda x, y, q: x.clamp(max=0.1)),
    "Add_Mul": (lambda x, y, q: ops.Add_Mul(x, 3.0, y), lambda x, y, q: 3 * x + y),
    "Kron": (
        lambda x, y, q: ops.Kron(x, y),
        lambda x, y, q: torch.stack([torch.kron(a, b) for a, b in zip(x[0], y[0],
        strict=True)])[None],
    ),
    "Relu": (lambda x, y, q: ops.Relu(x), lambda x, y, q: x.clamp(min=0)),
    "Sigmoid": (lambda x, y, q: ops.Sigmoid(x), lambda x, y, q: 1 / (1 + (-x).exp())),
    "Silu": (lambda x, y, q: ops.Silu(x), lambda x, y, q: x / (1 + (-x).exp())),
    "Exp": (lambda x, y, q: ops.Exp(x), lambda x, y, q: x.exp()),
    "Abs": (lambda x, y, q: ops.Abs(x), lambda x, y, q: torch.maximum(x, -x)),
    "Log": (lambda x, y, q: ops.Log(ops.Add(ops.Abs(x), 1.0)), lambda x, y, q: x.abs().log1p()),
    "WhereEq": (lambda x, y, q: ops.WhereEq(x, x, y, 0.0), lambda x, y, q: y),
    "WhereNe": (lambda x, y, q: ops.WhereNe(x, x, y, x), lambda x, y, q: x),
    "WhereGt": (lambda x, y, q: ops.WhereGt(x, y, 1.0, x), lambda x, y, q: torch.where(x > y, 1.0,
    x)),
    "WhereGe": (lambda x, y, q: ops.WhereGe(x, y, x, y), lambda x, y, q: torch.maximum(x, y)),
    "WhereLt": (lambda x, y, q: ops.WhereLt(x, y, x, y), lambda x, y, q: torch.minimum(x, y)),
    "WhereLe": (lambda x, y, q: ops.WhereLe(x, 0.0, 0.0, x), lambda x, y, q: x.relu()),
    "Softmax": (lambda x, y, q: ops.Softmax(x, 3), lambda x, y, q: x.exp() / x.exp().sum(3,
    keepdim=True)),
    "Softmax over blocks": (lambda x, y, q: ops.Softmax(x, 1), lambda x, y, q: x.softmax(1)),
    "Normalize": (lambda x, y, q: ops.Normalize(x, 1), lambda x, y, q: x / x.norm(dim=1,
    keepdim=True)),
    "Conv1d": (
        lambda x, y, q: ops.Conv1d(x, (1.0, -2.0, 0.5)),
        lambda x, y, q: -2 * x + shifted(x, 1) + 0.5 * shifted(x, -1),
    ),
    "Reshape": (lambda x, y, q: ops.Reshape(x, (1, x.shape[1], 2, 12)), lambda x, y, q: x.reshape(1,
    -1, 2, 12)),
    "Transpose": (lambda x, y, q: ops.Transpose(x), lambda x, y, q: x.transpose(2, 3)),
    "MaskSlice": (
        lambda x, y, q: ops.MaskSlice(x, 2, 5, dim=3),
        lambda x, y, q: x * x.new_tensor([0.0, 0, 1, 1, 1, 0]),
    ),
    "MaskSlice of blocks": (
        lambda x, y, q: ops.MaskSlice(x, 1, -1, fill=-3.0),
        lambda x, y, q: torch.cat((torch.full_like(x[:, :1], -3), outer(x)), 1)[:, : x.shape[1]],
    ),
}  # fmt: skip


def flat(x: Any) -> Any:
    """[1, B, 4, 6] -> [1, B, 24]."""
    return ops.Reshape(x, (1, x.shape[1], 24))


def outer(x: Tensor) -> Tensor:
    """[1, B, ...] without its first block, the last one filled."""
    return torch.cat((x[:, 1:-1], torch.full_like(x[:, -1:], -3)), 1)


def shifted(x: Tensor, by: int) -> Tensor:
    """Along the blocks, zeros from outside."""
    padded = torch.nn.functional.pad(x, (0, 0, 0, 0, 1, 1))
    return padded[:, 1 - by : 1 - by + x.shape[1]]


@dataclass(frozen=True)
class Applies(Flow):
    """Leaves what a case gives in a cache."""

    name: ClassVar[str] = "applies"
    case: str = "Mean"
    inner: tuple[int, ...] = ()

    def create_cache(self, block_size: int, head_dim: int) -> dict[str, tuple[int, ...]]:
        return {"x": (4, 6), "y": (4, 6), "out": self.inner, "score": (1,)}

    def forward_cache(self, c: Caches) -> None:
        for name in ("x", "y", "out", "score"):
            c[name] = ops.CFill(c[name])

    def forward_indexer(self, q: Value, c: Caches) -> Selection:
        ops.Save(c["out"], CASES[self.case][0](c["x"], c["y"], q))
        return ops.topK(ops.Load(c["score"]), self.topk_blocks)


class Sequences:
    """Tensors x and y of sequences of these lengths, scattered over rows, of which one is poison,
    and queries."""

    def __init__(self, lengths: list[int], seed: int) -> None:
        random = torch.Generator().manual_seed(seed)
        count = sum(lengths)
        self.lengths = torch.tensor(lengths)
        self.x, self.y = torch.randn(2, count + 3, 4, 6, generator=random).to(DEVICE)
        self.scores = torch.randn(count + 3, 1, generator=random).to(DEVICE)
        self.query = torch.randn(len(lengths), 3, 6, generator=random).to(DEVICE)
        *free, self.poison = torch.randperm(count + 3, generator=random).tolist()
        self.rows = [free[sum(lengths[:i]) : sum(lengths[: i + 1])] for i in range(len(lengths))]
        for tensor in (self.x, self.y, self.scores):
            tensor[self.poison] = float("nan")

    def of(self, number: int) -> tuple[Tensor, Tensor, Tensor]:
        """x, y [1, B, 4, 6] and q [1, 3, 6]."""
        rows = self.rows[number]
        return self.x[rows][None], self.y[rows][None], self.query[number][None]

    def vtensors(self, layout: EntryLayout) -> tuple[VTensor, VTensor, VTensor]:
        """All of them."""
        indptr = torch.tensor([0, *self.lengths.tolist()], device=DEVICE).cumsum(0)
        indices = torch.tensor(list(chain(*self.rows)), device=DEVICE)
        if layout is EntryLayout.PAGED:
            return (
                VTensor(self.x, indptr, indices),
                VTensor(self.y, indptr, indices),
                VTensor(self.query),
            )
        return (
            VTensor(self.x[indices], indptr),
            VTensor(self.y[indices], indptr),
            VTensor(self.query),
        )

    def batch(self) -> Batch:
        """All of them in a step; each has a block that is being filled."""
        width = int(self.lengths.max()) + 1
        rows = torch.tensor([[*rows, *[self.poison] * (width - len(rows))] for rows in self.rows])
        return Batch(rows.to(DEVICE), self.lengths * SIZE + 1, SIZE)


lengths = st.lists(st.integers(1, 9), min_size=1, max_size=5)


@pytest.mark.parametrize("layout", [EntryLayout.RAGGED, EntryLayout.PAGED])
@pytest.mark.parametrize("case", CASES)
@given(lengths=lengths, seed=st.integers(0, 99))
@examples(8)
def test_an_operator_is_the_pytorch_operator_on_each_sequence(
    case: str, layout: EntryLayout, lengths: list[int], seed: int
):
    found, expected = CASES[case]
    sequences = Sequences(lengths, seed)
    result = found(*sequences.vtensors(layout))
    assert result.num_sequences == len(lengths)
    for number in range(len(lengths)):
        torch.testing.assert_close(
            result.sequence(number), expected(*sequences.of(number)), **CLOSE
        )


@pytest.mark.parametrize("implementation", ["cpu", "triton"])
@pytest.mark.parametrize("fused", [True, False])
@pytest.mark.parametrize("case", CASES)
@given(lengths=lengths, seed=st.integers(0, 99), chunk=st.sampled_from([64, 4096, 1 << 20]))
@examples(8)
def test_a_step_of_all_sequences_gives_each_its_own(
    case: str, fused: bool, implementation: str, lengths: list[int], seed: int, chunk: int
):
    sequences, expected = Sequences(lengths, seed), CASES[case][1]
    inner = tuple(expected(*sequences.of(0)).shape[2:])
    program = trace(Applies(case=case, inner=inner, topk_blocks=2), 4, 6, 3)
    caches = {
        "x": sequences.x,
        "y": sequences.y,
        "score": sequences.scores,
        "out": torch.full((len(sequences.x), *inner), 7.0, device=DEVICE),
    }
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("kvgraft.decode.executor.CHUNK_BYTES", chunk)
        groups = plan(program) if fused else unfused(program)
        select(
            program,
            groups,
            sequences.query,
            caches,
            sequences.batch(),
            implementation=implementation,
        )
    for number, rows in enumerate(sequences.rows):
        torch.testing.assert_close(
            caches["out"][rows][None], expected(*sequences.of(number)), **CLOSE
        )
    untouched = torch.ones(len(sequences.x), dtype=torch.bool, device=DEVICE)
    untouched[list(chain(*sequences.rows))] = False
    assert bool((caches["out"][untouched] == 7).all())


@given(lengths=lengths, seed=st.integers(0, 99), k=st.integers(1, 12), hidden=st.booleans())
@examples(30)
def test_the_best_blocks_are_chosen_among_those_that_are_not_kept_anyway(
    lengths: list[int], seed: int, k: int, hidden: bool
):
    sequences = Sequences(lengths, seed)
    if hidden:
        sequences.scores[::2] = -math.inf
    program = trace(Applies(inner=(4, 1), topk_blocks=k), 4, 6, 3)
    out = torch.zeros(len(sequences.x), 4, 1, device=DEVICE)
    caches = {"x": sequences.x, "y": sequences.y, "score": sequences.scores, "out": out}
    batch = sequences.batch()
    chosen = select(program, plan(program), sequences.query, caches, batch)
    found, tokens = tables(chosen, batch, program.flow)
    for number, rows in enumerate(sequences.rows):
        total, scores = len(rows) + 1, sequences.scores[rows][:, 0].tolist()
        open_to_choice = [block for block in range(1, total - 2) if scores[block] > -math.inf]
        best = set(sorted(open_to_choice, key=lambda block: -scores[block])[:k])
        expected = sorted(best | {0} | {max(total - 2, 0), total - 1})
        assert tokens[number] == (len(expected) - 1) * SIZE + 1
        assert found[number, : len(expected)].tolist() == [
            [*rows, sequences.poison][block] for block in expected
        ]
        assert bool((found[number, len(expected) :] == sequences.poison).all())


def test_every_operator_has_a_case():
    tried = {case.split()[0] for case in CASES} | {"CFill", "Load", "Save", "topK", "approxTopK"}
    elsewhere = {"Fill", "Union", *(name for name in OPERATORS if name.endswith("Interleave"))}
    assert tried | elsewhere == OPERATORS.keys()


@pytest.mark.parametrize("implementation", ["cpu", "triton"])
def test_approximate_topk_takes_as_many_and_misses_what_it_may(
    monkeypatch: pytest.MonkeyPatch, implementation: str
):
    """As on a device: the CPU takes PyTorch's exact selection. Most scores fall into one bin, which
    is not refined."""

    def on_a_device(*arguments: Any, **options: Any) -> Tensor:
        return radix_topk(*arguments, **options | {"implementation": implementation})

    monkeypatch.setattr("kvgraft.decode.operators.radix_topk", on_a_device)
    scores = torch.rand(300, 1, generator=torch.Generator().manual_seed(0)).to(DEVICE)
    scores[[3, 50, 107, 222]] = 1e6
    x, tops = VTensor(scores, torch.tensor([0, 100, 300], device=DEVICE)), {}
    for tolerance in (None, 0.0, 0.5, 1.0):
        found = ops.topK(x, 16) if tolerance is None else ops.approxTopK(x, 16, tolerance=tolerance)
        tops[tolerance] = [set(found.sequence(number)[0].tolist()) for number in range(2)]
    for number, certain in enumerate(({3, 50}, {7, 122})):
        exact, *found = (tops[tolerance][number] for tolerance in (None, 0.0, 0.5, 1.0))
        assert [len(own) for own in found] == [16] * 3
        assert found[0] == exact
        assert len(found[1] & exact) >= 8
        assert len(found[2] & exact) < 16, "the bin of the last one was refined"
        assert certain <= found[2], "what lies in a better bin is never missed"


def test_union_has_each_block_once():
    scores, indptr = (
        torch.tensor([3.0, 1, 2, 0], device=DEVICE)[:, None, None],
        torch.tensor([0, 4], device=DEVICE),
    )
    x, y = (VTensor(scores, indptr) for _ in range(2))
    both = ops.Union(ops.topK(x, 2), ops.topK(y, 3))
    assert sorted(block for block in both.sequence(0)[0].tolist() if block >= 0) == [0, 1, 2]


@pytest.mark.parametrize("name", [name for name in OPERATORS if name.endswith("Interleave")])
def test_interleaved_reductions_are_of_consecutive_groups(name: str):
    x = torch.randn(1, 5, 8, 6).to(DEVICE)
    plain = {
        "Mean": lambda g: g.mean(0), "Max": lambda g: g.amax(0),
        "Min": lambda g: g.amin(0), "L2Norm": lambda g: g.norm(dim=0),
    }[name.removesuffix("Interleave")]  # fmt: skip
    expected = torch.stack([plain(group) for group in x[0].movedim(1, 0).split(2)], dim=1)
    found = ops.apply(name, VTensor(x[0], torch.tensor([0, 5], device=DEVICE)), dim=2, size=2)
    torch.testing.assert_close(found.sequence(0)[0], expected, **CLOSE)
