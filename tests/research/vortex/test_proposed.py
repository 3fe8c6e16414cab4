"""Each proposed flow scores blocks as its description says, over three steps, for one request in
plain torch."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from every_flow import NAMED
from kvgraft.decode.batch import Batch
from kvgraft.decode.executor import fill, select
from kvgraft.decode.flow import trace
from kvgraft.decode.motifs import Scored
from kvgraft.decode.planner import plan
from kvgraft.flows import FLOWS, parse_flow
from kvgraft.kernels.dispatch import radix_topk
from research.vortex.proposed import PROPOSED

BLOCK, DIM, GROUP, BLOCKS, STEPS = 16, 8, 3, 14, 3


class Seen:
    """What a score may be made of: keys and values [B, b, d], queries [g, d] of all steps so
    far."""

    def __init__(self, k: Tensor, v: Tensor, queries: Tensor) -> None:
        self.k, self.v = k, v
        self.heads = queries[-1] * DIM**-0.5  # [g, d]
        self.q = self.heads.mean(0)
        self.past = [step.mean(0) * DIM**-0.5 for step in queries]  # one a step
        self.mean, self.v_mean = k.mean(1), v.mean(1)
        self.low, self.high = k.amin(1), k.amax(1)
        # relevance of the mean key, of the mean value
        self.s, self.sv = self.mean @ self.q, self.v_mean @ self.q
        self.v_norm, self.k_norm = v.norm(dim=2).mean(1), k.norm(dim=2).mean(1)
        self.v_features = v.norm(dim=1)
        self.parts = k.unflatten(1, (4, -1))  # [B, 4, 4, d]

    def history(self) -> list[Tensor]:
        """Relevance in every step so far."""
        return [self.mean @ q for q in self.past]

    def quest(self, q: Tensor) -> Tensor:
        """[B, d]"""
        return torch.maximum(self.low * q, self.high * q)


def average(history: list[Tensor], rate: float) -> Tensor:
    total = torch.zeros_like(history[0])
    for now in history:
        total = (1 - rate) * total + rate * now
    return total


def smoothed(x: Tensor, kernel: list[float]) -> Tensor:
    return F.conv1d(x[None, None], torch.tensor(kernel)[None, None], padding=len(kernel) // 2)[0, 0]


def deviation(x: Seen) -> Tensor:
    square = average([now**2 for now in x.history()], 0.1)
    return (square - average(x.history(), 0.1) ** 2).clamp(min=1e-9).sqrt()


def gained(x: Seen) -> Tensor:
    history = [torch.zeros(len(x.k)), *x.history()]
    return history[-1] - history[-2]


Score = Callable[[Seen], Tensor]
SCORES: dict[str, Score] = {
    "opus_score_velocity": lambda x: x.s + gained(x),
    "opus_head_consensus_quest": lambda x: torch.stack(
        [x.quest(q * DIM**0.5).sum(1) for q in x.heads]
    ).amin(0),
    "opus_multi_resolution_agreement": lambda x: (x.parts.mean(2) @ x.q).amin(1),
    "opus_pessimistic_envelope": lambda x: torch.minimum(x.low * x.q, x.high * x.q).sum(1),
    "opus_value_energy_gate": lambda x: x.s * x.v_norm,
    "opus_volatility_boost": lambda x: x.s + deviation(x),
    "opus_anti_redundancy": lambda x: (
        x.s - 0.5 * average([torch.zeros(len(x.k)), *x.history()[:-1]], 0.1)
    ),
    "opus_positional_smoothing": lambda x: smoothed(x.s, [0.1, 0.2, 0.4, 0.2, 0.1]),
    "opus_saturated_features": lambda x: (x.mean * x.q).sigmoid().sum(1),
    "opus_magnitude_only": lambda x: x.k_norm,
    "opus_value_centroid_routing": lambda x: x.sv,
    "opus_dual_signal_product": lambda x: x.s * (x.k.norm(dim=1) @ x.q.abs()),
    "opus_moderate_relevance": lambda x: x.s * (1 - x.s.softmax(0)),
    "opus_head_region_consensus": lambda x: (
        (x.mean @ x.heads.T).sigmoid()[:, :, None] * (x.parts.mean(2) @ x.q).sigmoid()[:, None]
    ).amin((1, 2)),
    "opus_envelope_spread": lambda x: (x.high - x.low).sum(1),
    "opus_smoothed_query": lambda x: x.mean @ average(x.past, 0.5),
    "opus_elevation_over_history": lambda x: (
        x.s - torch.stack([0 * x.s, *x.history()[:-1]]).amin(0)
    ),
    "opus_coarse_fine": lambda x: x.s + (x.k.unflatten(1, (2, -1)).mean(2) @ x.q).amax(1),
    "opus_key_and_value_agreement": lambda x: torch.where(
        (x.s > 0) & (x.sv > 0), x.s * x.sv, x.s.minimum(x.sv)
    ),
    "opus_peak_sharpening": lambda x: smoothed(x.s, [-0.5, 2, -0.5]),
    "sonnet_value_energy_gate": lambda x: x.s * x.v_norm.sigmoid(),
    "sonnet_key_value_consensus": lambda x: torch.minimum(x.s, x.sv),
    "sonnet_value_weighted_centroid": lambda x: (
        ((x.k * x.v.norm(dim=2, keepdim=True)).sum(1) / x.v.norm(dim=2).sum(1, keepdim=True)) @ x.q
    ),
    "sonnet_distance_routing": lambda x: -(x.mean - x.q * DIM**0.5).abs().sum(1),
    "sonnet_magnitude_coactivation": lambda x: x.k.abs().mean(1) @ x.q.abs(),
    "sonnet_rectified_quest": lambda x: x.quest(x.q).relu().sum(1),
    "sonnet_head_region_peaks": lambda x: (x.parts.mean(2) @ x.heads.T).amax((1, 2)),
    "sonnet_smoothly_gated_features": lambda x: F.silu(x.mean * x.q).sum(1),
    "sonnet_magnitude_bias": lambda x: x.s + 0.1 * x.mean.norm(dim=1),
    "sonnet_above_mean_gate": lambda x: torch.where(x.s > x.s.mean(), x.s, -torch.inf),
    "sonnet_positional_smoothing": lambda x: smoothed(x.s, [1 / 3] * 3),
    "sonnet_persistent_value_energy": lambda x: x.s * average([x.v_norm] * len(x.past), 0.1),
    "sonnet_two_timescale_agreement": lambda x: torch.minimum(
        average(x.history(), 0.5), average(x.history(), 0.1)
    ),
    "sonnet_query_weighted_spread": lambda x: (
        (x.parts.amax(2) - x.parts.amin(2)) @ x.q.abs()
    ).amax(1),
    "sonnet_entropy_contribution": lambda x: -x.s.softmax(0) * x.s.log_softmax(0),
    "sonnet_curvature_bonus": lambda x: x.s + 0.5 * smoothed(x.s, [-1.0, 2.0, -1.0]).abs(),
    "sonnet_value_only_routing": lambda x: (x.v_mean @ x.heads.T).amax(1),
    "sonnet_gated_key_value_product": lambda x: x.s.sigmoid() * x.sv.sigmoid(),
    "sonnet_conservative_envelope": lambda x: x.low @ x.q,
    "sonnet_sigmoid_gated_quest": lambda x: (x.quest(x.q) * (x.high - x.low).sigmoid()).sum(1),
    "gpt_feature_value_temperature": lambda x: (x.mean * x.v_features) @ x.q,
    "gpt_value_scaled_quest": lambda x: torch.stack(
        [(x.quest(q) * x.v_features).sum(1) for q in x.heads]
    ).amax(0),
    "gpt_magnitude_penalised_alignment": lambda x: x.s - 0.1 * x.mean.abs() @ x.q.abs(),
    "gpt_sequence_value_gate": lambda x: x.s - 1e4 * (x.sv <= x.sv.mean()),
    "gpt_persistent_value_weighted_score": lambda x: average(
        [(x.mean * x.v_features) @ q for q in x.past], 0.1
    ),
    "gpt_sub_block_peak": lambda x: (x.parts.mean(2) @ x.q).amax(1),
    "gpt_sub_block_average": lambda x: (x.parts.mean(2) @ x.q).mean(1),
    "gpt_interleaved_envelope": lambda x: torch.stack(
        # [g, B, parts]
        [torch.maximum(x.parts.amin(2) * q, x.parts.amax(2) * q).sum(2) for q in x.heads]
    ).amax((0, 2)),
    "gpt_outlier_value_gate": lambda x: x.s + (x.v_norm - x.v_norm.mean()).relu(),
    "gpt_softmax_value_temperature": lambda x: x.s.softmax(0) * x.v_norm,
    "gpt_sigmoid_value_gate": lambda x: x.s * (x.v_norm - x.v_norm.mean()).sigmoid(),
    "gpt_lower_envelope_penalty": lambda x: x.s - 0.5 * (x.low @ x.q).relu(),
    "gpt_key_value_blend": lambda x: x.s + 0.5 * x.sv,
    "gpt_key_value_product": lambda x: x.s * x.sv,
    "gpt_persistent_surprise": lambda x: average([now - now.mean() for now in x.history()], 0.1),
    "gpt_head_peak_value_scale": lambda x: (x.mean @ x.heads.T).amax(1) * x.v_norm,
    "gpt_value_only_energy": lambda x: x.v_norm,
    "gpt_key_only_energy": lambda x: x.k_norm,
    "gpt_positional_smoothing": lambda x: smoothed(x.s, [0.25, 0.5, 0.25]),
    "gpt_normalised_relevance_value": lambda x: x.s.softmax(0) * F.normalize(x.v_norm, dim=0),
}


def test_there_are_sixty():
    assert len(PROPOSED) == 60
    assert SCORES.keys() == PROPOSED.keys()
    assert not SCORES.keys() & FLOWS.keys()


@pytest.mark.parametrize("name", SCORES)
def test_blocks_are_scored_as_described(name: str, monkeypatch: pytest.MonkeyPatch):
    random = torch.Generator().manual_seed(3)
    k, v = torch.randn(2, BLOCKS, BLOCK, DIM, generator=random)
    queries = torch.randn(STEPS, GROUP, DIM, generator=random) * 2
    flow = parse_flow(f"{NAMED[name]}:topk_blocks=3")
    assert isinstance(flow, Scored)
    program = trace(flow, BLOCK, DIM, GROUP)
    pool = {"k": k, "v": v} | {
        name: torch.full((BLOCKS, *shape), 9.0) for name, shape in program.caches.items()
    }
    fill(program, pool, torch.arange(BLOCKS))
    batch = Batch(torch.arange(BLOCKS)[None], torch.tensor([BLOCKS * BLOCK]), BLOCK)
    scored: list[Tensor] = []

    def spy(scores: Tensor, *rest: Any, **options: Any) -> Tensor:
        scored.append(scores[0])
        return radix_topk(scores, *rest, **options)

    monkeypatch.setattr("kvgraft.decode.operators.radix_topk", spy)
    for step in range(STEPS):
        chosen = select(program, plan(program), queries[step][None], pool, batch)[0]
        # of the blocks that are open to choice
        wanted = SCORES[name](Seen(k, v, queries[: step + 1]))[1:-2]
        torch.testing.assert_close(scored[-1][1:-2], wanted, atol=1e-5, rtol=1e-4)
        assert sorted(wanted[chosen[chosen >= 0] - 1].tolist()) == sorted(
            wanted.topk(3).values.tolist()
        )
