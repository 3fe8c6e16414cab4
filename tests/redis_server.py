"""A Redis server in a process of its own, on a socket in a directory."""

import shutil
import subprocess
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest
import redis

PROGRAM = shutil.which("redis-server") or shutil.which("valkey-server")
needs_redis = pytest.mark.skipif(
    PROGRAM is None, reason="neither redis-server nor valkey-server is installed"
)


class RedisServer:
    """It keeps nothing when it ends."""

    def __init__(self, folder: Path) -> None:
        self._socket, self._process = folder / "redis.sock", None
        self.url = f"unix://{self._socket}"
        self.start()

    def start(self) -> None:
        command = [
            PROGRAM,
            "--port",
            "0",
            "--unixsocket",
            str(self._socket),
            "--save",
            "",
            "--appendonly",
            "no",
        ]
        self._process = subprocess.Popen(command, stdout=subprocess.DEVNULL)
        self.client = redis.Redis.from_url(self.url)
        deadline = time.monotonic() + 60.0
        while True:
            try:
                self.client.ping()
                return
            except redis.ConnectionError:
                if time.monotonic() > deadline:
                    raise
                time.sleep(0.02)

    def stop(self) -> None:
        self.client.close()
        self._process.kill()
        self._process.wait()


@contextmanager
def redis_server(folder: Path) -> Iterator[RedisServer]:
    server = RedisServer(folder)
    try:
        yield server
    finally:
        server.stop()
