"""One namespace never finds another's text, in no cache; its own it does."""

import pytest
from engines import EVERYTHING, NAIVE, Ask, words
from hosts import Host
from processes import HostProcess

DOCUMENT = words(300, 1)
PROMPT = words(10, 2) + DOCUMENT
SALTS = [("a", "b"), ("a", None), (None, "a"), ("a", "A"), ("a", "a ")]


@pytest.mark.parametrize("text", [PROMPT, DOCUMENT], ids=["moved", "same"])
@pytest.mark.parametrize(("mine", "yours"), SALTS)
def test_a_stranger_finds_nothing(
    host: Host, plain: HostProcess, mine: str | None, yours: str | None, text: list[int]
):
    host.read(DOCUMENT, salt=mine)
    [answer] = host.ask(Ask(text, EVERYTHING, yours))
    assert (answer.cached, answer.grafted, answer.report["reason"]) == (0, 0, "no_known_text")
    assert [answer.tokens] == plain.tokens(text)


@pytest.mark.parametrize("mine", ["a", None])
def test_the_owner_finds_its_text(host: Host, plain: HostProcess, mine: str | None):
    host.read(DOCUMENT, salt=mine)
    [moved], [same] = (
        host.ask(Ask(PROMPT, EVERYTHING, mine)),
        host.ask(Ask(DOCUMENT, EVERYTHING, mine)),
    )
    assert moved.grafted == 288
    assert (same.cached, same.grafted) == (288, 0)
    assert [moved.tokens, same.tokens] == plain.tokens(PROMPT, DOCUMENT)


def test_what_both_know_stays_apart(host: Host):
    """The same text in two namespaces: what happens to one's does not touch the other's."""
    host.read(DOCUMENT, salt="a")
    pages = host.blocks_with_content()
    host.read(DOCUMENT, salt="b")
    host.evict(pages)
    mine, yours = host.ask(Ask(PROMPT, NAIVE, "a"), Ask(PROMPT, NAIVE, "b"))
    assert (mine.grafted, yours.grafted) == (0, 288)


def test_namespaces_are_no_concatenation(host: Host):
    """A model's name, a namespace and a text are told apart by length, not by a separator."""
    host.read(DOCUMENT, salt="ab")
    for salt in ("a", "b", "ab\x00", "/ab", ""):
        assert host.ask(Ask(PROMPT, NAIVE, salt))[0].grafted == 0
    assert host.ask(Ask(PROMPT, NAIVE, "ab"))[0].grafted == 288


def test_an_approximate_answer_stays_in_its_namespace(host: Host, plain: HostProcess):
    """What a stranger asks word for word is computed for it alone, exactly."""
    host.read(DOCUMENT, salt="a")
    assert host.ask(Ask(PROMPT, NAIVE, "a"))[0].grafted == 288
    [stranger] = host.ask(Ask(PROMPT, NAIVE, "b"))
    assert stranger.cached == 0
    assert [stranger.tokens] == plain.tokens(PROMPT)
