"""The flows that GPT-5 proposed."""

from kvgraft.decode import (
    Abs,
    Add,
    Caches,
    Conv1d,
    GeMM,
    Max,
    Mean,
    Multiply,
    Normalize,
    Relu,
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
    scaled,
)


class FeatureValueTemperature(Scored):
    """Relevance, each feature by the norm of the values' same feature."""

    name, uses = "gpt_feature_value_temperature", ("k_mean", "v_feature_norms")

    def score(self, q: Value, c: Caches) -> Value:
        return _by_values(q, c)


class ValueScaledQuest(Scored):
    """Quest's bound, each feature by the norm of the values' same feature, of the best query
    head."""

    name, uses = "gpt_value_scaled_quest", ("low", "high", "v_feature_norms")

    def score(self, q: Value, c: Caches) -> Value:
        low, high = (Multiply(c[name], c["v_feature_norms"]) for name in ("low", "high"))
        return Max(bound(scaled(q), low, high), dim=2)


class MagnitudePenalisedAlignment(Scored):
    """Relevance less a tenth of what it would be if no feature were negative."""

    name, uses = "gpt_magnitude_penalised_alignment", ("k_mean",)

    def score(self, q: Value, c: Caches) -> Value:
        return minus(relevance(q, c["k_mean"]), GeMM(Abs(c["k_mean"]), Abs(routing(q)).T), 0.1)


class SequenceValueGate(Scored):
    """Relevance, of blocks whose mean value is relevant above the mean over blocks; others come
    after all of them."""

    name, uses = "gpt_sequence_value_gate", ("k_mean", "v_mean")

    def score(self, q: Value, c: Caches) -> Value:
        gate = relevance(q, c["v_mean"])
        return Add(relevance(q, c["k_mean"]), WhereGt(gate, Mean(gate, dim=1), 0.0, -1e4))


class PersistentValueWeightedScore(Scored):
    """The running average of relevance with each feature by the norm of the values' (chosen: rate
    0.1)."""

    name, uses, state = (
        "gpt_persistent_value_weighted_score",
        ("k_mean", "v_feature_norms"),
        ("past",),
    )

    def score(self, q: Value, c: Caches) -> Value:
        return average(c["past"], _by_values(q, c), 0.1)


class SubBlockPeak(Scored):
    """The most relevant of four regions."""

    name, uses = "gpt_sub_block_peak", ("parts",)

    def score(self, q: Value, c: Caches) -> Value:
        return over_regions(Max, relevance(q, c["parts"]))


class SubBlockAverage(Scored):
    """The mean relevance of four regions."""

    name, uses = "gpt_sub_block_average", ("parts",)

    def score(self, q: Value, c: Caches) -> Value:
        return over_regions(Mean, relevance(q, c["parts"]))


class InterleavedEnvelope(Scored):
    """Quest's bound of every pair of a query head and a region (chosen: the grid that is paired),
    of the best pair."""

    name, uses = "gpt_interleaved_envelope", ("low_parts", "high_parts")

    def score(self, q: Value, c: Caches) -> Value:
        pairs = bound(scaled(q), c["low_parts"], c["high_parts"])  # [1, B, r, g]
        return Max(over_regions(Max, pairs), dim=2)


class OutlierValueGate(Scored):
    """Relevance, and by how much the mean norm of the values exceeds that of all blocks."""

    name, uses = "gpt_outlier_value_gate", ("k_mean", "v_norm")

    def score(self, q: Value, c: Caches) -> Value:
        return Add(relevance(q, c["k_mean"]), Relu(minus(c["v_norm"], Mean(c["v_norm"], dim=1))))


class SoftmaxValueTemperature(Scored):
    """The softmax of relevance, times the mean norm of the values."""

    name, uses = "gpt_softmax_value_temperature", ("k_mean", "v_norm")

    def score(self, q: Value, c: Caches) -> Value:
        return Multiply(Softmax(relevance(q, c["k_mean"]), dim=1), c["v_norm"])


class SigmoidValueGate(Scored):
    """Relevance times the sigmoid of by how much the mean norm of the values exceeds that of all
    blocks."""

    name, uses = "gpt_sigmoid_value_gate", ("k_mean", "v_norm")

    def score(self, q: Value, c: Caches) -> Value:
        return Multiply(
            relevance(q, c["k_mean"]), Sigmoid(minus(c["v_norm"], Mean(c["v_norm"], dim=1)))
        )


class LowerEnvelopePenalty(Scored):
    """Relevance less half that of the lower envelope, where it is positive."""

    name, uses = "gpt_lower_envelope_penalty", ("k_mean", "low")

    def score(self, q: Value, c: Caches) -> Value:
        return minus(relevance(q, c["k_mean"]), Relu(relevance(q, c["low"])), 0.5)


class KeyValueBlend(Scored):
    """Relevance of the mean key and, at half the weight, of the mean value."""

    name, uses = "gpt_key_value_blend", ("k_mean", "v_mean")

    def score(self, q: Value, c: Caches) -> Value:
        return minus(relevance(q, c["k_mean"]), relevance(q, c["v_mean"]), -0.5)


class KeyValueProduct(Scored):
    """Relevance of the mean key times that of the mean value."""

    name, uses = "gpt_key_value_product", ("k_mean", "v_mean")

    def score(self, q: Value, c: Caches) -> Value:
        return Multiply(relevance(q, c["k_mean"]), relevance(q, c["v_mean"]))


class PersistentSurprise(Scored):
    """The running average of by how much relevance exceeds that of all blocks (chosen: rate
    0.1)."""

    name, uses, state = "gpt_persistent_surprise", ("k_mean",), ("surprise",)

    def score(self, q: Value, c: Caches) -> Value:
        now = relevance(q, c["k_mean"])
        return average(c["surprise"], minus(now, Mean(now, dim=1)), 0.1)


class HeadPeakValueScale(Scored):
    """Relevance to the query head that the block means most to, times the mean norm of the
    values."""

    name, uses = "gpt_head_peak_value_scale", ("k_mean", "v_norm")

    def score(self, q: Value, c: Caches) -> Value:
        return Multiply(Max(heads(q, c["k_mean"]), dim=2), c["v_norm"])


class ValueOnlyEnergy(Scored):
    """The mean norm of the values, whatever the query."""

    name, uses = "gpt_value_only_energy", ("v_norm",)

    def score(self, q: Value, c: Caches) -> Value:
        return c["v_norm"]


class KeyOnlyEnergy(Scored):
    """The mean norm of the keys, whatever the query."""

    name, uses = "gpt_key_only_energy", ("k_norm",)

    def score(self, q: Value, c: Caches) -> Value:
        return c["k_norm"]


class PositionalSmoothing(Scored):
    """Relevance, smoothed by a triangle over three blocks."""

    name, uses = "gpt_positional_smoothing", ("k_mean",)

    def score(self, q: Value, c: Caches) -> Value:
        return Conv1d(relevance(q, c["k_mean"]), (0.25, 0.5, 0.25))


class NormalisedRelevanceValue(Scored):
    """The softmax of relevance times the mean norm of the values, normalised over blocks."""

    name, uses = "gpt_normalised_relevance_value", ("k_mean", "v_norm")

    def score(self, q: Value, c: Caches) -> Value:
        return Multiply(Softmax(relevance(q, c["k_mean"]), dim=1), Normalize(c["v_norm"], dim=1))


def _by_values(q: Value, c: Caches) -> Value:
    """Relevance with each feature by the norm of the values' same feature."""
    return Sum(Multiply(Multiply(c["k_mean"], routing(q)), c["v_feature_norms"]), dim=2)
