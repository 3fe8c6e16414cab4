"""Reports that go ahead of the end of an answer, since a stop string may end it where the engine is not asked."""

from collections.abc import Callable, Mapping

from kvgraft.vllm.compat.reports import may_stop_early, send_ahead, stop_sending
from kvgraft.vllm.connector.known import KnownText
from kvgraft.vllm.connector.tracked import Tracked


class ReportsAhead:
    """Sends each of them with the first tokens behind the prompt.

    Args:
        known: where the prompt's blocks are named, so that the report can count them.
    """

    def __init__(self, known: KnownText) -> None:
        self._known = known
        self._due: dict[str, tuple[Tracked, int]] = {}  # with the tokens generated before

    def add(self, tracked: Tracked) -> None:
        """A request's report says from now on how it was admitted."""
        if may_stop_early(tracked.request):
            self._due[tracked.id] = tracked, tracked.request.num_output_tokens

    def send(self, num_scheduled: Mapping[str, int], blocks_of: Callable[[str], list[int]]) -> None:
        """A step was scheduled: what completes a prompt gives a token."""
        for tracked, _ in self._due.values():
            request = tracked.request
            computed = request.num_computed_tokens + num_scheduled.get(tracked.id, 0)
            if computed < request.num_prompt_tokens:
                continue
            if not tracked.whole:
                self._known.offer(tracked, blocks_of(tracked.id), request.num_prompt_tokens)
            tracked.report.registered_blocks = tracked.num_sources
            send_ahead(request, tracked.report.as_params())

    def end_of_step(self) -> None:
        """The outputs of a step have been made: those that had a token had the report."""
        for tracked, before in list(self._due.values()):
            if tracked.request.num_output_tokens > before:
                self.drop(tracked)

    def drop(self, tracked: Tracked) -> None:
        """It has been sent, or nobody waits for it."""
        if self._due.pop(tracked.id, None) is not None:
            stop_sending(tracked.request)
