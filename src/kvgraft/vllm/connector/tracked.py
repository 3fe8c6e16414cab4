"""What the scheduler side knows of one request."""

from dataclasses import dataclass, field
from typing import Any

import numpy as np

from kvgraft.prefill.plan import Plan
from kvgraft.vllm.options import Control, Report, RequestOptions, namespace_label

NEVER = 1 << 62  # a position behind every token


@dataclass(frozen=True, eq=False)
class Candidate:
    """A plan that still has to be admitted, and what it holds true for.

    Attributes:
        sources: distinct pages that it grafts from, under `versions`.
    """

    plan: Plan
    num_prefix: int
    sources: list[int]
    versions: np.ndarray  # int64 [len(sources)]

    @property
    def first_graft(self) -> int:
        """Position of the first grafted token."""
        return int(self.plan.grafted.nonzero()[0])


@dataclass(eq=False)
class Tracked:
    """One request from its arrival until its blocks are given back.

    Attributes:
        request: vLLM's own object.
        whole: its prompt, if vLLM has been given a shorter one, for what is kept of `documents`, stretches of it.
        options: what it asked for; a `Control` is an operation on the frozen pool.
        scope: root of all keys of its content.
        source: identity of its content in the index.
        refusal: why it must not graft, or None.
        reason: why nothing was grafted so far.
        candidate: the plan that was made while it waits.
        pinned: source pages held until its recovery has ended.
        hashes: vLLM's own block hashes from the first grafted block on, while a nonce stands in their place.
        num_exact: leading tokens whose KV would be exact if nothing were grafted: not those that a flow attends for.
        first_approximate: first token whose KV is not exact.
        recovery: the admitted plan while the workers are at it.
        accounted: whether the metrics have counted it.
        num_offered, last_entry: blocks named in the index so far, and the entry of the last one.
        num_stored: leading blocks that the stores were offered.
        load: number of the load that it waits or has waited for, or None before it has asked.
        num_sources: entries that this request added.
    """

    request: Any
    options: RequestOptions | Control
    scope: bytes
    source: int
    refusal: str | None = None
    reason: str | None = None
    candidate: Candidate | None = None
    pinned: list[int] = field(default_factory=list)
    hashes: tuple[int, list[Any]] | None = None
    recovery: Candidate | None = None
    accounted: bool = False
    finished: bool = False
    admitted: bool = False
    num_exact: int = NEVER
    first_approximate: int = NEVER
    num_offered: int = 0
    last_entry: int = -1
    num_sources: int = 0
    num_stored: int = 0
    load: int | None = None
    whole: tuple[int, ...] = ()
    documents: tuple[range, ...] = ()
    report: Report = field(default_factory=Report)

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
        return [*self.whole, *self.request.output_token_ids] if self.whole else list(self.request.all_token_ids)

    @property
    def recovering(self) -> bool:
        """Whether workers write to its blocks."""
        return self.recovery is not None

    @property
    def namespace(self) -> str:
        """The isolation key, which vLLM folds into its own hashes too."""
        return self.request.cache_salt or ""

    @property
    def label(self) -> str:
        """What may be shown of the namespace."""
        return namespace_label(self.namespace)
