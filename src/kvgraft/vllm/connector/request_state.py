"""What the scheduler side knows of one request."""

from collections.abc import Hashable
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from kvgraft.prefill.plan import Plan
from kvgraft.reuse.approximate_prefix import Continued
from kvgraft.reuse.provenance import NEVER, BlockProvenance
from kvgraft.reuse.readings import Span
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
class Candidate:
    """A plan that still has to be admitted, and what it holds true for.

    Attributes:
        sources: distinct pages that it grafts from, under `versions`.
        steps, spans: see `BlockProvenance.mark_approximate`.
        in_place: pages whose approximate KV is recovered where it is; nobody else reads them.
        reserved: what its recovery holds beside all that, from when vLLM is told of it.
    """

    plan: Plan
    num_prefix: int
    sources: list[int]
    versions: np.ndarray  # int64 [len(sources)]
    steps: tuple[tuple[int, int], ...] = ()
    spans: tuple[Span, ...] = ()
    in_place: tuple[int, ...] = ()
    reserved: Reserved = field(default_factory=Reserved)


@dataclass(eq=False)
class RequestState:
    """One request from its arrival until its blocks are given back.

    Attributes:
        request: vLLM's own object.
        whole: its prompt, if vLLM has been given a shorter one, for what is kept of `documents`,
            stretches of it.
        kept: which tokens of these are kept (`RecoveryResult.kept`), as soon as a recovery has
            chosen.
        options: what it asked for; a `Control` is an operation on the pinned documents.
        offer: what it leaves behind for others.
        adapter: which it runs under, or None; without a digest its KV is like no other.
        shared: scopes of the namespaces that it may graft from beside its own.
        refusal: why it must not graft, or None.
        reason: why nothing was grafted so far.
        candidate: the plan that was made while it waits.
        prefix: pages of vLLM's exact hits, as of the last time that it asked.
        recovery_key: how it recovers what is reused: only others that do it in the same way go on
            with what it leaves. None: it neither goes on with approximate KV nor leaves any to go
            on with.
        continued: what it goes on with of an earlier prompt.
        num_continuable: leading blocks that others can go on with.
        hashes: vLLM's own block hashes from the first hidden block on, while others stand in their
            place.
        num_exact: leading tokens whose KV would be exact if nothing were grafted: not those that a
            flow attends for.
        plan: of its last recovery that has not failed.
        recovery: the admitted plan while the workers are at it.
        is_counted: whether the metrics have counted it.
        is_trial: whether it grafts what another request would have grafted, and leaves nothing
            behind.
        load: number of the load that it waits or has waited for, or None before it has asked.
    """

    request: Any
    options: RequestOptions | Control
    offer: BlockProvenance
    adapter: Adapter | None = None
    refusal: str | None = None
    shared: tuple[bytes, ...] = ()
    reason: str | None = None
    candidate: Candidate | None = None
    prefix: list[int] = field(default_factory=list)
    recovery_key: Hashable = None
    continued: Continued[Any] | None = None
    num_continuable: int = 0
    hashes: tuple[int, list[Any]] | None = None
    plan: Plan | None = None
    recovery: Candidate | None = None
    is_counted: bool = False
    is_trial: bool = False
    finished: bool = False
    admitted: bool = False
    num_exact: int = NEVER
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
        """Its tokens, as the client sent them, with those generated so far."""
        return (
            [*self.whole, *self.request.output_token_ids]
            if self.whole
            else list(self.request.all_token_ids)
        )

    @property
    def policy_name(self) -> str:
        """The method that recovers what is grafted, with its options."""
        return str(self.options.policy) if isinstance(self.options, RequestOptions) else ""

    @property
    def matches_similar(self) -> bool:
        """Whether near-duplicates are grafted, too."""
        return isinstance(self.options, RequestOptions) and self.options.match_similar

    @property
    def grafts_local_heads(self) -> bool:
        """Whether it takes from a source what local heads know of it."""
        return (
            not isinstance(self.options, RequestOptions) or self.options.policy.grafts_local_heads
        )

    @property
    def recovering(self) -> bool:
        """Whether workers write to its blocks."""
        return self.recovery is not None

    @property
    def has_known_weights(self) -> bool:
        """Whether its KV is that of others which have the same scope."""
        return self.adapter is None or bool(self.adapter.digest)

    @property
    def namespace(self) -> str:
        """The isolation key, which vLLM folds into its own hashes too."""
        return self.request.cache_salt or ""

    @property
    def pin_namespace(self) -> str:
        """Where what is pinned lies that it can graft from."""
        return pin_namespace(
            self.namespace, "" if self.adapter is None else self.adapter.request.lora_name
        )

    @property
    def label(self) -> str:
        """What may be shown of the namespace."""
        return namespace_label(self.namespace)
