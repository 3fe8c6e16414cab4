"""The native host's side of the document protocol: computes over parts of documents and fills the pages."""

from collections import Counter
from collections.abc import Sequence

import torch
from torch import Tensor

from kvgraft.engine.decoder import Decoder
from kvgraft.engine.request import Report
from kvgraft.kernels.dispatch import segpaged_attention
from kvgraft.kernels.layout import AttentionLayout
from kvgraft.kv.cache import KVCache
from kvgraft.kv.heads import StreamLayout
from kvgraft.kv.rope import rotate
from kvgraft.prefill.context import Hidden, Reduction
from kvgraft.prefill.documents import DocumentContext, Layout, blend
from kvgraft.prefill.plan import Plan
from kvgraft.prefill.stages import StageTimes


class NativeDocuments(DocumentContext):
    """One prompt of documents in the native engine.

    Args:
        token_ids: int64 [T].
        slots: int64 [lists, >= tokens that the policy keeps], of the prompt's pages.

    Attributes:
        num_kept: tokens in the pages after `retain`.
        scratch_bytes: most memory that keys and values of a layer took at a time beside the pages.
        recomputed: tokens of documents whose KV is computed anew in the last layer.
        stages, computed, attention_flops, ffn_flops: as in `NativePrefill`.
    """

    def __init__(
        self,
        decoder: Decoder,
        cache: KVCache,
        plan: Plan,
        token_ids: Tensor,
        layout: Layout,
        slots: Tensor,
        stable_layers: Sequence[int],
    ) -> None:
        self.plan, self.layout, self.stable_layers = plan, layout, stable_layers
        self.num_layers = decoder.config.num_layers
        self.counts = Counter()
        self.num_kept = self.scratch_bytes = self.recomputed = 0
        self.computed = self.attention_flops = self.ffn_flops = 0
        times = StageTimes(decoder.device)
        self.stages, self._timed = times.seconds, times.timed
        self._decoder, self._cache, self._token_ids, self._slots = decoder, cache, token_ids, slots
        self._heads = StreamLayout.dense(1, decoder.config.num_kv_heads).layers[0]  # of a layer beside the pages
        shifts = torch.zeros(plan.num_tokens, dtype=torch.int64)  # of the tokens of documents; nothing turns the others
        for at in layout.placed:
            shifts[at.start : at.stop] = at.start
        self._turns = decoder.config.rope.table(shifts.to(decoder.device))
        self._kept = torch.zeros(self.num_layers, plan.num_tokens, dtype=torch.bool)
        self._finite = torch.tensor(True, device=decoder.device)
        self._computed_last: tuple[Tensor, Tensor] | None = None  # tokens bool [T], their queries [n, Hq, d]

    def embed(self, where: Tensor) -> Hidden:
        return Hidden(self._decoder.embed(self._token_ids[where].to(self._decoder.device)), where)

    def layer(
        self, index: int, hidden: Hidden, *, sees: Tensor, writes: Tensor, outputs: Tensor, fuses: bool = False
    ) -> Hidden:
        if bool(((writes | outputs) & ~hidden.where).any()):
            raise ValueError("these tokens have no hidden state here: a layer can only drop tokens, never add them")
        with self._timed("sparse" if self.num_kept else "select"):
            decoder, config, where = self._decoder, self._decoder.config, hidden.where
            here = sees | writes | outputs
            pool = self._gather(index, here)
            query, *computed = decoder.project(index, hidden.states, *self._rope_of(where))
            new = [part[writes[where]] for part in computed]
            self._computed_last = (where, query)
            self._write(index, here, pool, writes, new, fuses)
            self.computed += query.shape[0]
            self.attention_flops += query.shape[0] * config.project_flops
            if not bool(outputs.any()):
                return Hidden(hidden.states[:0], outputs)
            rows = outputs[where]
            place = _rank(here)[outputs]  # int64 [n]: of each query among the keys
            layout = AttentionLayout.of([place], [torch.arange(pool[0].shape[1], device=decoder.device)[None]])
            attended = segpaged_attention(query[rows], *pool, self._heads, layout, config.head_dim**-0.5)
            states = decoder.add_attention(index, hidden.states[rows], attended.flatten(1))
            self.attention_flops += int((place + 1).sum()) * config.attention_flops
            self.attention_flops += place.numel() * config.output_flops
            self.ffn_flops += place.numel() * config.ffn_flops
            states = decoder.feed_forward(index, states)
            self._finite = self._finite & states.isfinite().all()
            return Hidden(states, outputs)

    def query(self) -> Tensor:
        if self._computed_last is None:
            raise ValueError("no layer has been computed yet, so there are no queries")
        return self._computed_last[1]

    def scores(self, index: int, queries: Tensor, reduction: Reduction = "sum") -> Tensor:
        """As in the protocol; documents stay where they are, and the queries are turned instead."""
        with self._timed("select"):
            if self._computed_last is None or bool((queries & ~self._computed_last[0]).any()):
                raise ValueError("the last layer has no queries for these tokens")
            where, query = self._computed_last
            asking = query[queries[where]]  # [n, Hq, d]
            config = self._decoder.config
            groups = asking.shape[1] // config.num_kv_heads
            positions = queries.nonzero()[:, 0].to(asking.device).repeat(groups)[:, None]  # [G * n, 1]
            logits = []
            for at in self.layout.placed:
                turned = rotate(asking, *self._turn(-at.start)).unflatten(1, (config.num_kv_heads, -1))
                keys = at.document.keys[index].to(asking.device)  # [Hkv, t, d]
                own = (turned.permute(1, 2, 0, 3).flatten(1, 2) @ keys.transpose(1, 2)).float()  # [Hkv, G * n, t]
                here = torch.arange(at.start, at.stop, device=asking.device)
                logits.append(own.masked_fill_(here > positions, -1e30))
            weights = (torch.cat(logits, dim=2) * config.head_dim**-0.5).softmax(2)
            self.attention_flops += asking.shape[0] * weights.shape[2] * config.attention_flops // 2
            scores = torch.zeros(self.plan.num_tokens)
            scores[self.plan.grafted] = (weights.amax((0, 1)) if reduction == "max" else weights.sum((0, 1))).cpu()
            return scores

    def block_keys(self, index: int, number: int) -> Tensor:
        at = self.layout.placed[number]
        return rotate(at.document.block_keys[index].to(self._decoder.device), *self._turn(at.start))

    def local_query(self, index: int, number: int) -> Tensor:
        at = self.layout.placed[number]
        return rotate(at.document.local_query[index][None].to(self._decoder.device), *self._turn(at.start))[0]

    def retain(self, kept: Tensor) -> None:
        with self._timed("align"):
            counts = kept.sum(1)
            if bool((counts != counts[0]).any()) or int(counts[0]) > self._slots.shape[1]:
                raise ValueError(
                    f"{counts.tolist()} tokens cannot be kept: room is for {self._slots.shape[1]} in each layer"
                )
            if bool((self.plan.fresh & ~kept).any()):
                raise ValueError("fresh tokens must be kept")
            self.num_kept = int(counts[0])
            for index in range(self.num_layers):
                keys, values = self._gather(index, kept[index])
                self._cache.write(index, self._slots[:, : self.num_kept], keys.transpose(0, 1), values.transpose(0, 1))
            self._kept = kept

    @property
    def is_finite(self) -> bool:
        """Whether all that was computed is."""
        return bool(self._finite)

    def account(self, report: Report) -> None:
        """Tell what was done."""
        report.recomputed_tokens = self.recomputed
        report.computed_share = self.computed / (self.plan.num_tokens * self.num_layers)
        report.flops, report.ffn_flops = self.attention_flops + self.ffn_flops, self.ffn_flops
        report.kv_bytes += self.scratch_bytes
        report.counts.update(self.counts)
        report.counts["kept_tokens"] = self.num_kept - int(self.plan.fresh.sum())
        report.stages.update(self.stages)

    def _gather(self, index: int, where: Tensor) -> tuple[Tensor, Tensor]:
        """Keys and values [Hkv, n, d] of a layer as they stand: from the pages what is kept, else from the documents;
        NaN where there is nothing yet."""
        config, device = self._decoder.config, self._decoder.device
        shape = (config.num_kv_heads, int(where.sum()), config.head_dim)
        keys, values = torch.full((2, *shape), float("nan"), dtype=self._decoder.dtype, device=device)
        self.scratch_bytes = max(self.scratch_bytes, keys.nbytes + values.nbytes)
        rank, missing = _rank(where), where & ~self._kept[index] & self.plan.grafted
        for at in self.layout.placed:
            tokens = missing[at.start : at.stop].nonzero()[:, 0]
            if tokens.numel():
                place = rank[at.start + tokens].to(device)
                for pool, source in ((keys, at.document.keys), (values, at.document.values)):
                    pool[:, place] = source[index][:, tokens].to(device)
        if missing.any():
            turned = rotate(keys.transpose(0, 1), *(part[where.to(device)] for part in self._turns))
            keys = turned.transpose(0, 1)
        held = where & self._kept[index]
        if held.any():
            slots = self._slots[:, _rank(self._kept[index])[held].to(device)]
            for pool, part in zip((keys, values), self._cache.read(index, slots), strict=True):
                pool[:, rank[held].to(device)] = part.transpose(0, 1)
        return keys, values

    def _write(
        self, index: int, here: Tensor, pool: Sequence[Tensor], writes: Tensor, new: Sequence[Tensor], fuses: bool
    ) -> None:
        """Put the keys and values [n, Hkv, d] of the tokens in `writes` into what was gathered of `here`, and, where
        they are kept, into the pages."""
        device, stays = self._decoder.device, writes & self._kept[index]
        place = _rank(here)[writes].to(device)
        if fuses:
            known = self.plan.grafted[writes].to(device)[:, None, None]
            old = [part[:, place].transpose(0, 1) for part in pool]
            new = [torch.where(known, a, b) for a, b in zip(blend(new, old), new, strict=True)]
        for part, changed in zip(pool, new, strict=True):
            part[:, place] = changed.transpose(0, 1)
        if index == self.num_layers - 1:
            self.recomputed += int((stays & self.plan.grafted).sum())
        slots = self._slots[:, _rank(self._kept[index])[stays].to(device)]
        self._cache.write(index, slots, *(part[stays[writes].to(device)] for part in new))

    def _rope_of(self, where: Tensor) -> tuple[Tensor, Tensor]:
        return self._decoder.config.rope.table(where.nonzero()[:, 0].to(self._decoder.device))

    def _turn(self, shift: int) -> tuple[Tensor, Tensor]:
        return self._decoder.config.rope.table(torch.tensor([shift], device=self._decoder.device))


def _rank(where: Tensor) -> Tensor:
    """int64 [T]: the place of each set token among them."""
    return where.cumsum(0) - 1
