"""Log of state changes (pinned documents and adapters) that every server of a fleet must make."""

import time
from collections.abc import Iterable, Mapping
from urllib.parse import unquote

from kvgraft.fleet.requests import FleetRequest, Head, decoded

PINS, RESET = "/v1/kvgraft/pins", "/reset_prefix_cache"
LOAD, UNLOAD = "/v1/load_lora_adapter", "/v1/unload_lora_adapter"
# routes that change the state of a server
PATHS = (PINS, RESET, LOAD, UNLOAD)
# maximum time of one change on one server
CHANGE_S = 120.0
# bytes of all logged pins; the oldest are forgotten first
MAX_BYTES = 1 << 28
# time for which a deletion is remembered; longer than a server takes to start
FORGET_NS = 3600 * 10**9

# identifies what a change sets: its kind and the object
Key = tuple[str, ...]
ReplayedState = Mapping[Key, FleetRequest]
# the order of execution: a pin may need an adapter
_KINDS = (LOAD, RESET, PINS)


class StateLog:
    """Log of the last change of each pinned document and each adapter, by time of request.

    A removal is a change, too. A reset of the prefix cache replaces all earlier changes of pins.
    """

    def __init__(self) -> None:
        self._last: dict[Key, FleetRequest] = {}

    @property
    def state(self) -> ReplayedState:
        """Copy of all logged changes."""
        return dict(self._last)

    def note(self, request: FleetRequest, head: Head, body: bytes) -> bool:
        """Log a request that a server has answered.

        Returns:
            Whether the server has made a change.
        """
        if (key := _key(request, head, body)) is None:
            return False
        if self.is_new(key, request):
            self._take(key, request)
        return True

    def learn(self, others: Iterable[ReplayedState]) -> None:
        """Add the changes of other servers."""
        for key, request in self.news(others):
            self._take(key, request)

    def is_new(self, key: Key, request: FleetRequest) -> bool:
        """Return whether no later change of the same object, and no later reset, is logged."""
        return request.at > max(self._at(key), self._at((RESET,)) if key[0] == PINS else 0)

    def news(self, others: Iterable[ReplayedState]) -> list[tuple[Key, FleetRequest]]:
        """Return the changes that this server has not made, in the order in which to make them."""
        last: dict[Key, FleetRequest] = {}
        for key, request in (item for state in others for item in state.items()):
            if self.is_new(key, request) and (key not in last or request.at > last[key].at):
                last[key] = request
        return sorted(last.items(), key=lambda item: (_KINDS.index(item[0][0]), item[1].at))

    def _at(self, key: Key) -> int:
        """Return the time of the last change of an object; 0 if there is none."""
        last = self._last.get(key)
        return last.at if last is not None else 0

    def _take(self, key: Key, request: FleetRequest) -> None:
        """Log a change, and forget changes that are superseded, expired or beyond MAX_BYTES."""
        self._last[key] = request
        room, since = MAX_BYTES, time.time_ns() - FORGET_NS
        for key, last in sorted(self._last.items(), key=lambda item: -item[1].at):
            if key[0] == PINS:
                room -= len(last.body)
                if (
                    room < 0
                    or last.at < self._at((RESET,))
                    or (last.method == "DELETE" and last.at < since)
                ):
                    del self._last[key]


def removes(request: FleetRequest) -> bool:
    """Return whether a change removes something; a server without that object has not failed."""
    return request.method == "DELETE" or request.target.startswith(UNLOAD)


def _key(request: FleetRequest, head: Head, body: bytes) -> Key | None:
    """Return the key of the change that a server made; None if it refused the request or changed
    nothing."""
    path, answer = unquote(request.target.partition("?")[0]), decoded(body)
    if head.status >= 300:
        return None

    if path.startswith(PINS):
        pinned = answer.get("pin") or {}
        place = (answer.get("tenant"), answer.get("namespace"), answer.get("model", ""))
        return (PINS, *map(str, place), str(pinned.get("name")))
    if path == RESET:
        return (RESET,) if answer.get("success") else None
    return (LOAD, str(decoded(request.body).get("lora_name"))) if path in (LOAD, UNLOAD) else None
