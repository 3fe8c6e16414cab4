import math

import pytest
import torch

from kvgraft.kernels.dispatch import attention_mass, varlen_attention
from kvgraft.kernels.layout import VarlenLayout

SHAPES = [(1, 1, 32), (8, 2, 64), (6, 3, 80), (4, 4, 16)]  # query heads, key heads, head size
POSITIONS = {
    "from the start": [range(63)],
    "one token": [[0]],
    "long run behind a prefix": [range(100, 700)],
    "scattered": [[0, 3, 4, 5, 90, 91, 200, 311]],
    "long run among scattered": [[2, 5, *range(40, 340), 400, 500]],
    "several prompts": [range(33), [], [7], [1, 2, 9, 128]],
    "decode": [[0], [5], [77], [300], [301]],
}


def pool(heads: int, size: int, dtype: torch.dtype, num_slots: int = 4096) -> torch.Tensor:
    cache = torch.full((num_slots, heads, size), float("nan"), dtype=dtype)
    return cache


def layout_of(kind: str, seed: int = 0) -> VarlenLayout:
    generator = torch.Generator().manual_seed(seed)
    slots = torch.randperm(4096, generator=generator)
    positions, tables, used = [], [], 0
    for given in POSITIONS[kind]:
        position = torch.tensor(list(given), dtype=torch.int64)
        length = int(position[-1]) + 1 if position.numel() else 4
        positions.append(position)
        tables.append(slots[used : used + length])
        used += length
    return VarlenLayout.of(positions, tables)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize("kind", POSITIONS)
def test_cpu_equals_reference_and_reads_nothing_else(kind: str, shape: tuple[int, int, int], dtype: torch.dtype):
    query_heads, key_heads, size = shape
    torch.manual_seed(1)
    layout = layout_of(kind)
    keys, values = pool(key_heads, size, dtype), pool(key_heads, size, dtype)
    for context in layout.contexts:  # every other slot stays NaN
        seen = context.slots[: int(context.positions[-1]) + 1]
        keys[seen] = torch.randn(len(seen), key_heads, size).to(dtype)
        values[seen] = torch.randn(len(seen), key_heads, size).to(dtype)
    query = torch.randn(layout.query_positions.numel(), query_heads, size).to(dtype)
    scale = size**-0.5
    expected = varlen_attention(query, keys, values, layout, scale, implementation="reference")
    actual = varlen_attention(query, keys, values, layout, scale)
    assert torch.isfinite(expected).all()
    tolerance = 2e-6 if dtype is torch.float32 else 2e-2  # bf16 keeps 8 bits of values of order 1
    torch.testing.assert_close(actual, expected, atol=tolerance, rtol=tolerance)


def test_reference_equals_attention_written_out():
    torch.manual_seed(2)
    keys, values, query = torch.randn(3, 1, 4), torch.randn(3, 1, 4), torch.randn(1, 2, 4)
    layout = VarlenLayout.of([torch.tensor([1])], [torch.tensor([2, 0, 1])])
    actual = varlen_attention(query, keys, values, layout, 0.5, implementation="reference")
    for head in range(2):
        weights = [math.exp(0.5 * float(query[0, head] @ keys[slot, 0])) for slot in (2, 0)]
        expected = (weights[0] * values[2, 0] + weights[1] * values[0, 0]) / sum(weights)
        torch.testing.assert_close(actual[0, head], expected)


def test_no_queries_at_all():
    layout = VarlenLayout.of([torch.zeros(0, dtype=torch.int64)], [torch.arange(4)])
    assert varlen_attention(torch.zeros(0, 2, 8), torch.zeros(8, 1, 8), torch.zeros(8, 1, 8), layout, 1.0).shape[0] == 0


@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize("at", [[0], [62], [0, 5, 6, 61], range(63), range(30, 63)])
def test_mass_equals_reference_and_sums_to_queries_times_heads(shape: tuple[int, int, int], at: list[int]):
    query_heads, key_heads, size = shape
    torch.manual_seed(3)
    positions = torch.tensor(list(at))
    query, keys = torch.randn(len(positions), query_heads, size), torch.randn(63, key_heads, size)
    expected = attention_mass(query, keys, positions, size**-0.5, implementation="reference")
    actual = attention_mass(query, keys, positions, size**-0.5)
    torch.testing.assert_close(actual, expected, atol=1e-5, rtol=1e-5)
    assert actual.sum().item() == pytest.approx(len(positions) * query_heads, rel=1e-5)
    assert not actual[int(positions.max()) + 1 :].any()
    greatest = attention_mass(query, keys, positions, size**-0.5, "max", implementation="reference")
    torch.testing.assert_close(
        attention_mass(query, keys, positions, size**-0.5, "max"), greatest, atol=1e-5, rtol=1e-5
    )
    assert (greatest <= expected + 1e-5).all()


def test_mass_is_reduced_by_sum_or_max():
    with pytest.raises(ValueError, match="reduction must be sum or max, got 'mean'"):
        attention_mass(torch.zeros(1, 1, 2), torch.zeros(1, 1, 2), torch.tensor([0]), 1.0, "mean")


def test_runs_are_pseudo_sequences():
    context = VarlenLayout.of([torch.tensor([0, 1, 4, 7, 8, 9])], [torch.arange(10)]).contexts[0]
    assert context.runs == [(0, 2), (2, 3), (3, 6)]
