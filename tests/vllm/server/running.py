"""A server in processes of its own, and who may call it."""

import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import httpx
import warm
from openai import OpenAI

from kvgraft.server.process import reserved_port

ALICE, BOB, ADMIN = "key-of-alice", "key-of-bob", "key-of-the-admin"
START_S = 900.0  # some twenty, unless the machine is busy
SETTINGS = {
    "HF_HUB_OFFLINE": "1",
    "VLLM_CPU_KVCACHE_SPACE": "1",
    # here an engine of another test may have set it otherwise, and the next one
    "VLLM_ENABLE_V1_MULTIPROCESSING": "1",
    "VLLM_LOGGING_LEVEL": "INFO",
    "VLLM_NO_USAGE_STATS": "1",
}
Process = subprocess.Popen[bytes] | warm.Program


@dataclass(frozen=True)
class RunningServer:
    """Where it listens, its first process, and clients of it."""

    url: str
    log: Path
    process: Process

    def http(self, key: str | None) -> httpx.Client:
        """A client that shows this key."""
        headers = {"Authorization": f"Bearer {key}"} if key else {}
        return httpx.Client(base_url=self.url, headers=headers, timeout=120.0)

    def openai(self, key: str) -> OpenAI:
        """The official client; it retries nothing, so that every answer is seen."""
        return OpenAI(base_url=f"{self.url}/v1", api_key=key, max_retries=0, timeout=120.0)

    def status(self, key: str) -> dict[str, Any]:
        """What `/v1/kvgraft/status` shows to this key."""
        with self.http(key) as client:
            answer = client.get("/v1/kvgraft/status")
        answer.raise_for_status()
        return answer.json()


@contextmanager
def running(
    arguments: Sequence[str], log: Path, environment: Mapping[str, str], *, anew: bool = False
) -> Iterator[RunningServer]:
    """Start `python ARGUMENTS --port ...`, wait until it answers, and end all of its processes.

    Args:
        environment: all of it.
        anew: as users start it; otherwise where vLLM has been imported already.
    """
    environment = {**environment, **SETTINGS}
    with (
        reserved_port() as port,
        _running([*arguments, "--port", str(port)], log, environment, anew) as process,
    ):
        server = RunningServer(f"http://127.0.0.1:{port}", log, process)
        _wait(server, process)
        yield server


@contextmanager
def _running(
    arguments: Sequence[str], log: Path, environment: Mapping[str, str], anew: bool
) -> Iterator[Process]:
    with log.open("ab") as output:
        if anew:
            command = [sys.executable, *arguments]
            process: Process = subprocess.Popen(
                command, stdout=output, stderr=output, env=environment, start_new_session=True
            )
        else:
            process = warm.start(arguments, environment, output, output)
    try:
        yield process
    finally:
        process.terminate()
        try:
            process.wait(30.0)
        finally:
            _end_group(process.pid)


def _wait(server: RunningServer, process: Process) -> None:
    deadline = time.monotonic() + START_S
    while time.monotonic() < deadline:
        if process.poll() is not None:
            raise RuntimeError(f"the server ended: {server.log.read_text()[-3000:]}")
        try:
            if httpx.get(f"{server.url}/health", timeout=5.0).is_success:
                return
        except httpx.TransportError:
            time.sleep(0.2)  # the wait between two looks
    raise RuntimeError(f"no answer within {START_S} s: {server.log.read_text()[-3000:]}")


def _end_group(group: int) -> None:
    try:
        os.killpg(group, signal.SIGKILL)
    except ProcessLookupError:
        return
