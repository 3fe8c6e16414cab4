"""The native host's side of the prefill protocol: policies run on the paged pool and the decoder."""

import time
from collections import defaultdict
from collections.abc import Iterator, Sequence
from contextlib import contextmanager

import torch
from torch import Tensor

from kvgraft.engine.decoder import Decoder
from kvgraft.kernels.dispatch import align_copy, attention_mass, varlen_attention
from kvgraft.kernels.layout import VarlenLayout
from kvgraft.kv.cache import KVCache
from kvgraft.prefill.context import Hidden, PrefillContext
from kvgraft.prefill.plan import Plan


class Rows:
    """Everything that depends only on which tokens a layer computes, made once and used by all its layers."""

    def __init__(self, where: Tensor, plan: Plan, slots: Sequence[Tensor], decoder: Decoder) -> None:
        self.where = where
        positions = [plan.positions[prompt][where[prompt]] for prompt in plan.prompts]
        self.counts = torch.tensor([p.numel() for p in positions])  # per prompt
        self.layout = VarlenLayout.of(positions, slots)
        self.cos, self.sin = decoder.config.rope.table(self.layout.query_positions)


class NativePrefill(PrefillContext):
    """One prefill pass of the native engine.

    Args:
        token_ids: int64 [T], the prompts of `plan` end to end.
        slots: per prompt, int64 slots of its positions (at least its length).

    Attributes:
        stages: seconds spent in align, dense, select and sparse work.
        computed: int64, per prompt the number of (token, layer) pairs computed.
    """

    def __init__(
        self, decoder: Decoder, cache: KVCache, plan: Plan, token_ids: Tensor, slots: Sequence[Tensor]
    ) -> None:
        self.plan = plan
        self.num_layers = decoder.config.num_layers
        self.num_kv_heads = decoder.config.num_kv_heads
        self.block_size = plan.block_size
        self.stages: dict[str, float] = defaultdict(float)
        self.computed = torch.zeros(len(plan.lengths), dtype=torch.int64)
        self._decoder = decoder
        self._cache = cache
        self._token_ids = token_ids
        self._slots = slots
        self._scale = decoder.config.head_dim**-0.5
        self._rows: Rows | None = None
        self._query: tuple[int, Rows, Tensor] | None = None

    def embed(self, where: Tensor) -> Hidden:
        return Hidden(self._decoder.embed(self._token_ids[where].to(self._decoder.device)), where)

    def graft(self, layers: range) -> None:
        plan = self.plan
        if not plan.graft_targets.numel():
            return
        with self._timed("align"):
            own = torch.cat([slots[:length] for slots, length in zip(self._slots, plan.lengths, strict=True)])  # [T]
            target = own[plan.graft_targets.to(own.device)]
            source, shifts = plan.graft_sources.to(own.device), plan.graft_shifts.to(own.device)
            cos, sin = self._decoder.config.rope.table(shifts)
            align_copy(self._cache.keys, self._cache.values, layers, source, target, cos, sin)

    def layer(self, index: int, hidden: Hidden) -> Hidden:
        with self._timed("dense" if hidden.where.equal(self.plan.active) else "sparse"):
            rows, query = self._project(index, hidden)
            keys, values = self._cache.keys[index], self._cache.values[index]
            attended = varlen_attention(query, keys, values, rows.layout, self._scale).flatten(1)  # [n, Hq * d]
            self.computed += rows.counts
            return hidden.with_states(self._decoder.finish(index, hidden.states, attended))

    def project(self, index: int, hidden: Hidden) -> None:
        with self._timed("select"):
            self._project(index, hidden)

    def query(self) -> Tensor:
        return self._last_query()[2]

    def keys(self, index: int, where: Tensor) -> Tensor:
        return self._cache.keys[index][self._slots_of(where)]

    def values(self, index: int, where: Tensor) -> Tensor:
        return self._cache.values[index][self._slots_of(where)]

    def scores(self, index: int, queries: Tensor) -> Tensor:
        """As in the protocol; prompts without grafted tokens score zero, since nothing is chosen among them."""
        computed_at, rows, query = self._last_query()
        if computed_at != index or bool((queries & ~rows.where).any()):
            raise ValueError(f"layer {index} has no queries for these tokens: its last queries are of {computed_at}")
        with self._timed("select"):
            scores = torch.zeros(self.plan.num_tokens)
            keys, chosen = self._cache.keys[index], queries[rows.where]  # chosen: bool [n]
            for prompt, slots in zip(self.plan.prompts, self._slots, strict=True):
                if not self.plan.grafted[prompt].any():
                    continue
                before = int(rows.where[: prompt.start].sum())
                mine = slice(before, before + int(rows.where[prompt].sum()))
                positions = self.plan.positions[prompt][queries[prompt]].to(slots.device)
                length = prompt.stop - prompt.start
                mass = attention_mass(query[mine][chosen[mine]], keys[slots[:length]], positions, self._scale)
                scores[prompt] = mass.cpu()
            return scores

    def last_hidden(self, hidden: Hidden) -> Tensor:
        """Hidden states of the last token of every prompt: [num_prompts, D].

        Raises:
            ValueError: the policy did not compute one of them.
        """
        last = torch.tensor([prompt.stop - 1 for prompt in self.plan.prompts])
        if not bool(hidden.where[last].all()):
            raise ValueError("the policy returned no hidden state for the last token of a prompt")
        return hidden.states[hidden.where.cumsum(0)[last] - 1]

    def _project(self, index: int, hidden: Hidden) -> tuple[Rows, Tensor]:
        if self._rows is None or not self._rows.where.equal(hidden.where):
            self._rows = Rows(hidden.where, self.plan, self._slots, self._decoder)
        rows = self._rows
        query, keys, values = self._decoder.project(index, hidden.states, rows.cos, rows.sin)
        self._cache.write(index, rows.layout.query_slots, keys, values)
        self._query = (index, rows, query)
        return rows, query

    def _last_query(self) -> tuple[int, Rows, Tensor]:
        if self._query is None:
            raise ValueError("no layer has been computed yet, so there are no queries")
        return self._query

    def _slots_of(self, where: Tensor) -> Tensor:
        pairs = zip(self._slots, self.plan.prompts, strict=True)
        return torch.cat([slots[: p.stop - p.start][where[p].to(slots.device)] for slots, p in pairs])

    @contextmanager
    def _timed(self, stage: str) -> Iterator[None]:
        start = self._clock()
        yield
        self.stages[stage] += self._clock() - start

    def _clock(self) -> float:
        if self._decoder.device.type == "cuda":
            torch.cuda.synchronize(self._decoder.device)
        return time.perf_counter()
