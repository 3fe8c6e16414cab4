"""How the report of a request gets past a stop string. vLLM's front end looks for these, ends the
answer by itself and aborts the request in the engine, whose last word on it never comes. So the
report goes ahead, in the one field of an engine output that is free text and that vLLM passes on
whatever its settings are."""

import json
from typing import Any
from weakref import WeakKeyDictionary

HEADER = "kvgraft-report"  # among the trace headers of a request in the engine


def may_stop_early(request: Any) -> bool:
    """Whether a stop string may end this request's answer."""
    return bool(request.sampling_params is not None and request.sampling_params.stop)


def send_ahead(request: Any, params: dict[str, Any]) -> None:
    """Let the request's next outputs carry these `kv_transfer_params`."""
    request.trace_headers = {**(request.trace_headers or {}), HEADER: json.dumps(params)}


def stop_sending(request: Any) -> None:
    """Let them carry nothing of ours any more. What is on its way keeps what it has."""
    request.trace_headers = _without(request.trace_headers)


class StoppedReports:
    """The front end's side: keeps what went ahead, for as long as the answer lasts, and hands it
    out with its end. Of several answers to one prompt (`n`), which the engine computes as requests
    of their own, all have the report of the first: vLLM passes on that of whichever ends last, and
    this one may have found the first one's KV.

    Args:
        output_processor: that of vLLM's engine client, one entrance of which is replaced on this
            instance.
    """

    def __init__(self, output_processor: Any) -> None:
        self._processor = output_processor
        self._process, output_processor.process_outputs = (
            output_processor.process_outputs,
            self.process_outputs,
        )
        # by vLLM's state of the request
        self._kept: WeakKeyDictionary[Any, dict[str, Any]] = WeakKeyDictionary()
        # by that of all answers
        self._of_first: WeakKeyDictionary[Any, dict[str, Any]] = WeakKeyDictionary()

    def __len__(self) -> int:
        """Reports that are kept."""
        return len(self._kept)

    def process_outputs(self, outputs: list[Any], *args: Any, **kwargs: Any) -> Any:
        """As vLLM's own, which it calls. Any output may turn out to be the last one, but by the
        engine's leave only one that has parameters of its own."""
        for output in outputs:
            state = self._processor.request_states.get(output.request_id)
            if state is None:
                continue
            if output.trace_headers and HEADER in output.trace_headers:
                self._kept[state] = json.loads(output.trace_headers[HEADER])
                output.trace_headers = _without(output.trace_headers)
            if output.kv_transfer_params is None:
                output.kv_transfer_params = self._kept.get(state)
            if (parent := state.parent_req) is not None:
                if state.request_index == 0 and output.kv_transfer_params is not None:
                    self._of_first[parent] = output.kv_transfer_params
                output.kv_transfer_params = self._of_first.get(parent, output.kv_transfer_params)
        return self._process(outputs, *args, **kwargs)


def _without(headers: Any) -> dict[str, str] | None:
    """Trace headers that are not ours."""
    return {name: value for name, value in (headers or {}).items() if name != HEADER} or None
