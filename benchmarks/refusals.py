"""Seconds until `kvgraft serve` refuses a wrong configuration, and lines that it prints: python
benchmarks/refusals.py

With another PYTHONPATH it measures another version. What does not end by itself within five minutes
is ended."""

import os
import socket
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path

from rich.console import Console
from rich.table import Table

REPEATS = 3
LIMIT_S = 300


def wrong_configurations(
    folder: Path, busy_port: int
) -> dict[str, tuple[list[str], dict[str, str]]]:
    """Arguments and environment by what is wrong."""
    store = folder / "store"
    store.mkdir(exist_ok=True)
    store.chmod(0o755)
    missing = ["--ssl-keyfile", str(folder / "key.pem"), "--ssl-certfile", str(folder / "cert.pem")]
    return {
        "store directory of mode 755": (["--kvgraft-store-dir", str(store)], {}),
        "store below an unwritable path": (["--kvgraft-store-dir", "/proc/kvgraft/store"], {}),
        "`KVGRAFT_CACHE_SECRET` of 3 digits": ([], {"KVGRAFT_CACHE_SECRET": "abc"}),
        "`--kv-cache-dtype fp8_inc`": (["--kv-cache-dtype", "fp8_inc"], {}),
        "`--pipeline-parallel-size 2`": (["--pipeline-parallel-size", "2"], {}),
        "missing TLS files": (missing, {}),
        "`--port 99999`": (["--port", "99999"], {}),
        "a busy port": (["--port", str(busy_port)], {}),
        "unknown policy": (["--kvgraft-policy", "sprad"], {}),
        "misspelt flag": (["--kvgraft-polcy", "naive"], {}),
    }


def measure(arguments: list[str], environment: dict[str, str]) -> tuple[float, int, int]:
    """Seconds, lines and exit code."""
    started = time.monotonic()
    command = [sys.executable, "-m", "kvgraft", "serve", *arguments]
    port = [] if "--port" in arguments else ["--port", "0"]
    said = {"HF_HUB_OFFLINE": "1", "VLLM_NO_USAGE_STATS": "1", **environment}
    with subprocess.Popen(
        [*command, *port],
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        env=os.environ | said,
    ) as process:
        try:
            output, _ = process.communicate(timeout=LIMIT_S)
        except subprocess.TimeoutExpired:
            process.kill()
            output, _ = process.communicate()
    return time.monotonic() - started, len(output.splitlines()), process.returncode


def main() -> None:
    """Print a table of medians."""
    repeats = int(sys.argv[1]) if len(sys.argv) > 1 else REPEATS
    table = Table("what is wrong", "seconds", "lines", "exit code")
    with tempfile.TemporaryDirectory() as folder, socket.socket() as busy:
        busy.bind(("127.0.0.1", 0))
        busy.listen()
        for name, given in wrong_configurations(Path(folder), busy.getsockname()[1]).items():
            found = [measure(*given) for _ in range(repeats)]
            seconds = statistics.median(one[0] for one in found)
            table.add_row(name, f"{seconds:.1f}", str(found[0][1]), str(found[0][2]))
    Console().print(table)


if __name__ == "__main__":
    main()
