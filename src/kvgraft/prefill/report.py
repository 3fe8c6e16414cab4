"""What every host tells about one prompt."""

from dataclasses import dataclass, field


@dataclass
class PrefillReport:
    """Where the tokens of a prompt came from and where its time went.

    Attributes:
        prompt_tokens: prefix + grafted + fresh.
        prefix_tokens: provided by exact prefix hits.
        grafted_tokens: aligned copies of cached KV, of which `recomputed_tokens` were computed again in the last layer.
        fresh_tokens: held by no cache.
        computed_share: (token, layer) pairs computed, as a share of those of full recomputation without any cache.
        stages: seconds by stage, such as match, align, dense, select, sparse; of what was computed together with other
            prompts its share, by the (token, layer) pairs computed.
    """

    policy: str = ""
    prompt_tokens: int = 0
    prefix_tokens: int = 0
    grafted_tokens: int = 0
    recomputed_tokens: int = 0
    fresh_tokens: int = 0
    computed_share: float = 0.0
    stages: dict[str, float] = field(default_factory=dict)
