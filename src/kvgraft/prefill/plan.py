"""The plan of one prefill pass: how every prompt token gets its keys and values. Pure data.

A plan may hold several prompts laid end to end, so that a policy treats a batch exactly as it
treats one prompt: all masks are boolean [T] over the tokens of all prompts, and whatever depends on
a prompt's borders is computed here."""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from enum import IntEnum
from functools import cached_property
from itertools import pairwise

import numpy as np
import torch
from torch import Tensor

from kvgraft.segments.matches import Match, grafted_tokens, in_blocks


class Kind(IntEnum):
    """How a token's KV is obtained."""

    FRESH = 0  # computed
    PREFIX = 1  # exact hit: the page of another request, shared
    GRAFTED = 2  # copied from another position and aligned
    IN_PLACE = 3  # left by an earlier prompt, approximate, in blocks that nobody else reads


@dataclass(frozen=True)
class Span:
    """Tokens [start, stop) of one prompt that are obtained in one way."""

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
        graft_readings: int64 [g], identity of what each one was read in (`Match.reading`).
        ends_in_graft: per prompt, whether known text reached its last token (which is computed all
            the same).
    """

    kinds: Tensor
    lengths: tuple[int, ...]
    block_size: int
    graft_targets: Tensor
    graft_sources: Tensor
    graft_shifts: Tensor
    graft_readings: Tensor
    ends_in_graft: tuple[bool, ...]

    @classmethod
    def for_prompt(
        cls,
        num_tokens: int,
        block_size: int,
        prefix_blocks: Iterable[int] = (),
        matches: Sequence[Match] = (),
        in_place: Iterable[int] = (),
    ) -> "Plan":
        """The plan of one prompt of `num_tokens` tokens.

        Args:
            prefix_blocks: indices of the prompt's blocks that hits provide.
            matches: grafts, disjoint from each other and from the prefix blocks.
            in_place: those of the prefix blocks that are approximate, and that a policy may
                recompute where they are.

        The last token is always fresh: its hidden state gives the first generated token.
        """
        kinds = np.full(num_tokens, Kind.FRESH, np.uint8)
        in_blocks(kinds, block_size)[list(prefix_blocks)] = Kind.PREFIX
        in_blocks(kinds, block_size)[list(in_place)] = Kind.IN_PLACE
        matches = sorted(matches, key=lambda match: match.start)
        for match in matches:
            kinds[match.start : match.start + match.length] = Kind.GRAFTED
        ends_in_graft = bool(kinds[-1] == Kind.GRAFTED)
        kinds[-1] = Kind.FRESH
        grafts = grafted_tokens(matches, block_size)
        count = len(grafts[0]) - ends_in_graft
        targets, sources, shifts, readings = (torch.from_numpy(values[:count]) for values in grafts)
        return cls(
            kinds=torch.from_numpy(kinds),
            lengths=(num_tokens,),
            block_size=block_size,
            graft_targets=targets,
            graft_sources=sources,
            graft_shifts=shifts,
            graft_readings=readings,
            ends_in_graft=(ends_in_graft,),
        )

    @classmethod
    def for_documents(cls, num_tokens: int, block_size: int, documents: Iterable[range]) -> "Plan":
        """The plan of one prompt whose documents lie outside the pool: they are grafted, from no
        page."""
        plan = cls.for_prompt(num_tokens, block_size)
        for tokens in documents:
            plan.kinds[tokens.start : tokens.stop] = Kind.GRAFTED
        return plan

    @classmethod
    def batch(cls, plans: Sequence["Plan"]) -> "Plan":
        """Several plans laid end to end."""
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
            torch.cat([plan.graft_readings for plan in plans]),
            tuple(ends for plan in plans for ends in plan.ends_in_graft),
        )

    def without_grafts(self) -> "Plan":
        """The same prompts with every grafted token fresh: full recomputation above the exact
        hits."""
        none = torch.zeros(0, dtype=torch.int64)
        kinds = torch.where(self.grafted, torch.tensor(Kind.FRESH, dtype=torch.uint8), self.kinds)
        return Plan(
            kinds,
            self.lengths,
            self.block_size,
            none,
            none,
            none,
            none,
            (False,) * len(self.lengths),
        )

    def part(self, start: int, stop: int) -> "Plan":
        """One prompt without grafts up to `stop`, when everything before `start` has been
        computed."""
        kinds = self.kinds[:stop].clone()
        kinds[:start] = Kind.PREFIX
        return replace(self, kinds=kinds, lengths=(stop,))

    @property
    def num_tokens(self) -> int:
        """T, the tokens of all prompts."""
        return self.kinds.numel()

    @cached_property
    def prefix(self) -> Tensor:
        """bool [T]: exact hits; nothing is ever computed for them."""
        return self.kinds == Kind.PREFIX

    @cached_property
    def grafted(self) -> Tensor:
        """bool [T]: tokens with approximate KV, aligned or in place, which a policy may
        recompute."""
        return self.kinds >= Kind.GRAFTED

    @cached_property
    def in_place(self) -> Tensor:
        """bool [T]: those of them that an earlier prompt has left in place."""
        return self.kinds == Kind.IN_PLACE

    @cached_property
    def grafted_blocks(self) -> np.ndarray:
        """bool [T // block_size] of one prompt: the full blocks that hold tokens which are grafted
        or in place."""
        whole = self.grafted[: self.num_tokens // self.block_size * self.block_size]
        found: np.ndarray = whole.view(-1, self.block_size).any(1).numpy()
        return found

    @cached_property
    def fresh(self) -> Tensor:
        """bool [T]: I_nr, the tokens that no cache holds; every policy computes them."""
        return self.kinds == Kind.FRESH

    @cached_property
    def question(self) -> Tensor:
        """bool [T]: the fresh tokens behind the last grafted one of their prompt; all of them where
        none is grafted."""
        behind = torch.zeros(self.num_tokens, dtype=torch.bool)
        for prompt in self.prompts:
            behind[prompt] = self.grafted[prompt].flip(0).cumsum(0).flip(0) == 0
        return behind & self.fresh

    @cached_property
    def active(self) -> Tensor:
        """bool [T]: everything but the exact hits."""
        return ~self.prefix

    @cached_property
    def prompts(self) -> tuple[slice, ...]:
        """Where each prompt lies in 0..T."""
        stops = np.cumsum(self.lengths).tolist()
        return tuple(
            slice(stop - length, stop) for stop, length in zip(stops, self.lengths, strict=True)
        )

    @cached_property
    def positions(self) -> Tensor:
        """int64 [T]: position of each token in its own prompt."""
        return torch.cat([torch.arange(length) for length in self.lengths])

    @property
    def spans(self) -> list[list[Span]]:
        """Per prompt, the maximal stretches of one kind."""
        return [_spans(self.kinds[prompt].numpy()) for prompt in self.prompts]

    def overflow(self, blocks: int = 1) -> Tensor:
        """bool [T]: grafted tokens within `blocks` blocks of a fresh interval, on either side
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
        """bool [T]: the last `tokens` tokens of the final graft of prompts that end in known text
        (SparseX 3.2)."""
        chosen = torch.zeros(self.num_tokens, dtype=torch.bool)
        for prompt, ends, spans in zip(self.prompts, self.ends_in_graft, self.spans, strict=True):
            if ends and len(spans) > 1 and spans[-2].kind == Kind.GRAFTED:
                first = max(spans[-2].start, spans[-2].stop - tokens)
                chosen[prompt.start + first : prompt.start + spans[-2].stop] = True
        return chosen

    def segment_starts(self, tokens: int, share: float = 1.0) -> Tensor:
        """bool [T]: the first `tokens` grafted tokens of every segment (a stretch that moved as
        one), or this share of them, rounded up, if that is less."""
        first, counts = self._segments
        most = (share * counts.double() - 1e-9).ceil().clamp(max=tokens).long()
        place = torch.arange(int(most.max()) if most.numel() else 0)
        return self._at(self.graft_targets[(first[:, None] + place)[place < most[:, None]]])

    def edges(self, tokens: int) -> Tensor:
        """bool [T]: the first and the last `tokens` grafted tokens of every segment."""
        numbers = self._segment_numbers
        first, counts = (part[numbers] for part in self._segments)
        before = torch.arange(numbers.numel()) - first
        return self._at(self.graft_targets[torch.minimum(before, counts - 1 - before) < tokens])

    @cached_property
    def segments(self) -> Tensor:
        """int64 [T]: number of the segment (a stretch that moved as one) of each grafted token, -1
        of others."""
        numbers = torch.full((self.num_tokens,), -1)
        numbers[self.graft_targets] = self._segment_numbers
        return numbers

    @cached_property
    def segment_shifts(self) -> Tensor:
        """int64 [segments]: new minus old position of the tokens of each segment."""
        return self.graft_shifts[self._segments[0]]

    def top_share(
        self, scores: Tensor, share: float, among: Tensor, in_place: float = 1.0
    ) -> Tensor:
        """bool [T]: in each prompt the best-scored `share` (rounded up) of the tokens in `among`
        bool [T], where those that are grafted in place count for so much each."""
        weights = torch.where(self.in_place, in_place, 1.0).double() * among
        counts = [
            int(np.ceil(share * float(weights[prompt].sum()) - 1e-9)) for prompt in self.prompts
        ]
        return self._top(scores, counts, among)

    def top(self, scores: Tensor, count: int, among: Tensor) -> Tensor:
        """bool [T]: in each prompt the `count` best-scored of the tokens in `among` bool [T], or
        all of them."""
        return self._top(
            scores, [min(count, int(among[prompt].sum())) for prompt in self.prompts], among
        )

    @cached_property
    def _segments(self) -> tuple[Tensor, Tensor]:
        """Where in 0..g each segment begins, and how many tokens it has: int64 [segments] each."""
        starts = torch.ones_like(self.graft_targets, dtype=torch.bool)
        starts[1:] = (self.graft_targets.diff() != 1) | (self.graft_shifts.diff() != 0)
        first = starts.nonzero()[:, 0]
        return first, first.diff(append=torch.tensor([starts.numel()]))

    @cached_property
    def _segment_numbers(self) -> Tensor:
        """int64 [g]: the number of the segment of each copied token."""
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
        """bool [T]: in each prompt the fewest tokens of `among` bool [T], at least `least` if there
        are as many, that hold a share `mass` of what these score together."""
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
        """bool [T]: in each prompt the tokens that score no less than the worst in `chosen` bool
        [T]; none if empty."""
        reached = torch.zeros(self.num_tokens, dtype=torch.bool)
        for prompt in self.prompts:
            if chosen[prompt].any():
                reached[prompt] = scores[prompt] >= scores[prompt][chosen[prompt]].min()
        return reached


def _spans(kinds: np.ndarray) -> list[Span]:
    cuts = np.flatnonzero(np.diff(kinds)) + 1
    edges = [0, *cuts.tolist(), kinds.size]
    return [Span(a, b, Kind(int(kinds[a]))) for a, b in pairwise(edges)]
