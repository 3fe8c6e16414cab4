"""The flows that Claude Opus 4.7 proposed."""

from kvgraft.decode import (
    Abs,
    Add,
    Caches,
    Conv1d,
    Exp,
    GeMM,
    Kron,
    Load,
    Log,
    Max,
    Maximum,
    Min,
    Minimum,
    Multiply,
    Reshape,
    Save,
    Sigmoid,
    Softmax,
    Sum,
    Value,
    WhereGt,
)
from kvgraft.decode.motifs import (
    Scored,
    average,
    bound,
    heads,
    minus,
    over_regions,
    relevance,
    routing,
)


class ScoreVelocity(Scored):
    """Relevance, and what it has gained since the last step (chosen: in equal parts)."""

    name, uses, state = "opus_score_velocity", ("k_mean",), ("before",)

    def score(self, q: Value, c: Caches) -> Value:
        now = relevance(q, c["k_mean"])
        gained = minus(now, Load(c["before"]))
        Save(c["before"], now)
        return Add(now, gained)


class HeadConsensusQuest(Scored):
    """Quest's bound of the query head that the block means least to."""

    name, uses = "opus_head_consensus_quest", ("low", "high")

    def score(self, q: Value, c: Caches) -> Value:
        return Min(bound(q, c["low"], c["high"]), dim=2)


class MultiResolutionAgreement(Scored):
    """The least relevant of four regions."""

    name, uses = "opus_multi_resolution_agreement", ("parts",)

    def score(self, q: Value, c: Caches) -> Value:
        return over_regions(Min, relevance(q, c["parts"]))


class PessimisticEnvelope(Scored):
    """The least that a key within the envelope can give the routing query."""

    name, uses = "opus_pessimistic_envelope", ("low", "high")

    def score(self, q: Value, c: Caches) -> Value:
        return bound(routing(q), c["high"], c["low"])


class ValueEnergyGate(Scored):
    """Relevance times the mean norm of the values."""

    name, uses = "opus_value_energy_gate", ("k_mean", "v_norm")

    def score(self, q: Value, c: Caches) -> Value:
        return Multiply(relevance(q, c["k_mean"]), c["v_norm"])


class VolatilityBoost(Scored):
    """Relevance, and its standard deviation over steps (chosen: running averages of rate 0.1)."""

    name, uses, state = "opus_volatility_boost", ("k_mean",), ("mean", "square")

    def score(self, q: Value, c: Caches) -> Value:
        now = relevance(q, c["k_mean"])
        mean, square = average(c["mean"], now, 0.1), average(c["square"], Multiply(now, now), 0.1)
        variance = Maximum(minus(square, Multiply(mean, mean)), 1e-9)
        return Add(now, Exp(Multiply(Log(variance), 0.5)))


class AntiRedundancy(Scored):
    """Relevance less half its average over past steps (chosen: rate 0.1)."""

    name, uses, state = "opus_anti_redundancy", ("k_mean",), ("past",)

    def score(self, q: Value, c: Caches) -> Value:
        now, past = relevance(q, c["k_mean"]), Load(c["past"])
        average(c["past"], now, 0.1)
        return minus(now, past, 0.5)


class PositionalSmoothing(Scored):
    """Relevance, smoothed over five blocks (chosen: 0.1, 0.2, 0.4, 0.2, 0.1)."""

    name, uses = "opus_positional_smoothing", ("k_mean",)

    def score(self, q: Value, c: Caches) -> Value:
        return Conv1d(relevance(q, c["k_mean"]), (0.1, 0.2, 0.4, 0.2, 0.1))


class SaturatedFeatures(Scored):
    """What each feature contributes to relevance, through a sigmoid."""

    name, uses = "opus_saturated_features", ("k_mean",)

    def score(self, q: Value, c: Caches) -> Value:
        return Sum(Sigmoid(Multiply(c["k_mean"], routing(q))), dim=2)


class MagnitudeOnly(Scored):
    """The mean norm of the keys, whatever the query."""

    name, uses = "opus_magnitude_only", ("k_norm",)

    def score(self, q: Value, c: Caches) -> Value:
        return c["k_norm"]


class ValueCentroidRouting(Scored):
    """Relevance of the mean value instead of the mean key."""

    name, uses = "opus_value_centroid_routing", ("v_mean",)

    def score(self, q: Value, c: Caches) -> Value:
        return relevance(q, c["v_mean"])


class DualSignalProduct(Scored):
    """Relevance times that of magnitudes: of the query's to the norms of the keys' features."""

    name, uses = "opus_dual_signal_product", ("k_mean", "k_feature_norms")

    def score(self, q: Value, c: Caches) -> Value:
        magnitude = GeMM(c["k_feature_norms"], Abs(routing(q)).T)
        return Multiply(relevance(q, c["k_mean"]), magnitude)


class ModerateRelevance(Scored):
    """Relevance times what its softmax lacks to one."""

    name, uses = "opus_moderate_relevance", ("k_mean",)

    def score(self, q: Value, c: Caches) -> Value:
        now = relevance(q, c["k_mean"])
        return Multiply(now, Add(Multiply(Softmax(now, dim=1), -1.0), 1.0))


class HeadRegionConsensus(Scored):
    """The least of all pairs of a head and a region, each by its sigmoid (chosen: two that are low
    stay low)."""

    name, uses = "opus_head_region_consensus", ("k_mean", "parts")

    def score(self, q: Value, c: Caches) -> Value:
        by_head, by_region = Sigmoid(heads(q, c["k_mean"])), Sigmoid(relevance(q, c["parts"]))
        one, blocks, group = by_head.shape
        grid = Kron(Reshape(by_head, (one, blocks, 1, group)), by_region)  # [1, B, parts, g]
        return Min(Min(grid, dim=2), dim=3)


class EnvelopeSpread(Scored):
    """How wide the envelope of the keys is, over all features, whatever the query."""

    name, uses = "opus_envelope_spread", ("low", "high")

    def score(self, q: Value, c: Caches) -> Value:
        return Sum(minus(c["high"], c["low"]), dim=2)


class SmoothedQuery(Scored):
    """Relevance to the average of the queries so far (chosen: rate 0.5). Since relevance is linear
    in the query, it is the scores that are averaged: a block's state, as the language has it."""

    name, uses, state = "opus_smoothed_query", ("k_mean",), ("smoothed",)

    def score(self, q: Value, c: Caches) -> Value:
        return average(c["smoothed"], relevance(q, c["k_mean"]), 0.5)


class ElevationOverHistory(Scored):
    """Relevance above the least that it has been in steps before (chosen: that begins at 0)."""

    name, uses, state = "opus_elevation_over_history", ("k_mean",), ("floor",)

    def score(self, q: Value, c: Caches) -> Value:
        now, floor = relevance(q, c["k_mean"]), Load(c["floor"])
        Save(c["floor"], Minimum(floor, now))
        return minus(now, floor)


class CoarseFine(Scored):
    """Relevance of the block, and of the better of its halves."""

    name, uses = "opus_coarse_fine", ("k_mean", "halves")

    def score(self, q: Value, c: Caches) -> Value:
        return Add(relevance(q, c["k_mean"]), over_regions(Max, relevance(q, c["halves"])))


class KeyAndValueAgreement(Scored):
    """Relevance of the mean key times that of the mean value, if both are positive; else the
    smaller of them."""

    name, uses = "opus_key_and_value_agreement", ("k_mean", "v_mean")

    def score(self, q: Value, c: Caches) -> Value:
        key, value = relevance(q, c["k_mean"]), relevance(q, c["v_mean"])
        both = Minimum(key, value)
        return WhereGt(both, 0.0, Multiply(key, value), both)


class PeakSharpening(Scored):
    """Relevance twice, less half of each neighbour's."""

    name, uses = "opus_peak_sharpening", ("k_mean",)

    def score(self, q: Value, c: Caches) -> Value:
        return Conv1d(relevance(q, c["k_mean"]), (-0.5, 2.0, -0.5))
