"""A fleet that cannot start says so in one line; one that is told to end takes all with it that it
has started."""

import json
import os
import signal
import socket
import subprocess
import sys
import threading
import time
from pathlib import Path

import httpx
import psutil
import pytest
from fleets import SETTINGS, START_S, Corpus, RunningFleet, running_fleet

from kvgraft.fleet.ingress import RETRY_S

DRAIN_S = 2


def alive(processes: list[psutil.Process]) -> list[psutil.Process]:
    return [one for one in processes if one.is_running() and one.status() != psutil.STATUS_ZOMBIE]


def wait_until_up(fleet: RunningFleet) -> None:
    """Wait until the command says that the fleet is up: it answers a little earlier, and a signal
    would end its start."""
    deadline = time.monotonic() + START_S
    while "kvgraft fleet: http" not in fleet.log.read_text(errors="replace"):
        assert time.monotonic() < deadline
        time.sleep(0.2)


@pytest.mark.slow
@pytest.mark.soak  # with seconds that need a core of its own
def test_a_fleet_that_is_interrupted_ends_all_that_it_has_started(tmp_path: Path):
    """With a request in flight that takes longer than it may."""
    sent = {
        "model": "bundled",
        "prompt": Corpus(20, 1).prompt(0)[0],
        "ignore_eos": True,
        "stream": True,
    }
    sent["max_tokens"] = 3000
    found: list[httpx.Response] = []

    def ask_meanwhile() -> None:
        with fleet.http() as client:
            found.append(
                client.post("/v1/completions", json=sent | {"stream": False, "max_tokens": 1})
            )

    with running_fleet(
        ["--replicas", "1", "--drain-s", str(DRAIN_S)], tmp_path / "log", {}
    ) as fleet:
        wait_until_up(fleet)
        [replica] = fleet.wait_for(1)
        processes = psutil.Process(fleet.process.pid).children(recursive=True)
        engine = psutil.Process(replica["server_pid"]).children(recursive=True)
        assert len(engine) >= 2, "an engine and its worker"
        assert {*engine} <= {*processes}
        with fleet.http() as client, client.stream("POST", "/v1/completions", json=sent) as stream:
            texts = stream.iter_text()
            next(texts)
            started = time.monotonic()
            fleet.process.send_signal(signal.SIGINT)
            later = threading.Timer(DRAIN_S / 2, ask_meanwhile)
            later.start()
            last = "".join(texts)
        later.join()
        assert fleet.process.wait(60) == 0
        seconds = time.monotonic() - started

    assert '"finish_reason":"length"' not in last
    assert json.loads(last.rstrip().rpartition("data: ")[2])["error"]["code"] == 503
    [refused] = found
    assert refused.status_code == 503
    assert refused.headers["Retry-After"] == str(RETRY_S)
    assert refused.json()["error"]["message"] == "this fleet is ending"
    deadline = time.monotonic() + 15
    while alive(processes) and time.monotonic() < deadline:
        time.sleep(0.2)
    assert alive(processes) == []
    assert seconds < 45


def gone(processes: list[psutil.Process]) -> bool:
    """Whether all of them end; a minute is plenty."""
    return not psutil.wait_procs(alive(processes), timeout=60)[1]


@pytest.mark.slow
@pytest.mark.soak
@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_a_fleet_that_is_interrupted_before_it_is_up_ends_all_that_it_has_started(
    number: signal.Signals, tmp_path: Path
):
    log = tmp_path / "log"
    command = [sys.executable, "-m", "kvgraft", "fleet", "--kvgraft-single-tenant", "--port", "0"]
    with (
        log.open("wb") as output,
        subprocess.Popen(
            command, env=os.environ | SETTINGS, stdout=output, stderr=output, start_new_session=True
        ) as fleet,
    ):
        started = psutil.Process(fleet.pid)
        while not any("serve" in one.cmdline() for one in started.children(recursive=True)):
            assert fleet.poll() is None, log.read_text(errors="replace")
            time.sleep(0.2)
        processes = started.children(recursive=True)
        fleet.send_signal(number)
        assert fleet.wait(START_S) == 130
    text = log.read_text(errors="replace")
    assert text.count("aborted") == 1
    assert "Traceback" not in text
    assert gone(processes)


@pytest.mark.slow
@pytest.mark.soak
def test_a_second_signal_ends_the_drain(tmp_path: Path):
    sent = {"model": "bundled", "prompt": Corpus(20, 1).prompt(0)[0], "ignore_eos": True}
    sent |= {"stream": True, "max_tokens": 3000, "n": 8}
    with running_fleet(["--replicas", "1", "--drain-s", "3000"], tmp_path / "log", {}) as fleet:
        wait_until_up(fleet)
        processes = psutil.Process(fleet.process.pid).children(recursive=True)
        with fleet.http() as client, client.stream("POST", "/v1/completions", json=sent) as stream:
            texts = stream.iter_text()
            next(texts)
            fleet.process.send_signal(signal.SIGINT)
            with fleet.http() as other:
                while other.post("/v1/completions", json={}).status_code != 503:
                    time.sleep(0.1)
            fleet.process.send_signal(signal.SIGINT)
            # 0 after a drain
            assert fleet.process.wait(START_S) == 130
    assert gone(processes)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--port", "99999"], "--port 99999: allowed are 0 to 65535"),
        (["--kvgraft-store-dir", "/proc/kvgraft"], "/proc/kvgraft: nothing can be written there"),
        (["--ssl-certfile", "/no.pem"], "--ssl-certfile /no.pem: there is no such file"),
        (["./no-model"], "there is no model ./no-model"),
        (["--check"], "--check: ask `kvgraft serve --check`"),
        ([], "another process listens there; end it, or give another port"),
    ],
    ids=lambda value: " ".join(value) if isinstance(value, list) else "",
)
def test_a_fleet_that_cannot_start_says_so_before_ray_starts(arguments: list[str], message: str):
    with socket.socket() as busy:
        busy.bind(("127.0.0.1", 0))
        busy.listen()
        port = ["--port", str(busy.getsockname()[1])] if not arguments else []
        command = [sys.executable, "-m", "kvgraft", "fleet", *arguments, *port]
        ended = subprocess.run(command, capture_output=True, text=True, timeout=120, check=False)
    assert ended.returncode == 2
    assert ended.stderr.startswith("kvgraft: ")
    assert ended.stderr.count("\n") == 1
    assert message in ended.stderr
