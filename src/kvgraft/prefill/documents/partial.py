"""A prompt of documents, computed over parts of them: the document protocol for all hosts.

A layer gathers the KV that its queries attend to, from documents in host memory and from pages of
the prompt, into scratch memory. Only what the policy retains is written to the pages.
"""

from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cached_property, partial
from typing import Literal

import torch
from torch import Tensor

from kvgraft.core.plan import Plan
from kvgraft.kernels.dispatch import segpaged_attention
from kvgraft.kernels.layout import AttentionLayout
from kvgraft.kv.heads import StreamLayout
from kvgraft.kv.importance import MOST_WEIGHTS
from kvgraft.kv.rope import Rope, rotate
from kvgraft.prefill.context import Hidden, Reduction
from kvgraft.prefill.documents.context import DocumentContext, DocumentLayout, blend
from kvgraft.prefill.stages import StageTimes

Attend = Callable[[Tensor, Tensor, Tensor], Tensor | None]
# Logit of a masked key. It is finite, since a query before all documents has no other.
UNSEEN = -1e30


class LayerHost(ABC):
    """A model, run layer by layer with attention from the caller, and the pages of one prompt.

    Attributes:
        scale: of the attention logits.
        max_rows: greatest number of tokens that `run` takes at a time.
    """

    num_layers: int
    num_kv_heads: int
    head_dim: int
    scale: float
    max_rows: int
    dtype: torch.dtype
    device: torch.device
    rope: Rope

    @abstractmethod
    def embed(self, token_ids: Tensor) -> Tensor:
        """Embed token ids int64 [n] -> hidden states [n, ...]."""

    @abstractmethod
    def run(
        self, index: int, states: Tensor, positions: Tensor, rows: Tensor, attend: Attend
    ) -> Tensor:
        """Run one decoder layer.

        Args:
            states: [n, ...], of tokens at `positions` int64 [n].
            rows: bool [n], tokens whose output is returned.
            attend: takes their queries [n, Hq, d], keys and values [n, Hkv, d], rotated, and
                returns the attention output [r, Hq, d] of `rows`, or None if there are none.

        Returns:
            States [r, ...].
        """

    def agree(self, values: Tensor, reduction: Reduction) -> Tensor:
        """Reduce over all heads, like `over_heads` of a context. A host that has all heads returns
        the values unchanged."""
        return values

    @abstractmethod
    def read(self, index: int, places: Tensor) -> tuple[Tensor, Tensor]:
        """Read keys and values [n, Hkv, d] from the pages, at these places int64 [n]."""

    @abstractmethod
    def write(self, index: int, places: Tensor, keys: Tensor, values: Tensor) -> None:
        """Write keys and values [n, Hkv, d] into the pages."""


class PartialPrefill(DocumentContext):
    """One prompt of documents.

    Args:
        token_ids: int64 [T].
        room: tokens that fit into the pages.

    Attributes:
        num_kept: tokens in the pages after `retain`, in each layer.
        kept: bool [L, T], these tokens.
        scratch_bytes: peak memory of the gathered keys and values of a layer, without the pages.
        recomputed: document tokens whose KV is recomputed in the last layer.
        times: seconds spent in select, align and sparse work.
        projected, attended: tokens whose queries, keys and values were computed, and (query, key)
            pairs, over all layers.
        scored: (query, key) pairs of scores.
        finished: tokens that went through the rest of each layer.
    """

    def __init__(
        self,
        host: LayerHost,
        plan: Plan,
        token_ids: Tensor,
        layout: DocumentLayout,
        room: int,
        stable_layers: Sequence[int] = (),
    ) -> None:
        self.plan, self.layout, self.stable_layers = plan, layout, stable_layers
        self.num_layers = host.num_layers
        self.num_kept = self.scratch_bytes = self.recomputed = 0
        self.projected = self.attended = self.scored = 0
        self.finished = [0] * self.num_layers
        self.times = StageTimes(host.device)
        self._timed = self.times.timed
        self._host, self._token_ids, self._room = host, token_ids, room
        # page layout of one layer of scratch memory
        self._heads = StreamLayout.dense(1, host.num_kv_heads).layers[0]
        # shifts of document tokens; the others are not rotated
        shifts = torch.zeros(plan.num_tokens, dtype=torch.int64)
        for at in layout.placed:
            shifts[at.start : at.stop] = at.start

        self._turns = host.rope.table(shifts.to(host.device))
        self.kept = torch.zeros(self.num_layers, plan.num_tokens, dtype=torch.bool)
        self._stage = "select"
        self._finite = torch.tensor(True, device=host.device)
        # tokens of the last layer, their queries, all keys
        self._last: tuple[Tensor, Tensor, Scratch] | None = None

    @property
    def is_finite(self) -> bool:
        """Return whether all computed states are finite."""
        return bool(self._finite)

    def embed(self, where: Tensor) -> Hidden:
        return Hidden(self._host.embed(self._token_ids[where].to(self._host.device)), where)

    def layer(
        self,
        index: int,
        hidden: Hidden,
        *,
        sees: Tensor,
        writes: Tensor,
        outputs: Tensor,
        fuses: bool = False,
    ) -> Hidden:
        if bool(((writes | outputs) & ~hidden.where).any()):
            raise ValueError(
                "these tokens have no hidden state here: a layer can only drop tokens, never add "
                "them"
            )
        with self._timed(self._stage):
            here = sees | writes | outputs
            scratch = Scratch(here, *self._gather(index, here))
            queries, states = [], []

            def attend(
                tokens: Tensor, query: Tensor, keys: Tensor, values: Tensor
            ) -> Tensor | None:
                queries.append(query)
                self._write(index, scratch, tokens, writes, (keys, values), fuses)
                return self._attend(
                    index, scratch, tokens[outputs[tokens]], query[outputs[tokens].to(query.device)]
                )

            tokens = hidden.where.nonzero()[:, 0]
            pairs = zip(
                tokens.split(self._host.max_rows),
                hidden.states.split(self._host.max_rows),
                strict=True,
            )
            for part, entering in pairs:
                rows = outputs[part].to(entering.device)
                states.append(
                    self._host.run(
                        index, entering, part.to(entering.device), rows, partial(attend, part)
                    )
                )
            self._last = (hidden.where, torch.cat(queries), scratch)
            after = torch.cat(states)
            self._finite = self._finite & after.isfinite().all()
            return Hidden(after, outputs)

    def query(self) -> Tensor:
        return self._last_layer[1]

    def over_heads(self, values: Tensor, reduction: Reduction = "sum") -> Tensor:
        return self._host.agree(values, reduction)

    def scores(self, index: int, queries: Tensor, reduction: Reduction = "sum") -> Tensor:
        """Compute the scores of the protocol. Documents stay in place, and the queries are rotated
        back instead."""
        where, query, _ = self._last_layer
        if bool((queries & ~where).any()):
            raise ValueError("the last layer has no queries for these tokens")

        with self._timed("select"):
            asking, positions = (
                query[queries[where].to(query.device)],
                queries.nonzero()[:, 0].to(query.device),
            )
            mass = torch.zeros(int(self.plan.grafted.sum()), device=query.device)
            rows = max(MOST_WEIGHTS // (asking.shape[1] * max(mass.numel(), 1)), 1)
            for part, at in zip(asking.split(rows), positions.split(rows), strict=True):
                weights = self._weights(index, part, at)
                if reduction == "sum":
                    mass += weights.sum((0, 1))
                else:
                    mass = mass.maximum(weights.amax((0, 1)))
            self.scored += asking.shape[0] * mass.numel()
            scores = torch.zeros(self.plan.num_tokens)
            scores[self.plan.grafted] = self.over_heads(mass, reduction).cpu()
            return scores

    def block_keys(self, index: int, number: int) -> Tensor:
        at = self.layout.placed[number]
        return rotate(at.document.block_keys[index].to(self._host.device), *self._turn(at.start))

    def local_query(self, index: int, number: int) -> Tensor:
        at = self.layout.placed[number]
        return rotate(
            at.document.local_query[index][None].to(self._host.device), *self._turn(at.start)
        )[0]

    def retain(self, kept: Tensor) -> None:
        with self._timed("align"):
            counts = kept.sum(1)
            if bool((counts != counts[0]).any()) or int(counts[0]) > self._room:
                raise ValueError(
                    f"{counts.tolist()} tokens cannot be kept: each layer has room for {self._room}"
                )
            if bool((self.plan.fresh & ~kept).any()):
                raise ValueError("fresh tokens must be kept")
            self.num_kept = int(counts[0])
            places = torch.arange(self.num_kept, device=self._host.device)
            for index in range(self.num_layers):
                keys, values = self._gather(index, kept[index])
                self._host.write(index, places, keys.transpose(0, 1), values.transpose(0, 1))
            self.kept = kept
            self._stage = "sparse" if bool((kept & self.plan.grafted).any()) else "select"

    def computed(self) -> tuple[Tensor, Tensor]:
        """Keys and values [Hkv, n, d] of all tokens that the last layer saw or wrote, in order."""
        scratch = self._last_layer[2]
        return scratch.keys, scratch.values

    @property
    def _last_layer(self) -> "tuple[Tensor, Tensor, Scratch]":
        if self._last is None:
            raise ValueError("no layer has been computed yet, so there are no queries")
        return self._last

    def _gather(self, index: int, where: Tensor) -> tuple[Tensor, Tensor]:
        """Current keys and values [Hkv, n, d] of a layer: from the pages if retained, otherwise
        from the documents.

        Tokens without KV are NaN.
        """
        host, device = self._host, self._host.device
        shape = (host.num_kv_heads, int(where.sum()), host.head_dim)
        keys, values = torch.full((2, *shape), float("nan"), dtype=host.dtype, device=device)
        self.scratch_bytes = max(self.scratch_bytes, keys.nbytes + values.nbytes)
        rank, held = _rank(where), where & self.kept[index]
        missing = where & self.plan.grafted & ~held
        if missing.any():
            place, turns = (
                rank[missing].to(device),
                (part[missing.to(device)] for part in self._turns),
            )
            aligned = rotate(
                self._cached("keys", index, missing).transpose(0, 1), *turns
            ).transpose(0, 1)
            keys.index_copy_(1, place, aligned)
            values.index_copy_(1, place, self._cached("values", index, missing))

        if held.any():
            found = host.read(index, _rank(self.kept[index])[held].to(device))
            for pool, part in zip((keys, values), found, strict=True):
                pool[:, rank[held].to(device)] = part.transpose(0, 1)

        return keys, values

    def _cached(self, what: Literal["keys", "values"], index: int, where: Tensor) -> Tensor:
        """Keys or values [Hkv, n, d] of document tokens, as the documents were read."""
        found = []
        for at in self.layout.placed:
            tokens = where[at.start : at.stop].nonzero()[:, 0]
            source: Tensor = getattr(at.document, what)[index]
            found.append(source.index_select(1, tokens).to(self._host.device))
        return torch.cat(found, dim=1)

    def _write(
        self,
        index: int,
        scratch: "Scratch",
        tokens: Tensor,
        writes: Tensor,
        new: Sequence[Tensor],
        fuses: bool,
    ) -> None:
        """Write keys and values [n, Hkv, d] of the tokens int64 [n] in `writes` into the scratch,
        and into the pages if retained."""
        device = self._host.device
        self.projected += tokens.numel()
        new = [part[writes[tokens].to(device)] for part in new]
        tokens = tokens[writes[tokens]]
        place = scratch.place(tokens)
        if fuses:
            known = self.plan.grafted[tokens].to(device)[:, None, None]
            old = [part[:, place].transpose(0, 1) for part in (scratch.keys, scratch.values)]
            new = [
                torch.where(known, a, b)
                for a, b in zip(blend(new, old, self.over_heads), new, strict=True)
            ]

        for pool, part in zip((scratch.keys, scratch.values), new, strict=True):
            pool[:, place] = part.transpose(0, 1)

        stays = self.kept[index][tokens]
        if index == self.num_layers - 1:
            self.recomputed += int((stays & self.plan.grafted[tokens]).sum())

        places = _rank(self.kept[index])[tokens[stays]].to(device)
        self._host.write(index, places, *(part[stays.to(device)] for part in new))

    def _attend(
        self, index: int, scratch: "Scratch", tokens: Tensor, query: Tensor
    ) -> Tensor | None:
        """Attention [n, Hq, d] of these tokens int64 [n] to all tokens before them in the
        scratch."""
        if not tokens.numel():
            return None
        place = scratch.place(tokens).cpu()
        self.attended += int((place + 1).sum())
        self.finished[index] += tokens.numel()
        slots = torch.arange(scratch.keys.shape[1], device=query.device)
        layout = AttentionLayout.of([place], [slots[None]])
        return segpaged_attention(
            query, scratch.keys, scratch.values, self._heads, layout, self._host.scale
        )

    def _weights(self, index: int, query: Tensor, positions: Tensor) -> Tensor:
        """Softmax attention of queries [n, Hq, d] at positions int64 [n] to all documents: float32
        [Hkv, G * n, t]."""
        host, groups, logits = self._host, query.shape[1] // self._host.num_kv_heads, []
        first, query = int(positions[0]), query * host.scale
        for number, at in enumerate(self.layout.placed):
            cos, sin = (part[number] for part in self._turns_back)
            turned = rotate(query, cos, sin).unflatten(1, (host.num_kv_heads, groups))
            keys = at.document.keys[index].to(query.device)  # [Hkv, t, d]
            # [Hkv, G * n, t]
            scored = (turned.permute(1, 2, 0, 3).flatten(1, 2) @ keys.transpose(1, 2)).float()
            if first < at.stop:
                here = torch.arange(at.start, at.stop, device=query.device)
                scored.masked_fill_(here > positions.repeat(groups)[:, None], UNSEEN)
            logits.append(scored)

        return torch.cat(logits, dim=2).softmax(2)

    @cached_property
    def _turns_back(self) -> tuple[Tensor, Tensor]:
        """Cosine and sine [D, 1, d / 2] of the rotation from each document's place back to position
        0."""
        starts = torch.tensor([-at.start for at in self.layout.placed], device=self._host.device)
        cos, sin = self._host.rope.table(starts)
        return cos[:, None], sin[:, None]

    def _turn(self, shift: int) -> tuple[Tensor, Tensor]:
        return self._host.rope.table(torch.tensor([shift], device=self._host.device))


@dataclass(frozen=True, eq=False)
class Scratch:
    """Keys and values [Hkv, n, d] of the tokens in `where` bool [T], in one layer."""

    where: Tensor
    keys: Tensor
    values: Tensor

    def place(self, tokens: Tensor) -> Tensor:
        """Places of these tokens int64 [n] in the scratch, on its device."""
        return _rank(self.where)[tokens].to(self.keys.device)


def _rank(where: Tensor) -> Tensor:
    """Place of each set token among the set tokens: int64 [T]."""
    return where.cumsum(0) - 1
