"""What a policy may ask of a host: the host protocol.

A policy never sees block tables, cache layouts or model classes. A host (the native engine, vLLM)
implements `PrefillContext` once; every policy then runs on it, for one prompt or a batch of prompts
laid end to end."""

from abc import ABC, abstractmethod
from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, fields, replace
from typing import ClassVar, Literal

import torch
from torch import Tensor

from kvgraft.kernels.upload import upload
from kvgraft.kv.heads import HeadMap
from kvgraft.methods import layers_share
from kvgraft.prefill.plan import Plan
from kvgraft.prefill.spreading import Spreading

Reduction = Literal["sum", "max"]
Heads = tuple[bool, ...]  # KV heads of a layer


@dataclass(frozen=True, eq=False)
class Hidden:
    """Hidden states of some tokens: `states` [n, D], one row for each set position of `where` bool
    [T], in order."""

    states: Tensor
    where: Tensor

    def only(self, where: Tensor) -> "Hidden":
        """The rows of a subset of these tokens."""
        if bool((where & ~self.where).any()):
            raise ValueError(
                "these tokens have no hidden state here: a layer can only drop tokens, never add "
                "them"
            )
        states = self.states
        [rows] = upload(states.device, where[self.where].nonzero()[:, 0])
        return Hidden(states[rows], where)

    def with_states(self, states: Tensor) -> "Hidden":
        """The same tokens, one layer further."""
        return replace(self, states=states)

    def joined(self, other: "Hidden") -> "Hidden":
        """These tokens and others at the same layer; ValueError if some are in both."""
        if bool((self.where & other.where).any()):
            raise ValueError("some tokens are in both: which of their states counts?")
        where = self.where | other.where
        mine = self.where[where]
        rows = torch.where(mine, mine.cumsum(0) - 1, len(self.states) + (~mine).cumsum(0) - 1)
        both = torch.cat([self.states, other.states])
        [rows] = upload(both.device, rows)
        return Hidden(both[rows], where)


class PrefillContext(ABC):
    """One prefill pass over the prompts of `plan`.

    Attributes:
        plan: which tokens are prefix, grafted, fresh.
        token_ids: int64 [T], of the prompts of `plan`.
        num_layers: of the model.
        num_kv_heads: that this context has queries, keys and values of; other ranks may have others
            (`over_heads`).
        block_size: tokens in a block.
        head_map: classes of the model's KV heads, if the host has them.
        head_paging: whether local heads keep sinks and a window only, so that answers are those of
            the model by head.
        residual_layers: layers of which the host keeps the residual stream that enters them.
        local_layers: layers whose queries see a window that some prompt is longer than.
        counts: of each prompt what a policy wants counted, by name; the host reports it.
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
    def scoring_layers(self) -> list[int]:
        """Layers whose attention tells what a prompt needs: those that see all of it, if there are
        any."""
        layers = range(self.num_layers)
        return [index for index in layers if index not in self.local_layers] or list(layers)

    @abstractmethod
    def embed(self, where: Tensor) -> Hidden:
        """Embeddings of the tokens in `where` bool [T]."""

    @abstractmethod
    def graft(self, layers: range) -> None:
        """Align-copy the grafted KV of these layers into the prompts' own pages (SparseX 3.1)."""

    @abstractmethod
    def layer(self, index: int, hidden: Hidden, spreading: Spreading | None = None) -> Hidden:
        """One decoder layer for these tokens: compute and store their KV, attend causally to the
        whole prompt.

        Args:
            spreading: applies the KV change of some of these tokens to other grafted tokens, before
                these attend. The layer needs no `graft` then. Not every host has it.
        """

    @abstractmethod
    def project(self, index: int, hidden: Hidden) -> None:
        """Only the first step of `layer`: compute queries, keys, values of these tokens and store
        the KV."""

    def project_heads(self, index: int, hidden: Hidden, reused: Heads, kept: Tensor) -> None:
        """As `project`, but the KV heads in `reused` keep what was grafted of the tokens in `kept`
        bool [T] (RedKnot 4.2). Not every host has it."""
        raise NotImplementedError("this host has no head-wise recovery")

    def attend(self, index: int, hidden: Hidden, local: Heads) -> Hidden:
        """The second step of `layer`, after a projection of these tokens: attention, its output
        added. The KV heads in `local` see the sinks and the window of the head map. Not every host
        has it."""
        raise NotImplementedError("this host has no head-wise recovery")

    def feed_forward(self, index: int, hidden: Hidden, where: Tensor) -> Hidden:
        """The last step of `layer`: the FFN of the tokens in `where` bool [T]; the others pass by
        it (RedKnot 4.2). Not every host has it."""
        raise NotImplementedError("this host has no head-wise recovery")

    @abstractmethod
    def query(self) -> Tensor:
        """Queries of the last `layer` or `project` call: [n, Hq, d], rotated."""

    @abstractmethod
    def keys(self, index: int, where: Tensor) -> Tensor:
        """The cache as it stands, rotated keys of the tokens in `where`: [n, Hkv, d]."""

    @abstractmethod
    def kv(self, index: int, where: Tensor) -> tuple[Tensor, Tensor]:
        """The same with the values: [n, Hkv, d] each."""

    def rotate_keys(self, shifts: Tensor) -> Callable[[int, Tensor], Tensor]:
        """What gives a layer's rotated keys [n, Hkv, d], or differences of such, as they are so
        many positions int64 [n] further on (delta-RoPE, SparseX 3.1). Not every host has it."""
        raise NotImplementedError("this host turns no keys")

    def add(self, index: int, where: Tensor, keys: Tensor, values: Tensor) -> None:
        """Change the cache: add rotated keys and values [n, Hkv, d] to those of the grafted tokens
        in `where` bool [T]. Not every host has it."""
        raise NotImplementedError("this host lets policies change no KV")

    def over_heads(self, values: Tensor, reduction: Reduction = "sum") -> Tensor:
        """Floats that were summed over the heads here, or are the greatest of theirs -> over all
        heads of the model, the same on every rank: so all choose alike."""
        return values

    @abstractmethod
    def scores(self, index: int, queries: Tensor, reduction: Reduction = "sum") -> Tensor:
        """Sparse-Q scores, float32 [T]: for every key the softmax attention that it receives from
        the tokens in `queries` bool [T], summed over them and over heads (SparseX Eq. 1 and 2), or
        the greatest of them. Uses the queries of the last `layer` or `project` call, which must
        have been at this layer and have included them."""

    def residual(self, index: int, where: Tensor) -> Hidden:
        """What entered the layer `index`, one of `residual_layers`, when the grafted tokens in
        `where` bool [T] were computed at their source (cross-query reuse). Needs a graft first. Not
        every host has it."""
        raise NotImplementedError("this host keeps no residual stream")

    def logits(self, hidden: Hidden) -> Tensor:
        """Logits after each of these tokens, which have left the last layer: float32 [n, V]. Not
        every host has it."""
        raise NotImplementedError("this host gives policies no logits")

    def reject(self, where: Tensor) -> None:
        """Count that the grafted tokens in `where` bool [T] were not to be trusted, and have been
        computed."""
        raise NotImplementedError("this host does not count what policies reject")

    def run(
        self, layers: Iterable[int], hidden: Hidden, spreading: Spreading | None = None
    ) -> Hidden:
        """Run these layers, one after the other, each as `layer` does.

        `hidden` must be what `embed` or a layer has returned for these tokens: a host may compute
        it again."""
        for index in layers:
            hidden = self.layer(index, hidden, spreading)
        return hidden


@dataclass(frozen=True)
class Policy(ABC):
    """A way to recover a plan. One method, one file, one frozen dataclass whose fields are its
    options."""

    name: ClassVar[str]
    uses_grafts: ClassVar[bool] = True  # False: plans reach this policy without grafts
    # False: it computes what local heads have lost of a grafted token
    grafts_local_heads: ClassVar[bool] = True
    # False: KV that an earlier prompt left in place is as good as it gets
    recovers_in_place: ClassVar[bool] = True
    needs_head_map: ClassVar[bool] = False  # True: it works head by head, which only some hosts can
    # or "similar": how prompts are matched, unless the user says otherwise
    match: ClassVar[str] = "exact"

    def __str__(self) -> str:
        """`name:option=value,...`, which `parse_policy` reads."""
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
        """Layers of which it needs the residual stream that enters them."""
        return ()

    @abstractmethod
    def recover(self, ctx: PrefillContext) -> Hidden:
        """Compute what must be computed; the returned rows must include the last token of every
        prompt."""

    def recompute(self, ctx: PrefillContext) -> Hidden:
        """What runs instead where nothing is grafted: full recomputation of everything that is no
        exact hit."""
        return ctx.run(range(ctx.num_layers), ctx.embed(ctx.plan.active))
