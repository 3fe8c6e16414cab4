"""The flows that Claude Sonnet 4.6 proposed."""

import math

from kvgraft.decode import (
    Abs,
    Caches,
    Conv1d,
    GeMM,
    L2Norm,
    Log,
    Max,
    Maximum,
    Mean,
    Minimum,
    Multiply,
    Relu,
    Sigmoid,
    Silu,
    Softmax,
    Sum,
    Value,
    WhereGt,
)
from kvgraft.decode.motifs import Scored, average, heads, minus, over_regions, relevance, routing


class ValueEnergyGate(Scored):
    """Relevance times the sigmoid of the mean norm of the values (chosen: a gate never turns the
    sign)."""

    name, uses = "sonnet_value_energy_gate", ("k_mean", "v_norm")

    def score(self, q: Value, c: Caches) -> Value:
        return Multiply(relevance(q, c["k_mean"]), Sigmoid(c["v_norm"]))


class KeyValueConsensus(Scored):
    """The smaller of the relevance of the mean key and of the mean value."""

    name, uses = "sonnet_key_value_consensus", ("k_mean", "v_mean")

    def score(self, q: Value, c: Caches) -> Value:
        return Minimum(relevance(q, c["k_mean"]), relevance(q, c["v_mean"]))


class ValueWeightedCentroid(Scored):
    """Relevance of the mean key, weighted by the norms of the values."""

    name, uses = "sonnet_value_weighted_centroid", ("k_weighted",)

    def score(self, q: Value, c: Caches) -> Value:
        return relevance(q, c["k_weighted"])


class DistanceRouting(Scored):
    """Nearness of the mean key to the routing query, in the sum of absolute differences."""

    name, uses = "sonnet_distance_routing", ("k_mean",)

    def score(self, q: Value, c: Caches) -> Value:
        return Multiply(Sum(Abs(minus(c["k_mean"], Mean(q, dim=1))), dim=2), -1.0)


class MagnitudeCoactivation(Scored):
    """The mean absolute key against the absolute routing query."""

    name, uses = "sonnet_magnitude_coactivation", ("k_abs",)

    def score(self, q: Value, c: Caches) -> Value:
        return GeMM(c["k_abs"], Abs(routing(q)).T)


class RectifiedQuest(Scored):
    """Quest's bound, of the features in which it is positive."""

    name, uses = "sonnet_rectified_quest", ("low", "high")

    def score(self, q: Value, c: Caches) -> Value:
        return Sum(Relu(_features(routing(q), c)), dim=2)


class HeadRegionPeaks(Scored):
    """The best pair of a head and a region."""

    name, uses = "sonnet_head_region_peaks", ("parts",)

    def score(self, q: Value, c: Caches) -> Value:
        return Max(over_regions(Max, heads(q, c["parts"])), dim=2)


class SmoothlyGatedFeatures(Scored):
    """What each feature contributes to relevance, through SiLU."""

    name, uses = "sonnet_smoothly_gated_features", ("k_mean",)

    def score(self, q: Value, c: Caches) -> Value:
        return Sum(Silu(Multiply(c["k_mean"], routing(q))), dim=2)


class MagnitudeBias(Scored):
    """Relevance, and a tenth of the norm of the mean key."""

    name, uses = "sonnet_magnitude_bias", ("k_mean",)

    def score(self, q: Value, c: Caches) -> Value:
        return minus(relevance(q, c["k_mean"]), L2Norm(c["k_mean"], dim=2), -0.1)


class AboveMeanGate(Scored):
    """Relevance where it is above the mean over blocks, and no other block, however many k would
    allow."""

    name, uses = "sonnet_above_mean_gate", ("k_mean",)

    def score(self, q: Value, c: Caches) -> Value:
        now = relevance(q, c["k_mean"])
        return WhereGt(now, Mean(now, dim=1), now, -math.inf)


class PositionalSmoothing(Scored):
    """Relevance, the mean of three blocks."""

    name, uses = "sonnet_positional_smoothing", ("k_mean",)

    def score(self, q: Value, c: Caches) -> Value:
        return Conv1d(relevance(q, c["k_mean"]), (1 / 3, 1 / 3, 1 / 3))


class PersistentValueEnergy(Scored):
    """Relevance times the running average of the mean norm of the values (chosen: rate 0.1)."""

    name, uses, state = "sonnet_persistent_value_energy", ("k_mean", "v_norm"), ("energy",)

    def score(self, q: Value, c: Caches) -> Value:
        return Multiply(relevance(q, c["k_mean"]), average(c["energy"], c["v_norm"], 0.1))


class TwoTimescaleAgreement(Scored):
    """The smaller of a fast and a slow running average of relevance (chosen: rates 0.5 and 0.1)."""

    name, uses, state = "sonnet_two_timescale_agreement", ("k_mean",), ("fast", "slow")

    def score(self, q: Value, c: Caches) -> Value:
        now = relevance(q, c["k_mean"])
        return Minimum(average(c["fast"], now, 0.5), average(c["slow"], now, 0.1))


class QueryWeightedSpread(Scored):
    """How wide the envelope of the widest region is, by the absolute routing query."""

    name, uses = "sonnet_query_weighted_spread", ("low_parts", "high_parts")

    def score(self, q: Value, c: Caches) -> Value:
        return over_regions(Max, GeMM(minus(c["high_parts"], c["low_parts"]), Abs(routing(q)).T))


class EntropyContribution(Scored):
    """What the block adds to the entropy of the softmax of relevance."""

    name, uses = "sonnet_entropy_contribution", ("k_mean",)

    def score(self, q: Value, c: Caches) -> Value:
        share = Maximum(Softmax(relevance(q, c["k_mean"]), dim=1), 1e-30)
        return Multiply(Multiply(share, Log(share)), -1.0)


class CurvatureBonus(Scored):
    """Relevance, and half of how much it bends there."""

    name, uses = "sonnet_curvature_bonus", ("k_mean",)

    def score(self, q: Value, c: Caches) -> Value:
        now = relevance(q, c["k_mean"])
        return minus(now, Abs(Conv1d(now, (-1.0, 2.0, -1.0))), -0.5)


class ValueOnlyRouting(Scored):
    """Relevance of the mean value, to the query head that it means most to."""

    name, uses = "sonnet_value_only_routing", ("v_mean",)

    def score(self, q: Value, c: Caches) -> Value:
        return Max(heads(q, c["v_mean"]), dim=2)


class GatedKeyValueProduct(Scored):
    """The sigmoid of the relevance of the mean key times that of the mean value."""

    name, uses = "sonnet_gated_key_value_product", ("k_mean", "v_mean")

    def score(self, q: Value, c: Caches) -> Value:
        return Multiply(Sigmoid(relevance(q, c["k_mean"])), Sigmoid(relevance(q, c["v_mean"])))


class ConservativeEnvelope(Scored):
    """Relevance of the lower envelope of the keys."""

    name, uses = "sonnet_conservative_envelope", ("low",)

    def score(self, q: Value, c: Caches) -> Value:
        return relevance(q, c["low"])


class SigmoidGatedQuest(Scored):
    """Quest's bound, each feature by the sigmoid of the width of its envelope."""

    name, uses = "sonnet_sigmoid_gated_quest", ("low", "high")

    def score(self, q: Value, c: Caches) -> Value:
        return Sum(Multiply(_features(routing(q), c), Sigmoid(minus(c["high"], c["low"]))), dim=2)


def _features(q: Value, c: Caches) -> Value:
    """[1, B, d]: what each feature contributes to Quest's bound."""
    return Maximum(Multiply(c["high"], q), Multiply(c["low"], q))
