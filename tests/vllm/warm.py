"""Python programs in processes that have imported vLLM already: a start takes the engine's seconds,
not the imports'.

Run as a script it imports vLLM, and forks for every program that is asked for on a socket, whose
number is its argument: a JSON object, beside it the program's input, output and errors. It ends
with the socket, and so do they. The processes that a program starts are forks, too; on CPUs vLLM
would have them import everything again."""

import gc
import json
import multiprocessing
import os
import runpy
import signal
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Mapping, Sequence
from contextlib import suppress
from functools import cache
from importlib import import_module
from pathlib import Path
from typing import IO, Any

IMPORTED = (
    "vllm.entrypoints.llm", "vllm.entrypoints.launchers.api_server.entry",
    "vllm.v1.engine.async_llm",
    "vllm.v1.engine.core", "vllm.v1.worker.cpu_worker", "vllm.model_executor.models.llama",
    "vllm.model_executor.models.qwen3", "kvgraft.cli", "kvgraft.vllm.worker",
    "kvgraft.server.serve",
)  # fmt: skip
MESSAGE = 1 << 17  # bytes of a request for a program, at most


class Program:
    """A running program, with what `subprocess.Popen` has as far as tests need it."""

    def __init__(self, pid: int, stdin: IO[str] | None, stdout: IO[str] | None) -> None:
        self.pid, self.stdin, self.stdout = pid, stdin, stdout
        self.returncode: int | None = None

    def poll(self) -> int | None:
        """The exit status, or None while it runs."""
        if self.returncode is None:
            self.returncode = _exchange({"ended": self.pid})
        return self.returncode

    def wait(self, timeout: float = float("inf")) -> int:
        """The exit status. TimeoutExpired if it runs on."""
        deadline = time.monotonic() + timeout
        while (status := self.poll()) is None:
            if time.monotonic() > deadline:
                raise subprocess.TimeoutExpired(f"program {self.pid}", timeout)
            time.sleep(0.01)
        return status

    def terminate(self) -> None:
        """Ask it to end."""
        if self.poll() is None:
            os.kill(self.pid, signal.SIGTERM)

    def end(self) -> None:
        """End it and all processes that it has started, whatever they do."""
        with suppress(ProcessLookupError):
            os.killpg(self.pid, signal.SIGKILL)
        self.wait()
        for stream in (self.stdin, self.stdout):
            if stream is not None:
                with suppress(BrokenPipeError):
                    stream.close()


def start(
    arguments: Sequence[str],
    environment: Mapping[str, str],
    errors: IO[Any],
    output: IO[Any] | None = None,
) -> Program:
    """Start what `python ARGUMENTS` would: a script, or `-m` and a module.

    Args:
        environment: all of it.
        output: where its output goes, and then it has no input; without, both are pipes.
    """
    if output is None:
        (given, stdin), (stdout, said) = os.pipe(), os.pipe()
        streams = (os.fdopen(stdin, "w"), os.fdopen(stdout))
    else:
        given, said, streams = (
            os.open(os.devnull, os.O_RDONLY),
            os.dup(output.fileno()),
            (None, None),
        )
    program = {"arguments": list(arguments), "environment": dict(environment)}
    pid = _exchange(program, [given, said, errors.fileno()])
    os.close(given)
    os.close(said)
    return Program(pid, *streams)


def run(script: Path, given: Any, **environment: str) -> Any:
    """What a script answers in JSON to a JSON value. AssertionError with the end of what it has
    printed if it fails.

    Args:
        environment: on top of ours.
    """
    with tempfile.TemporaryFile("w+") as errors:
        program = start([str(script)], os.environ | environment, errors)
        try:
            print(json.dumps(given), file=program.stdin)
            program.stdin.close()
            said, status = program.stdout.read(), program.wait()
        finally:
            program.end()
        errors.seek(0)
        assert status == 0, f"{script.name} ended with {status}:\n{errors.read()[-4000:]}"
    return json.loads(said)


@cache
def _forks() -> socket.socket:
    """The process that forks, one for a session; it ends when this one does."""
    from engines import ENVIRONMENT  # which the script has no need of

    ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    with theirs:
        subprocess.Popen(
            [sys.executable, __file__, str(theirs.fileno())],
            env=os.environ | ENVIRONMENT,
            pass_fds=[theirs.fileno()],
        )
    return ours


def _exchange(message: dict[str, Any], files: Sequence[int] = ()) -> Any:
    forks = _forks()
    socket.send_fds(forks, [json.dumps(message).encode()], files)
    answer = forks.recv(MESSAGE)
    if not answer:
        raise RuntimeError("the process that forks has died")
    return json.loads(answer)


def serve(asking: socket.socket) -> list[str]:
    """Fork for whoever asks, until nobody does; returns in a fork, with the arguments of its
    program."""
    running: set[int] = set()
    while True:
        message, files, _, _ = socket.recv_fds(asking, MESSAGE, 3)
        if not message:
            break
        asked = json.loads(message)
        if pid := asked.get("ended"):
            ended, status = os.waitpid(pid, os.WNOHANG)
            running -= {ended}
            asking.send(json.dumps(os.waitstatus_to_exitcode(status) if ended else None).encode())
            continue
        if not (pid := os.fork()):
            asking.close()
            _become(asked["environment"], files)
            return list(asked["arguments"])
        for number in files:
            os.close(number)
        running.add(pid)
        asking.send(json.dumps(pid).encode())
    for pid in running:
        with suppress(ProcessLookupError):
            os.killpg(pid, signal.SIGKILL)
    return []


def _become(environment: Mapping[str, str], files: Sequence[int]) -> None:
    os.setsid()
    for number, file in enumerate(files):
        os.dup2(file, number)
        os.close(file)
    os.environ.clear()
    os.environ.update(environment)
    forking = multiprocessing.get_context("fork")
    multiprocessing.get_context = lambda method=None: forking


def main() -> None:
    for name in IMPORTED:
        import_module(name)
    gc.freeze()  # what forks collect is their own
    with socket.socket(fileno=int(sys.argv[1])) as asking:
        arguments = serve(asking)
    if arguments[:1] == ["-m"]:
        sys.argv = arguments[1:]
        runpy.run_module(arguments[1], run_name="__main__", alter_sys=True)
    elif arguments:
        sys.argv = arguments
        runpy.run_path(arguments[0], run_name="__main__")


if __name__ == "__main__":
    main()
