"""Layers of experts: any rows alone, their sum, floating-point operations.

That logits, checkpoints, policies and documents are right is tested with those of the other
families."""

from pathlib import Path

import pytest
import torch

from kvgraft import Engine, Request
from kvgraft.engine.decoder import Decoder
from kvgraft.engine.experts import Experts, mix


@pytest.fixture(scope="module")
def decoder(model_dirs: dict[str, Path]) -> Decoder:
    return Decoder.from_pretrained(model_dirs["qwen3_moe"])


@pytest.mark.parametrize("rows", [range(0), [17], [3, 30, 17], range(1, 40, 2)], ids=len)
def test_rows_alone_come_out_as_among_all(decoder: Decoder, rows: range | list[int]) -> None:
    hidden = torch.randn(40, 64, generator=torch.Generator().manual_seed(0))
    before, mine = hidden.clone(), torch.tensor(rows, dtype=torch.int64)
    for layer in range(decoder.config.num_layers):
        whole, part = decoder.feed_forward(layer, hidden), decoder.feed_forward(layer, hidden[mine])
        torch.testing.assert_close(part, whole[mine], atol=1e-5, rtol=1e-5)
    assert torch.equal(hidden, before)


@pytest.mark.parametrize("normed", [True, False])
def test_a_row_is_the_weighted_sum_of_its_experts(normed: bool) -> None:
    """Row by row and expert by expert, in float64."""
    experts = Experts(count=5, active=2, inner_size=6, normed=normed, layers=frozenset({0}))
    draw = torch.Generator().manual_seed(1)
    rows, router = (
        torch.randn(9, 4, generator=draw).double(),
        torch.randn(5, 4, generator=draw).double(),
    )
    gate_up, down = (
        torch.randn(60, 4, generator=draw).double(),
        torch.randn(20, 6, generator=draw).double(),
    )
    for row, mixed in zip(rows, mix(experts, rows, router, gate_up, down), strict=True):
        weights, picked = (router @ row).softmax(0).topk(2)
        expected = torch.zeros(4, dtype=torch.float64)
        for weight, expert in zip(
            weights / weights.sum() if normed else weights, picked.tolist(), strict=True
        ):
            gate, up = (gate_up[12 * expert : 12 * expert + 12] @ row).chunk(2)
            expected += weight * (down[4 * expert : 4 * expert + 4] @ (gate.sigmoid() * gate * up))
        torch.testing.assert_close(mixed, expected, atol=1e-5, rtol=1e-5)  # weights are float32


def test_floating_point_operations_are_those_of_active_experts(model_dirs: dict[str, Path]) -> None:
    """Of the router, three experts of eight in two layers, and one FFN in the second."""
    engine = Engine(model_dirs["qwen3_moe"], dtype="float32")
    of_experts, of_ffn = 2 * 64 * (8 + 3 * 3 * 24), 2 * 64 * 3 * 96
    assert [engine.config.ffn_flops(layer) for layer in range(3)] == [
        of_experts,
        of_ffn,
        of_experts,
    ]
    report = engine.generate([Request([*range(3, 67)], "full")])[0].report
    assert report.ffn_flops == 64 * (2 * of_experts + of_ffn)
