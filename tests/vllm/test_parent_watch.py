"""Engines and workers end with the process that has started them, however that ends."""

import os
import signal
import subprocess
import sys
import threading
import time
from contextlib import suppress
from pathlib import Path

import psutil
import pytest

from kvgraft.vllm.process_lifetime import GRACE_S, LOOK_S, end_with_parent

PARENT = """
import multiprocessing, signal, sys, time
from kvgraft.vllm.process_lifetime import end_with_parent

def work(ignores, pipe):
    if ignores:
        signal.signal(signal.SIGTERM, signal.SIG_IGN)
    end_with_parent()
    end_with_parent()
    pipe.send(None)
    time.sleep(600)

if __name__ == "__main__":
    context = multiprocessing.get_context(sys.argv[2])
    ours, theirs = context.Pipe()
    child = context.Process(target=work, args=(bool(int(sys.argv[1])), theirs))
    child.start()
    ours.recv()
    print(child.pid, flush=True)
    time.sleep(600)
"""


def ends_within(process: psutil.Process, seconds: float) -> bool:
    deadline = time.monotonic() + seconds
    while process.is_running() and process.status() != psutil.STATUS_ZOMBIE:
        if time.monotonic() > deadline:
            return False
        time.sleep(0.1)
    return True


@pytest.mark.parametrize(
    ("ignores", "method"),
    [(False, "spawn"), (True, "spawn"), (False, "fork"), (False, "forkserver")],
)
def test_a_process_ends_when_its_parent_is_killed(ignores: bool, method: str, tmp_path: Path):
    """Paired: not before, and not at once where it may take its time to end in order."""
    program = tmp_path / "parent.py"
    program.write_text(PARENT)
    command = [sys.executable, str(program), str(int(ignores)), method]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as parent:
        assert parent.stdout is not None
        child = psutil.Process(int(parent.stdout.readline()))
        assert child.num_threads() >= 2
        assert not ends_within(child, 2 * LOOK_S)
        parent.kill()
    try:
        assert ends_within(child, LOOK_S + 2 + (GRACE_S if ignores else 0))
    finally:
        if child.is_running():
            child.kill()


def test_what_nobody_of_ours_has_started_is_not_watched():
    """A server that a shell has started goes on without the shell."""
    before = threading.active_count()
    end_with_parent()
    assert threading.active_count() == before


@pytest.mark.slow
def test_the_engine_of_a_server_that_is_killed_ends(tmp_path: Path):
    log = tmp_path / "log"
    command = [sys.executable, "-m", "kvgraft", "serve", "--port", "0", "--kvgraft-costs", "tokens"]
    environment = os.environ | {"HF_HUB_OFFLINE": "1", "VLLM_NO_USAGE_STATS": "1"}
    with (
        log.open("wb") as output,
        subprocess.Popen(
            command, stdout=output, stderr=output, env=environment, start_new_session=True
        ) as server,
    ):
        try:
            deadline = time.monotonic() + 300
            while "Application startup complete" not in log.read_text(errors="replace"):
                assert time.monotonic() < deadline
                assert server.poll() is None, log.read_text(errors="replace")[-3000:]
                time.sleep(0.5)
            children = psutil.Process(server.pid).children(recursive=True)
            assert len(children) >= 2, "an engine and its worker"
            server.kill()
            assert all(ends_within(child, 2 * (LOOK_S + GRACE_S) + 5) for child in children)
        finally:
            with suppress(ProcessLookupError):
                os.killpg(server.pid, signal.SIGKILL)
