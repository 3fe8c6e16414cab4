"""Shared namespaces inside vLLM: who is let in finds their text and leaves nothing in them."""

from collections.abc import Sequence
from typing import Any

import pytest
from engines import BLOCK, EVERYTHING, NAIVE, OFF, Answer, Ask, words
from hosts import Host
from processes import HostProcess

from kvgraft.vllm.namespace_grants import GRANTED, granted_params, granted_salts
from kvgraft.vllm.options import CONTROL_TOKEN, Control

DOCUMENT = words(300, 1)
PROMPT = words(10, 2) + DOCUMENT


@pytest.fixture(autouse=True)
def _token(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(CONTROL_TOKEN, "a token of the test's own")


def send(
    host: Host, prompt: Sequence[int], options: Any, salt: str | None, granted: Any, **sampling: Any
) -> Answer:
    """Ask with these parameters of the API server's."""
    params = {"kvgraft": options, GRANTED: granted} if granted is not None else {"kvgraft": options}
    name = host.add(
        Ask(prompt, options, salt), extra_args={"kv_transfer_params": params}, **sampling
    )
    [answer] = host.finish(name)
    return answer


def ask(
    host: Host,
    prompt: Sequence[int],
    options: Any = NAIVE,
    salt: str = "a",
    shared: Sequence[str] = (),
) -> Answer:
    return send(host, prompt, options, salt, granted_params(salt, shared))


def pin(host: Host, text: list[int], salt: str, name: str = "manual") -> None:
    host.ask(Ask(text, Control("pin", name).as_params()["kvgraft"], salt, max_tokens=1), limit=200)


def segments(host: Host, salt: str) -> list[dict[str, Any]]:
    [answer] = host.ask(
        Ask([5], Control("list").as_params()["kvgraft"], salt, max_tokens=1), limit=200
    )
    return answer.report["pins"]


def test_who_is_let_in_finds_the_text_and_nobody_else(host: Host, plain: HostProcess):
    pin(host, DOCUMENT, "wiki")
    for shared in ((), ("law",), ("wik",)):
        stranger = ask(host, PROMPT, EVERYTHING, shared=shared)
        assert (stranger.cached, stranger.report["reason"]) == (0, "no_known_text")
        host.forget()
        pin(host, DOCUMENT, "wiki")
    reader = ask(host, PROMPT, EVERYTHING, shared=("law", "wiki"))
    assert reader.grafted == 288
    assert [stranger.tokens, reader.tokens] == plain.tokens(PROMPT, PROMPT)
    assert [segment["hits"] for segment in segments(host, "wiki")] == [1]


def test_physical_blocks_are_nobody_else_s(host: Host):
    """Also where the shared text begins the prompt: it is copied, and only its owner has it as it
    stands."""
    pin(host, DOCUMENT, "wiki")
    reader = ask(host, DOCUMENT, shared=("wiki",))
    assert (reader.report["prefix_tokens"], reader.grafted) == (0, 288)
    assert host.ask(Ask(DOCUMENT, OFF, "wiki"))[0].cached == 288


def test_what_a_reader_leaves_is_its_own(host: Host):
    pin(host, DOCUMENT, "wiki")
    mine = words(200, 3)
    ask(host, mine, shared=("wiki",))
    for salt, shared in (("b", ("wiki",)), ("wiki", ()), ("c", ())):
        assert ask(host, words(9, 4) + mine, salt=salt, shared=shared).cached == 0
    assert ask(host, words(9, 4) + mine).grafted == 192
    assert [segment["name"] for segment in segments(host, "wiki")] == ["manual"]


def test_own_and_shared_text_in_one_prompt(host: Host, plain: HostProcess):
    texts = {salt: words(100, seed) for seed, salt in enumerate(("a", "wiki", "law", "hidden"), 10)}
    for salt, text in texts.items():
        host.read(text, salt=salt)
    prompt = [token for text in texts.values() for token in words(5, 20) + text]
    answer = ask(host, prompt, EVERYTHING, shared=("wiki", "law"))
    assert answer.grafted == 3 * 96
    assert [answer.tokens] == plain.tokens(prompt)
    assert ask(host, prompt, OFF, shared=("wiki", "law")).grafted == 0


def test_documents_of_which_a_part_is_kept_may_be_shared(host: Host):
    text = words(15 * BLOCK, 1)
    prompt = words(9, 5) + text + words(20, 6)
    pin(host, text, "wiki")
    assert ask(host, prompt, {"policy": "condense"}).report["reason"] == "no_known_text"
    host.forget()
    pin(host, text, "wiki")
    assert ask(host, prompt, {"policy": "condense"}, shared=("wiki",)).report["kept_tokens"] < len(
        text
    )


def test_a_reader_neither_sheds_nor_deletes_what_it_reads(host: Host):
    """Above the watermark, 85 of 95 blocks, it sheds its own text."""
    pin(host, words(20 * BLOCK, 1), "wiki")
    pin(host, words(10 * BLOCK, 2), "a", "notes")
    deletion = Control("delete", "manual").as_params()["kvgraft"]
    assert host.ask(Ask([5], deletion, "a", max_tokens=1))[0].report["status"] == 404
    ask(host, words(60 * BLOCK - 10, 3), OFF, shared=("wiki",))
    assert [segment["num_shed"] for segment in segments(host, "a")] == [5]
    assert [(segment["num_blocks"], segment["num_shed"]) for segment in segments(host, "wiki")] == [
        (20, 0)
    ]


@pytest.mark.parametrize(
    ("salt", "shared", "goes_on"),
    [("a", ("wiki",), True), ("a", (), False), ("a", ("law",), False), ("b", ("wiki",), False)],
)
def test_only_who_reads_the_same_goes_on_with_what_was_left(
    host: Host, salt: str, shared: tuple[str, ...], goes_on: bool
):
    pin(host, DOCUMENT, "wiki")
    assert ask(host, PROMPT, shared=("wiki",)).grafted == 288
    answer = ask(host, PROMPT + words(40, 7), salt=salt, shared=shared)
    assert answer.report["prefix_tokens"] == 0
    assert (answer.report["continued_tokens"] > 250) == goes_on


def forged(what: str, salt: str) -> Any:
    honest = granted_params(salt, ["wiki"])
    return {
        "for another namespace": granted_params("b", ["wiki"]),
        "for other text": honest | {"salts": ["wiki", "law"]},
        "without a proof": {"salts": ["wiki"]},
        "with an empty one": honest | {"proof": ""},
        "with none": honest | {"proof": None},
        "with more": honest | {"more": 1},
        "no list": honest | {"salts": "wiki"},
        "no object": ["wiki"],
        "names": "wiki",
    }[what]


@pytest.mark.parametrize(
    "what",
    [
        "for another namespace",
        "for other text",
        "without a proof",
        "with an empty one",
        "with none",
        "with more",
        "no list",
        "no object",
        "names",
    ],
)
def test_a_forged_grant_is_no_grant(host: Host, plain: HostProcess, what: str):
    host.read(DOCUMENT, salt="wiki")
    answer = send(host, PROMPT, NAIVE, "a", forged(what, "a"))
    assert (answer.cached, answer.report["reason"]) == (0, "invalid_params")
    assert [answer.tokens] == plain.tokens(PROMPT)


def test_without_the_api_server_nothing_is_shared(host: Host):
    """A client of plain vLLM that names what only `kvgraft serve` grants is told so."""
    host.read(DOCUMENT, salt="wiki")
    answer = send(host, PROMPT, NAIVE | {"shared": ["wiki"]}, "a", None)
    assert (answer.cached, answer.report["reason"]) == (0, "invalid_params")
    assert send(host, PROMPT, NAIVE | {"shared": []}, "wiki", None).grafted == 288


def test_without_a_token_in_the_environment_nobody_may_grant(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.delenv(CONTROL_TOKEN)
    with pytest.raises(ValueError, match="granted by the API server only"):
        granted_salts(granted_params("a", ["wiki"]), "a")


def test_a_grant_says_what_it_was_made_of():
    assert granted_salts(granted_params("a", ["wiki", "law"]), "a") == ("wiki", "law")
    assert granted_salts(granted_params("a", []), "a") == granted_salts(None, "a") == ()
    assert granted_params("a", ["b", "c"])["proof"] != granted_params("a", ["b,c"])["proof"]
