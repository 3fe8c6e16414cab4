"""Recoveries before the first request, so that no request waits for the compilation of kernels."""

import logging

import numpy as np
import torch

from kvgraft.core.matches import Match
from kvgraft.core.plan import Plan
from kvgraft.prefill.context import Policy
from kvgraft.prefill.documents.keeping import KeepsDocuments
from kvgraft.vllm.compat.model import ModelHost
from kvgraft.vllm.prefill import VllmPrefill

logger = logging.getLogger("kvgraft")
# tokens of the made-up prompts; kernels have tiles of several sizes
SIZES = (256, 2048, 8192)
# number of distinct token ids in them
VOCABULARY = 100


@torch.inference_mode()
def warm_up(host: ModelHost, policy: Policy, max_length: int) -> None:
    """Recover made-up prompts of at most `max_length` tokens under this policy.

    The cache must be empty. Policies that keep a part of documents or work head by head are
    skipped.
    """
    if isinstance(policy, KeepsDocuments) or policy.needs_head_map or host.head_paging:
        return

    size = host.block_size
    for length in SIZES:
        count = -(-length // size)
        if length > max_length or 2 * count >= host.num_blocks:
            break
        # vLLM never gives out block 0.
        source, target = np.arange(1, count + 1), np.arange(count + 1, 2 * count + 1)
        texts = _texts(length, source, size) if policy.uses_grafts else []
        plan, tokens = (
            Plan.for_prompt(length, size, matches=texts),
            torch.arange(length) % VOCABULARY,
        )
        groups = 1 + max(host.group_of)
        for one in policy.choices:
            one.recover(
                VllmPrefill(host, plan, tokens, [[target] * groups], np.stack([source] * groups, 1))
            )
        host.clear(torch.from_numpy(target))


def _texts(length: int, source: np.ndarray, size: int) -> list[Match]:
    """Return two known texts in swapped order, with little new text around them.

    Args:
        length: tokens of the prompt.
        source: blocks that hold the texts.
        size: tokens per block.
    """
    new, found = length // 32, []
    known = length // 2 - new
    for number, (start, begin) in enumerate([(new, known), (known + 2 * new, 0)]):
        pages = source[begin // size : -(-(begin + known) // size)].astype(np.int32)
        found.append(Match(start, known, begin, pages, depth=0, source=number))
    return found
