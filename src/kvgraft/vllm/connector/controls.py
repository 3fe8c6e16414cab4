"""Control requests of the API server: pin, unpin and list documents; idle refresh."""

import os
from collections.abc import Sequence
from typing import Any

from kvgraft.reuse.refresh import Allowance, Refresh, TextToRead
from kvgraft.segments.pins import PinnedDocument, PinnedDocuments
from kvgraft.vllm.connector.planner import Planner
from kvgraft.vllm.connector.reporting import Reporting
from kvgraft.vllm.connector.request_state import RequestState
from kvgraft.vllm.options import CONTROL_TOKEN, READ, Control, pin_namespace
from kvgraft.vllm.pool import SharedPool

MAX_TRIES = 8  # of a text whose reading requests interrupt


class RefreshControls:
    """Counts what requests bring and graft, and carries out the control requests that read anew.

    Args:
        known: what can be grafted, and vLLM's blocks.
        share: see `Allowance`; 0: nothing is counted, and there is nothing to read.
        longest: tokens that a prompt may have.

    Raises:
        ValueError: nobody could ask for it.
    """

    def __init__(self, known: Planner, reporting: Reporting, share: float, longest: int) -> None:
        if share and not os.environ.get(CONTROL_TOKEN):
            raise ValueError(
                f"idle_refresh is {share}, but no API server of ours will ask what to read: start "
                "it with `kvgraft serve`, "
                f"or set {CONTROL_TOKEN} to a secret and VLLM_PLUGINS=kvgraft"
            )
        self._known, self._refresh, self._reporting = known, Refresh(known.index), reporting
        self._allowance, self._longest = Allowance(share), longest
        # has been handed out, and was not read to its end
        self._unfinished: TextToRead | None = None
        self._num_tries = 0

    def arrived(self, state: RequestState) -> None:
        """A request brings a prompt."""
        if not (isinstance(state.options, Control) or state.is_trial):
            self._allowance.num_brought += state.prompt_tokens

    def grafted(self, state: RequestState, pages: Sequence[int]) -> None:
        """A request grafts from these pages, which are held. What is read anew is read by the model
        itself: text that belongs to an adapter is left out."""
        if self._allowance.share and state.adapter is None:
            self._refresh.note(state.offer.scope, state.namespace, pages)

    def forget(self) -> None:
        """What has been read may be of old weights."""
        self._unfinished = None

    def ended(self, state: RequestState) -> dict[str, Any]:
        """Carry out a control request that has ended, or was aborted.

        Returns:
            `refresh`: the `tokens` to read and the `cache_salt` of their namespace; no tokens:
            there is nothing. `read`: the `num_tokens` of the prompt, if it was read to its end.
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
        left, room = self._allowance.left, self._known.pins.num_unpressed * self._known.block_size
        if left <= 0:
            return None
        text = self._unfinished
        if text is None or self._num_tries >= MAX_TRIES or len(text.tokens) > room:
            text, self._num_tries = self._refresh.choose(min(left, room), self._longest), 0
        self._unfinished, self._num_tries = text, self._num_tries + 1
        return text

    def _count(self, state: RequestState) -> dict[str, Any]:
        """Account for what was computed of a text."""
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
    """Carries out control requests: a namespace pins, deletes and lists its own segments.

    Args:
        pool: where the pinned pages lie.
        pins: what is pinned in it.
    """

    def __init__(self, pool: SharedPool, pins: PinnedDocuments, block_size: int) -> None:
        self._pool, self._pins, self._block_size = pool, pins, block_size

    def apply(self, state: RequestState, blocks: list[int]) -> dict[str, Any]:
        """Carry out a control request that has finished.

        Returns:
            `list`: all `pins` of the namespace. Others: the `pin` as it is or was, and `num_pins`
            that there are now. Or an `error` and its `status`.
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
        """Pin the full blocks of a text; uses are counted from now on, unless others have pinned
        the same blocks."""
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


def _error(status: int, text: str) -> dict[str, Any]:
    return {"error": text, "status": status}
