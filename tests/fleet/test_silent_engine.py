"""An engine that stops answering: its server leaves the fleet, and what it was sent goes to another
one."""

import os
import signal
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import psutil
import pytest
from fleets import START_S, Asked, Corpus, ask, running_fleet

TIMEOUT_S = 5
NUM_REQUESTS = 60


@pytest.mark.slow
@pytest.mark.soak  # it freezes what it needs all cores for
def test_a_frozen_engine_leaves_the_fleet_and_no_request_is_lost(tmp_path: Path):
    corpus = Corpus(23, 12)
    flags = ["--replicas", "2", "--drain-s", "5", "--kvgraft-engine-timeout", str(TIMEOUT_S)]
    with running_fleet(flags, tmp_path / "log", {}) as fleet:
        frozen, _ = fleet.wait_for(2)
        engine = engine_of(frozen["server_pid"])

        def send(number: int) -> Asked:
            with fleet.http() as client:
                return ask(client, corpus.prompt(number % 12, question=number // 12))

        with ThreadPoolExecutor(4) as threads:
            answers = [threads.submit(send, number) for number in range(NUM_REQUESTS)]
            time.sleep(1.0)
            for process in engine:
                os.kill(process.pid, signal.SIGSTOP)
            frozen_at = time.monotonic()
            wait_until(lambda: frozen["name"] not in {one["name"] for one in fleet.replicas()})
            out_s = time.monotonic() - frozen_at
            fleet.wait_for(2, but=[frozen["name"]])
            ready_s = time.monotonic() - frozen_at
            found = [answer.result() for answer in answers]
            print(f"out of rotation after {out_s:.1f} s, replaced after {ready_s:.1f} s")

        assert [answer.status for answer in found] == [200] * NUM_REQUESTS
        assert not any(process.is_running() for process in engine)


def wait_until(happened: Callable[[], bool]) -> None:
    deadline = time.monotonic() + START_S
    while not happened():
        assert time.monotonic() < deadline
        time.sleep(0.2)


def engine_of(server: int) -> list[psutil.Process]:
    """The processes below a server, without the one in which Python looks after shared memory."""
    found = psutil.Process(server).children(recursive=True)
    processes = [one for one in found if "resource_tracker" not in " ".join(one.cmdline())]
    assert len(processes) >= 2, "an engine and its worker"
    return processes
