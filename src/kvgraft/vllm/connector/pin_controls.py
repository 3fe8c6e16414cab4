"""What the API server asks of the pinned documents: to pin a text, to delete it, to list what there
is."""

from typing import Any

from kvgraft.segments.pins import PinnedDocument, PinnedDocuments
from kvgraft.vllm.connector.request_state import RequestState
from kvgraft.vllm.options import Control, pin_namespace
from kvgraft.vllm.pool import SharedPool


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
