"""State of a request while the engine works on it."""

import time
from collections import deque
from collections.abc import Hashable, Iterable
from dataclasses import dataclass, field

import numpy as np
import torch
from torch import Tensor

from kvgraft.core.approximate_prefix import Continued
from kvgraft.core.plan import Kind, Plan
from kvgraft.core.provenance import BlockProvenance
from kvgraft.decode.flow import Flow
from kvgraft.engine.request import Event, Report, Request, Result
from kvgraft.engine.sampling import Sampler
from kvgraft.engine.text import IncrementalText
from kvgraft.kv.heads import StreamLayout
from kvgraft.kv.lists import PageLists
from kvgraft.prefill.context import Policy
from kvgraft.prefill.documents.keeping import KeepsDocuments


@dataclass(eq=False)
class SequenceState:
    """Tokens, pages and progress of one request.

    Attributes:
        prompt: its token ids, int64 [num_prompt].
        tokens: prompt and generated token ids.
        provenance: origin of the KV in the blocks that it leaves for others.
        lists: its pages. All are reserved at admission, so that a running request never waits for
            memory.
        flow: how its decode steps attend; None is dense.
        shared: scopes of other namespaces that it may graft from, see `scope`.
        shares_prefix: whether it may use pages that others use, too. False if its flow keeps state
            in them.
        matches_similar: whether near-duplicates of its prompt are grafted, too.
        documents: spans of the prompt that its policy keeps in part.
        num_dropped: prompt tokens that its pages do not or will not hold. The remaining tokens lie
            closer together there, so that token t of the answer lies at t - num_dropped.
        plan: how the KV of its prompt is obtained.
        recovers_by: policy that recovers its grafts: `policy`, or one that it chooses from. The
            most careful one until the plan is made.
        continued: approximate blocks of an earlier prompt that it continues from, if any.
        continuation_keys: keys of its blocks from the first approximate one on, for prompts that
            continue from them.
        refusal: why it must not graft, or None.
        reason: why nothing was grafted at its admission, or None.
        num_indexed: leading blocks that the caches of its flow know.
        num_computed: leading places of its pages that hold KV.
        logits: float32 [V] that each token of the answer was chosen from, if the request asks for
            them.
    """

    index: int
    request: Request
    policy: Policy
    prompt: np.ndarray
    provenance: BlockProvenance
    sampler: Sampler
    text: IncrementalText
    flow: Flow | None = None
    shared: tuple[bytes, ...] = ()
    shares_prefix: bool = True
    matches_similar: bool = False
    documents: tuple[range, ...] = ()
    num_dropped: int = 0
    report: Report = field(default_factory=Report)
    submitted_at: float = field(default_factory=time.perf_counter)
    events: deque[Event] = field(default_factory=deque)
    lists: PageLists | None = None
    plan: Plan | None = None
    continued: Continued[bytes] | None = None
    continuation_keys: list[bytes] = field(default_factory=list)
    refusal: str | None = None
    reason: str | None = None
    num_indexed: int = 0
    num_computed: int = 0
    logits: list[Tensor] = field(default_factory=list)
    done: bool = False

    def __post_init__(self) -> None:
        self.tokens: list[int] = self.prompt.tolist()
        self.num_prompt = len(self.tokens)
        self.report.prompt_tokens = self.num_prompt
        self.report.policy = self.policy.name
        self.recovers_by = self.policy.choices[0]
        if not self.policy.uses_grafts:
            self.refusal = "policy_full"

    @property
    def scope(self) -> bytes:
        """Digest of model and namespace. It isolates what the sequence leaves and, apart from
        `shared`, what it may reuse."""
        return self.provenance.scope

    @property
    def scopes(self) -> tuple[bytes, ...]:
        """Scopes that it may read, its own first."""
        return (self.scope, *self.shared)

    @property
    def input_ids(self) -> np.ndarray:
        """Tokens of prompt and answer, int64 [tokens]."""
        return self.first_tokens(len(self.tokens))

    @property
    def policy_name(self) -> str:
        """Policy that its costs are estimated for, with all options."""
        return str(self.policy.choices[0])

    @property
    def recovery_name(self) -> str:
        """Policy that has recovered its grafts, with all options."""
        return str(self.recovers_by)

    @property
    def grafts_local_heads(self) -> bool:
        """Whether it needs the KV of local heads from its sources."""
        return self.policy.grafts_local_heads

    @property
    def recovers_in_place(self) -> bool:
        """Whether its policy recomputes grafted tokens of blocks that it continues from."""
        return self.policy.recovers_in_place

    def first_tokens(self, count: int) -> np.ndarray:
        """First tokens of prompt and answer, int64 [count]."""
        return np.concatenate(
            (self.prompt[:count], np.array(self.tokens[self.num_prompt : count], np.int64))
        )

    @property
    def pages(self) -> PageLists:
        """`lists` of an admitted sequence; ValueError before admission."""
        if self.lists is None:
            raise ValueError("the sequence has not been admitted yet")
        return self.lists

    @property
    def admitted_plan(self) -> Plan:
        """`plan` of an admitted sequence; ValueError before admission."""
        if self.plan is None:
            raise ValueError("the sequence has not been admitted yet")
        return self.plan

    @property
    def recovery_key(self) -> Hashable:
        """Settings of recovery and attention. Only prompts with an equal key continue from its
        approximate KV. None: it shares no blocks."""
        if not self.shares_prefix:
            return None
        return str(self.policy), self.matches_similar, self.flow, self.shared

    def depths(self, count: int) -> np.ndarray:
        """Depths of its first blocks, int16 [count]: see `BlockProvenance.depths`."""
        size = self.admitted_plan.block_size
        hits = self.admitted_plan.prefix[::size].numpy().copy()
        if self.continued is not None:
            hits[self.continued.first_block : self.continued.stop_block] = False
        return self.provenance.depths(count, size, hits)

    def set_plan(self, plan: Plan) -> None:
        """Set the plan, and report what it means for the prompt."""
        self.plan, report = plan, self.report
        continued = 0 if self.continued is None else len(self.continued.keys) * plan.block_size
        counts = plan.kinds.bincount(minlength=len(Kind)).tolist()
        report.fresh_tokens, report.grafted_tokens = counts[Kind.FRESH], counts[Kind.GRAFTED]
        report.continued_tokens, report.depth = continued, self.provenance.depth
        report.prefix_tokens = (
            plan.num_tokens - report.fresh_tokens - report.grafted_tokens - continued
        )
        report.conclude(self.refusal or self.reason)
        self.recovers_by = self.policy.chosen_for(plan, torch.from_numpy(self.prompt))
        chooses = self.recovers_by is not self.policy and bool(plan.grafted.any())
        report.recovered_by = str(self.recovers_by) if chooses else None

    @property
    def num_reserved(self) -> int:
        """Places for KV that it may need. The last generated token needs none."""
        return self.num_prompt - self.num_dropped + self.request.sampling.max_tokens - 1

    @property
    def first_token_pending(self) -> bool:
        """Return whether the first token of the answer is still to come."""
        return len(self.tokens) == self.num_prompt

    def place_documents(
        self, policy: KeepsDocuments, segments: Iterable[tuple[int, int]], layout: StreamLayout
    ) -> None:
        """Take the segments as the documents that the policy keeps in part. The last prompt token
        is always computed."""
        last = self.num_prompt - 1
        documents = tuple(range(start, min(stop, last)) for start, stop in segments if start < last)
        if layout.num_local_lists:
            self.refusal = "head_paging"
        elif not documents:
            self.refusal = "no_documents"
        else:
            self.documents = documents
            lengths = [len(span) for span in documents]
            self.num_dropped = sum(lengths) - policy.num_kept(lengths)

    def choose(self, logits: Tensor, best: int | None = None) -> int:
        """Return the next token: of the forced output while it lasts, then by sampling. `best` is
        the most likely token, if known."""
        given, place = self.request.forced_output, len(self.tokens) - self.num_prompt
        return given[place] if place < len(given) else self.sampler.sample(logits, best)

    def accept(self, token: int, logits: Tensor, eos_token_ids: tuple[int, ...]) -> None:
        """Append the next token, emit its text, and finish when an end is reached."""
        if self.first_token_pending:
            self.report.ttft_s = time.perf_counter() - self.submitted_at

        if self.request.return_logits:
            self.logits.append(logits.float().cpu())

        self.tokens.append(token)
        sampling = self.request.sampling
        is_eos = token in eos_token_ids and not sampling.ignore_eos
        text = "" if is_eos else self.text.push(token)
        if self.text.stopped:
            self.finish("stop", text)
        elif is_eos:
            self.finish("eos", text)
        elif len(self.tokens) - self.num_prompt >= sampling.max_tokens:
            self.finish("length", text)
        else:
            self.events.append(Event(self.index, text))

    def finish(self, reason: str, text: str = "", error: str | None = None) -> None:
        """Emit the last event."""
        self.done = True
        text += self.text.flush()
        generated = self.tokens[self.num_prompt :]
        logits = torch.stack(self.logits) if self.logits else None
        result = Result(self.text.text, generated, reason, self.report, logits, error)
        self.events.append(Event(self.index, text, result))
