"""Prompts of which a part is kept: vLLM is given one of as many tokens, so that it has no more
blocks."""

import numpy as np

from kvgraft.prefill.documents.keeping import KeepsDocuments
from kvgraft.prefill.report import unknown_reason
from kvgraft.vllm.compat import set_prompt
from kvgraft.vllm.connector.hash_masking import HashMasking
from kvgraft.vllm.connector.planner import Planner
from kvgraft.vllm.connector.request_state import RequestState

SHORTEST_DOCUMENT = 64  # tokens of a document of which a part may be kept
LEAST_SHARE = 0.1  # of a prompt that documents make up


class PromptTruncation:
    """Puts a shorter prompt in the place of a request's own, and the whole one back if nothing can
    be kept after all.

    Args:
        known: finds the documents.
        masking: nobody may find the blocks of a shorter prompt: they have the hashes of a nonce.
    """

    def __init__(self, known: Planner, masking: HashMasking) -> None:
        self._known, self._masking = known, masking
        # prompts of requests of which workers know a shorter one
        self._restored: dict[str, list[int]] = {}

    def shorten(self, state: RequestState, policy: KeepsDocuments) -> None:
        """Let vLLM see as many tokens as the policy keeps at most, if enough of the prompt is
        known."""
        known, tokens = self._known.documents(state), state.token_ids
        matches = [match for match in known if match.length >= SHORTEST_DOCUMENT]
        state.documents = tuple(range(match.start, match.start + match.length) for match in matches)
        lengths = [match.length for match in matches]
        if not matches:
            state.refusal = (
                "too_short" if known else unknown_reason(len(tokens), self._known.block_size)
            )
            return
        if sum(lengths) < LEAST_SHARE * len(tokens):
            state.refusal = "too_little_known"
            return
        for match in matches:
            self._known.pool.hit_counts[match.pages] += 1
        num_kept = len(tokens) - sum(lengths) + policy.num_kept(lengths)
        state.whole = tuple(tokens)
        set_prompt(state.request, tokens[-num_kept:])  # only the last of them will ever be read
        self._masking.mask(state, 0)
        state.offer.mark_approximate([(0, 1)])

    def settle(self, state: RequestState, kept: np.ndarray) -> None:
        """A recovery has kept these tokens (`RecoveryResult.kept`): vLLM, which still waits for
        more, sees as many, and blocks behind them are free. If the request is preempted it keeps
        the same: its answer goes on with them."""
        request, num_kept = state.request, int(np.unpackbits(kept[0]).sum())
        num_prompt = len(state.whole) - sum(map(len, state.documents)) + num_kept
        state.kept = kept
        if num_prompt < request.num_prompt_tokens:
            set_prompt(request, list(state.whole[-num_prompt:]))
            self._masking.hide_again(state)
            request.num_computed_tokens = request.num_tokens
            self._known.groups.trim(state.id, request.num_tokens)

    def restore(self, state: RequestState, reason: str) -> None:
        """The request has its whole prompt again and is computed in full; if it was preempted, with
        the answer so far, which goes on as if all of that were a prompt."""
        self._masking.release(state)
        set_prompt(state.request, list(state.whole))
        if state.kept is not None:
            self._restored[state.id] = list(state.whole)
        state.whole, state.documents, state.hashes, state.kept = (), (), None, None
        state.offer.reset(state.num_exact)
        state.refusal = reason

    def take_restored(self) -> dict[str, list[int]]:
        """What workers must know before these requests are resumed, by request id: since the last
        call."""
        restored, self._restored = self._restored, {}
        return restored
