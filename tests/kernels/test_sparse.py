from importlib.util import find_spec

import hypothesis.strategies as st
import pytest
import torch
from hypothesis import given

from devices import DEVICE
from kvgraft.kernels.dispatch import block_sparse_attention, page_topk, radix_topk
from properties import examples

IMPLEMENTATIONS = ["cpu", *(["triton"] if find_spec("triton") else [])]
NUM_PAGES, SIZE = 40, 16  # ten pages for each of four sequences


@pytest.mark.parametrize("implementation", IMPLEMENTATIONS)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize(
    ("group", "dim", "value_dim"),
    [(1, 32, 32), (4, 64, 64), (3, 80, 80), (16, 48, 32), (20, 576, 576)],
)
@pytest.mark.parametrize("lengths", [[1], [16, 16], [5, 17, 160, 33], [160] * 3])
@pytest.mark.parametrize("num_sinks", [None, 2])
def test_attention_to_tables_of_pages(
    implementation, dtype, group, dim, value_dim, lengths, num_sinks
):
    torch.manual_seed(len(lengths))
    tables = torch.randperm(NUM_PAGES).view(-1, 10)[: len(lengths)].to(DEVICE)
    # where nobody wrote
    keys = torch.full((NUM_PAGES, SIZE, dim), float("nan"), dtype=dtype, device=DEVICE)
    values = keys[..., :value_dim] if value_dim < dim else keys.clone()
    for table, length in zip(tables, lengths, strict=True):
        slots = (table[:, None] * SIZE + torch.arange(SIZE, device=DEVICE)).flatten()[:length]
        if value_dim == dim:
            values.view(-1, dim)[slots] = torch.randn(length, dim).to(keys)
        keys.view(-1, dim)[slots] = torch.randn(length, dim).to(keys)
    query = torch.randn(len(lengths), group, dim).to(keys)
    sinks = None if num_sinks is None else torch.randn(num_sinks, group, device=DEVICE)
    lengths = torch.tensor(lengths, device=DEVICE)
    arguments = (query, keys, values, tables, lengths, dim**-0.5, None, sinks)
    wanted = block_sparse_attention(*arguments, implementation="reference")
    found = block_sparse_attention(*arguments, implementation=implementation)
    assert wanted.shape == (len(lengths), group, value_dim)
    assert wanted.isfinite().all()
    torch.testing.assert_close(
        found, wanted, atol=2e-5 if dtype is torch.float32 else 2e-2, rtol=1e-5
    )


@pytest.mark.parametrize("implementation", ["reference", *IMPLEMENTATIONS])
def test_a_sink_takes_its_share_of_the_softmax_and_adds_no_value(implementation):
    torch.manual_seed(0)
    query, keys = torch.randn(4, 3, 32, device=DEVICE), torch.randn(4, SIZE, 32, device=DEVICE)
    tables, lengths = torch.arange(4, device=DEVICE)[:, None], torch.full((4,), 9, device=DEVICE)
    sinks = torch.tensor([[0.0, 2.0, -torch.inf], [-1.0, 1.0, 30.0]], device=DEVICE)
    found = block_sparse_attention(
        query, keys, keys, tables, lengths, 0.2, sinks=sinks, implementation=implementation
    )
    logits = query @ keys[:, :9].transpose(1, 2) * 0.2
    own = sinks.repeat(2, 1)[..., None]  # sequence s is head s % 2
    wanted = logits.exp() / (logits.exp().sum(-1, keepdim=True) + own.exp()) @ keys[:, :9]
    torch.testing.assert_close(found, wanted, atol=1e-5, rtol=1e-4)


def best(scores: torch.Tensor, lengths: torch.Tensor, k: int) -> list[list[float]]:
    """The scores that are chosen, in order."""
    found = radix_topk(scores, lengths, k, implementation="reference")
    return [sorted(row[own[own >= 0]].tolist()) for row, own in zip(scores, found, strict=True)]


@pytest.mark.parametrize("implementation", IMPLEMENTATIONS)
@pytest.mark.parametrize("remap", [False, True])
@examples(25)
@given(data=st.data())
def test_exact_radix_topk_is_topk_as_a_set(implementation, remap, data):
    rows, columns = data.draw(st.integers(1, 4)), data.draw(st.integers(1, 70))
    some = st.one_of(
        st.floats(width=32, allow_nan=False), st.sampled_from([0.0, 1.0, -1.0, -float("inf")])
    )
    scores = torch.tensor(data.draw(st.lists(st.lists(some, min_size=columns, max_size=columns),
    min_size=rows,
                                             max_size=rows)), device=DEVICE)  # fmt: skip
    lengths = data.draw(st.lists(st.integers(0, columns), min_size=rows, max_size=rows))
    lengths = torch.tensor(lengths, device=DEVICE)
    k = data.draw(st.integers(1, 80))
    found = radix_topk(scores, lengths, k, remap=remap, implementation=implementation)
    assert found.shape == (rows, k)
    for row, own, length, wanted in zip(
        scores, found, lengths, best(scores, lengths, k), strict=True
    ):
        own = own[own >= 0]
        assert own.unique().numel() == own.numel() == len(wanted)
        assert own.numel() == 0 or own.max() < length
        assert sorted(row[own].tolist()) == wanted


@pytest.mark.parametrize("implementation", IMPLEMENTATIONS)
@pytest.mark.parametrize("remap", [False, True])
def test_lossy_radix_topk_misses_no_more_than_it_may(implementation, remap):
    scores = torch.randn(6, 3000, generator=torch.Generator().manual_seed(1)).to(DEVICE)
    lengths, k, tolerance = torch.tensor([3000, 2500, 1500, 700, 100, 40], device=DEVICE), 64, 0.25
    found = radix_topk(scores, lengths, k, tolerance, remap=remap, implementation=implementation)
    for row, own, length in zip(scores, found, lengths.tolist(), strict=True):
        wanted = set(row[:length].topk(min(k, length)).indices.tolist())
        own = set(own[own >= 0].tolist())
        assert len(own) == len(wanted)
        assert len(own & wanted) >= (1 - tolerance) * len(wanted)
    once = radix_topk(scores, lengths, k, 1.0, remap=remap, implementation=implementation)
    assert [len(set(row[row >= 0].tolist())) for row in once] == [64] * 5 + [40]


@pytest.mark.parametrize("implementation", IMPLEMENTATIONS)
@pytest.mark.parametrize("always", [(1, 2), (0, 1), (3, 0)])
def test_tables_hold_the_best_pages_beside_the_first_and_the_last(implementation, always):
    size, k, tokens = 4, 5, [0, 1, 4, 9, 16, 33, 64, 2047]
    random = torch.Generator().manual_seed(2)
    scores = torch.randn(len(tokens), 520, generator=random)[:, :512]
    scores[-1, 7:200] = float("-inf")
    scores[:, 511:] = float("nan")  # of no block that is full
    scores[-2, :16] = scores[-2, :16].round()
    rows = torch.randperm(len(tokens) * 512, generator=random).view(len(tokens), 512)
    arguments = [x.to(DEVICE) for x in (scores, rows, torch.tensor(tokens))]
    wanted = page_topk(*arguments, size, always, k, implementation="reference")
    found = page_topk(*arguments, size, always, k, implementation=implementation)
    assert torch.equal(found[1], wanted[1])
    for number, (own, best, count) in enumerate(
        zip(found[0], wanted[0], wanted[1].tolist(), strict=True)
    ):
        blocks = [scores[number, rows[number].tolist().index(page)] for page in own.tolist()]
        expected = [scores[number, rows[number].tolist().index(page)] for page in best.tolist()]
        held = -(-count // size)
        assert own.tolist()[held:] == [own.tolist()[max(held, 1) - 1]] * (len(own) - held)
        torch.testing.assert_close(sorted(blocks[:held]), sorted(expected[:held]), equal_nan=True)


def test_bad_options_of_topk():
    with pytest.raises(ValueError, match="tolerance a share from 0 to 1, got 3 and 2"):
        radix_topk(torch.zeros(1, 1), torch.ones(1), 3, 2)
    assert radix_topk(torch.zeros(2, 0), torch.zeros(2), 3).tolist() == [[-1] * 3] * 2
