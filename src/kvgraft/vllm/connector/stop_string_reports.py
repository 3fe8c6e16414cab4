"""Reports that go ahead of the end of an answer, since a stop string may end it where the engine is
not asked."""

from collections.abc import Callable, Mapping

from kvgraft.vllm.compat.reports import may_stop_early, send_ahead, stop_sending
from kvgraft.vllm.connector.planner import Planner
from kvgraft.vllm.connector.request_state import RequestState


class StopStringReports:
    """Sends each of them with the first tokens behind the prompt.

    Args:
        known: where the prompt's blocks are named, so that the report can count them.
    """

    def __init__(self, known: Planner) -> None:
        self._known = known
        self._due: dict[str, tuple[RequestState, int]] = {}  # with the tokens generated before

    def add(self, state: RequestState) -> None:
        """A request's report says from now on how it was admitted."""
        if may_stop_early(state.request):
            self._due[state.id] = state, state.request.num_output_tokens

    def send(self, num_scheduled: Mapping[str, int], blocks_of: Callable[[str], list[int]]) -> None:
        """A step was scheduled: what completes a prompt gives a token."""
        for state, _ in self._due.values():
            request = state.request
            computed = request.num_computed_tokens + num_scheduled.get(state.id, 0)
            if computed < request.num_prompt_tokens:
                continue
            if not state.whole:
                self._known.offer(state, blocks_of(state.id), request.num_prompt_tokens)
            state.report.registered_blocks = state.offer.num_entries
            send_ahead(request, state.report.as_params())

    def end_of_step(self) -> None:
        """The outputs of a step have been made: those that had a token had the report."""
        for state, before in list(self._due.values()):
            if state.request.num_output_tokens > before:
                self.drop(state)

    def drop(self, state: RequestState) -> None:
        """It has been sent, or nobody waits for it."""
        if self._due.pop(state.id, None) is not None:
            stop_sending(state.request)
