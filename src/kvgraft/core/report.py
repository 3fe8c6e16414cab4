"""Report of a host about one prompt: the origin of its tokens, its outcome and the reason."""

from dataclasses import dataclass, field
from enum import StrEnum


class Outcome(StrEnum):
    """Outcome of a prompt."""

    GRAFTED = "grafted"  # known text was grafted, behind any exact prefix
    # nothing was grafted; it continues from KV of an earlier prompt that held grafts
    CONTINUED = "continued"
    PREFIX_ONLY = "prefix_only"  # nothing was grafted; exact prefix hits were used
    MISS = "miss"  # nothing was known
    OFF = "off"  # grafting was switched off for it, or impossible
    # known text was found but not used: everything except exact hits was computed
    FALLBACK = "fallback"


FALLBACKS = {  # reasons why known text was given up
    "pool_pressure": (
        "its sources and its own blocks did not fit into the pool together, and nothing else ran"
    ),
    "non_finite": "its hidden states or logits came out non-finite",
    "error": "its recovery failed; the log has the traceback",
    "no_documents": "its policy keeps a part of documents, and there are none",
    "head_paging": "its policy keeps a part of documents, which local heads would have given back",
}
REFUSALS = {  # reasons why it was not to be grafted, or could not be
    "off": "it said so (reuse: off)",
    "policy_full": "its policy is full",
    "guard_tripped": "the guard of quality found answers of its policy too far from exact ones",
    "exact_for": "the operator wants requests of its kind answered with exact KV",
    "control": "it is an operation of the server itself",
    "invalid_params": "its kv_transfer_params could not be read",
    "residual_stream": (
        "the residual stream of a layer that its policy needs is not kept: "
        "--kvgraft-residual-layers"
    ),
    "unsupported_model": (
        "its policy keeps a part of documents or works head by head: not with layers as this "
        "model's"
    ),
    "no_head_map": (
        "its policy works head by head, and the server has no map of the model's: "
        "--kvgraft-head-map"
    ),
    "repetition_penalty": "its policy keeps a part of the prompt, and the penalty needs all of it",
    "lora": "the weights of its LoRA adapter are not known, or others were loaded while it ran",
    "multimodal": "it has images, audio or video",
    "prompt_embeds": "it brings embeddings",
    "prompt_logprobs": "it asks for logprobs of its prompt",
    "pooling": "it is a pooling request",
    "streaming_session": "it is a streaming session",
}
MISSES = {  # reasons why nothing could be grafted
    "no_known_text": "no block of it was read before in its namespace, but for exact prefix hits",
    "too_deep": (
        "what is known of it was read behind more grafts than --kvgraft-max-depth (`max_depth`) "
        "allows"
    ),
    "shadow": (
        "known text would have been grafted, but the server is in shadow mode (or it is gone by "
        "now)"
    ),
    "too_short": (
        "what is left behind its prefix is less than a block, or what is known of it takes as long "
        "to recover"
    ),
    "too_little_known": (
        "grafting what is known of it would save less than what becomes approximate is worth"
    ),
}
REASONS = FALLBACKS | REFUSALS | MISSES
KINDS = ("prefix", "continued", "grafted", "fresh")  # kinds of a prompt's tokens


def unknown_reason(num_tokens: int, block_size: int) -> str:
    """Return why nothing is known of the num_tokens tokens behind a prompt's prefix.

    Text is known by whole blocks of block_size tokens.
    """
    return "too_short" if num_tokens < block_size else "no_known_text"


@dataclass
class PrefillReport:
    """Origin of a prompt's tokens, and where its time went.

    Attributes:
        prompt_tokens: prefix + continued + grafted + fresh.
        prefix_tokens: tokens of exact prefix hits.
        continued_tokens: tokens with KV of an earlier prompt that began with the same tokens and
            held or followed grafts. The KV is used unchanged.
        grafted_tokens: aligned copies of cached KV. `recomputed_tokens` of them were computed again
            in the last layer.
        fresh_tokens: tokens that no cache holds.
        too_deep_tokens: fresh tokens that are known, but only at a depth beyond the limit.
        depth: depth of the KV that the answer depends on: 0 is exact, d + 1 is over grafts of depth
            d.
        computed_share: (token, layer) pairs computed, as a share of full recomputation without any
            cache.
        estimated_full_s, estimated_reuse_s: estimated seconds of its prefill behind the cached
            prefix, without and with grafts (in tokens if costs are not measured). They decided
            whether to graft; None without an estimate.
        stages: seconds by stage, such as match, align, dense, select, sparse. Work of a batch is
            divided by the (token, layer) pairs of each prompt.
        outcome: an `Outcome`.
        reason: why nothing approximate was used, one of REASONS, or None.
        profile: profile that named the policy; None if the request or the server's settings did, or
            nothing.
        recovered_by: policy that `auto` has chosen, with options; None under other policies and
            without grafts.
    """

    policy: str = ""
    prompt_tokens: int = 0
    prefix_tokens: int = 0
    continued_tokens: int = 0
    grafted_tokens: int = 0
    recomputed_tokens: int = 0
    fresh_tokens: int = 0
    too_deep_tokens: int = 0
    depth: int = 0
    computed_share: float = 0.0
    estimated_full_s: float | None = None
    estimated_reuse_s: float | None = None
    stages: dict[str, float] = field(default_factory=dict)
    outcome: str = ""
    reason: str | None = None
    profile: str | None = None
    recovered_by: str | None = None

    def conclude(self, reason: str | None) -> None:
        """Set outcome and reason from the token counts and the reason why nothing was grafted."""
        if reason == "no_known_text" and self.too_deep_tokens:
            reason = "too_deep"

        if self.grafted_tokens:
            outcome = Outcome.GRAFTED
        elif reason in FALLBACKS:
            outcome = Outcome.FALLBACK
        elif reason in REFUSALS:
            outcome = Outcome.OFF
        elif self.continued_tokens:
            outcome = Outcome.CONTINUED
        else:
            outcome = Outcome.PREFIX_ONLY if self.prefix_tokens else Outcome.MISS

        self.outcome = outcome.value
        self.reason = None if outcome in (Outcome.GRAFTED, Outcome.CONTINUED) else reason

    @property
    def fallback(self) -> str | None:
        """Reason why known text was found but not used, or None."""
        return self.reason if self.outcome == Outcome.FALLBACK else None
