"""Changes of state that every server of a fleet makes, also one that starts later: pinned
documents and adapters."""

import time
from collections.abc import Iterable, Mapping
from urllib.parse import unquote

from kvgraft.fleet.requests import FleetRequest, Head, decoded

PINS, RESET = "/v1/kvgraft/pins", "/reset_prefix_cache"
LOAD, UNLOAD = "/v1/load_lora_adapter", "/v1/unload_lora_adapter"
PATHS = (PINS, RESET, LOAD, UNLOAD)  # what is asked there changes the state of a server
CHANGE_S = 120.0  # for which a server may take for one
MAX_BYTES = 1 << 28  # of all changes of segments that are known; the oldest are forgotten first
# for which it is known that a segment was deleted: longer than a server takes to start
FORGET_NS = 3600 * 10**9

Key = tuple[str, ...]  # what a change sets: its kind, and which one
ReplayedState = Mapping[Key, FleetRequest]
# in the order in which they are carried out: a segment may be of an adapter
_KINDS = (LOAD, RESET, PINS)


class StateLog:
    """The last change of each segment and each adapter, by when it was asked for
    (`FleetRequest.at`); one that removes it is a change, too. A reset takes the place of all
    changes of segments before it."""

    def __init__(self) -> None:
        self._last: dict[Key, FleetRequest] = {}

    @property
    def state(self) -> ReplayedState:
        """All of them."""
        return dict(self._last)

    def note(self, request: FleetRequest, head: Head, body: bytes) -> bool:
        """A server has answered; whether it has carried out a change."""
        if (key := _key(request, head, body)) is None:
            return False
        if self.is_new(key, request):
            self._take(key, request)
        return True

    def learn(self, others: Iterable[ReplayedState]) -> None:
        """Take in the changes of other servers."""
        for key, request in self.news(others):
            self._take(key, request)

    def is_new(self, key: Key, request: FleetRequest) -> bool:
        """Whether nothing that was asked for later is known."""
        return request.at > max(self._at(key), self._at((RESET,)) if key[0] == PINS else 0)

    def news(self, others: Iterable[ReplayedState]) -> list[tuple[Key, FleetRequest]]:
        """Return the changes that this server has not made, in an order that works."""
        last: dict[Key, FleetRequest] = {}
        for key, request in (item for state in others for item in state.items()):
            if self.is_new(key, request) and (key not in last or request.at > last[key].at):
                last[key] = request
        return sorted(last.items(), key=lambda item: (_KINDS.index(item[0][0]), item[1].at))

    def _at(self, key: Key) -> int:
        last = self._last.get(key)
        return last.at if last is not None else 0

    def _take(self, key: Key, request: FleetRequest) -> None:
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
    """Whether a change removes something: where it is not, that is no failure."""
    return request.method == "DELETE" or request.target.startswith(UNLOAD)


def _key(request: FleetRequest, head: Head, body: bytes) -> Key | None:
    """What was set, as the server names it; None: nothing, or it was refused."""
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
