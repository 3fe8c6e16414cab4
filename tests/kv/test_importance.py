"""Appendix A of SamKV, against hand-made attention."""

import pytest
import torch

from kvgraft.kv.importance import (
    ENOUGH,
    Received,
    by_block,
    exceptionally_small,
    ranks,
    received_attention,
)


def naive(query: torch.Tensor, keys: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Mean and exponent of every token, one at a time."""
    count, groups = len(keys), query.shape[1] // keys.shape[1]
    logits = (
        torch.einsum("nhd,mhd->hnm", query, keys.repeat_interleave(groups, 1))
        * keys.shape[-1] ** -0.5
    )
    future = torch.ones(count, count, dtype=torch.bool).triu(1)
    weights = logits.masked_fill(future, float("-inf")).softmax(-1).mean(0)
    means, exponents = [], []
    for token in range(count):
        received = weights[token + 1 :, token]
        means.append(float(received.mean()) if len(received) else 0.0)
        if len(received) < ENOUGH:
            exponents.append(float("inf"))
            continue
        x = torch.arange(1, len(received) + 1).float().log()
        solution = torch.linalg.lstsq(x[:, None], received.log()[:, None]).solution
        exponents.append(-float(solution[0]))
    return torch.tensor(means), torch.tensor(exponents)


@pytest.mark.parametrize("count", [1, 9, 40, 300])
def test_the_streamed_fit_is_the_plain_one(count: int):
    generator = torch.Generator().manual_seed(count)
    query, keys = (
        torch.randn(count, 4, 8, generator=generator),
        torch.randn(count, 2, 8, generator=generator),
    )
    found = received_attention(query, keys)
    mean, exponent = naive(query, keys)
    torch.testing.assert_close(found.mean, mean, rtol=1e-4, atol=1e-6)
    torch.testing.assert_close(found.exponent, exponent, rtol=1e-3, atol=1e-3)


def attended_as(wanted: torch.Tensor) -> Received:
    """Of a text whose token t + 1 gives the first token so much of its attention, [n - 1], and the
    rest to itself."""
    count = len(wanted) + 1
    logits = torch.full((count, count), -60.0).double()
    logits[range(count), range(count)] = 0.0
    logits[1:, 0] = (wanted / (1 - wanted)).log()
    # against one-hot keys, so that the logits are these
    query = (logits * count**0.5).float()[:, None]
    return received_attention(query, torch.eye(count)[:, None])


def test_a_power_law_gives_its_exponent():
    wanted = torch.arange(1, 64).double() ** -0.5 * (1 - 1e-6)
    found = attended_as(wanted)
    assert float(found.exponent[0]) == pytest.approx(0.5, abs=1e-3)
    assert float(found.mean[0]) == pytest.approx(float(wanted.mean()), rel=1e-4)


def test_the_smaller_exponent_is_of_the_token_that_receives_more_everywhere():
    """Even if what the other one receives decays less (SamKV, Appendix A.1)."""
    distance = torch.arange(1, 64).double()
    much, little = 0.9 * distance**-0.3, 0.05 * distance**-0.1
    assert (much > little).all()
    assert attended_as(much).exponent[0] < attended_as(little).exponent[0]


def test_the_token_that_receives_most_stands_for_its_block():
    received = Received(
        torch.tensor([0.1, 0.5, 0.2, 0.9, 0.3]), torch.tensor([1.0, 0.7, 0.9, 0.4, 2.0])
    )
    found = by_block(received, 2)
    assert found.representative.tolist() == [1, 3, 4]
    assert found.exponent.tolist() == pytest.approx([0.7, 0.4, 2.0])
    assert found.attention.tolist() == pytest.approx([0.5, 0.9, 0.3])


def test_pauta_finds_what_is_three_deviations_below():
    values = torch.cat((torch.linspace(0.9, 1.1, 20), torch.tensor([0.1, float("inf"), 1.9])))
    assert exceptionally_small(values).nonzero().flatten().tolist() == [20]
    # among ten nothing can be
    assert not exceptionally_small(torch.tensor([1.0] * 9 + [-100.0])).any()
    assert not exceptionally_small(torch.tensor([float("inf")])).any()


def test_ranks():
    assert ranks(torch.tensor([[3.0, 1.0, 2.0], [0.0, 0.0, -1.0]])).tolist() == [
        [2, 0, 1],
        [1, 2, 0],
    ]
