"""What a server that starts later must be told, and what a client is told of a change."""

import json
import time

import pytest

from kvgraft.fleet.ingress import together
from kvgraft.fleet.requests import FleetRequest, Head
from kvgraft.fleet.state_log import LOAD, PINS, RESET, UNLOAD, StateLog

DONE, REFUSED = Head(200, ()), Head(409, ())


def change(at: int, target: str, method: str = "POST", body: object = None) -> FleetRequest:
    return FleetRequest(method, target, (), json.dumps(body).encode(), at=at)


def segment(name: str, tenant: str = "t", model: str | None = None) -> bytes:
    """As a server answers."""
    place = {"tenant": tenant, "namespace": ""} | ({"model": model} if model else {})
    return json.dumps({**place, "pin": {"name": name}, "num_pins": 1}).encode()


def pin(changes: StateLog, at: int, name: str, head: Head = DONE, **place: str) -> FleetRequest:
    asked = change(at, PINS, body={"name": name, "text": "a"})
    changes.note(asked, head, segment(name, **place))
    return asked


def told(changes: StateLog) -> list[FleetRequest]:
    """To a server that knows nothing."""
    return [request for _, request in StateLog().news([changes.state])]


def test_the_last_change_of_each_is_told():
    changes, now = StateLog(), time.time_ns()
    pin(changes, now, "a")
    last = pin(changes, now + 1, "a")
    others = [pin(changes, now + 2, "a", tenant="u"), pin(changes, now + 3, "a", model="m")]
    pin(changes, now + 4, "b", REFUSED)
    assert told(changes) == [last, *others]
    deleted = change(now + 5, f"{PINS}/a?tenant=t", "DELETE")
    assert changes.note(deleted, DONE, segment("a"))
    assert told(changes) == [*others, deleted]


def test_adapters_come_before_segments():
    changes = StateLog()
    of_adapter = pin(changes, 1, "a", model="m")
    loaded = change(2, LOAD, body={"lora_name": "m", "lora_path": "/m"})
    assert changes.note(loaded, DONE, b"Success: LoRA adapter 'm' added successfully.")
    assert told(changes) == [loaded, of_adapter]
    unloaded = change(3, UNLOAD, body={"lora_name": "m"})
    changes.note(unloaded, DONE, b"")
    assert told(changes) == [unloaded, of_adapter]


def test_a_reset_is_the_end_of_segments_before_it():
    changes, other = StateLog(), StateLog()
    pin(changes, 1, "a")
    pin(other, 1, "a")
    assert not changes.note(change(2, RESET), DONE, b'{"success": false}')
    assert len(told(changes)) == 1
    reset = change(2, RESET)
    assert changes.note(reset, DONE, b'{"success": true}')
    later = pin(changes, 3, "b")
    assert told(changes) == [reset, later]
    assert not changes.news([other.state])
    assert [request for _, request in other.news([changes.state])] == [reset, later]


def test_of_several_who_were_told_the_last_counts():
    one, two, new = StateLog(), StateLog(), StateLog()
    pin(one, 1, "a")
    last = pin(two, 2, "a")
    assert [request for _, request in new.news([one.state, two.state])] == [last]
    new.learn([two.state, one.state])
    assert not new.news([one.state, two.state])


def test_what_is_known_is_bounded(monkeypatch: pytest.MonkeyPatch):
    """Paired: what just fits."""
    monkeypatch.setattr(
        "kvgraft.fleet.state_log.MAX_BYTES", 2 * len(change(0, PINS, body={"name": "a"}).body)
    )
    changes = StateLog()
    for at in (1, 2, 3):
        changes.note(change(at, PINS, body={"name": "a"}), DONE, segment(str(at)))
        assert len(changes.state) == min(at, 2)
    now = time.time_ns()
    for at in (now - 2 * 3600 * 10**9, now):
        changes.note(change(at, PINS, "DELETE", ""), DONE, segment(f"deleted {at}"))
    assert [key[-1] for key in changes.state if key[-1].startswith("deleted")] == [f"deleted {now}"]


@pytest.mark.parametrize(
    ("answers", "status", "says"),
    [
        ([(DONE, b"a"), (DONE, b"b")], 200, "a"),
        ([(REFUSED, b"a"), (REFUSED, b"b")], 409, "a"),
        (
            [(DONE, b""), (REFUSED, b'{"error": {"message": "full"}}')],
            409,
            "1 of 2 servers refuse this, the others",
        ),
        ([(DONE, b""), (REFUSED, b'{"error": {"message": "full"}}')], 409, "done it: full"),
        (
            [(DONE, b""), TimeoutError(), (REFUSED, b"")],
            503,
            "1 of 3 servers have done this, 1 failed or did not",
        ),
        ([], 503, "no server is there"),
    ],
)
def test_what_a_client_is_told_of_a_change(answers: list[object], status: int, says: str):
    answer = together(answers)
    assert answer.status_code == status
    assert says in answer.body.decode()
