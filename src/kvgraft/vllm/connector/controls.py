"""Control requests of the API server: pinned documents and idle refresh."""

import os
from collections.abc import Sequence
from typing import Any

from kvgraft.core.admission import Admission
from kvgraft.core.pins import PinnedDocument
from kvgraft.core.refresh import Allowance, Refresh, TextToRead
from kvgraft.vllm.connector.reporting import Reporting
from kvgraft.vllm.connector.request_state import RequestState
from kvgraft.vllm.options import CONTROL_TOKEN, KEY, READ, SCORE, Control, pin_namespace
from kvgraft.vllm.pool import SharedPool

# attempts to compute a text before another one is chosen; requests interrupt these attempts
MAX_TRIES = 8


class RefreshControls:
    """Carry out the control requests of the idle refresh.

    The idle refresh recomputes popular approximate text exactly. Its budget grows with the prompt
    tokens that requests bring.

    Args:
        admission: chooses from its index.
        reporting: counts the refreshed tokens.
        share: budget as a share of the prompt tokens (see `Allowance`); 0 disables the refresh.
        longest: maximum number of tokens in a prompt.

    Raises:
        ValueError: `share` is above 0, but no API server of KVGraft can send these control
            requests.
    """

    def __init__(
        self,
        admission: Admission[SharedPool],
        reporting: Reporting,
        share: float,
        longest: int,
    ) -> None:
        if share and not os.environ.get(CONTROL_TOKEN):
            raise ValueError(
                f"idle_refresh is {share}, but no API server of ours will ask what to read: start "
                "it with `kvgraft serve`, "
                f"or set {CONTROL_TOKEN} to a secret and VLLM_PLUGINS=kvgraft"
            )
        self._admission, self._reporting = admission, reporting
        self._refresh = Refresh(admission.index)
        self._allowance, self._longest = Allowance(share), longest
        # the last text handed out, until it is computed to its end
        self._unfinished: TextToRead | None = None
        self._num_tries = 0

    def arrived(self, state: RequestState) -> None:
        """Count the prompt tokens of a new request."""
        if not (isinstance(state.options, Control) or state.is_trial):
            self._allowance.num_brought += state.prompt_tokens

    def grafted(self, state: RequestState, pages: Sequence[int]) -> None:
        """Record the pages that a request grafts from. They must be held.

        The refresh runs on the base model, so text of adapters is left out.
        """
        if self._allowance.share and state.adapter is None:
            self._refresh.note(state.provenance.scope, state.namespace, pages)

    def forget(self) -> None:
        """Forget the unfinished text, because it may come from old weights."""
        self._unfinished = None

    def ended(self, state: RequestState) -> dict[str, Any]:
        """Carry out a control request that has ended or was aborted.

        Returns:
            For `refresh`: the `tokens` to compute and the `cache_salt` of their namespace. Empty
            `tokens` mean that there is nothing to do. For `read`: the `num_tokens` of the prompt if
            it was computed to its end.
        """
        if isinstance(state.options, Control) and state.options.op == READ:
            return self._count(state)
        text = self._next()
        return (
            {"tokens": text.tokens.tolist(), "cache_salt": text.namespace}
            if text
            else {"tokens": []}
        )

    def _next(self) -> TextToRead | None:
        """Return the text to compute next, or None.

        An unfinished text comes first, up to `MAX_TRIES` times.
        """
        left, size = self._allowance.left, self._admission.pool.block_size
        room = self._admission.pins.num_unpressed * size
        if left <= 0:
            return None
        text = self._unfinished
        if text is None or self._num_tries >= MAX_TRIES or len(text.tokens) > room:
            text, self._num_tries = self._refresh.choose(min(left, room), self._longest), 0
        self._unfinished, self._num_tries = text, self._num_tries + 1
        return text

    def _count(self, state: RequestState) -> dict[str, Any]:
        """Count the computed tokens of a text, and report the text if it is complete."""
        request, unfinished = state.request, self._unfinished
        if not state.admitted:
            return {}

        num_tokens = int(request.num_prompt_tokens)
        num_read = max(
            0, min(int(request.num_computed_tokens), num_tokens) - state.report.prefix_tokens
        )
        self._allowance.num_read += num_read
        self._reporting.idle_refresh(num_read)
        if not request.num_output_tokens:
            return {}

        if unfinished is not None and num_tokens >= len(unfinished.tokens):
            self._unfinished = None

        return {"num_tokens": num_tokens}


class PinControls:
    """Carry out control requests that pin, delete and list the documents of a namespace.

    Args:
        admission: has the pool and the documents pinned in it.
    """

    def __init__(self, admission: Admission[SharedPool]) -> None:
        self._pool, self._pins = admission.pool, admission.pins
        self._block_size = admission.pool.block_size

    def apply(self, state: RequestState, blocks: list[int]) -> dict[str, Any]:
        """Carry out a control request that has finished.

        Args:
            blocks: blocks of the request in the main KV cache group.

        Returns:
            For `list`: all `pins` of the namespace. For other operations: the `pin` and the new
            `num_pins`. On failure: an `error` and its HTTP `status`.
        """
        control = state.options
        if not isinstance(control, Control):
            raise TypeError(f"{control!r} is no control operation")

        namespace = pin_namespace(state.namespace, control.adapter)
        if control.op == "pin" and not state.has_known_weights:
            return _error(
                409,
                f"the weights of adapter {control.adapter!r} are not known, or others were loaded "
                "just now",
            )

        if control.op == "pin":
            num_blocks = state.request.num_prompt_tokens // self._block_size
            return self._pin(control, namespace, blocks[:num_blocks])

        entries = self._pins.list(namespace)
        if control.op == "list":
            return {"pins": [self._describe(entry) for entry in entries]}

        named = next((entry for entry in entries if entry.name == control.name), None)
        if named is None:
            return _error(404, f"no pinned document {control.name!r}")

        self._pins.delete(control.name, namespace)
        return {"pin": self._describe(named), "num_pins": len(entries) - 1}

    def _pin(self, control: Control, namespace: str, pages: list[int]) -> dict[str, Any]:
        """Pin the full blocks of a text.

        Hits are counted from 0, except for blocks that are pinned already.
        """
        if not pages:
            return _error(
                400, f"nothing to pin: the text fills no block of {self._block_size} tokens"
            )

        held = self._pins.pages
        self._pool.hit_counts[[page for page in pages if page not in held]] = 0
        try:
            entry = self._pins.insert(
                control.name, namespace, pages, control.owner or namespace, control.quota
            )
        except ValueError as error:
            return _error(409, str(error))

        return {"pin": self._describe(entry), "num_pins": len(self._pins.list(namespace))}

    def _describe(self, entry: PinnedDocument) -> dict[str, Any]:
        return {
            "name": entry.name,
            "num_tokens": len(entry.pages) * self._block_size,
            "num_blocks": len(entry.pages),
            "num_shed": entry.num_shed,
            "hits": int(self._pool.hit_counts[list(entry.pages)].max(initial=0)),
        }


class Controls:
    """Carry out the control requests of the API server; arguments as for `RefreshControls`."""

    def __init__(
        self,
        admission: Admission[SharedPool],
        reporting: Reporting,
        share: float,
        longest: int,
    ) -> None:
        self.refresh = RefreshControls(admission, reporting, share, longest)
        self._pins = PinControls(admission)

    def apply(
        self, state: RequestState, control: Control, blocks: list[int]
    ) -> dict[str, Any] | None:
        """Carry out a control request that has ended.

        Args:
            blocks: blocks of the request in the main KV cache group.

        Returns:
            `kv_transfer_params` of the response; None if there is nothing to report.
        """
        if control.is_idle_refresh:
            return {KEY: self.refresh.ended(state)}
        if control.op == SCORE or not state.request.num_output_tokens:
            return None
        return {KEY: self._pins.apply(state, blocks)}


def _error(status: int, text: str) -> dict[str, Any]:
    return {"error": text, "status": status}
