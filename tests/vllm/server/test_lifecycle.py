"""The end of a server, and an engine that does not answer: with real processes and real signals."""

import json
import os
import re
import signal
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from threading import Thread
from typing import Any

import httpx
import psutil
import pytest
from running import RunningServer, running

pytestmark = pytest.mark.slow
WAIT_S = 60.0
END_S = 60.0  # in which a server without requests has ended, with all of its processes


@contextmanager
def serving(log: Path, *flags: str) -> Iterator[RunningServer]:
    """A server of one tenant, and no process of it left afterwards."""
    arguments = ["-m", "kvgraft", "serve", "--kvgraft-costs", "tokens", *flags]
    with running(
        arguments, log, {k: v for k, v in os.environ.items() if k != "VLLM_API_KEY"}
    ) as server:
        yield server


class Stream(Thread):
    """A stream of one request, read to its end in a thread; the first line is its status.

    Args:
        num_lines: to wait for, before anything else happens.
    """

    def __init__(
        self,
        server: RunningServer,
        num_tokens: int,
        path: str = "/v1/completions",
        num_lines: int = 3,
        **body: Any,
    ) -> None:
        super().__init__(daemon=True)
        self.lines: list[str] = []
        self.error: httpx.HTTPError | None = None
        self._url = server.url + path
        self._body = {
            "model": "bundled",
            "max_tokens": num_tokens,
            "ignore_eos": True,
            "stream": True,
            **body,
        }
        if path == "/v1/completions":
            self._body |= {
                "prompt": "question : code of lamp ? answer :",
                "stream_options": {"include_usage": True},
            }
        self.start()
        wait_for(lambda: len(self.lines) >= num_lines)

    def run(self) -> None:
        try:
            with httpx.stream("POST", self._url, json=self._body, timeout=120.0) as answer:
                self.lines += [f"HTTP {answer.status_code}"]
                for line in answer.iter_lines():
                    self.lines += [line] if line else []
        except httpx.HTTPError as error:
            self.error = error

    @property
    def last(self) -> str:
        """The last line, once the stream has ended."""
        self.join(WAIT_S)
        assert not self.is_alive(), "the stream does not end"
        assert self.error is None
        return self.lines[-1]


def wait_for(condition: Callable[[], bool], within_s: float = WAIT_S) -> float:
    """Wait; returns the seconds that it took."""
    started = time.monotonic()
    while not condition():
        assert time.monotonic() < started + within_s, "it does not come to that"
        time.sleep(0.02)
    return time.monotonic() - started


def family(server: RunningServer) -> list[psutil.Process]:
    """All processes of a server, which must be more than one."""
    found = [
        psutil.Process(server.process.pid),
        *psutil.Process(server.process.pid).children(recursive=True),
    ]
    assert len(found) > 1
    return found


def engine(server: RunningServer) -> list[psutil.Process]:
    """The processes of its engine, without the one in which Python looks after shared memory."""
    return [one for one in family(server)[1:] if "resource_tracker" not in " ".join(one.cmdline())]


def is_gone(processes: list[psutil.Process]) -> bool:
    """Whether none of them runs; those that a test has started must be waited for by someone
    else."""
    alive = [process for process in processes if process.is_running()]
    states = []
    for process in alive:
        with suppress(psutil.NoSuchProcess):
            states.append(process.status())
    return all(state == psutil.STATUS_ZOMBIE for state in states)


def health(server: RunningServer) -> httpx.Response:
    return httpx.get(f"{server.url}/health", timeout=5.0)


def silent_s(server: RunningServer) -> float:
    """What the metric says."""
    text = httpx.get(f"{server.url}/metrics", timeout=5.0).text
    [value] = re.findall(
        r'^kvgraft:engine_silent_seconds\{model_name="bundled"\} (\S+)$', text, re.MULTILINE
    )
    return float(value)


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
def test_streams_end_as_ever_after_the_signal_and_new_requests_are_refused(
    tmp_path: Path, number: int
):
    """The engine stands still until all has been asked, else a busy machine may end the stream,
    and the server with it, before that."""
    with serving(tmp_path / "log", "--shutdown-timeout", "100") as server:
        processes, frozen = family(server), engine(server)
        for process in frozen:
            process.suspend()
        stream = Stream(server, 1500, num_lines=1, n=4)

        if number == signal.SIGINT:
            os.killpg(server.process.pid, number)  # as a terminal does
        else:
            os.kill(server.process.pid, number)
        wait_for(lambda: health(server).status_code == 503)
        ask = {"model": "bundled", "prompt": "lamp", "max_tokens": 1}
        refused = httpx.post(f"{server.url}/v1/completions", json=ask, timeout=10.0)
        shown = [
            httpx.get(f"{server.url}{path}", timeout=5.0)
            for path in ("/metrics", "/v1/kvgraft/status")
        ]
        refusals = health(server), refused
        for process in frozen:
            process.resume()

        for answer in refusals:
            assert answer.status_code == 503
            assert int(answer.headers["Retry-After"]) > 0
            assert answer.json()["error"]["message"] == "this server is shutting down"
        assert [answer.status_code for answer in shown] == [200, 200]
        assert stream.last == "data: [DONE]"
        assert '"completion_tokens":6000' in stream.lines[-2]
        assert server.process.wait(END_S) == 0
        wait_for(lambda: is_gone(processes))


def test_at_the_limit_answers_end_with_an_error(tmp_path: Path):
    with serving(tmp_path / "log", "--shutdown-timeout", "2") as server:
        processes, plain = family(server), Stream(server, 4000, n=8)
        chat = {"messages": [{"role": "user", "content": "lamp"}]}
        message = Stream(server, 4000, "/v1/messages", **chat)
        whole = Thread(target=lambda: answers.append(ask_whole(server)))
        answers: list[httpx.Response] = []
        whole.start()
        time.sleep(0.5)  # until it runs
        started = time.monotonic()
        os.kill(server.process.pid, signal.SIGTERM)

        for stream in (plain, message):
            error = json.loads(stream.last.removeprefix("data: "))["error"]
            assert error["code"] == 503
            assert "before this answer was complete" in error["message"]
        assert time.monotonic() - started > 1.5
        assert message.lines[-2] == "event: error"
        whole.join(WAIT_S)
        assert [answer.status_code for answer in answers] == [503]
        server.process.wait(END_S)
        wait_for(lambda: is_gone(processes))


def ask_whole(server: RunningServer) -> httpx.Response:
    """A long answer that is no stream."""
    ask = {"model": "bundled", "prompt": "lamp", "max_tokens": 4000, "ignore_eos": True}
    return httpx.post(f"{server.url}/v1/completions", json=ask, timeout=120.0)


def test_a_second_signal_ends_at_once(tmp_path: Path):
    with serving(tmp_path / "log") as server:
        processes, stream = family(server), Stream(server, 4000, n=8)
        os.kill(server.process.pid, signal.SIGTERM)
        wait_for(lambda: health(server).status_code == 503)
        assert stream.is_alive()
        os.kill(server.process.pid, signal.SIGINT)
        assert server.process.wait(END_S) == 128 + signal.SIGINT
        wait_for(lambda: is_gone(processes))


@pytest.mark.parametrize(("limit", "status"), [("1", 0), ("12", 1)])
def test_an_engine_that_hangs_is_killed_after_the_limit(tmp_path: Path, limit: str, status: int):
    """By vLLM, where its own limit is shorter than ours for the engine to end."""
    with serving(tmp_path / "log", "--shutdown-timeout", limit) as server:
        processes, stream = family(server), Stream(server, 4000)
        for process in engine(server):
            process.suspend()
        os.kill(server.process.pid, signal.SIGTERM)
        assert '"code":503' in stream.last
        assert server.process.wait(END_S) == status
        wait_for(lambda: is_gone(processes))


def test_an_engine_that_does_not_answer_is_not_healthy_until_it_does(tmp_path: Path):
    with serving(tmp_path / "log", "--kvgraft-engine-timeout", "3") as server:
        wait_for(lambda: silent_s(server) < 2.0)
        frozen = engine(server)
        for process in frozen:
            process.suspend()
        wait_for(lambda: health(server).status_code == 503)
        assert "the engine has not answered for" in health(server).json()["error"]["message"]
        assert httpx.get(f"{server.url}/ping", timeout=5.0).status_code == 503
        before = silent_s(server)
        assert before > 3.0
        time.sleep(0.5)
        assert silent_s(server) >= before + 0.5
        status = httpx.get(f"{server.url}/v1/kvgraft/status", timeout=5.0).json()
        assert status["engine_silent_s"] > before

        for process in frozen:
            process.resume()
        wait_for(lambda: health(server).status_code == 200)
        wait_for(lambda: silent_s(server) < 2.0)
