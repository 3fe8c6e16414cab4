"""Parameters that are refused, and draws that follow the distribution they were asked for."""

import math
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from kvgraft.engine.sampling import Sampler, SamplingParams
from properties import examples

LOGITS = torch.tensor([0.1, 2.0, -math.inf, 1.5, 2.5, -3.0])
NUM_DRAWS = 4000


def draws(logits: Tensor, num: int, **params: Any) -> list[int]:
    sampler = Sampler(SamplingParams(**params))
    return [sampler.sample(logits) for _ in range(num)]


@pytest.mark.parametrize(
    ("params", "message"),
    [
        ({"max_tokens": 0}, "max_tokens .* got 0"),
        ({"temperature": -1.0}, r"temperature .* got -1\.0"),
        ({"temperature": math.nan}, "temperature .* got nan"),
        ({"temperature": math.inf}, "temperature .* got inf"),
        ({"temperature": 1e-9}, "temperature .* got 1e-09"),
        ({"top_p": 0.0}, r"top_p .* got 0\.0"),
        ({"top_p": 1.1}, r"top_p .* got 1\.1"),
        ({"top_p": math.nan}, "top_p .* got nan"),
        ({"top_k": -1}, "top_k .* got -1"),
        ({"seed": -1}, "seed .* got -1"),
        ({"seed": 2**63}, "seed .* got 9223372036854775808"),
        ({"stop": "end"}, "stop .* got 'end'"),
        ({"stop": ("end", "")}, "stop .* got .'end', ''"),
    ],
)
def test_values_out_of_range_are_named(params: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        SamplingParams(**params)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_greedy_is_argmax(dtype: torch.dtype) -> None:
    logits = torch.randn(1000, generator=torch.Generator().manual_seed(0)).to(dtype)
    assert draws(logits, 3) == [int(logits.argmax())] * 3


@pytest.mark.parametrize(
    ("params", "kept"),
    [
        ({}, {0, 1, 3, 4, 5}),
        ({"top_k": 2}, {1, 4}),
        ({"top_k": 100}, {0, 1, 3, 4, 5}),
        ({"top_p": 0.5}, {4}),  # the likeliest has .53
        ({"top_p": 0.6}, {1, 4}),
        ({"top_p": 1e-9}, {4}),
        ({"top_k": 2, "top_p": 0.6}, {4}),  # of two tokens the likeliest has .65
    ],
)
def test_draws_follow_the_kept_distribution(params: dict[str, Any], kept: set[int]) -> None:
    drawn = torch.tensor(draws(LOGITS, NUM_DRAWS, temperature=0.8, seed=0, **params)).bincount(
        minlength=len(LOGITS)
    )
    masked = LOGITS.where(
        torch.tensor([i in kept for i in range(len(LOGITS))]), torch.tensor(-math.inf)
    )
    expected = (masked / 0.8).softmax(dim=0)
    assert {i for i, count in enumerate(drawn) if count} == kept
    # four standard errors
    assert (drawn / NUM_DRAWS - expected).abs().max() < 4 * math.sqrt(0.25 / NUM_DRAWS)


def test_the_lowest_temperature_is_finite() -> None:
    assert draws(torch.tensor([1e4, 3e4, -1e4]), 5, temperature=1e-5) == [1] * 5


@examples(30)
@given(st.integers(0, 2**63 - 1), st.floats(0.1, 2), st.floats(0.1, 1), st.integers(0, 50))
def test_a_seed_repeats_whatever_else_is_sampled(
    seed: int, temperature: float, top_p: float, top_k: int
) -> None:
    logits = torch.randn(50, generator=torch.Generator().manual_seed(seed))
    params = SamplingParams(temperature=temperature, top_p=top_p, top_k=top_k, seed=seed)
    alone = draws(logits, 5, temperature=temperature, top_p=top_p, top_k=top_k, seed=seed)
    sampler, other = Sampler(params), Sampler(SamplingParams(temperature=1.0))
    beside = [(sampler.sample(logits), other.sample(logits))[0] for _ in range(5)]
    assert alone == beside


def test_seeds_differ_and_no_seed_draws_anew() -> None:
    logits = torch.zeros(1000)
    runs = [draws(logits, 8, temperature=1.0, seed=seed) for seed in (0, 1, None, None)]
    assert len(set(map(tuple, runs))) == 4
