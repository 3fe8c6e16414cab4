"""Parts of the protocol that all hosts with a paged cache share: rows by prompt, Sparse-Q scores,
stage times."""

from abc import abstractmethod
from collections import Counter, deque
from collections.abc import Sequence
from functools import cached_property

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor

from kvgraft.core.plan import Plan
from kvgraft.kernels.dispatch import attention_mass
from kvgraft.kernels.layout import joined
from kvgraft.kernels.memoised import memoised
from kvgraft.kernels.upload import upload
from kvgraft.prefill.context import Hidden, PrefillContext, Reduction
from kvgraft.prefill.device_tokens import DeviceTokens, TokenSet, are_equal
from kvgraft.prefill.stages import StageTimes

# Token sets whose slots are cached. A policy uses few sets, in layer after layer.
KEPT_SLOTS = 2


class PagedPrefill(PrefillContext):
    """One prefill pass over a paged cache.

    Args:
        slots: per prompt, int64 [lists, >= its length] slots of its positions, on the cache's
            device. There are several lists if heads or layers have pages of their own.
        scale: of the attention logits.

    Attributes:
        times: seconds spent in align, dense, select and sparse work.
        computed: int64, per prompt the number of (token, layer) pairs computed.
        rejected: bool [T], grafted tokens that the policy did not trust.
    """

    def __init__(self, plan: Plan, slots: Sequence[Tensor], scale: float) -> None:
        self.plan = plan
        self.block_size = plan.block_size
        self.counts = [Counter() for _ in plan.lengths]
        self.times = StageTimes(slots[0].device)
        self._timed = self.times.timed
        self.computed = np.zeros(len(plan.lengths), np.int64)
        self.rejected = torch.zeros(plan.num_tokens, dtype=torch.bool)
        self._slots = slots
        # tokens, their slots
        self._found: deque[tuple[TokenSet, Tensor]] = deque(maxlen=KEPT_SLOTS)
        self._scale = scale
        # layer, its tokens, queries [n, Hq, d]
        self._query: tuple[int, TokenSet, Tensor] | None = None

    @abstractmethod
    def _keys_at(self, index: int, slots: Tensor) -> Tensor:
        """Read the keys in these slots [lists, n]: [n, Hkv, d]."""

    @abstractmethod
    def _add_at(self, index: int, slots: Tensor, keys: Tensor, values: Tensor) -> None:
        """Add keys and values [n, Hkv, d] to those in these slots [lists, n]."""

    @abstractmethod
    def _kv_at(self, index: int, slots: Tensor) -> tuple[Tensor, Tensor]:
        """Read the keys and values in these slots [lists, n]: [n, Hkv, d] each."""

    def query(self) -> Tensor:
        return self._last_query()[2]

    def keys(self, index: int, where: Tensor) -> Tensor:
        return self._keys_at(index, self._slots_of(where))

    def kv(self, index: int, where: Tensor) -> tuple[Tensor, Tensor]:
        return self._kv_at(index, self._slots_of(where))

    def add(self, index: int, where: Tensor, keys: Tensor, values: Tensor) -> None:
        if bool((where & ~self.plan.grafted).any()):
            raise ValueError(
                "only the KV of grafted tokens may be changed: any other is exact, or computed here"
            )
        self._add_at(index, self._slots_of(where), keys, values)

    def scores(self, index: int, queries: Tensor, reduction: Reduction = "sum") -> Tensor:
        """Compute the scores of the protocol. Prompts without grafted tokens score zero, since no
        token is chosen there."""
        return self._scores(index, queries, reduction).cpu()

    def device_scores(self, index: int, queries: TokenSet, reduction: Reduction = "sum") -> Tensor:
        return self._scores(index, queries, reduction)

    def _scores(self, index: int, queries: TokenSet, reduction: Reduction) -> Tensor:
        """Compute `scores` on the device of the cache."""
        if isinstance(queries, DeviceTokens):
            return self._scores_of_found(index, queries, reduction)

        computed_at, where, query = self._last_query()
        if computed_at != index or not isinstance(where, Tensor) or (queries & ~where).any():
            raise ValueError(
                f"layer {index} has no queries for these tokens: its last queries are of "
                f"{computed_at}"
            )

        with self._timed("select"):
            asking = queries & self._has_grafts
            counts = [
                (int(asking[prompt].sum()), prompt.stop - prompt.start)
                for prompt in self.plan.prompts
            ]
            rows = asking[where].nonzero()[:, 0]
            rows, positions = upload(query.device, rows, self.plan.positions[asking])
            keys = self._keys_at(index, self._flat_slots)
            chosen = query if len(rows) == len(query) else query[rows]
            mass = attention_mass(chosen, keys, positions, self._scale, reduction, counts)
            return self.over_heads(mass, reduction)

    def _scores_of_found(self, index: int, queries: DeviceTokens, reduction: Reduction) -> Tensor:
        """Compute `scores` for queries of which the host only knows the number in each prompt."""
        computed_at, tokens, query = self._last_query()
        if computed_at != index or tokens is not queries:
            raise ValueError(f"layer {index} has not computed these tokens last")

        with self._timed("select"):
            places, known = self._indices(queries), queries.known
            counts = self.plan.counts_of(known) + queries.found_counts
            starts = torch.tensor([prompt.start for prompt in self.plan.prompts])
            prompt_of = starts.repeat_interleave(torch.tensor(self.plan.lengths))[known]
            before, first = upload(
                query.device, prompt_of - 1, starts.repeat_interleave(torch.from_numpy(counts))
            )
            if queries.asks is not None:
                # A query before its prompt sees no key, and stays in front when sorted.
                own = torch.where(queries.asks, places[: len(before)], before)
                places = torch.cat([own, places[len(before) :]])
            if len(before) or len(queries.found) > 1:
                places, order = places.sort()
                query = query[order]
            positions = places if len(counts) == 1 else places - first
            self._count_scores(positions, counts)
            keys = self._keys_at(index, self._flat_slots)
            sizes = list(zip(counts.tolist(), self.plan.lengths, strict=True))
            mass = attention_mass(query, keys, positions, self._scale, reduction, sizes)
            return self.over_heads(mass, reduction)

    def _count_scores(self, positions: Tensor, counts: np.ndarray) -> None:
        """Count the work of scores whose queries only the device knows.

        Args:
            positions: int64 [n] on the device; -1 for queries that see no key.
            counts: int64, queries of each prompt.
        """

    def reject(self, where: Tensor) -> None:
        self.rejected |= where

    def seconds_of(self, number: int) -> dict[str, float]:
        """Seconds by stage of one prompt: its share of the pass by the (token, layer) pairs
        computed."""
        share = int(self.computed[number]) / max(1, int(self.computed.sum()))
        return {stage: share * seconds for stage, seconds in self.times.seconds.items()}

    def last_hidden(self, hidden: Hidden) -> Tensor:
        """States of the last token of every prompt: [num_prompts, ...].

        Raises:
            ValueError: the policy did not compute one of them.
        """
        last = torch.tensor([prompt.stop - 1 for prompt in self.plan.prompts])
        tokens, states = hidden.tokens, hidden.states
        known = tokens if isinstance(tokens, Tensor) else tokens.known
        if not bool(known[last].all()):
            raise ValueError("the policy returned no hidden state for the last token of a prompt")
        return states[upload(states.device, known.cumsum(0)[last] - 1)[0]]

    def _rows_of(self, where: Tensor) -> list[Tensor]:
        """Positions that are set in `where` bool [T], per prompt."""
        return [self.plan.positions[prompt][where[prompt]] for prompt in self.plan.prompts]

    def _stage(self, hidden: Hidden) -> str:
        return "dense" if are_equal(hidden.tokens, self.plan.active) else "sparse"

    @memoised
    def _indices(self, tokens: DeviceTokens) -> Tensor:
        """Places of these tokens in 0..T, in the order of their rows: int64 [n] on the device."""
        parts = [part.tokens for part in tokens.found]
        if tokens.known.any():
            parts[:0] = upload(self._flat_slots.device, tokens.known.nonzero()[:, 0])
        return joined(parts)

    def _slots_of(self, tokens: TokenSet) -> Tensor:
        """Slots of these tokens: int64 [lists, n]. The last results are cached.

        Places of tokens that the host knows are found on the CPU, to avoid waiting for the device.
        """
        for known, slots in self._found:
            if known is tokens:
                return slots
        [places] = (
            upload(self._flat_slots.device, tokens.nonzero()[:, 0])
            if isinstance(tokens, Tensor)
            else [self._indices(tokens)]
        )
        slots = self._flat_slots[:, places]
        self._found.append((tokens, slots))
        return slots

    @cached_property
    def _flat_slots(self) -> Tensor:
        """Slots of all tokens of the plan: int64 [lists, T]."""
        own = [
            slots[:, :length] for slots, length in zip(self._slots, self.plan.lengths, strict=True)
        ]
        return joined(own, 1)

    @cached_property
    def _stacked_slots(self) -> Tensor:
        """Slots by prompt, padded: int32 [prompts, lists, longest]."""
        own = [
            slots[:, :length] for slots, length in zip(self._slots, self.plan.lengths, strict=True)
        ]
        if len(own) == 1:
            return own[0][None].int()
        longest = max(self.plan.lengths)
        padded = [F.pad(slots, (0, longest - slots.shape[1]), value=-1) for slots in own]
        return torch.stack(padded).int()

    @cached_property
    def _has_grafts(self) -> Tensor:
        """Tokens of prompts that have grafted tokens: bool [T]."""
        found = torch.zeros(self.plan.num_tokens, dtype=torch.bool)
        for prompt in self.plan.prompts:
            found[prompt] = bool(self.plan.grafted[prompt].any())
        return found

    def _last_query(self) -> tuple[int, TokenSet, Tensor]:
        if self._query is None:
            raise ValueError("no layer has been computed yet, so there are no queries")
        return self._query
