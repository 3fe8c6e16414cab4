"""Rounds of selection on a CUDA device, for which the host never waits.

The result is that of `SelectsInRounds.choose` on the CPU, except for the order of equal scores.
"""

from collections.abc import Callable, Sequence

import numpy as np
import torch
from torch import Tensor

from kvgraft.core.plan import Plan, share_of
from kvgraft.kernels.upload import upload
from kvgraft.prefill.device_tokens import DeviceTokens, FoundTokens, TokenSet

# (tokens to compute, tokens among them whose queries score) -> scores of all keys, float32 [T]
Probe = Callable[[TokenSet, TokenSet], Tensor]


class Candidates:
    """Tokens that may still be chosen.

    Args:
        among: bool [T] on the CPU; not the last token.

    Attributes:
        left: number of candidates in each prompt.
    """

    def __init__(self, plan: Plan, among: Tensor, device: torch.device) -> None:
        self.left = plan.counts_of(among)
        # [prompts, longest]; padding is the last token, which is never a candidate
        offsets, last = torch.arange(max(plan.lengths)), plan.num_tokens - 1
        places = torch.stack(
            [
                torch.where(offsets < length, prompt.start + offsets, last)
                for prompt, length in zip(plan.prompts, plan.lengths, strict=True)
            ]
        )
        self._closed, self._places = upload(device, ~among, places)

    def take(self, scores: Tensor, counts: Sequence[int]) -> tuple[FoundTokens, Tensor]:
        """Choose the candidates with the best scores, `counts` in each prompt.

        Returns:
            The tokens, and the best scores in descending order, [prompts, max(counts)].
        """
        left, most = scores.masked_fill(self._closed, -torch.inf), max(counts)
        by_prompt = left[None] if len(counts) == 1 else left[self._places]
        # A stable sort, so that all ranks choose the same of equal scores.
        best, index = (part[:, :most] for part in by_prompt.sort(descending=True, stable=True))
        tokens = index if len(counts) == 1 else self._places.gather(1, index)
        if min(counts) < most:
            rows = [number * most + place for number, n in enumerate(counts) for place in range(n)]
            tokens = tokens.flatten()[upload(scores.device, torch.tensor(rows))[0]]

        tokens = tokens.flatten().sort().values
        self._closed.index_fill_(0, tokens, True)
        self.left = [there - n for there, n in zip(self.left, counts, strict=True)]
        return FoundTokens(tokens, tuple(counts)), best


def choose_on_device(
    plan: Plan,
    device: torch.device,
    always_recompute: Tensor,
    asking: Tensor,
    shares: Sequence[float],
    probe: Probe,
) -> TokenSet:
    """Return `always_recompute` and the choice of each round.

    Args:
        always_recompute: bool [T] on the CPU.
        asking: bool [T] on the CPU, tokens whose queries score in the first round.
        shares: share of the remaining tokens that each round chooses.
    """
    candidates = Candidates(plan, plan.grafted & ~always_recompute, device)
    edges, found, latest = _Edges(plan, device), list[FoundTokens](), list[Tensor]()
    for share in shares:
        counts = share_of(candidates.left, share)
        if not any(counts):
            break
        if found:
            reaching = edges.reaching(found[-1], *latest)
            scores = probe(reaching, reaching)
        else:
            scores = probe(plan.fresh | always_recompute, asking)
        new, best = candidates.take(scores, counts)
        found.append(new)
        latest = [scores, best]
    return DeviceTokens(always_recompute, tuple(found)) if found else always_recompute


def top_share_on_device(plan: Plan, scores: Tensor, share: float) -> TokenSet:
    """Return the grafted tokens with the best scores, like `Plan.top_share`."""
    candidates, none = Candidates(plan, plan.grafted, scores.device), torch.zeros_like(plan.fresh)
    counts = share_of(candidates.left, share)
    return DeviceTokens(none, (candidates.take(scores, counts)[0],)) if any(counts) else none


class _Edges:
    """Fresh tokens inside the text. Those that score as high as the chosen tokens of their prompt
    choose with them."""

    def __init__(self, plan: Plan, device: torch.device) -> None:
        self._device = device
        self._where = plan.fresh & ~plan.question
        self._prompts = np.repeat(np.arange(len(plan.lengths)), plan.lengths)

    def reaching(self, new: FoundTokens, scores: Tensor, best: Tensor) -> DeviceTokens:
        """Return the chosen tokens and those that reach the least of the scores `best`."""
        chosen_there = torch.from_numpy(np.array(new.counts)[self._prompts] > 0)
        if not chosen_there.all():
            self._where = self._where & chosen_there
        if not self._where.any():
            return DeviceTokens(self._where, (new,))
        # place of the least score of each token's prompt in `best`
        last = np.array(new.counts)[self._prompts] - 1 + self._prompts * best.shape[1]
        given = self._where.nonzero()[:, 0], torch.from_numpy(last)[self._where]
        rows, least = upload(self._device, *given)
        bounds = best[0, -1] if len(best) == 1 else best.flatten()[least]
        return DeviceTokens(self._where, (new,), scores[rows] >= bounds)
