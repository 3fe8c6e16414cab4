"""The host protocol: operations that a host offers to policies.

A policy never sees block tables, cache layouts or model classes. A host (the native engine, vLLM)
implements `PrefillContext` once. Every policy then runs on it, for one prompt or a batch of prompts
end to end.
"""

from abc import ABC, abstractmethod
from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, fields, replace
from functools import cached_property
from typing import ClassVar, Literal

import torch
from torch import Tensor

from kvgraft.core.plan import Plan
from kvgraft.kernels.upload import upload
from kvgraft.kv.heads import HeadMap
from kvgraft.methods import layers_share
from kvgraft.prefill.device_tokens import DeviceTokens, TokenSet
from kvgraft.prefill.spreading import Spreading

Reduction = Literal["sum", "max"]
Heads = tuple[bool, ...]  # KV heads of a layer


@dataclass(frozen=True, eq=False)
class Hidden:
    """Hidden states of some tokens: `states` [n, D] has one row for each set position of `where`
    bool [T], in order."""

    states: Tensor
    where: Tensor

    @property
    def tokens(self) -> TokenSet:
        """The tokens, as far as the host knows them without waiting."""
        return self.where

    @property
    def computed(self) -> "Hidden":
        """The same, computed now at the latest."""
        return self

    def only(self, where: Tensor) -> "Hidden":
        """Return the rows of a subset of these tokens."""
        if bool((where & ~self.where).any()):
            raise ValueError(
                "these tokens have no hidden state here: a layer can only drop tokens, never add "
                "them"
            )
        states = self.states
        [rows] = upload(states.device, where[self.where].nonzero()[:, 0])
        return Hidden(states[rows], where)

    def with_states(self, states: Tensor) -> "Hidden":
        """Return the same tokens with other states, such as those of the next layer."""
        return replace(self, states=states)

    def joined(self, other: "Hidden") -> "Hidden":
        """Join these tokens and others at the same layer; ValueError if some are in both."""
        if bool((self.where & other.where).any()):
            raise ValueError("some tokens are in both: which of their states counts?")
        where = self.where | other.where
        mine = self.where[where]
        rows = torch.where(mine, mine.cumsum(0) - 1, len(self.states) + (~mine).cumsum(0) - 1)
        both = torch.cat([self.states, other.states])
        [rows] = upload(both.device, rows)
        return Hidden(both[rows], where)


class DeviceHidden(Hidden):
    """Hidden states of tokens that only the device knows completely, in the order of their rows.

    Reading `where` waits for the device.
    """

    def __init__(self, states: Tensor, tokens: DeviceTokens) -> None:
        vars(self).update(states=states, chosen=tokens)

    chosen: DeviceTokens

    @property
    def where(self) -> Tensor:
        """The tokens, bool [T] on the CPU."""
        return self.chosen.mask

    @property
    def tokens(self) -> TokenSet:
        return self.chosen

    def with_states(self, states: Tensor) -> Hidden:
        return DeviceHidden(states, self.chosen)


class LaterHidden(Hidden):
    """Hidden states that are computed when they are needed.

    A host whose `run` computes the first layer again never needs them.
    """

    def __init__(self, tokens: TokenSet, compute: Callable[[TokenSet], Hidden]) -> None:
        vars(self).update(given=tokens, compute=compute)

    given: TokenSet
    compute: Callable[[TokenSet], Hidden]

    @cached_property
    def computed(self) -> Hidden:
        return self.compute(self.given)

    @property
    def states(self) -> Tensor:
        """Hidden states, as in the protocol."""
        return self.computed.states

    @property
    def where(self) -> Tensor:
        """The tokens, bool [T] on the CPU."""
        return self.given if isinstance(self.given, Tensor) else self.given.mask

    @property
    def tokens(self) -> TokenSet:
        return self.given


class PrefillContext(ABC):
    """One prefill pass over the prompts of `plan`.

    Attributes:
        plan: kind of each token: prefix, grafted or fresh.
        token_ids: int64 [T], of the prompts of `plan`.
        num_layers: layers of the model.
        num_kv_heads: KV heads of this context. Other ranks may have others (`over_heads`).
        block_size: tokens in a block.
        head_map: classes of the model's KV heads, if the host has them.
        head_paging: whether local heads keep only sinks and a window, so that answers are those of
            the sparser model.
        residual_layers: layers whose input residual stream the host caches.
        local_layers: layers whose queries see only a window, if some prompt is longer than it.
        counts: per prompt, counters of the policy by name, which the host reports.
    """

    plan: Plan
    token_ids: Tensor
    num_layers: int
    num_kv_heads: int
    block_size: int
    head_map: HeadMap | None = None
    head_paging: bool = False
    residual_layers: tuple[int, ...] = ()
    local_layers: frozenset[int] = frozenset()
    counts: Sequence[Counter[str]]

    @property
    def chooses_on(self) -> torch.device | None:
        """Device on which policies choose tokens without waiting for it (`DeviceTokens`); None if
        they choose on the CPU."""
        return None

    @property
    def scoring_layers(self) -> list[int]:
        """Layers whose attention may choose tokens: those that see the whole prompt, or all layers
        if there are none."""
        layers = range(self.num_layers)
        return [index for index in layers if index not in self.local_layers] or list(layers)

    @abstractmethod
    def embed(self, where: TokenSet) -> Hidden:
        """Compute the embeddings of the tokens in `where` bool [T]."""

    def settled(self, tokens: TokenSet) -> TokenSet:
        """Return the chosen tokens of the last pass as this host takes them.

        By default the host must know them, so it waits for the device.
        """
        return tokens if isinstance(tokens, Tensor) else tokens.mask

    @abstractmethod
    def graft(self, layers: range) -> None:
        """Align-copy the grafted KV of these layers into the prompts' own pages (SparseX 3.1)."""

    @abstractmethod
    def layer(self, index: int, hidden: Hidden, spreading: Spreading | None = None) -> Hidden:
        """Run one decoder layer for these tokens: compute and store their KV, attend causally to
        the whole prompt.

        Args:
            spreading: applies the KV change of some of these tokens to other grafted tokens before
                these attend. The layer then needs no `graft`. Not every host supports it.
        """

    @abstractmethod
    def project(self, index: int, hidden: Hidden) -> None:
        """Run only the first step of `layer`: compute queries, keys and values of these tokens, and
        store the KV."""

    def project_heads(self, index: int, hidden: Hidden, reused: Heads, kept: Tensor) -> None:
        """Project like `project`, but keep grafted KV in the heads `reused` for the tokens in
        `kept` bool [T] (RedKnot 4.2).

        Not every host supports it.
        """
        raise NotImplementedError("this host has no head-wise recovery")

    def attend(self, index: int, hidden: Hidden, local: Heads) -> Hidden:
        """Run the second step of `layer` after a projection of these tokens: add the attention
        output.

        The KV heads in `local` see the sinks and the window of the head map. Not every host
        supports it.
        """
        raise NotImplementedError("this host has no head-wise recovery")

    def feed_forward(self, index: int, hidden: Hidden, where: Tensor) -> Hidden:
        """Run the last step of `layer`, the FFN, for the tokens in `where` bool [T]; the others
        skip it (RedKnot 4.2).

        Not every host supports it.
        """
        raise NotImplementedError("this host has no head-wise recovery")

    @abstractmethod
    def query(self) -> Tensor:
        """Queries of the last `layer` or `project` call: [n, Hq, d], rotated."""

    @abstractmethod
    def keys(self, index: int, where: Tensor) -> Tensor:
        """Current rotated keys in the cache of the tokens in `where` bool [T]: [n, Hkv, d]."""

    @abstractmethod
    def kv(self, index: int, where: Tensor) -> tuple[Tensor, Tensor]:
        """Current rotated keys and values of the tokens in `where` bool [T]: [n, Hkv, d] each."""

    def rotate_keys(self, shifts: Tensor) -> Callable[[int, Tensor], Tensor]:
        """Return a function that moves rotated keys of a layer by `shifts` int64 [n] positions
        (delta-RoPE, SparseX 3.1).

        The function takes a layer index and keys [n, Hkv, d], or differences of keys. Not every
        host supports it.
        """
        raise NotImplementedError("this host turns no keys")

    def add(self, index: int, where: Tensor, keys: Tensor, values: Tensor) -> None:
        """Add rotated keys and values [n, Hkv, d] to the cached ones of the grafted tokens in
        `where` bool [T].

        Not every host supports it.
        """
        raise NotImplementedError("this host lets policies change no KV")

    def over_heads(self, values: Tensor, reduction: Reduction = "sum") -> Tensor:
        """Reduce floats that cover this rank's heads over all heads of the model.

        The result is the same on every rank, so that all ranks choose the same tokens.
        """
        return values

    @abstractmethod
    def scores(self, index: int, queries: Tensor, reduction: Reduction = "sum") -> Tensor:
        """Sparse-Q scores, float32 [T]: the softmax attention that every key receives from
        `queries` bool [T].

        They are summed over queries and heads (SparseX Eq. 1 and 2), or their maximum is taken. The
        queries are those of the last `layer` or `project` call, which must have been at this layer
        and have included these tokens.
        """

    def device_scores(self, index: int, queries: TokenSet, reduction: Reduction = "sum") -> Tensor:
        """Compute `scores`, and leave them on the device `chooses_on`."""
        raise NotImplementedError("this host has its scores on the CPU")

    def residual(self, index: int, where: Tensor) -> Hidden:
        """Cached hidden states that entered the layer `index` when the tokens in `where` bool [T]
        were computed at their source.

        The layer must be one of `residual_layers`, and the tokens grafted before the call
        (cross-query reuse). Not every host supports it.
        """
        raise NotImplementedError("this host keeps no residual stream")

    def logits(self, hidden: Hidden) -> Tensor:
        """Logits after each of these tokens, which have left the last layer: float32 [n, V]. Not
        every host supports it."""
        raise NotImplementedError("this host gives policies no logits")

    def reject(self, where: Tensor) -> None:
        """Count grafted tokens in `where` bool [T] that the policy did not trust and has
        computed."""
        raise NotImplementedError("this host does not count what policies reject")

    def run(
        self, layers: Iterable[int], hidden: Hidden, spreading: Spreading | None = None
    ) -> Hidden:
        """Run these layers one after the other, each like `layer`.

        Args:
            hidden: must be what `embed` or a layer has returned for these tokens, since a host may
                compute it again.
        """
        hidden = hidden.computed
        for index in layers:
            hidden = self.layer(index, hidden, spreading)
        return hidden


@dataclass(frozen=True)
class Policy(ABC):
    """A way to recover a plan. Each method is one file and one frozen dataclass whose fields are
    its options."""

    name: ClassVar[str]
    uses_grafts: ClassVar[bool] = True  # False: plans reach this policy without grafts
    # False: it computes the KV of grafted tokens that local heads have lost
    grafts_local_heads: ClassVar[bool] = True
    # False: it does not recompute grafted KV that an earlier prompt left in place
    recovers_in_place: ClassVar[bool] = True
    # True: it works head by head, which only some hosts support
    needs_head_map: ClassVar[bool] = False
    # "exact" or "similar": default matching of prompts
    match: ClassVar[str] = "exact"

    def __str__(self) -> str:
        """Return `name:option=value,...`, which `parse_policy` reads."""
        given = {field.name: getattr(self, field.name) for field in fields(self)}
        unused = {
            layers_share(name)
            for name, value in given.items()
            if name.endswith("_layers") and value is not None
        }
        options = ",".join(
            f"{n}={value}" for n, value in given.items() if value is not None and n not in unused
        )
        return f"{self.name}:{options}" if options else self.name

    def residual_layers(self, num_layers: int) -> tuple[int, ...]:
        """Layers whose input residual stream the policy needs."""
        return ()

    @property
    def choices(self) -> "tuple[Policy, ...]":
        """Itself, or the policies that it chooses from, the most careful one first."""
        return (self,)

    def chosen_for(self, plan: Plan, token_ids: Tensor) -> "Policy":
        """Return the policy that recovers a prompt: itself, unless it chooses by prompt.

        Args:
            token_ids: int64 [T], the prompt on the CPU.
        """
        return self

    @abstractmethod
    def recover(self, ctx: PrefillContext) -> Hidden:
        """Compute fresh tokens and the grafted ones that the policy chooses. The result must
        include the last token of every prompt."""

    def recompute(self, ctx: PrefillContext) -> Hidden:
        """Recompute everything except exact hits. Hosts call it for prompts without grafts."""
        return ctx.run(range(ctx.num_layers), ctx.embed(ctx.plan.active))
