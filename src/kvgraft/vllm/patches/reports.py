"""Delivery of a request's report when a stop string ends the answer.

vLLM's front end searches for stop strings. It ends the answer itself and aborts the request in the
engine, so the engine's final output never arrives. So the report is sent ahead, in the trace
headers. They are the one free-text field of an engine output that vLLM always passes on.
"""

import json
from typing import Any
from weakref import WeakKeyDictionary

# name of our entry in the trace headers of a request
HEADER = "kvgraft-report"


def may_stop_early(request: Any) -> bool:
    """Return True if a stop string may end this request's answer."""
    return bool(request.sampling_params is not None and request.sampling_params.stop)


def send_ahead(request: Any, params: dict[str, Any]) -> None:
    """Attach these `kv_transfer_params` to the request's next outputs."""
    request.trace_headers = {**(request.trace_headers or {}), HEADER: json.dumps(params)}


def stop_sending(request: Any) -> None:
    """Attach nothing to later outputs. Outputs that are already sent keep what they have."""
    request.trace_headers = _without(request.trace_headers)


class StoppedReports:
    """Front end's side: adds reports that were sent ahead to the answer's last output.

    With several answers to one prompt (`n`), the engine computes each as a request. All of them
    carry the report of the first. vLLM passes on the report of the answer that ends last, which may
    have found the first one's KV.

    Args:
        output_processor: output processor of vLLM's engine client; one of its methods is replaced
            on this instance.
    """

    def __init__(self, output_processor: Any) -> None:
        self._processor = output_processor
        self._process, output_processor.process_outputs = (
            output_processor.process_outputs,
            self.process_outputs,
        )
        # by vLLM's state of the request
        self._kept: WeakKeyDictionary[Any, dict[str, Any]] = WeakKeyDictionary()
        # by vLLM's state of all answers to one prompt
        self._of_first: WeakKeyDictionary[Any, dict[str, Any]] = WeakKeyDictionary()

    def __len__(self) -> int:
        """Number of reports kept."""
        return len(self._kept)

    def process_outputs(self, outputs: list[Any], *args: Any, **kwargs: Any) -> Any:
        """Process outputs as vLLM does, with the reports added.

        Any output may be the last one. Outputs that already have parameters of the engine keep
        them.
        """
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
    """Return the trace headers without ours."""
    return {name: value for name, value in (headers or {}).items() if name != HEADER} or None
