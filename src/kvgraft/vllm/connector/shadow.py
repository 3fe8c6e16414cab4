"""What would have been grafted on a server in shadow mode; and requests that try it, without
leaving anything."""

from collections import OrderedDict
from dataclasses import dataclass, replace

from kvgraft.vllm.connector.hash_masking import HashMasking
from kvgraft.vllm.connector.request_state import Candidate, RequestState
from kvgraft.vllm.groups import Reserved
from kvgraft.vllm.options import NOTE_PLAN

REMEMBERED = 256  # plans, of the watched requests that came last


@dataclass(frozen=True, eq=False)
class Found:
    """A plan, and in which namespace it was made."""

    scope: bytes
    candidate: Candidate


class ShadowMode:
    """Remembers plans for a while; nothing that they would graft from is held."""

    def __init__(self, masking: HashMasking) -> None:
        self._masking = masking
        self._found: OrderedDict[str, Found] = OrderedDict()

    def note(self, state: RequestState, candidate: Candidate) -> None:
        """This would have been grafted; the plan is remembered if the API server may want to try
        it."""
        if (state.request.kv_transfer_params or {}).get(NOTE_PLAN):
            self._found[state.id] = Found(state.offer.scope, candidate)
            if len(self._found) > REMEMBERED:
                self._found.popitem(last=False)
        state.report.shadow_graftable_tokens = int(
            (candidate.plan.grafted & ~candidate.plan.in_place).sum()
        )

    def try_out(self, state: RequestState, of: str) -> None:
        """A request with the prompt of an earlier one of its namespace is to graft what that would
        have: vLLM finds the same prefix as then, and nothing that has been computed since."""
        found = self._found.get(of)
        state.is_counted, state.recovery_key = True, None
        if found is not None and found.scope == state.offer.scope:
            state.candidate = replace(found.candidate, reserved=Reserved())
            self._masking.mask(state, found.candidate.num_prefix)

    def clear(self) -> None:
        """Forget all plans."""
        self._found.clear()
