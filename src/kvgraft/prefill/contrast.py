"""Text that looks alike but was read apart, and the tokens by which it differs.

A model that reads several entities in one prompt gives each of them, and whatever belongs to it, a mark of its own
(Feng and Steinhardt, "How do Language Models Bind Entities in Context?", 2023). Text that was read apart carries the
marks of another prompt: every document that was read alone is "the first". Where documents differ in topic, their words
still tell them apart; where they share their wording, only the marks do (docs/results/alike.md).
"""

from collections.abc import Iterable

import numpy as np
import torch
from torch import Tensor

from kvgraft.prefill.plan import Plan

WORDING_TOKENS = 4  # that two texts must share in a row to have the same wording there
WORDING_SHARE = 0.3  # of a segment that looks alike, which shared wordings are at least
PHRASE_TOKENS = 6  # that such segments must share in a row: fewer recur in any text of few words
SLOT_TOKENS = 16  # of what differs, at most; longer stretches are text of their own
HEAD_TOKENS = 8  # recomputed at the beginning of those
VALUE_TOKENS = 4  # of a value that some texts share and others do not, at most
CONTEXT_TOKENS = 3, 2  # before such a value, and behind it, that must be the same
NEAR_TOKENS = 2  # recomputed on either side of a slot; one where two would take more than `MOST_SHARE` of a segment
MOST_SHARE = 0.5
START_TOKENS = 4  # recomputed at the beginning of each segment that looks alike
_OWN = -1  # reading of what was not copied
_FACTOR = np.uint64(6364136223846793005)  # of fingerprints


def distinguishing_tokens(plan: Plan, token_ids: Tensor, alike_share: float) -> Tensor:
    """Return the copied tokens that tell alike segments apart, which were read apart: bool [T].

    A token belongs to a shared wording if it lies in `WORDING_TOKENS` tokens that stand in the same prompt once
    more, in text that was read in another prompt and has moved by another distance, or in new text (of two blocks at
    least; less is the edge of a segment). Segments of which at least `WORDING_SHARE` is that look alike if, in all of
    them of a prompt together, at least `alike_share` of the tokens lie in `PHRASE_TOKENS` such tokens.

    The *slots* of such a segment are what lies between shared wordings (of a stretch longer than `SLOT_TOKENS` the
    first `HEAD_TOKENS`), and values of up to `VALUE_TOKENS` in place of which another text has another one, between
    the same tokens. They are returned with `NEAR_TOKENS` on either side, without which they come out wrong, and with
    the first `START_TOKENS` of the segment.

    Args:
        token_ids: int64 [T], of the prompts of `plan`.
        alike_share: from 0 to 1.
    """
    if not plan.graft_targets.numel():
        return torch.zeros_like(plan.fresh)

    text = _Text(plan, token_ids)
    segments, counts = text.segments, np.bincount(text.segments)
    shared = text.shared(counts, WORDING_TOKENS)
    alike = (np.bincount(segments, shared) >= np.maximum(WORDING_SHARE * counts, 1))[segments] & plan.grafted.numpy()
    phrases = text.shared(counts, PHRASE_TOKENS) & alike
    for prompt in plan.prompts:
        alike[prompt] &= phrases[prompt].sum() >= max(alike_share * alike[prompt].sum(), 1)
    if not alike.any():
        return torch.zeros_like(plan.fresh)

    runs = _numbered(segments, shared)
    short = (np.bincount(runs)[runs] <= SLOT_TOKENS) | (_places(runs) < HEAD_TOKENS)
    slots = ((~shared & short) | text.values(alike)) & alike

    starts = (np.bincount(segments, slots) > 0)[segments] & (_places(segments) < START_TOKENS)
    narrow, wide = (_widened(slots, segments, near) | starts for near in (1, NEAR_TOKENS))
    fits = np.bincount(segments, wide) <= MOST_SHARE * counts
    chosen = torch.from_numpy(np.where(fits[segments], wide, narrow))
    return chosen & plan.grafted & ~plan.in_place


class _Text:
    """The tokens of a plan, and where each was read.

    Attributes:
        segments: int64 [T], number of the stretch that each token is in: of one prompt, copied as one or not copied.
    """

    def __init__(self, plan: Plan, token_ids: Tensor) -> None:
        prompts = np.repeat(np.arange(len(plan.lengths)), plan.lengths)
        self._tokens, self._prompts = token_ids.numpy().astype(np.uint64), prompts.astype(np.uint64)
        self.segments = _numbered(prompts, plan.segments.numpy())
        self._copied, self._least = plan.grafted.numpy(), 2 * plan.block_size
        self._readings, self._moves = np.full((2, plan.num_tokens), _OWN)
        targets = plan.graft_targets.numpy()
        self._readings[targets], self._moves[targets] = plan.graft_readings.numpy(), plan.graft_shifts.numpy()

    def shared(self, counts: np.ndarray, length: int) -> np.ndarray:
        """bool [T]: tokens in so many that stand in the same prompt in other text; `counts` are those of segments."""
        counting = self._copied | (counts >= self._least)[self.segments]
        starts = self._within(0, length)
        starts = starts[counting[starts]]
        groups = _groups(self._fingerprints(starts, range(length)))
        found = starts[self._apart(groups, starts)]
        return self._covered(found, found + length)

    def values(self, among: np.ndarray) -> np.ndarray:
        """bool [T]: tokens in `among` bool [T], or new, of values in place of which other text has a value that begins
        and ends with other tokens."""
        before, behind = CONTEXT_TOKENS
        places, ends, contexts = [], [], []
        for length in range(1, VALUE_TOKENS + 1):
            at = self._within(-before, length + behind)
            at = at[(among | ~self._copied)[at]]
            places.append(at)
            ends.append(at + length)
            contexts.append(self._fingerprints(at, [*range(-before, 0), *range(length, length + behind)]))
        first, stop, groups = np.concatenate(places), np.concatenate(ends), _groups(np.concatenate(contexts))
        differ = _vary(groups, self._tokens[first]) & _vary(groups, self._tokens[stop - 1])
        found = self._apart(groups, first) & differ
        return self._covered(first[found], stop[found])

    def _within(self, first: int, stop: int) -> np.ndarray:
        """Places p whose tokens [p + first, p + stop) are of one segment, int64 [n]."""
        reach = stop - first - 1
        whole = self.segments[: max(len(self.segments) - reach, 0)] == self.segments[reach:]
        return np.flatnonzero(whole) - first

    def _fingerprints(self, places: np.ndarray, offsets: Iterable[int]) -> np.ndarray:
        """Of the tokens at these offsets from each place, and of its prompt: uint64 [n]."""
        found = self._prompts[places]
        for offset in offsets:
            found = found * _FACTOR + self._tokens[places + offset] + np.uint64(1)
        return found

    def _apart(self, groups: np.ndarray, places: np.ndarray) -> np.ndarray:
        """bool [n]: places in groups with text of several readings that has moved by several distances. Turns of a
        conversation, each read behind the others in a prompt of its own, move together."""
        return _vary(groups, self._readings[places]) & _vary(groups, self._moves[places])

    def _covered(self, first: np.ndarray, stop: np.ndarray) -> np.ndarray:
        """bool [T]: the tokens from each place to another one."""
        covered = np.zeros(len(self.segments) + 1, np.int64)
        np.add.at(covered, first, 1)
        np.add.at(covered, stop, -1)
        return covered.cumsum()[:-1] > 0


def _groups(fingerprints: np.ndarray) -> np.ndarray:
    """Number of the group of equal fingerprints, int64 [n]."""
    groups: np.ndarray = np.unique(fingerprints, return_inverse=True)[1].ravel()
    return groups


def _vary(groups: np.ndarray, values: np.ndarray) -> np.ndarray:
    """bool [n]: whether the values of its group differ."""
    first = np.empty(groups.max(initial=-1) + 1, values.dtype)
    first[groups] = values
    differ = np.zeros(len(first), bool)
    differ[groups[values != first[groups]]] = True
    varying: np.ndarray = differ[groups]
    return varying


def _places(stretches: np.ndarray) -> np.ndarray:
    """Place of each token in its stretch, int64 [T]; stretches are numbered in order."""
    counts = np.bincount(stretches)
    return np.arange(len(stretches)) - (counts.cumsum() - counts)[stretches]


def _numbered(*columns: np.ndarray) -> np.ndarray:
    """Number of the stretch of equal values that each place lies in, int64 [T]."""
    changes = [np.diff(column, prepend=column[:1]) != 0 for column in columns]
    return np.logical_or.reduce(changes).cumsum()


def _widened(slots: np.ndarray, segments: np.ndarray, near: int) -> np.ndarray:
    """With so many tokens next to them, in the same segment."""
    wide = slots.copy()
    for step in range(1, near + 1):
        together = segments[:-step] == segments[step:]
        wide[:-step] |= slots[step:] & together
        wide[step:] |= slots[:-step] & together
    return wide
