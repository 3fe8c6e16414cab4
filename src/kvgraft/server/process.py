"""Run of a `kvgraft serve` process: up when it answers, gone with its children when the caller
ends."""

import os
import signal
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, nullcontext, suppress
from dataclasses import dataclass
from pathlib import Path

import httpx

HOST = "127.0.0.1"
START_TIMEOUT_S = 300.0
STOP_TIMEOUT_S = 90.0
# characters of a server's log that the error shows if it does not start
LOG_TAIL = 3000
# The kernel sends SIGKILL when the parent ends (prctl PR_SET_PDEATHSIG, Linux); the setting
# survives exec. SIGTERM would let the server finish requests that no client waits for any more. Its
# engine process ends by itself (`vllm/process_lifetime.py`).
_UNTIL_ITS_PARENT_ENDS = """
import ctypes, os, signal, sys
if sys.platform == "linux":
    ctypes.CDLL(None).prctl(1, signal.SIGKILL)
if os.getppid() != int(sys.argv[1]):
    sys.exit("the parent has ended")
os.execv(sys.argv[2], sys.argv[2:])
"""
# arguments of the Python interpreter
KVGRAFT = ("-m", "kvgraft")
ENVIRONMENT = {"HF_HUB_OFFLINE": "1", "VLLM_NO_USAGE_STATS": "1", "VLLM_CPU_KVCACHE_SPACE": "1"}


@dataclass(frozen=True)
class Server:
    """A running server.

    Attributes:
        url: base URL without /v1.
        process: the server's process.
        log: its log file; None if it writes to this process's output.
    """

    url: str
    process: subprocess.Popen[bytes]
    log: Path | None

    @property
    def api(self) -> str:
        """Base URL of the OpenAI API."""
        return f"{self.url}/v1"


@contextmanager
def serving(*arguments: str, environment: Mapping[str, str] | None = None) -> Iterator[Server]:
    """Run a server for an evaluation, as `running` does, with a temporary log.

    Args:
        environment: added to the environment of this process and to `ENVIRONMENT`.
    """
    with tempfile.TemporaryDirectory() as folder:
        log = Path(folder) / "server.log"
        with running(arguments, ENVIRONMENT | dict(environment or {}), log) as server:
            yield server


@contextmanager
def running(
    arguments: Sequence[str],
    environment: Mapping[str, str],
    log: Path | None = None,
    *,
    command: str = "serve",
    program: Sequence[str] = KVGRAFT,
    start_timeout_s: float = START_TIMEOUT_S,
    stop_timeout_s: float = STOP_TIMEOUT_S,
) -> Iterator[Server]:
    """Run `kvgraft serve` (or `fleet`) on a free port of 127.0.0.1, and yield it when /health
    answers.

    Args:
        environment: added to the environment of this process.
        log: file for the server's output; None: the output of this process.
        command: `serve` or `fleet`.
        program: what Python runs instead of `-m kvgraft`, for measurements.
        start_timeout_s: seconds until it must answer.
        stop_timeout_s: seconds in which it may end by itself before it is killed.

    Raises:
        RuntimeError: it ended, or was not up in time; the message holds the end of its log.
    """
    with reserved_port() as port:
        whole = [sys.executable, *program, command, *arguments, "--host", HOST, "--port", str(port)]
        with _process(whole, environment, log, stop_timeout_s) as process:
            server = Server(f"http://{HOST}:{port}", process, log)
            _wait_until_healthy(server, start_timeout_s)
            yield server


@contextmanager
def reserved_port() -> Iterator[int]:
    """Yield a port of 127.0.0.1, and keep it from other processes while a server starts on it.

    A bound socket that does not listen holds the port. The server can bind the same port because of
    SO_REUSEADDR, which vLLM's servers set.
    """
    with socket.socket() as held:
        held.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        held.bind((HOST, 0))
        yield held.getsockname()[1]


@contextmanager
def _process(
    command: Sequence[str], environment: Mapping[str, str], log: Path | None, stop_timeout_s: float
) -> Iterator[subprocess.Popen[bytes]]:
    """Run a process that ends when this process ends, for any reason."""
    with log.open("wb") if log is not None else nullcontext() as output:
        process = subprocess.Popen(  # noqa: S603  # our own module in our own interpreter
            [sys.executable, "-c", _UNTIL_ITS_PARENT_ENDS, str(os.getpid()), *command],
            env=os.environ | dict(environment),
            stdout=output,
            stderr=None if output is None else subprocess.STDOUT,
            start_new_session=True,
        )

    try:
        yield process
    finally:
        process.terminate()
        with suppress(subprocess.TimeoutExpired):
            process.wait(stop_timeout_s)
        with suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL)
        process.wait()


def _wait_until_healthy(server: Server, timeout_s: float) -> None:
    """Wait until /health answers.

    Raises:
        RuntimeError: the process ended or the time is over.
    """
    deadline = time.monotonic() + timeout_s
    while time.monotonic() < deadline and server.process.poll() is None:
        with suppress(httpx.HTTPError):
            if httpx.get(f"{server.url}/health", timeout=5).status_code == 200:
                return
        time.sleep(0.5)

    state = (
        "was not up in time"
        if server.process.poll() is None
        else f"ended with {server.process.returncode}"
    )
    said = (
        server.log.read_text(errors="replace")[-LOG_TAIL:]
        if server.log is not None
        else "see its log"
    )
    raise RuntimeError(f"the server {state}:\n{said}")
