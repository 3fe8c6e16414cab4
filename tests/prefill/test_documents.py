"""The equations of SamKV, and where blocks lie in a prompt, against small cases made by hand."""

import math
from types import SimpleNamespace

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from kvgraft.kv.documents import BlockCut, Document
from kvgraft.policies import Condense, SamKV
from kvgraft.policies.samkv import _normed, match, personalise, retrieved_share
from kvgraft.prefill.documents.context import DocumentLayout, Placed, blend

BLOCKS = BlockCut(8, 1, 1)


def all_here(values: Tensor) -> Tensor:
    return values


def placed(start: int, num_tokens: int) -> Placed:
    kv, none = torch.zeros(1, 1, num_tokens, 2), torch.zeros(0)
    return Placed(start, Document(kv, kv, BLOCKS.size, none, none, none, none, none))


@pytest.fixture
def layout() -> DocumentLayout:
    """5 fresh tokens, documents of 28, 3 and 16 tokens with 2 fresh ones between the first two,
    then a question."""
    return DocumentLayout([placed(5, 28), placed(35, 3), placed(38, 16)], BLOCKS, 60)


def test_equation_1_adds_what_the_other_documents_look_for():
    generic = torch.tensor([[1.0, 0.0], [0.0, 0.0]])  # two heads
    local = [
        torch.tensor(q)
        for q in ([[3.0, 4.0], [0.0, 0.0]], [[0.0, 2.0], [0.0, 0.0]], [[-1.0, 0.0], [0.0, 0.0]])
    ]
    first, second, third = personalise(generic, torch.stack(local), all_here)
    # |cos| to the generic query: 3/5, 0, 1
    assert first.flatten().tolist() == pytest.approx((generic + local[2] / 2).flatten().tolist())
    assert second.flatten().tolist() == pytest.approx(
        (generic + (0.6 * local[0] + local[2]) / 2).flatten().tolist()
    )
    assert third.flatten().tolist() == pytest.approx(
        (generic + 0.6 * local[0] / 2).flatten().tolist()
    )


def test_equation_1_leaves_a_single_document_the_generic_query():
    generic = torch.randn(2, 2)
    [query] = personalise(generic, torch.randn(1, 2, 2), all_here)
    assert torch.equal(query, generic)


def test_equation_2_is_the_share_above_the_anchors():
    best, anchor, worst = (
        torch.tensor([4.0, 4.0, 4.0, 4.0, 1.0]),
        torch.tensor([3.0, 4.0, 0.0, 5.0, 1.0]),
        torch.zeros(5),
    )
    assert retrieved_share(best, anchor, worst).tolist() == [0.25, 0.0, 0.0, 0.0, 0.0]
    assert retrieved_share(
        torch.tensor([2.0]), torch.tensor([-1.0]), torch.tensor([-2.0])
    ).tolist() == [0.75]


def test_equation_4_blends_by_the_cosine_of_old_and_new():
    # keys, values
    new = [torch.tensor([[[1.0, 0.0]], [[0.0, 2.0]]]), torch.tensor([[[0.0, 0.0]], [[0.0, 0.0]]])]
    old = [torch.tensor([[[1.0, 0.0]], [[0.0, 1.0]]]), torch.tensor([[[1.0, 0.0]], [[0.0, 0.0]]])]
    keys, values = blend(new, old, all_here)
    theta = 1 / math.sqrt(2)  # of the first token; of the second it is 1
    assert keys.flatten().tolist() == pytest.approx([1.0, 0.0, 0.0, 2.0])
    assert values.flatten().tolist() == pytest.approx([1 - theta, 0.0, 0.0, 0.0])


def test_blocks_match_by_inner_products_over_all_heads():
    query, keys = torch.randn(4, 2), torch.randn(3, 2, 2)
    expected = [sum(query[h] @ key[h // 2] for h in range(4)) for key in keys]
    torch.testing.assert_close(match(query, keys), torch.stack(expected))


def test_where_blocks_lie(layout: DocumentLayout):
    assert layout.starts.tolist() == [5, 13, 21, 29, 35, 38, 46]
    assert layout.stops.tolist() == [13, 21, 29, 33, 38, 46, 54]
    assert layout.owner.tolist() == [0, 0, 0, 0, 1, 2, 2]
    assert layout.is_middle.tolist() == [False, True, True, False, False, False, False]
    assert layout.anchors.nonzero().flatten().tolist() == [
        *range(5, 13),
        *range(29, 33),
        *range(35, 54),
    ]
    assert (layout.block_of < 0).nonzero().flatten().tolist() == [*range(5), 33, 34, *range(54, 60)]


def test_a_halo_does_not_reach_another_document(layout: DocumentLayout):
    tokens = torch.zeros(60, dtype=torch.bool)
    tokens[[21, 36, 50, 58]] = True
    assert layout.before(tokens, 0).nonzero().flatten().tolist() == [
        *range(21, 29),
        *range(35, 38),
        *range(46, 54),
    ]
    assert layout.before(tokens, 1).nonzero().flatten().tolist() == [*range(13, 29), *range(35, 54)]
    assert layout.before(tokens, 9).nonzero().flatten().tolist() == [*range(5, 29), *range(35, 54)]


def test_the_budget_is_filled_to_the_token(layout: DocumentLayout):
    ranking = torch.tensor([2, 1])
    assert layout.fill(ranking, 11).nonzero().flatten().tolist() == [13, 14, 15, *range(21, 29)]
    assert layout.fill(ranking, 99).sum() == 16
    assert layout.fill(ranking, 0).sum() == layout.fill(ranking[:0], 5).sum() == 0


def test_a_block_is_worth_its_best_token(layout: DocumentLayout):
    scores = torch.zeros(60)
    scores[[3, 6, 14, 15, 53]] = torch.tensor([9.0, 1.0, 2.0, 3.0, 4.0])
    assert layout.by_block(scores).tolist() == [1.0, 3.0, 0.0, 0.0, 0.0, 0.0, 4.0]


@pytest.mark.parametrize("policy", [SamKV, Condense])
def test_the_number_kept_follows_from_lengths(policy: type[SamKV] | type[Condense]):
    assert policy(kept_share=0.15, block_tokens=8).num_kept([512] * 8) == int(0.15 * 4096)
    assert policy(kept_share=0.15, block_tokens=8).num_kept([100] * 8) == 8 * (
        8 + 8 + 4
    )  # what is always kept is more than that
    filtered = {"top_p": "off"} if policy is SamKV else {}
    assert policy(kept_share=1.0, **filtered).num_kept([5, 700]) == 705
    without = {"selection": "off"} if policy is SamKV else {}
    assert (
        policy(kept_share=0.0, initial_blocks=0, local_blocks=0, **without).num_kept([5, 700]) == 0
    )


def test_samkv_selects_as_many_tokens_as_a_document_has_on_average():
    lengths = [512, 512, 1024]
    anchors = 3 * (64 + 2 * 64)
    assert SamKV().num_kept(lengths) == anchors + sum(lengths) // 3
    assert SamKV().num_kept([700]) == 700
    assert SamKV(kept_share=0.3).num_kept(lengths) == int(0.3 * sum(lengths))
    assert SamKV(selection="off").num_kept(lengths) == anchors


def test_scores_are_normalised_over_the_retrieved_blocks(layout: DocumentLayout):
    """Blocks that were not retrieved change nothing of the others' scores."""
    ctx = SimpleNamespace(layout=layout)
    scores = torch.arange(7, dtype=torch.float32)[None].repeat(2, 1)
    retrieved = torch.zeros(2, 7, dtype=torch.bool)
    retrieved[0, 1:3], retrieved[1, 1] = True, True
    normed = _normed(ctx, scores, retrieved)
    assert torch.equal(normed[0, 1:3], torch.tensor([-1.0, 1.0]))
    assert normed[1, 1] == 0
    assert torch.isinf(normed[~retrieved]).all()
    scores[:, [0, 3, 4, 5, 6]] = 99.0
    assert torch.equal(_normed(ctx, scores, retrieved), normed)


def test_cosines_are_of_all_heads_together():
    """A head that points elsewhere counts by its size only."""
    one, other = torch.tensor([[1.0, 0.0], [0.0, 0.1]]), torch.tensor([[1.0, 0.0], [0.1, 0.0]])
    _, biased = personalise(one, torch.stack([other, torch.zeros(2, 2)]), all_here)
    cosine = F.cosine_similarity(one.flatten(), other.flatten(), dim=0)
    torch.testing.assert_close(biased, one + cosine * other)
