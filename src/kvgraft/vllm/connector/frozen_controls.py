"""What the API server asks of the frozen pool: to freeze a text, to delete it, to list what there is."""

from typing import Any

from kvgraft.segments.frozen import FrozenEntry, FrozenPool
from kvgraft.vllm.connector.request_state import RequestState
from kvgraft.vllm.options import Control, frozen_namespace
from kvgraft.vllm.pool import SharedPool


class FrozenControls:
    """Carries out control requests: a namespace freezes, deletes and lists its own segments.

    Args:
        pool: where the frozen pages lie.
        frozen: what is frozen in it.
    """

    def __init__(self, pool: SharedPool, frozen: FrozenPool, block_size: int) -> None:
        self._pool, self._frozen, self._block_size = pool, frozen, block_size

    def apply(self, state: RequestState, blocks: list[int]) -> dict[str, Any]:
        """Carry out a control request that has finished.

        Returns:
            `list`: all `segments` of the namespace. Others: the `segment` as it is or was, and `num_segments` that
            there are now. Or an `error` and its `status`.
        """
        control = state.options
        if not isinstance(control, Control):
            raise TypeError(f"{control!r} is no control operation")
        namespace = frozen_namespace(state.namespace, control.adapter)
        if control.op == "freeze" and not state.has_known_weights:
            return _error(
                409, f"the weights of adapter {control.adapter!r} are not known, or others were loaded just now"
            )
        if control.op == "freeze":
            num_blocks = state.request.num_prompt_tokens // self._block_size
            return self._freeze(control, namespace, blocks[:num_blocks])
        entries = self._frozen.list(namespace)
        if control.op == "list":
            return {"segments": [self._describe(entry) for entry in entries]}
        named = next((entry for entry in entries if entry.name == control.name), None)
        if named is None:
            return _error(404, f"no frozen segment {control.name!r}")
        self._frozen.delete(control.name, namespace)
        return {"segment": self._describe(named), "num_segments": len(entries) - 1}

    def _freeze(self, control: Control, namespace: str, pages: list[int]) -> dict[str, Any]:
        """Pin the full blocks of a text; uses are counted from now on, unless others have frozen the same blocks."""
        if not pages:
            return _error(400, f"nothing to freeze: the text fills no block of {self._block_size} tokens")
        held = self._frozen.pages
        self._pool.hit_counts[[page for page in pages if page not in held]] = 0
        try:
            entry = self._frozen.insert(control.name, namespace, pages, control.owner or namespace, control.quota)
        except ValueError as error:
            return _error(409, str(error))
        return {"segment": self._describe(entry), "num_segments": len(self._frozen.list(namespace))}

    def _describe(self, entry: FrozenEntry) -> dict[str, Any]:
        return {
            "name": entry.name,
            "num_tokens": len(entry.pages) * self._block_size,
            "num_blocks": len(entry.pages),
            "num_shed": entry.num_shed,
            "hits": int(self._pool.hit_counts[list(entry.pages)].max(initial=0)),
        }


def _error(status: int, text: str) -> dict[str, Any]:
    return {"error": text, "status": status}
