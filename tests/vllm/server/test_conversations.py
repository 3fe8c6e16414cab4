"""Two tenants who talk about shared and private text, on a server with a store that is restarted in
between: each goes on with its own, nobody with anything of the other's, and who wants exact KV is
answered as by plain vLLM."""

import os
from collections.abc import Iterator
from dataclasses import dataclass, field
from itertools import count
from pathlib import Path
from random import Random
from typing import Any

import pytest
from processes import HostProcess
from running import ADMIN, ALICE, BOB, RunningServer, running
from test_store import wait_until_stored

from kvgraft.engine.text import load_tokenizer
from kvgraft.server.pin_routes import PATH
from kvgraft_lab.testbed import MODEL_DIR

pytestmark = pytest.mark.slow
BLOCK, LONGEST = 32, 2560  # tokens of a block, and of a request
WANT_EXACT: list[dict[str, Any]] = [{"reuse": "off"}, {"reuse": "exact"}, {"policy": "full"}]
encode = load_tokenizer(MODEL_DIR).encode
namespaces = map("probe-{}".format, count())  # that nobody has used


@pytest.fixture(scope="module")
def plain(tmp_path_factory: pytest.TempPathFactory) -> Iterator[HostProcess]:
    process = HostProcess(
        MODEL_DIR,
        tmp_path_factory.mktemp("plain") / "log",
        with_kvgraft=False,
        max_model_len=LONGEST,
    )
    yield process
    process.close()


@dataclass
class Conversation:
    """What one tenant has said and heard.

    Attributes:
        shared: where text stands in it that both tenants may read.
    """

    key: str
    tokens: list[int] = field(default_factory=list)
    shared: list[range] = field(default_factory=list)

    def say(self, *texts: str) -> None:
        """What comes next."""
        for text in texts:
            self.tokens = self.tokens + encode(text)

    def quote(self, text: str) -> None:
        """What both may read comes next."""
        start = len(self.tokens)
        self.say(text)
        self.shared.append(range(start, len(self.tokens)))

    def listen(self, server: RunningServer) -> dict[str, Any]:
        """The answer comes next; returns the report."""
        tokens, report = ask(server, self.key, self.tokens, {}, max_tokens=40)
        self.tokens = self.tokens + tokens
        return report


def ask(
    server: RunningServer, key: str, prompt: list[int], options: dict[str, Any], max_tokens: int = 1
) -> tuple[list[int], dict[str, Any]]:
    """The answer and the report."""
    body = {"model": "bundled", "prompt": prompt, "max_tokens": max_tokens, "temperature": 0}
    body |= {
        "ignore_eos": True,
        "return_token_ids": True,
        "kv_transfer_params": {"kvgraft": options},
    }
    with server.http(key) as client:
        answer = client.post("/v1/completions", json=body).raise_for_status().json()
    return answer["choices"][0]["token_ids"], answer["kv_transfer_params"]["kvgraft"]


def found(report: dict[str, Any]) -> int:
    return report["prefix_tokens"] + report["continued_tokens"] + report["grafted_tokens"]


def start(directory: Path, log: Path) -> Any:
    arguments = ["-m", "kvgraft", "serve", "--api-key", ALICE, BOB, "--max-model-len", str(LONGEST)]
    arguments += [
        "--num-gpu-blocks-override",
        "640",
        "--dtype",
        "float32",
        "--kvgraft-costs",
        "tokens",
    ]
    arguments += [
        "--kvgraft-share",
        "wiki=*",
        "--kvgraft-share",
        f"law={ALICE}",
        "--kvgraft-store-dir",
        str(directory),
    ]
    return running(arguments, log, {**os.environ, "KVGRAFT_ADMIN_KEY": ADMIN})


def share(server: RunningServer, namespace: str, text: str) -> None:
    body = {"name": "manual", "tenant": "shared", "namespace": namespace, "text": text}
    with server.http(ADMIN) as client:
        client.post(PATH, json=body).raise_for_status()


def check_that_nobody_else_goes_on(
    server: RunningServer, conversation: Conversation, other: str
) -> None:
    """The other tenant sends the same, and finds what is shared alone."""
    _, report = ask(server, other, conversation.tokens, {"namespace": next(namespaces)})
    assert (report["prefix_tokens"], report["continued_tokens"]) == (0, 0)
    for first, stop, kind in report["spans"]:
        assert kind == "fresh" or any(
            first in text and stop - 1 in text for text in conversation.shared
        )
    assert report["grafted_tokens"] > 200, "of what is shared"


def check_that_it_is_unknown(server: RunningServer, other: str, text: str) -> None:
    """Also outside a conversation."""
    _, report = ask(server, other, encode(f"note grey means 51 . {text}"), {})
    assert (found(report), report["reason"]) == (0, "no_known_text")


def check_exact(server: RunningServer, conversation: Conversation, plain: HostProcess) -> None:
    """Among the same text, grafted and gone on with."""
    [truth] = plain.tokens(conversation.tokens, max_tokens=16)
    for options in WANT_EXACT:
        tokens, report = ask(server, conversation.key, conversation.tokens, options, max_tokens=16)
        assert (report["grafted_tokens"], report["continued_tokens"], report["depth"]) == (0, 0, 0)
        assert tokens == truth, options


def test_conversations_of_two_tenants(plain: HostProcess, texts: Any, tmp_path: Path):
    texts = type(texts)()
    texts._rng = Random(11)
    wiki, law = texts.document(300), texts.document(300)
    private = {key: [texts.document(270) for _ in range(4)] for key in (ALICE, BOB)}
    alice, bob = both = Conversation(ALICE), Conversation(BOB)
    with start(tmp_path / "store", tmp_path / "first") as server:
        for namespace, text in (("wiki", wiki), ("law", law)):
            share(server, namespace, text)
        for one, other in ((alice, BOB), (bob, ALICE)):
            for text in private[one.key][:3]:
                ask(server, one.key, encode(text), {"reuse": "off"})
            one.say("the old river slept .", private[one.key][0], "note grey means 51 .")
            one.quote(wiki)
            one.say("question : code of lamp ? answer :")
            report = one.listen(server)
            assert (report["outcome"], report["continued_tokens"]) == ("grafted", 0)
            assert report["grafted_tokens"] > 400
            check_that_nobody_else_goes_on(server, one, other)
            check_that_it_is_unknown(server, other, private[one.key][0])
        alice.say(law)
        for turn in (1, 2):
            for one, other in ((alice, BOB), (bob, ALICE)):
                one.say(private[one.key][turn], "question : code of lamp ? answer :")
                before, report = len(one.tokens), one.listen(server)
                assert report["continued_tokens"] > 500
                assert report["grafted_tokens"] > 200
                assert found(report) > before - 100
                check_that_nobody_else_goes_on(server, one, other)
                check_that_it_is_unknown(server, other, private[one.key][turn])
        for one in both:
            check_exact(server, one, plain)
        wait_until_stored(tmp_path / "store", [wiki, law, *private[ALICE][:3], *private[BOB][:3]])
    with start(tmp_path / "store", tmp_path / "second") as server:
        for one, other in ((alice, BOB), (bob, ALICE)):
            one.say(private[one.key][3])
            one.quote(wiki)
            one.say("question : code of lamp ? answer :")
            report = one.listen(server)
            assert (report["outcome"], report["continued_tokens"]) == ("grafted", 0)
            assert found(report) > 1000, "exact text outlasts the server"
            check_that_nobody_else_goes_on(server, one, other)
            check_that_it_is_unknown(server, other, private[one.key][3])
            one.say("the old river slept .")
            report = one.listen(server)
            assert report["continued_tokens"] > 200
            check_that_nobody_else_goes_on(server, one, other)
        for one in both:
            check_exact(server, one, plain)
