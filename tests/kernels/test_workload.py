"""Equal shares of a step's work: what is planned, what programs do in the interpreter, and that
results are right."""

from collections import Counter
from importlib.util import find_spec
from unittest.mock import patch

import hypothesis.strategies as st
import pytest
import torch
from hypothesis import given
from torch import Tensor

from devices import DEVICE
from kvgraft.decode.batch import Batch
from kvgraft.decode.executor import fill, select
from kvgraft.decode.flow import trace
from kvgraft.decode.planner import plan
from kvgraft.flows import FLOWS
from kvgraft.kernels import workload
from kvgraft.kernels.dispatch import block_sparse_attention
from kvgraft.kernels.workload import FREE_PADDING, MOST_PADDING, Lengths, parts_of, plan_work
from properties import examples

with_triton = pytest.mark.skipif(find_spec("triton") is None, reason="Triton is not installed")
no_device = pytest.mark.skipif(DEVICE != "cpu", reason="only the interpreter can be watched")
LENGTHS = st.lists(st.one_of(st.integers(0, 3), st.integers(0, 90)), min_size=1, max_size=9)
SKEWED = [2048, *[64] * 15]  # full blocks of 32K and 1K tokens in blocks of 16
SIZE, DIM, GROUP = 4, 16, 2


@given(lengths=LENGTHS, programs=st.integers(1, 40))
def test_every_unit_is_taken_once_and_no_program_has_more_than_the_average(
    lengths: list[int], programs: int
):
    work = plan_work(torch.tensor(lengths, device=DEVICE), programs)
    taken, total = [], sum(lengths)
    assert work.num_programs == programs
    for first, last in work.programs.unfold(0, 2, 1).tolist():
        own = [
            (s, u)
            for s, begin, count in work.chunks[first:last].tolist()
            for u in range(begin, begin + count)
        ]
        assert len(own) <= -(-total // programs)
        taken += own
    assert taken == [(s, u) for s, length in enumerate(lengths) for u in range(length)]
    for number, (first, last) in enumerate(work.sequences.unfold(0, 2, 1).tolist()):
        own = work.chunks[first:last]
        assert own[:, 2].sum() == lengths[number]
        assert (own[:, 0] == number).all()


@with_triton
@examples(12)
@given(
    lengths=LENGTHS,
    programs=st.integers(1, 40),
    unit=st.sampled_from([1, 3]),
    tile=st.sampled_from([4, 16]),
)
def test_the_plan_of_a_device_is_that_of_the_host(
    lengths: list[int], programs: int, unit: int, tile: int
):
    from kvgraft.kernels.triton import workload as on_device

    counts = torch.tensor(lengths, device=DEVICE)
    with patch.object(on_device, "TILE", tile):
        found = on_device.plan_work(counts, unit, programs)
    wanted = plan_work(-(-counts // unit), programs)
    assert torch.equal(found.chunks, wanted.chunks)
    assert torch.equal(found.programs, wanted.programs)
    assert torch.equal(found.sequences, wanted.sequences)


@given(lengths=LENGTHS, times=st.sampled_from([1, 1000]))
def test_parts_hold_all_sequences_and_little_padding(lengths: list[int], times: int):
    lengths = [times * length for length in lengths]
    parts = parts_of(lengths)
    for rows, most in parts:
        here = sum(lengths[rows])
        assert most == max(lengths[rows])
        assert most * (rows.stop - rows.start) - here <= max(here * MOST_PADDING, FREE_PADDING)
    assert sum(sum(lengths[rows]) for rows, _ in parts) == sum(lengths)


def test_a_long_sequence_is_a_part_of_its_own():
    assert parts_of([7] * 5) == [(slice(0, 5), 7)]
    assert parts_of([64, 64, 9000, 64, 70, 0]) == [
        (slice(0, 2), 64),
        (slice(2, 3), 9000),
        (slice(3, 6), 70),
    ]
    assert parts_of([0, 0]) == []


def test_no_sequences_or_programs_are_refused():
    for units, programs in (
        (torch.zeros(0, dtype=torch.int64), 1),
        (torch.ones(1, dtype=torch.int64), 0),
    ):
        with pytest.raises(
            ValueError, match=f"sequences and programs, got {len(units)} and {programs}"
        ):
            plan_work(units, programs)


@pytest.fixture(params=[1, 3, 50], ids="{} programs".format)
def programs(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> int:
    """As many as a device has; 50 are more than there is work for."""
    monkeypatch.setattr(workload, "programs_of", lambda device: request.param)
    return request.param


def attention(lengths: list[int], group: int = 5) -> tuple[Tensor, ...]:
    """Arguments of an attention to scattered pages, NaN where nobody wrote."""
    torch.manual_seed(len(lengths))
    most = max(max(lengths), 1)
    width = -(-most // SIZE)
    tables = torch.randperm(len(lengths) * width).view(-1, width).to(DEVICE)
    keys, values = torch.full((2, tables.numel(), SIZE, DIM), float("nan"), device=DEVICE)
    for table, length in zip(tables, lengths, strict=True):
        slots = (table[:, None] * SIZE + torch.arange(SIZE, device=DEVICE)).flatten()[:length]
        for pool in (keys, values):
            pool.view(-1, DIM)[slots] = torch.randn(length, DIM).to(DEVICE)
    query = torch.randn(len(lengths), group, DIM).to(DEVICE)
    return query, keys, values, tables, torch.tensor(lengths, device=DEVICE), DIM**-0.5


@with_triton
@examples(4)
@given(lengths=st.lists(st.one_of(st.integers(0, 2), st.integers(0, 200)), min_size=1, max_size=5))
def test_shared_attention_is_attention(programs: int, lengths: list[int]):
    arguments = attention(lengths)
    wanted = block_sparse_attention(*arguments, implementation="reference")
    for bound in None, Lengths(arguments[4] + 3 * SIZE):
        found = block_sparse_attention(*arguments, bound, implementation="triton")
        torch.testing.assert_close(found, wanted, atol=2e-5, rtol=1e-5)
    found = block_sparse_attention(*arguments, implementation="cpu")
    torch.testing.assert_close(found, wanted, atol=2e-5, rtol=1e-5)


class Step:
    """Sequences of so many full blocks, and one that is being filled."""

    def __init__(self, blocks: list[int], flow: str = "block_topk") -> None:
        random = torch.Generator().manual_seed(0)
        self.program = trace(FLOWS[flow](topk_blocks=3), SIZE, DIM, GROUP)
        rows = torch.randperm(len(blocks) * (max(blocks) + 1), generator=random)
        keys, values = torch.randn(2, rows.numel(), SIZE, DIM, generator=random).to(DEVICE)
        self.query = torch.randn(len(blocks), GROUP, DIM, generator=random).to(DEVICE)
        self.rows, shapes = rows.view(len(blocks), -1).to(DEVICE), self.program.caches
        caches = {
            name: torch.empty(rows.numel(), *shape, device=DEVICE) for name, shape in shapes.items()
        }
        self.pool = {"k": keys, "v": values, **caches}
        fill(
            self.program, self.pool, torch.arange(rows.numel(), device=DEVICE), implementation="cpu"
        )
        self.batch = self.of(blocks)

    def of(self, blocks: list[int]) -> Batch:
        return Batch(self.rows, torch.tensor(blocks) * SIZE + 1, SIZE)

    def only(self, number: int) -> "Step":
        """With one of the sequences."""
        here = slice(number, number + 1)
        self.query, self.batch = (
            self.query[here],
            Batch(self.rows[here], self.batch.tokens[here], SIZE),
        )
        return self

    def choose(self, implementation: str, batch: Batch | None = None) -> list[set[int]]:
        found = select(
            self.program,
            plan(self.program),
            self.query,
            self.pool,
            batch or self.batch,
            implementation=implementation,
        )
        return [set(own[own >= 0].tolist()) for own in found]


@with_triton
@pytest.mark.parametrize("blocks", [[70, 0, 1, 5, 5, 200, 0], [0, 0], [1]], ids=str)
@pytest.mark.parametrize("flow", ["quest", "h2o"])
def test_a_flow_chooses_the_same_on_a_skewed_batch(programs: int, flow: str, blocks: list[int]):
    chosen = {name: Step(blocks, flow).choose(name) for name in ("cpu", "triton")}
    alone = [Step(blocks, flow).only(number).choose("cpu")[0] for number in range(len(blocks))]
    assert chosen == {"cpu": alone, "triton": alone}


def count(monkeypatch: pytest.MonkeyPatch, table: Tensor) -> Counter[tuple[int, ...]]:
    """Entries of a table that each program of the interpreter takes up from now on, padding
    included."""
    from triton.runtime.interpreter import InterpreterBuilder

    taken: Counter[tuple[int, ...]] = Counter()
    load, first = InterpreterBuilder.create_masked_load, table.data_ptr()

    def counting(self, ptrs, mask, *rest):  # type: ignore[no-untyped-def]
        if mask.data.any() and first <= ptrs.data[mask.data].min() < first + table.nbytes:
            taken[self.grid_idx] += mask.data.size
        return load(self, ptrs, mask, *rest)

    monkeypatch.setattr(InterpreterBuilder, "create_masked_load", counting)
    return taken


@with_triton
@no_device
def test_blocks_that_programs_go_through_and_the_longest_share(monkeypatch: pytest.MonkeyPatch):
    step = Step(SKEWED)
    shares = {}
    for name, blocks in (("balanced", SKEWED), ("padded", [2048] * 16)):
        with monkeypatch.context() as patch:
            taken = count(patch, step.rows)
            step.choose("triton", step.of(blocks))
        shares[name] = (sum(taken.values()), max(taken.values()))
    # eight programs, tiles of 64
    assert shares == {"balanced": (3008, 384), "padded": (32768, 4096)}


@with_triton
@no_device
def test_tokens_that_programs_attend_to_and_the_longest_share(monkeypatch: pytest.MonkeyPatch):
    arguments = attention([4096, *[128] * 15], group=1)
    taken = count(monkeypatch, arguments[3])
    block_sparse_attention(*arguments, implementation="triton")
    # 94 tiles of eight programs
    assert (sum(taken.values()), max(taken.values())) == (4096 + 15 * 128, 12 * 64)
