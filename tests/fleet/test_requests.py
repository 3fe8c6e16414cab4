"""By which text a request is routed, and whose it is."""

import numpy as np
import pytest
from starlette.responses import StreamingResponse

from kvgraft.core.fingerprints import Fingerprints
from kvgraft.fleet.ingress import with_headers
from kvgraft.fleet.replica_contents import ReplicaContents
from kvgraft.fleet.requests import (
    MAX_CHARACTERS,
    MAX_TEXTS,
    Head,
    decoded,
    end_to_end,
    narrowed_by,
    scope_of,
    texts_of,
)  # fmt: skip
from kvgraft.fleet.router_view import RouterView

SECRET = bytes(range(32))
PARTS = [
    {"type": "text", "text": "b"},
    {"type": "image_url", "image_url": {"url": "c"}},
    {"type": "text", "text": "d"},
]


@pytest.mark.parametrize(
    ("request_", "texts"),
    [
        ({"prompt": "a"}, ["a"]),
        ({"prompt": ["a", "b"]}, ["a", "b"]),
        ({"prompt": [1, 2, 3]}, []),
        (
            {"messages": [{"role": "system", "content": "a"}, {"role": "user", "content": PARTS}]},
            ["a", "b", "d"],
        ),
        ({"instructions": "a", "input": "b"}, ["a", "b"]),
        ({"input": [{"role": "user", "content": [{"type": "input_text", "text": "a"}]}]}, ["a"]),
        ({"messages": None, "prompt": {}}, []),
        ({}, []),
    ],
)
def test_the_texts_of_a_prompt(request_: dict[str, object], texts: list[str]):
    assert texts_of(request_) == texts


def test_deep_long_and_many_texts_are_no_texts():
    """Paired: those that are just few, short and flat enough."""
    deep: object = "a"
    for _ in range(100_000):
        deep = [deep]
    assert texts_of({"prompt": deep}) == ["a"]
    assert len(texts_of({"prompt": [""] * MAX_TEXTS})) == MAX_TEXTS
    assert texts_of({"prompt": [""] * (MAX_TEXTS + 1)}) == []
    assert texts_of({"prompt": "a" * MAX_CHARACTERS}) == ["a" * MAX_CHARACTERS]
    assert texts_of({"prompt": "a" * MAX_CHARACTERS, "input": "a"}) == []


@pytest.mark.parametrize(
    ("request_", "parts"),
    [
        ({"model": "base"}, (b"", b"", b"")),
        ({}, (b"", b"", b"")),
        ({"model": "adapter", "cache_salt": "s"}, (b"", b"s", b"adapter")),
        ({"kv_transfer_params": {"kvgraft": {"namespace": "n"}}}, (b"n", b"", b"")),
        (
            {"model": {}, "cache_salt": [], "kv_transfer_params": {"kvgraft": {"namespace": {}}}},
            (b"", b"", b""),
        ),
        (
            {"model": ["base"], "cache_salt": 1, "kv_transfer_params": {"kvgraft": 1}},
            (b"", b"", b""),
        ),
        (
            {"model": "\x00", "cache_salt": "\ud800", "kv_transfer_params": [1]},
            (b"", b"?", b"\x00"),
        ),
    ],
)
def test_what_narrows_a_scope_is_text_whatever_is_given(
    request_: dict[str, object], parts: tuple[bytes, ...]
):
    assert narrowed_by(request_, {"base"}) == parts


@pytest.mark.parametrize("body", [b"", b"{", b"[1]", b"\xff", b"[" * 100_000])
def test_a_body_that_nobody_understands_has_no_text(body: bytes):
    assert decoded(body) == {}


def test_what_vllm_understands_is_understood():
    assert decoded(b'{"prompt": "a", "temperature": NaN}')["prompt"] == "a"


def test_a_scope_is_whose_its_parts_are_and_of_its_secret():
    scopes = {
        scope_of(secret, *parts)
        for secret in (SECRET, SECRET[::-1])
        for parts in ([b"a", b"b"], [b"ab", b""], [b"", b"ab"], [b"a"], [b"a", b"b", b""])
    }
    assert len(scopes) == 10
    assert scope_of(SECRET, b"a", b"b") == scope_of(SECRET, b"a", b"b")


def test_a_sketch_tells_nothing_to_who_guesses_in_another_scope():
    """Paired: the same text, guessed under the scope of its owner and under those of others."""
    text = np.random.default_rng(0).integers(97, 123, 20_000, np.uint8).tobytes()
    held = ReplicaContents(1e6)
    held.add(Fingerprints.of(text, scope_of(SECRET, b"alice", b"", b"", b"")))
    known = RouterView[str]()
    known.update("server", held.sketches()[0])

    def share_of(scope: bytes) -> float:
        return float(known.where(Fingerprints.of(text, scope).values, ["server"]).mean())

    assert share_of(scope_of(SECRET, b"alice", b"", b"", b"")) == 1.0
    for other in (
        [b"bob", b"", b"", b""],
        [b"alice", b"namespace", b"", b""],
        [b"alice", b"", b"salt", b""],
    ):
        assert share_of(scope_of(SECRET, *other)) < 0.05
    assert share_of(scope_of(SECRET[::-1], b"alice", b"", b"", b"")) < 0.05
    own = Fingerprints.of(text, scope_of(SECRET, b"alice", b"", b"", b""))
    others = Fingerprints.of(text, scope_of(SECRET, b"bob", b"", b"", b""))
    assert own.places.tolist() != others.places.tolist()  # not even the places are the same


def test_an_answer_is_a_stream_by_its_type():
    assert Head(200, (("Content-Type", "text/event-stream; charset=utf-8"),)).is_stream
    assert not Head(200, (("content-type", "application/json"),)).is_stream
    assert not Head(200, ()).is_stream


def test_headers_of_one_connection_are_not_passed_on():
    """Paired: all others are, as often as they are there."""
    headers = [("Set-Cookie", "a"), ("Set-Cookie", "b"), ("X-Other", "c"), ("Date", "d")]
    dropped = [
        ("Connection", "close, X-Hop"),
        ("connection", "x-next"),
        ("x-hop", "1"),
        ("X-Next", "2"),
        ("TE", "3"),
    ]
    assert end_to_end([*dropped, *headers]) == tuple(headers)
    assert end_to_end([*headers, *dropped], "date", "x-other") == tuple(headers[:2])


def test_a_stream_has_all_headers_of_its_server():
    head = Head(
        200, (("content-type", "text/event-stream"), ("set-cookie", "a"), ("set-cookie", "b"))
    )
    answer = with_headers(StreamingResponse([]), head)
    assert answer.headers.getlist("set-cookie") == ["a", "b"]
    assert answer.headers.getlist("content-type") == ["text/event-stream"]
