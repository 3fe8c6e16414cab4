"""Requests with the same largest segment carry the same header, which tells nothing of it; a real
router follows it."""

import json
import shutil
import socket
import subprocess
import sys
import threading
import time
import urllib.request
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from urllib.error import URLError

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvgraft.core.prompt import mark
from kvgraft.fleet.affinity import HEADER, affinity_headers

SECRET = "sixteen bytes or more"
LONG, SHORT = "The harbour was built in 1911. " * 20, "The bridge is closed. " * 5
SYSTEM = {"role": "system", "content": "You answer questions. " * 500}
ROUTER = shutil.which("vllm-router")


def value(prompt, secret: str | bytes | None = SECRET) -> str | None:
    return affinity_headers(prompt, secret=secret).get(HEADER)


def user(*texts: str) -> dict:
    content = texts[0] if len(texts) == 1 else [{"type": "text", "text": text} for text in texts]
    return {"role": "user", "content": content}


SAME = {  # the same long document, in every form that a prompt has
    "texts": [SHORT, LONG],
    "marked": f"Read this: {mark(LONG)} and {mark(SHORT)} Who built it, " + "please tell me " * 80,
    "paragraphs": f"Documents:\n\n{SHORT}\n\n{LONG}\n \nWho built it?",
    "parts": [user("Who built it?", LONG, SHORT)],
    "messages": [
        SYSTEM,
        user(LONG),
        {"role": "assistant", "content": "Noted."},
        user("Who built it?"),
    ],
    "developer": [{**SYSTEM, "role": "developer"}, user(LONG)],
    "tool result": [
        user("Look it up"),
        {"role": "assistant", "content": None, "tool_calls": []},
        user(LONG),
    ],
    "image": [
        {
            "role": "user",
            "content": [{"type": "image_url", "image_url": {"url": "x"}}, {"text": LONG}],
        }
    ],
    "chat body": {"model": "m", "messages": [SYSTEM, user(f"{SHORT}\n\n{LONG}")]},
    "completion body": {"model": "m", "prompt": f"{LONG}\n\nWho built it?"},
    "responses body": {"instructions": SYSTEM["content"], "input": [user(LONG, "Who built it?")]},
    "responses text": {"instructions": SYSTEM["content"], "input": LONG},
}


@pytest.mark.parametrize("prompt", SAME.values(), ids=SAME)
def test_the_largest_segment_decides_whatever_is_around_it(prompt):
    assert value(prompt) == value([LONG])
    assert value(prompt) != value([SHORT])


@given(st.lists(st.text(min_size=1), min_size=1), st.randoms())
def test_the_order_of_segments_does_not_matter(texts: list[str], random):
    assert value(random.sample(texts, len(texts))) == value(texts)


def test_the_value_is_that_of_any_process():
    script = "import json, sys; from kvgraft.fleet.affinity import affinity_headers as of; " + (
        "print(json.dumps(of(sys.argv[1], secret=sys.argv[2]))); "
        "print(sorted({'torch', 'vllm', 'ray', 'transformers'} & set(sys.modules)))"
    )
    ran = subprocess.run(
        [sys.executable, "-c", script, LONG, SECRET], capture_output=True, text=True, check=True
    )
    headers, heavy = ran.stdout.splitlines()
    assert json.loads(headers) == affinity_headers(LONG, secret=SECRET)
    assert heavy == "[]", "a client need not import these"


def test_a_value_belongs_to_a_secret():
    values = {
        value(LONG),
        value(LONG, "another one of sixteen"),
        value(LONG, b"\x00" * 16),
        value(LONG, None),
    }
    assert len(values) == 4
    assert all(len(found) == 32 for found in values)
    assert value(LONG, None) == value(LONG, None), "of one process all requests are together"
    assert value(LONG, SECRET.encode()) == value(LONG)
    for short in ("", "fifteen bytes..", b"short"):
        with pytest.raises(
            ValueError, match=f"secret has {len(short)} bytes, must have at least 16"
        ):
            affinity_headers(LONG, secret=short)


NOTHING = [
    "",
    " \n\n ",
    [],
    {},
    [SYSTEM],
    {"messages": [SYSTEM]},
    {"prompt": [1, 2, 3]},
    [user("")],
    [{"role": "user"}],
]


@pytest.mark.parametrize("prompt", NOTHING, ids=repr)
def test_without_text_there_is_no_header(prompt):
    assert affinity_headers(prompt, secret=SECRET) == {}


def test_a_marker_without_its_partner_is_refused():
    with pytest.raises(ValueError, match="has no"):
        affinity_headers(f"a <|reuse|>{LONG}", secret=SECRET)


class _Backend(ThreadingHTTPServer):
    """Answers as an OpenAI server would, and notes the headers of what it was asked."""

    def __init__(self) -> None:
        super().__init__(("127.0.0.1", 0), _Handler)
        self.asked: list[dict[str, str]] = []
        threading.Thread(target=self.serve_forever, daemon=True).start()


class _Handler(BaseHTTPRequestHandler):
    def do_GET(self) -> None:
        self._answer({"object": "list", "data": [{"id": "m", "object": "model"}]})

    def do_POST(self) -> None:
        self.rfile.read(int(self.headers["Content-Length"]))
        self.server.asked.append({name.lower(): held for name, held in self.headers.items()})
        message = {"role": "assistant", "content": "1911"}
        choices = [{"index": 0, "message": message, "finish_reason": "stop"}]
        self._answer(
            {"id": "a", "object": "chat.completion", "created": 0, "model": "m", "choices": choices}
        )

    def _answer(self, content: dict) -> None:
        body = json.dumps(content).encode()
        self.send_response(200)
        self.send_header("Content-Type", "application/json")
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        self.wfile.write(body)

    def log_message(self, *args: object) -> None:
        pass


@pytest.fixture
def routed(request) -> Iterator[tuple[str, list[_Backend]]]:
    """The address of vLLM's router under a policy, and two servers behind it."""
    if ROUTER is None:
        pytest.skip(
            "no command vllm-router: pip install vllm-router, in an environment of its own, and "
            "have it in PATH"
        )
    backends = [_Backend(), _Backend()]
    with socket.socket() as found, socket.socket() as other:
        found.bind(("127.0.0.1", 0))
        other.bind(("127.0.0.1", 0))
        port, metrics_port = found.getsockname()[1], other.getsockname()[1]
    urls = [f"http://127.0.0.1:{backend.server_port}" for backend in backends]
    arguments = [
        "--policy",
        request.param,
        "--port",
        str(port),
        "--prometheus-port",
        str(metrics_port),
    ]
    router = subprocess.Popen(
        [ROUTER, *arguments, "--worker-urls", *urls], stdout=subprocess.DEVNULL
    )
    try:
        _wait_for(f"http://127.0.0.1:{port}/health", router)
        yield f"http://127.0.0.1:{port}/v1/chat/completions", backends
    finally:
        router.terminate()
        router.wait(30)
        for backend in backends:
            backend.shutdown()
            backend.server_close()


def _wait_for(url: str, process: subprocess.Popen) -> None:
    deadline = time.monotonic() + 60
    while process.poll() is None and time.monotonic() < deadline:
        try:
            urllib.request.urlopen(url, timeout=5).close()  # noqa: S310
        except URLError:
            time.sleep(0.1)
        else:
            return
    pytest.fail(f"{url} does not answer; the router's exit code: {process.poll()}")


@pytest.mark.parametrize("routed", ["consistent_hash", "sticky_least_loaded"], indirect=True)
def test_vllms_router_sends_a_document_to_one_server(routed):
    url, backends = routed
    documents = [f"Document {number}. {LONG}" for number in range(24)]
    for question in ("Who built it?", "When?", "Why was it built there, of all places?"):
        for number, document in enumerate(documents):
            others = [documents[number - 1][:200], "A short one."]
            messages = (
                [SYSTEM, user(*others, document, question)]
                if number % 2
                else [user(f"{document}\n\n{question}")]
            )
            ask = urllib.request.Request(  # noqa: S310
                url,
                json.dumps({"model": "m", "messages": messages}).encode(),
                {"Content-Type": "application/json", "Authorization": "Bearer K1"}
                | affinity_headers(messages, secret=SECRET),
            )
            with urllib.request.urlopen(ask) as answer:  # noqa: S310
                assert json.load(answer)["choices"][0]["message"]["content"] == "1911"
    reached = [{headers[HEADER.lower()] for headers in backend.asked} for backend in backends]
    assert all(reached), "both servers are used"
    assert not reached[0] & reached[1]
    assert reached[0] | reached[1] == {value(document) for document in documents}
    assert sum(len(backend.asked) for backend in backends) == 72
    keys = {headers["authorization"] for backend in backends for headers in backend.asked}
    assert keys == {"Bearer K1"}, "servers tell tenants apart by their keys"
