"""State that the scheduler side keeps for one request."""

from collections.abc import Hashable
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from kvgraft.core.admission import Reuse
from kvgraft.core.approximate_prefix import Continued
from kvgraft.core.plan import Plan
from kvgraft.core.provenance import BlockProvenance
from kvgraft.prefill.context import Policy
from kvgraft.vllm.compat.adapters import Adapter
from kvgraft.vllm.groups import Reserved
from kvgraft.vllm.options import (
    Control,
    RequestOptions,
    ServedReport,
    namespace_label,
    pin_namespace,
)


@dataclass(eq=False)
class RequestState:
    """State of one request, from its arrival until its blocks are freed.

    Attributes:
        request: vLLM's own request object.
        options: what the request asked for. A `Control` is an operation on the pinned documents.
        provenance: origin of the KV in the blocks that the request leaves for others.
        adapter: LoRA adapter of the request, or None. Without a digest its KV matches no other.
        refusal: reason why the request must not graft, or None.
        shared: scopes of the shared namespaces that it may graft from, besides its own.
        reason: reason why nothing was grafted so far, or None.
        candidate: decision that was made while the request waits.
        reserved: pages that its recovery holds in other KV cache groups, from `match` on.
        prefix: pages of vLLM's exact prefix hit at the last call of `match`.
        recovery_key: how the request recovers reused KV. Only requests with an equal key continue
            with its approximate KV. None: it neither uses nor leaves approximate KV.
        continued: approximate prefix of an earlier prompt that the request continues with, or None.
        hashes: number of the first masked block, and vLLM's own block hashes from there on.
        plan: plan of the last recovery that has not failed.
        recovers_by: policy that the request's policy has chosen for its last recovery; None if it
            is that one itself.
        recovery: the admitted decision while the workers recover it.
        is_counted: True if the metrics have counted the request.
        is_trial: True if the request tries the plan of another request (shadow mode). It leaves no
            blocks behind.
        load: number of the store load that the request waits for or has waited for; None before.
        whole: tokens of the client's prompt if vLLM sees a truncated one; else empty.
        documents: ranges of `whole` that are known documents.
        kept: tokens of `documents` that a recovery has kept (see `RecoveryResult.kept`), or None.
    """

    request: Any
    options: RequestOptions | Control
    provenance: BlockProvenance
    adapter: Adapter | None = None
    refusal: str | None = None
    shared: tuple[bytes, ...] = ()
    reason: str | None = None
    candidate: Reuse | None = None
    reserved: Reserved = field(default_factory=Reserved)
    prefix: list[int] = field(default_factory=list)
    recovery_key: Hashable = None
    continued: Continued[Any] | None = None
    hashes: tuple[int, list[Any]] | None = None
    plan: Plan | None = None
    recovers_by: Policy | None = None
    recovery: Reuse | None = None
    is_counted: bool = False
    is_trial: bool = False
    finished: bool = False
    admitted: bool = False
    load: int | None = None
    whole: tuple[int, ...] = ()
    documents: tuple[range, ...] = ()
    kept: np.ndarray | None = None
    report: ServedReport = field(default_factory=ServedReport)

    @property
    def id(self) -> str:
        """vLLM's request id."""
        return str(self.request.request_id)

    @property
    def prompt_tokens(self) -> int:
        """Tokens of the prompt as the client sent it."""
        return len(self.whole) or int(self.request.num_prompt_tokens)

    @property
    def token_ids(self) -> list[int]:
        """The client's prompt and the tokens generated so far."""
        return (
            [*self.whole, *self.request.output_token_ids]
            if self.whole
            else list(self.request.all_token_ids)
        )

    @property
    def input_ids(self) -> np.ndarray:
        """`token_ids`, int64 [T]."""
        return np.array(self.token_ids, np.int64)

    @property
    def scopes(self) -> tuple[bytes, ...]:
        """Scopes that it may read, its own first."""
        return (self.provenance.scope, *self.shared)

    @property
    def policy_name(self) -> str:
        """Policy that its costs are estimated for, with options."""
        if not isinstance(self.options, RequestOptions):
            return ""
        return str(self.options.policy.choices[0])

    @property
    def recovery_name(self) -> str:
        """Policy that has recovered the grafts, with options."""
        return self.policy_name if self.recovers_by is None else str(self.recovers_by)

    @property
    def matches_similar(self) -> bool:
        """True if near-duplicates are grafted too."""
        return isinstance(self.options, RequestOptions) and self.options.match_similar

    @property
    def grafts_local_heads(self) -> bool:
        """True if the request grafts the KV of local heads from its sources."""
        return (
            not isinstance(self.options, RequestOptions) or self.options.policy.grafts_local_heads
        )

    @property
    def recovers_in_place(self) -> bool:
        """True if its policy can recompute grafted tokens of an approximate prefix."""
        return isinstance(self.options, RequestOptions) and self.options.policy.recovers_in_place

    @property
    def recovering(self) -> bool:
        """True while workers write to the request's blocks."""
        return self.recovery is not None

    @property
    def has_known_weights(self) -> bool:
        """True if the weights are identified, so equal scopes mean equal KV."""
        return self.adapter is None or bool(self.adapter.digest)

    @property
    def leaves_kv(self) -> bool:
        """True if others may graft its KV: equal scopes and token ids mean equal KV.

        They do not for prompts with images or prompt embeddings. Trials leave nothing.
        """
        is_text = not self.request.mm_features and self.request.prompt_embeds is None
        return is_text and self.has_known_weights and not self.is_trial

    @property
    def namespace(self) -> str:
        """Isolation key of the request, which vLLM also includes in its block hashes."""
        return self.request.cache_salt or ""

    @property
    def pin_namespace(self) -> str:
        """Namespace of the pinned documents that the request can graft from."""
        return pin_namespace(
            self.namespace, "" if self.adapter is None else self.adapter.request.lora_name
        )

    @property
    def label(self) -> str:
        """Label of the namespace that logs and metrics may show."""
        return namespace_label(self.namespace)
