"""The plan of one prefill pass: how each prompt token gets its keys and values. Pure data.

A plan may hold several prompts end to end, so that a policy treats a batch exactly like one prompt.
All masks are boolean [T] over the tokens of all prompts. Everything that depends on prompt borders
is computed here.
"""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from enum import IntEnum
from functools import cached_property
from itertools import pairwise

import numpy as np
import torch
from torch import Tensor

from kvgraft.core.matches import Match, grafted_tokens, in_blocks

# Greatest length of the text before a match that only the source or only the prompt has, as a share
# of the match, for which the context counts as the same.
BEFORE_SHARE = 0.1


class Kind(IntEnum):
    """Kinds of tokens by the origin of their KV."""

    FRESH = 0  # must be computed
    PREFIX = 1  # exact hit: the page of another request, shared
    GRAFTED = 2  # copied from another position and aligned
    IN_PLACE = 3  # approximate KV of an earlier prompt, in blocks that no other request holds


@dataclass(frozen=True)
class Span:
    """Consecutive tokens [start, stop) of one prompt, of one kind."""

    start: int
    stop: int
    kind: Kind


@dataclass(frozen=True, eq=False)
class Plan:
    """One or several prompts, token by token.

    Attributes:
        kinds: uint8 [T], values of `Kind`.
        lengths: tokens of each prompt; they sum to T.
        block_size: tokens in a block, the unit of `overflow`.
        graft_targets: int64 [g], positions in 0..T of the tokens that are copied, ascending.
        graft_sources: int64 [g], pool slot that each one is copied from.
        graft_shifts: int64 [g], new minus old position: the argument of delta-RoPE.
        readings: int64 [T], identity of the prompt that each token was read in (`Match.reading`);
            -1 for fresh tokens and where it is not known.
        ends_in_graft: per prompt, whether known text reached its last token (which is computed
            anyway).
        same_context: per prompt, whether its known text stands in the context that it was read in.
            That is one match of exact KV, in a prompt that continues no other one. Before it,
            source and prompt have at most `BEFORE_SHARE` of its length each that the other has not
            at the same place. Text that began its own prompt stands in that context only there.
    """

    kinds: Tensor
    lengths: tuple[int, ...]
    block_size: int
    graft_targets: Tensor
    graft_sources: Tensor
    graft_shifts: Tensor
    readings: Tensor
    ends_in_graft: tuple[bool, ...]
    same_context: tuple[bool, ...]

    @classmethod
    def for_prompt(
        cls,
        num_tokens: int,
        block_size: int,
        prefix_blocks: Iterable[int] = (),
        matches: Sequence[Match] = (),
        in_place: Iterable[int] = (),
        hits: Sequence[Match] = (),
        *,
        continues: bool = False,
    ) -> "Plan":
        """Return the plan of one prompt of `num_tokens` tokens.

        The last token is always fresh: its hidden state gives the first generated token.

        Args:
            prefix_blocks: indices of the prompt's blocks that hits provide.
            matches: grafts, disjoint from each other and from the prefix blocks.
            in_place: prefix blocks that are approximate, and that a policy may recompute in place.
            hits: text of the prefix blocks, with its readings.
            continues: whether some of the prefix blocks are approximate.
        """
        kinds = np.full(num_tokens, Kind.FRESH, np.uint8)
        in_blocks(kinds, block_size)[list(prefix_blocks)] = Kind.PREFIX
        in_blocks(kinds, block_size)[list(in_place)] = Kind.IN_PLACE
        matches = sorted(matches, key=lambda match: match.start)
        for match in matches:
            kinds[match.start : match.start + match.length] = Kind.GRAFTED

        ends_in_graft = bool(kinds[-1] == Kind.GRAFTED)
        kinds[-1] = Kind.FRESH
        readings = np.full(num_tokens, -1, np.int64)
        for match in (*hits, *matches):
            read_in = match.source if match.reading is None else match.reading
            readings[match.start : match.start + match.length] = read_in

        readings[-1] = -1
        grafts = grafted_tokens(matches, block_size)
        count = len(grafts[0]) - ends_in_graft
        targets, sources, shifts = (torch.from_numpy(values[:count]) for values in grafts)
        return cls(
            kinds=torch.from_numpy(kinds),
            lengths=(num_tokens,),
            block_size=block_size,
            graft_targets=targets,
            graft_sources=sources,
            graft_shifts=shifts,
            readings=torch.from_numpy(readings),
            ends_in_graft=(ends_in_graft,),
            same_context=(not continues and _is_in_context(matches, hits),),
        )

    @classmethod
    def for_documents(cls, num_tokens: int, block_size: int, documents: Iterable[range]) -> "Plan":
        """Return the plan of one prompt whose documents lie outside the pool. Their tokens are
        grafted, but have no source page."""
        plan = cls.for_prompt(num_tokens, block_size)
        for tokens in documents:
            plan.kinds[tokens.start : tokens.stop] = Kind.GRAFTED
        return plan

    @classmethod
    def batch(cls, plans: Sequence["Plan"]) -> "Plan":
        """Join several plans end to end."""
        starts = np.cumsum([0, *(plan.num_tokens for plan in plans)])
        return cls(
            torch.cat([plan.kinds for plan in plans]),
            tuple(length for plan in plans for length in plan.lengths),
            plans[0].block_size,
            torch.cat(
                [
                    plan.graft_targets + int(start)
                    for plan, start in zip(plans, starts, strict=False)
                ]
            ),
            torch.cat([plan.graft_sources for plan in plans]),
            torch.cat([plan.graft_shifts for plan in plans]),
            torch.cat([plan.readings for plan in plans]),
            tuple(ends for plan in plans for ends in plan.ends_in_graft),
            tuple(same for plan in plans for same in plan.same_context),
        )

    def without_grafts(self) -> "Plan":
        """Return the same prompts with every grafted token fresh: full recomputation above the
        exact hits."""
        none = torch.zeros(0, dtype=torch.int64)
        kinds = torch.where(self.grafted, torch.tensor(Kind.FRESH, dtype=torch.uint8), self.kinds)
        return Plan(
            kinds,
            self.lengths,
            self.block_size,
            none,
            none,
            none,
            torch.where(self.grafted, -1, self.readings),
            (False,) * len(self.lengths),
            (False,) * len(self.lengths),
        )

    def part(self, start: int, stop: int) -> "Plan":
        """Return the plan of the tokens [start, stop) of one prompt without grafts, whose tokens
        before `start` are computed."""
        kinds = self.kinds[:stop].clone()
        kinds[:start] = Kind.PREFIX
        return replace(self, kinds=kinds, lengths=(stop,), readings=self.readings[:stop])

    @property
    def num_tokens(self) -> int:
        """Number of tokens of all prompts, T."""
        return self.kinds.numel()

    @cached_property
    def prefix(self) -> Tensor:
        """Exact hits, bool [T]; nothing is ever computed for them."""
        return self.kinds == Kind.PREFIX

    @cached_property
    def grafted(self) -> Tensor:
        """Tokens with approximate KV, copied or in place, which a policy may recompute: bool
        [T]."""
        return self.kinds >= Kind.GRAFTED

    @cached_property
    def in_place(self) -> Tensor:
        """Grafted tokens that an earlier prompt has left in place: bool [T]."""
        return self.kinds == Kind.IN_PLACE

    @cached_property
    def grafted_blocks(self) -> np.ndarray:
        """Full blocks of one prompt that hold grafted or in-place tokens: bool [T //
        block_size]."""
        whole = self.grafted[: self.num_tokens // self.block_size * self.block_size]
        found: np.ndarray = whole.view(-1, self.block_size).any(1).numpy()
        return found

    @cached_property
    def fresh(self) -> Tensor:
        """Tokens that no cache holds (I_nr): bool [T]. Every policy computes them."""
        return self.kinds == Kind.FRESH

    @cached_property
    def question(self) -> Tensor:
        """Fresh tokens behind the last grafted one of their prompt, or all fresh tokens of a prompt
        without grafts: bool [T]."""
        behind = torch.zeros(self.num_tokens, dtype=torch.bool)
        for prompt in self.prompts:
            behind[prompt] = self.grafted[prompt].flip(0).cumsum(0).flip(0) == 0
        return behind & self.fresh

    @cached_property
    def active(self) -> Tensor:
        """All tokens except the exact hits: bool [T]."""
        return ~self.prefix

    @cached_property
    def prompts(self) -> tuple[slice, ...]:
        """Slice of each prompt in 0..T."""
        stops = np.cumsum(self.lengths).tolist()
        return tuple(
            slice(stop - length, stop) for stop, length in zip(stops, self.lengths, strict=True)
        )

    def counts_of(self, where: Tensor) -> list[int]:
        """Number of tokens that are set in `where` bool [T], for each prompt."""
        return [int(where[prompt].sum()) for prompt in self.prompts]

    @cached_property
    def positions(self) -> Tensor:
        """Position of each token in its own prompt: int64 [T]."""
        return torch.cat([torch.arange(length) for length in self.lengths])

    @property
    def spans(self) -> list[list[Span]]:
        """Maximal spans of one kind, per prompt."""
        return [_spans(self.kinds[prompt].numpy()) for prompt in self.prompts]

    def overflow(self, blocks: int = 1) -> Tensor:
        """Grafted tokens within `blocks` blocks of a fresh interval, on either side: bool [T]
        (SparseX 3.3)."""
        reach = min(blocks * self.block_size, self.num_tokens)
        near = torch.zeros(self.num_tokens, dtype=torch.bool)
        for prompt in self.prompts:
            counts = torch.nn.functional.pad(self.fresh[prompt].cumsum(0), (1, 0))  # [t + 1]
            here = torch.arange(counts.numel() - 1)
            near[prompt] = (
                counts[(here + reach + 1).clamp(max=here.numel())]
                > counts[(here - reach).clamp(min=0)]
            )
        return near & self.grafted

    def tail(self, tokens: int = 64) -> Tensor:
        """Last `tokens` tokens of the final graft, in prompts that end in known text: bool [T]
        (SparseX 3.2)."""
        chosen = torch.zeros(self.num_tokens, dtype=torch.bool)
        for prompt, ends, spans in zip(self.prompts, self.ends_in_graft, self.spans, strict=True):
            if ends and len(spans) > 1 and spans[-2].kind == Kind.GRAFTED:
                first = max(spans[-2].start, spans[-2].stop - tokens)
                chosen[prompt.start + first : prompt.start + spans[-2].stop] = True
        return chosen

    def segment_starts(self, tokens: int, share: float = 1.0) -> Tensor:
        """First `tokens` grafted tokens of every segment, or this share of its tokens, rounded up,
        if that is less: bool [T].

        A segment is a run of tokens that moved by the same distance.
        """
        first, counts = self._segments
        most = (share * counts.double() - 1e-9).ceil().clamp(max=tokens).long()
        place = torch.arange(int(most.max()) if most.numel() else 0)
        return self._at(self.graft_targets[(first[:, None] + place)[place < most[:, None]]])

    def edges(self, tokens: int) -> Tensor:
        """First and last `tokens` grafted tokens of every segment: bool [T]."""
        numbers = self._segment_numbers
        first, counts = (part[numbers] for part in self._segments)
        before = torch.arange(numbers.numel()) - first
        return self._at(self.graft_targets[torch.minimum(before, counts - 1 - before) < tokens])

    @cached_property
    def segments(self) -> Tensor:
        """Number of the segment of each grafted token, -1 for others: int64 [T]. A segment is a run
        that moved by one distance."""
        numbers = torch.full((self.num_tokens,), -1)
        numbers[self.graft_targets] = self._segment_numbers
        return numbers

    @cached_property
    def segment_shifts(self) -> Tensor:
        """New minus old position of the tokens of each segment: int64 [segments]."""
        return self.graft_shifts[self._segments[0]]

    def top_share(
        self, scores: Tensor, share: float, among: Tensor, in_place: float = 1.0
    ) -> Tensor:
        """Tokens of `among` bool [T] with the best scores, a `share` of them in each prompt,
        rounded up: bool [T].

        Tokens that are grafted in place count as `in_place` tokens each.
        """
        weights = torch.where(self.in_place, in_place, 1.0).double() * among
        counts = share_of([float(weights[prompt].sum()) for prompt in self.prompts], share)
        return self._top(scores, counts, among)

    def top(self, scores: Tensor, count: int, among: Tensor) -> Tensor:
        """Tokens of `among` bool [T] with the best scores, `count` in each prompt or all of them:
        bool [T]."""
        return self._top(scores, [min(count, left) for left in self.counts_of(among)], among)

    @cached_property
    def _segments(self) -> tuple[Tensor, Tensor]:
        """First index in 0..g and number of tokens of each segment: int64 [segments] each."""
        starts = torch.ones_like(self.graft_targets, dtype=torch.bool)
        starts[1:] = (self.graft_targets.diff() != 1) | (self.graft_shifts.diff() != 0)
        first = starts.nonzero()[:, 0]
        return first, first.diff(append=torch.tensor([starts.numel()]))

    @cached_property
    def _segment_numbers(self) -> Tensor:
        """Number of the segment of each copied token: int64 [g]."""
        counts = self._segments[1]
        return torch.arange(counts.numel()).repeat_interleave(counts)

    def _at(self, positions: Tensor) -> Tensor:
        chosen = torch.zeros(self.num_tokens, dtype=torch.bool)
        chosen[positions] = True
        return chosen

    def _top(self, scores: Tensor, counts: Sequence[int], among: Tensor) -> Tensor:
        chosen = torch.zeros(self.num_tokens, dtype=torch.bool)
        for prompt, count in zip(self.prompts, counts, strict=True):
            candidates = among[prompt].nonzero()[:, 0]  # [c]
            best = scores[prompt][candidates].topk(count).indices
            chosen[prompt.start + candidates[best]] = True
        return chosen

    def top_mass(self, scores: Tensor, mass: float, among: Tensor, least: int) -> Tensor:
        """Fewest tokens of `among` bool [T] that hold a share `mass` of its total score, in each
        prompt: bool [T].

        At least `least` tokens are chosen, if there are that many.
        """
        chosen = torch.zeros(self.num_tokens, dtype=torch.bool)
        for prompt in self.prompts:
            candidates = among[prompt].nonzero()[:, 0]  # [c]
            best = scores[prompt][candidates].sort(descending=True)
            before = best.values.cumsum(0) - best.values
            needed = before < mass * best.values.sum()
            needed[:least] = True
            chosen[prompt.start + candidates[best.indices[needed]]] = True
        return chosen

    def reaching(self, scores: Tensor, chosen: Tensor) -> Tensor:
        """Tokens of each prompt that score at least as high as the worst in `chosen` bool [T]; none
        if it is empty: bool [T]."""
        reached = torch.zeros(self.num_tokens, dtype=torch.bool)
        for prompt in self.prompts:
            if chosen[prompt].any():
                reached[prompt] = scores[prompt] >= scores[prompt][chosen[prompt]].min()
        return reached


def share_of(weights: Sequence[float], share: float) -> list[int]:
    """Return a share of the candidates of each prompt, rounded up."""
    return [int(np.ceil(share * weight - 1e-9)) for weight in weights]


def _spans(kinds: np.ndarray) -> list[Span]:
    cuts = np.flatnonzero(np.diff(kinds)) + 1
    edges = [0, *cuts.tolist(), kinds.size]
    return [Span(a, b, Kind(int(kinds[a]))) for a, b in pairwise(edges)]


def _is_in_context(matches: Sequence[Match], hits: Sequence[Match]) -> bool:
    """Return whether the only match stands in the context that it was read in, see `Plan`."""
    if len(matches) != 1 or matches[0].depth:
        return False
    [match] = matches
    shared = sum(
        hit.length
        for hit in hits
        if (hit.source, hit.source_start) == (match.source, hit.start) and hit.start < match.start
    )
    if not match.source_start and match.start:
        return False  # It was the beginning of its prompt, and no longer is.
    changed = max(match.start, match.source_start) - shared
    return changed <= BEFORE_SHARE * match.length
