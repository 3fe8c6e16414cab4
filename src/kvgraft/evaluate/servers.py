"""A `kvgraft serve` process of one's own: up when it answers, gone with all its children when the caller is done."""

import os
import signal
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path

import httpx

HOST = "127.0.0.1"
START_TIMEOUT_S = 300.0
STOP_TIMEOUT_S = 30.0
LOG_TAIL = 3000  # characters shown of the log of a server that does not start
ENVIRONMENT = {"HF_HUB_OFFLINE": "1", "VLLM_NO_USAGE_STATS": "1", "VLLM_CPU_KVCACHE_SPACE": "1"}


@dataclass(frozen=True)
class Server:
    """A running server: its base URL without /v1, its process and log."""

    url: str
    process: subprocess.Popen[bytes]
    log: Path

    @property
    def api(self) -> str:
        """Base URL of the OpenAI API."""
        return f"{self.url}/v1"


@contextmanager
def serving(*arguments: str, environment: Mapping[str, str] | None = None) -> Iterator[Server]:
    """`kvgraft serve` with these arguments on a free port of 127.0.0.1, once it answers /health.

    Args:
        environment: what vLLM reads, on top of ours and of `ENVIRONMENT`.

    Raises:
        RuntimeError: it ended or was not up in time; the message holds the end of its log.
    """
    with reserved_port() as port, tempfile.TemporaryDirectory() as folder:
        command = [sys.executable, "-m", "kvgraft", "serve", *arguments, "--host", HOST, "--port", str(port)]
        log = Path(folder) / "server.log"
        with _running(command, ENVIRONMENT | dict(environment or {}), log) as process:
            server = Server(f"http://{HOST}:{port}", process, log)
            _wait_until_healthy(server)
            yield server


@contextmanager
def reserved_port() -> Iterator[int]:
    """A port of 127.0.0.1 that nobody else is given while a server takes its time to start on it: it shares it
    (SO_REUSEADDR, while this one does not listen), as vLLM's servers do."""
    with socket.socket() as held:
        held.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        held.bind((HOST, 0))
        yield held.getsockname()[1]


@contextmanager
def _running(command: Sequence[str], environment: Mapping[str, str], log: Path) -> Iterator[subprocess.Popen[bytes]]:
    with log.open("wb") as output:
        process = subprocess.Popen(  # noqa: S603  # our own module in our own interpreter
            command, env=os.environ | environment, stdout=output, stderr=subprocess.STDOUT, start_new_session=True
        )
    try:
        yield process
    finally:
        process.terminate()
        with suppress(subprocess.TimeoutExpired):
            process.wait(STOP_TIMEOUT_S)
        with suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL)
        process.wait()


def _wait_until_healthy(server: Server) -> None:
    deadline = time.monotonic() + START_TIMEOUT_S
    while time.monotonic() < deadline and server.process.poll() is None:
        with suppress(httpx.HTTPError):
            if httpx.get(f"{server.url}/health", timeout=5).status_code == 200:
                return
        time.sleep(0.5)
    state = "was not up in time" if server.process.poll() is None else f"ended with {server.process.returncode}"
    raise RuntimeError(f"the server {state}:\n{server.log.read_text(errors='replace')[-LOG_TAIL:]}")
