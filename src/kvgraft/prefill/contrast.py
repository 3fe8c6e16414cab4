"""Find tokens that distinguish segments with the same wording.

A model binds a value to its entity by the order in which the entities appear in the prompt (Feng
and Steinhardt, "How do Language Models Bind Entities in Context?", 2023). A segment that was read
alone was the first of its prompt, and so was every other one. After a graft, their bindings
collide. Segments on different topics still differ in their words. Segments with the same wording
and different values do not (docs/results/alike.md).
"""

from collections.abc import Iterable

import numpy as np
import torch
from torch import Tensor

from kvgraft.core.plan import Plan

WORDING_TOKENS = 4  # a run of this length that two texts share is shared wording
WORDING_SHARE = 0.3  # a segment with less shared wording is no candidate
ALIKE_RUNS = 16  # shared runs from which a text may look like a part of another one
PHRASE_TOKENS = 5  # shared wording must be long: runs that recur by chance seldom reach this length
SLOT_TOKENS = 16  # a longer run without shared wording is text of its own
HEAD_TOKENS = 8  # the first tokens of such a run are recomputed
VALUE_TOKENS = 4  # the longest value that is found although some segments share it
CONTEXT_TOKENS = 3, 2  # tokens before and behind such a value that must be equal
NEAR_TOKENS = 3  # recomputed on each side of a slot
START_TOKENS = 4  # recomputed at the start of each segment that has a slot
# Share of the candidates' tokens. If more would be recomputed, all behind the first are.
MOST_SHARE = 0.45
# Segments on one subject with less shared wording than this are recomputed as a whole.
SAME_WORDS_SHARE = 0.4
# Share of a segment's distinct tokens that makes it be on the subject of the others.
SUBJECT_SHARE = 0.2
SUBJECT_SEGMENTS = 3  # least number of segments on one subject
# A segment with fewer tokens is a sentence of some text, not a text of its own.
TEXT_TOKENS = 24
_FACTOR = np.uint64(6364136223846793005)  # multiplier of the fingerprints


def distinguishing_tokens(plan: Plan, token_ids: Tensor, alike_share: float) -> Tensor:
    """Return the copied tokens to recompute so that the model can distinguish similar segments:
    bool [T].

    Shared wording is a run of `WORDING_TOKENS` that occurs again in the same prompt. The other
    place must be text that was read in another prompt and has moved by another distance, or new
    text of at least two blocks (less is the edge of a segment). A segment is a candidate if
    `WORDING_SHARE` of it is shared wording. The candidates of a prompt are similar if at least
    `alike_share` of their shared wording lies in shared runs of `PHRASE_TOKENS`.

    Candidates before the first one of another reading keep their cached KV, and later ones are
    recomputed behind them. Candidates of one reading were read one behind the other
    (`reuse.readings`).

    A slot is a run between shared wordings (if longer than `SLOT_TOKENS`, only its first
    `HEAD_TOKENS`), or a value of up to `VALUE_TOKENS` that another value replaces in the same
    context elsewhere. The result is all slots, `NEAR_TOKENS` on each side of them (a slot alone
    gives wrong answers), and the first `START_TOKENS` of each segment with a slot. If that is more
    than `MOST_SHARE` of the candidates' tokens, the result is all candidates that do not keep their
    KV.

    Segments can also say the same in other words. `SUBJECT_SEGMENTS` or more segments have one
    subject if, in each, `SUBJECT_SHARE` of the distinct tokens stand once in each of half of all
    segments. If less than `SAME_WORDS_SHARE` of their tokens is wording of segments that look
    alike, all of them behind the first reading are recomputed.

    Args:
        token_ids: int64 [T], the prompts of `plan` end to end, on the CPU.
        alike_share: from 0 to 1; 1 turns the search off.
    """
    if alike_share == 1.0 or not plan.graft_targets.numel():
        return torch.zeros_like(plan.fresh)

    text = _Text(plan, token_ids)
    segments, counts = text.segments, np.bincount(text.segments)
    wording = text.shared(counts, WORDING_TOKENS)
    candidates = (np.bincount(segments, wording) >= np.maximum(WORDING_SHARE * counts, 1))[segments]
    found, similar, on_subject = np.zeros((3, *candidates.shape), bool)
    if candidates.any():
        found, similar = _differences(plan, text, counts, wording, candidates, alike_share)
    for prompt in plan.prompts:
        on_subject[prompt] = mine = text.on_one_subject(prompt)
        if (similar & wording)[prompt][mine].sum() < SAME_WORDS_SHARE * mine.sum():
            found[prompt] |= mine & text.behind_another(prompt, on_subject)
    return torch.from_numpy(found)


def shares_wording(text: Tensor, other: Tensor) -> bool:
    """Return whether a text int64 [n] may look like a part of another one, int64 [m].

    `ALIKE_RUNS` of its runs of `WORDING_TOKENS` stand in the other one, or in a short text
    `WORDING_SHARE` of them.
    """
    if min(len(text), len(other)) < WORDING_TOKENS:
        return False
    powers = _FACTOR ** np.arange(WORDING_TOKENS, dtype=np.uint64)
    mine, theirs = (
        (one.unfold(0, WORDING_TOKENS, 1).numpy().astype(np.uint64) * powers).sum(1)
        for one in (text, other)
    )
    return bool(np.isin(mine, theirs).sum() >= min(ALIKE_RUNS, WORDING_SHARE * len(mine)))


def _differences(
    plan: Plan,
    text: "_Text",
    counts: np.ndarray,
    wording: np.ndarray,
    candidates: np.ndarray,
    alike_share: float,
) -> tuple[np.ndarray, np.ndarray]:
    """Return the tokens that distinguish candidates, and the similar candidates: bool [T] each."""
    segments = text.segments
    phrases = text.shared(counts, PHRASE_TOKENS)
    similar, ambiguous = np.zeros((2, *candidates.shape), bool)
    for prompt in plan.prompts:
        mine = candidates[prompt] & text.copied[prompt]
        if phrases[prompt][mine].sum() >= max(alike_share * wording[prompt][mine].sum(), 1):
            similar[prompt] = mine
            ambiguous[prompt] = mine & text.behind_another(prompt, candidates)

    runs = _numbered(segments, wording)
    short = (np.bincount(runs)[runs] <= SLOT_TOKENS) | (_places(runs) < HEAD_TOKENS)
    slots = ((~wording & short) | text.values(candidates | ~text.copied)) & ambiguous
    starts = (np.bincount(segments, slots) > 0)[segments] & (_places(segments) < START_TOKENS)
    found = _widened(slots, segments) | starts
    for prompt in plan.prompts:
        if found[prompt].sum() > MOST_SHARE * similar[prompt].sum():
            found[prompt] = ambiguous[prompt]

    return found, similar


class _Text:
    """The tokens of a plan and the place where each was read.

    Attributes:
        copied: bool [T], grafted and not in place.
        segments: int64 [T], number of each token's segment: tokens of one prompt that moved by one
            distance, or that are not copied and of one reading.
    """

    def __init__(self, plan: Plan, token_ids: Tensor) -> None:
        prompts = np.repeat(np.arange(len(plan.lengths)), plan.lengths)
        self._tokens = token_ids.numpy().astype(np.uint64)
        self._prompts = prompts.astype(np.uint64)
        self.copied = (plan.grafted & ~plan.in_place).numpy()
        self._readings, self._moves = plan.readings.numpy(), np.zeros(plan.num_tokens, int)
        own = np.where(self.copied, -1, self._readings)
        self.segments = _numbered(prompts, plan.segments.numpy(), own)
        self._least = 2 * plan.block_size
        self._moves[plan.graft_targets.numpy()] = plan.graft_shifts.numpy()

    def shared(self, counts: np.ndarray, length: int) -> np.ndarray:
        """Return the tokens in runs of `length` that occur in other text of the prompt: bool [T].

        Args:
            counts: int64, tokens of each segment.
        """
        counting = self.copied | (counts >= self._least)[self.segments]
        starts = self._within(0, length)
        starts = starts[counting[starts]]
        fingerprints = self._fingerprints(starts, range(length))
        recur = _recurring(fingerprints)
        starts, groups = starts[recur], _groups(fingerprints[recur])
        found = starts[self._apart(groups, starts)]
        return self._covered(found, found + length)

    def behind_another(self, prompt: slice, where: np.ndarray) -> np.ndarray:
        """Return the tokens of a prompt from the first one on whose reading differs from those
        before it: bool [n].

        Only tokens in `where` bool [T] count. Segments of less than `TEXT_TOKENS` are ignored: they
        are sentences that several texts share.
        """
        readings, sizes = self._readings[prompt], np.bincount(self.segments)[self.segments[prompt]]
        where = where[prompt] & (sizes >= TEXT_TOKENS)
        ends = where & (readings != readings[where.argmax()])
        behind: np.ndarray = np.logical_or.accumulate(ends)
        return behind

    def on_one_subject(self, prompt: slice) -> np.ndarray:
        """Return the tokens of copied segments, of at least two blocks, that have one subject: bool
        [n].

        Words that are rare in a text but occur in most texts of a prompt name their subject.
        Frequent words occur more than once in each text.
        """
        found = np.zeros(prompt.stop - prompt.start, bool)
        counts = np.bincount(self.segments)
        mine = np.flatnonzero((self.copied & (counts >= self._least)[self.segments])[prompt])
        segments, tokens = self.segments[prompt][mine], self._tokens[prompt][mine].astype(np.int64)
        number = np.unique(segments).size
        if number < SUBJECT_SEGMENTS:
            return found

        size = tokens.max() + 1
        pairs, times = np.unique((segments - segments[0]) * size + tokens, return_counts=True)
        segment_of, token_of = np.divmod(pairs, size)
        found_in = np.bincount(token_of)  # how many segments
        once = np.bincount(token_of, times) == found_in
        common = (once & (found_in >= max(2, number / 2)))[token_of]
        on_subject = np.bincount(segment_of, common) >= SUBJECT_SHARE * np.bincount(
            segment_of
        ).clip(1)
        mine = mine[on_subject[segments - segments[0]]]
        if (
            min(len(np.unique(of[prompt][mine])) for of in (self._readings, self._moves))
            >= SUBJECT_SEGMENTS
        ):
            found[mine] = True

        return found

    def values(self, among: np.ndarray) -> np.ndarray:
        """Return the tokens of values that other text replaces in the same context: bool [T].

        The two values must differ in their first and in their last token.

        Args:
            among: bool [T], the tokens to search.
        """
        before, behind = CONTEXT_TOKENS
        places, ends, contexts = [], [], []
        for length in range(1, VALUE_TOKENS + 1):
            at = self._within(-before, length + behind)
            at = at[among[at]]
            places.append(at)
            ends.append(at + length)
            contexts.append(
                self._fingerprints(at, [*range(-before, 0), *range(length, length + behind)])
            )

        around = np.concatenate(contexts)
        recur = _recurring(around)
        first, stop = np.concatenate(places)[recur], np.concatenate(ends)[recur]
        groups = _groups(around[recur])
        differ = _vary(groups, self._tokens[first]) & _vary(groups, self._tokens[stop - 1])
        found = self._apart(groups, first) & differ
        return self._covered(first[found], stop[found])

    def _within(self, first: int, stop: int) -> np.ndarray:
        """Return the places p with tokens [p + first, p + stop) in one segment: int64 [n]."""
        reach = stop - first - 1
        whole = self.segments[: max(len(self.segments) - reach, 0)] == self.segments[reach:]
        return np.flatnonzero(whole) - first

    def _fingerprints(self, places: np.ndarray, offsets: Iterable[int]) -> np.ndarray:
        """Return a hash of the tokens at these offsets from each place: uint64 [n]."""
        found = self._prompts[places]
        for offset in offsets:
            found = found * _FACTOR + self._tokens[places + offset] + np.uint64(1)
        return found

    def _apart(self, groups: np.ndarray, places: np.ndarray) -> np.ndarray:
        """Return whether each place is in a group with several readings and several moves: bool
        [n].

        Turns of one conversation have several readings but move together.
        """
        return _vary(groups, self._readings[places]) & _vary(groups, self._moves[places])

    def _covered(self, first: np.ndarray, stop: np.ndarray) -> np.ndarray:
        """Return the tokens in any of the ranges [first, stop): bool [T]."""
        covered = np.zeros(len(self.segments) + 1, np.int64)
        np.add.at(covered, first, 1)
        np.add.at(covered, stop, -1)
        return covered.cumsum()[:-1] > 0


def _recurring(fingerprints: np.ndarray) -> np.ndarray:
    """Return where a fingerprint may occur again: bool [n], true for all that do and for few
    others.

    Sorting all of them, as `_groups` does, would take longer than everything else.
    """
    bits = len(fingerprints).bit_length() + 4
    buckets = (fingerprints * _FACTOR >> np.uint64(64 - bits)).astype(np.int64)
    order = np.arange(len(fingerprints), dtype=np.int32)
    last = np.empty(1 << bits, np.int32)
    last[buckets] = order
    shared = np.zeros(1 << bits, bool)
    shared[buckets[last[buckets] != order]] = True
    recurring: np.ndarray = shared[buckets]
    return recurring


def _groups(fingerprints: np.ndarray) -> np.ndarray:
    """Return a number for each distinct fingerprint: int64 [n]."""
    groups: np.ndarray = np.unique(fingerprints, return_inverse=True)[1].ravel()
    return groups


def _vary(groups: np.ndarray, values: np.ndarray) -> np.ndarray:
    """Return whether the values within the group of each element differ: bool [n]."""
    first = np.empty(groups.max(initial=-1) + 1, values.dtype)
    first[groups] = values
    differ = np.zeros(len(first), bool)
    differ[groups[values != first[groups]]] = True
    varying: np.ndarray = differ[groups]
    return varying


def _places(stretches: np.ndarray) -> np.ndarray:
    """Return the place of each token in its stretch: int64 [T]."""
    counts = np.bincount(stretches)
    return np.arange(len(stretches)) - (counts.cumsum() - counts)[stretches]


def _numbered(*columns: np.ndarray) -> np.ndarray:
    """Return the number of each stretch of equal values: int64 [T]."""
    changes = [np.diff(column, prepend=column[:1]) != 0 for column in columns]
    return np.logical_or.reduce(changes).cumsum()


def _widened(slots: np.ndarray, segments: np.ndarray) -> np.ndarray:
    """Return the slots with `NEAR_TOKENS` more on each side in the same segment: bool [T]."""
    wide = slots.copy()
    for step in range(1, NEAR_TOKENS + 1):
        together = segments[:-step] == segments[step:]
        wide[:-step] |= slots[step:] & together
        wide[step:] |= slots[:-step] & together
    return wide
