"""What a tier that machines share costs prompts when the place fails them: down, slow or corrupt,
against no such tier.

    python benchmarks/shared_tier.py [--tokens 1024] [--rounds 20]
        [--out docs/results/shared_tier.json]

A Redis server is started for each way to fail. An engine with a store in host memory answers a new
prompt above each tier in turn. Either nobody has read its text ("new"), or another machine has read
and announced it ("announced") before the place fails. An announced prompt waits for the place until
the circuit breaker opens. A proxy delays every answer of the slow server by two seconds, and
changes the data of the corrupt one. Paired ratios of times to first token.
"""

import json
import shutil
import socket
import statistics
import subprocess
import tempfile
import threading
import time
from collections import defaultdict
from collections.abc import Iterator
from contextlib import ExitStack, closing, contextmanager, suppress
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Annotated

import numpy as np
import redis
import typer
from rich.console import Console

from kvgraft import Engine
from kvgraft.cli.progress import progress_bar
from kvgraft.store import SegmentStore
from kvgraft.store.shared import Sharing
from kvgraft_lab.evaluate.statistics import bootstrap
from store import (
    NEW_TOKENS,
    VOCABULARY,
    answer,
    as_text,
    configuration,
    make_engine,
    require_equal,
    tiers_of,
    turned,
)  # fmt: skip
from tables import line_of_settings, markdown_table
from ttft import make_model

NONE, HEALTHY, DOWN, SLOW, CORRUPT = "none", "healthy", "down", "slow", "corrupt"
SIDES = (NONE, HEALTHY, DOWN, SLOW, CORRUPT)
DELAY_S = 2.0  # of every answer of the slow server
SECRET = b"benchmark of a shared tier......"
ROOM = 1 << 30
TIMEOUT_S = 0.5
console, error_console = Console(), Console(stderr=True)


@dataclass(frozen=True)
class Row:
    """Prompts above a tier: median and longest time to the first token, median ratio to no shared
    tier, its bounds (95 %), and what the tier counted."""

    prompts: str
    tier: str
    ms: float
    longest_ms: float
    ratio: float
    low: float
    high: float
    counts: dict[str, int]


def main(
    tokens: Annotated[int, typer.Option(help="Of a prompt.", min=64)] = 1024,
    layers: Annotated[int, typer.Option(help="Of the random model.", min=1)] = 12,
    rounds: Annotated[int, typer.Option(help="Measured, after one that warms up.", min=1)] = 20,
    out: Annotated[Path | None, typer.Option(help="Write the figures into this file, too.")] = None,
) -> None:
    """Times to the first token, in one process, in turn."""
    with (
        tempfile.TemporaryDirectory() as name,
        progress_bar(error_console, "prompts") as on_progress,
        ExitStack() as s,
    ):
        make_model(Path(name) / "model", layers, tokens + 2 * NEW_TOKENS)
        engine = make_engine(Path(name) / "model", "float32", tokens)
        prompts = {number: make_prompt(number, tokens) for number in range(2 * (rounds + 1))}
        announced = [prompt for number, prompt in prompts.items() if number % 2]
        stores = {
            side: s.enter_context(side_of(side, engine, announced, Path(name))) for side in SIDES
        }
        seconds: dict[tuple[str, str], list[float]] = defaultdict(list)
        counts = {side: store.counts for side, store in stores.items()}
        grown: dict[tuple[str, str], dict[str, int]] = {}
        for kind in ("new", "announced"):
            for number in range(rounds + 1):
                times = ask_all(engine, stores, prompts[2 * number + (kind == "announced")], number)
                for side, found in times.items():
                    seconds[kind, side].append(found)
                on_progress(number + 1 + (rounds + 1) * (kind == "announced"), 2 * (rounds + 1))
            now = {side: store.counts for side, store in stores.items()}
            grown |= {(kind, side): now[side] - counts[side] for side in SIDES}
            counts = now
    settings = configuration(layers, "float32", rounds) | {
        "tokens": tokens,
        "timeout, s": TIMEOUT_S,
    }
    rows = [
        row_of(kind, side, seconds, grown[kind, side])
        for kind in ("new", "announced")
        for side in SIDES
    ]
    report({**settings, "answers of the slow server, s late": DELAY_S}, rows, out)


def make_prompt(number: int, tokens: int) -> list[int]:
    """A text of its own, and something behind it."""
    return (
        np.random.default_rng(number)
        .integers(1, VOCABULARY, tokens // 16 * 16 + NEW_TOKENS)
        .tolist()
    )


@contextmanager
def side_of(
    side: str, engine: Engine, announced: list[list[int]], folder: Path
) -> Iterator[SegmentStore]:
    """Open a store above a place that holds the announced prompts and fails from now on."""
    if side == NONE:
        with closing(open_store(engine, None)) as store:
            yield store
        return
    with ExitStack() as stack:
        server, path = stack.enter_context(redis_server(folder / f"{side}.sock"))
        with closing(open_store(engine, f"unix://{path}")) as writer:
            for prompt in announced:
                answer(engine, prompt, "full", tiers_of(engine, writer), remember=True)
                writer.flush()
        url, late = (
            stack.enter_context(proxy(path))
            if side == SLOW
            else (f"unix://{path}", threading.Event())
        )
        store = stack.enter_context(closing(open_store(engine, url)))
        require_equal(len(store), len(writer), f"{side}: chunks that are announced")
        late.set()
        if side == DOWN:
            server.kill()
            server.wait()
        elif side == CORRUPT:
            with redis.Redis.from_url(f"unix://{path}") as client:
                for key in client.keys("kvgraft:*/*"):
                    data = client.get(key)
                    client.set(key, bytes(data[:-1]) + bytes([data[-1] ^ 1]))
        yield store


def open_store(engine: Engine, url: str | None) -> SegmentStore:
    size = engine.memory.pool.block_size
    shared = None if url is None else Sharing(url, SECRET, None, TIMEOUT_S, ROOM, 1.0).open()
    return SegmentStore(block_size=size, ram_bytes=ROOM, shared=shared)


@contextmanager
def redis_server(path: Path) -> Iterator[tuple[subprocess.Popen[bytes], Path]]:
    """A server on a socket."""
    if (program := shutil.which("redis-server") or shutil.which("valkey-server")) is None:
        raise FileNotFoundError("redis-server is not installed")
    command = [
        program,
        "--port",
        "0",
        "--unixsocket",
        str(path),
        "--save",
        "",
        "--appendonly",
        "no",
    ]
    process = subprocess.Popen(command, stdout=subprocess.DEVNULL)
    try:
        while not path.exists():
            require_equal(process.poll(), None, "exit status of redis-server")
            time.sleep(0.01)
        yield process, path
    finally:
        process.kill()
        process.wait()


@contextmanager
def proxy(server: Path) -> Iterator[tuple[str, threading.Event]]:
    """A way to a server on which every answer is late once the event is set."""
    late, path = threading.Event(), server.with_suffix(".proxy")

    def pass_on(source: socket.socket, target: socket.socket, *, answers: bool) -> None:
        with suppress(OSError):
            while data := source.recv(1 << 16):
                if answers and late.is_set():
                    time.sleep(DELAY_S)
                target.sendall(data)
        with suppress(OSError):
            target.shutdown(socket.SHUT_WR)

    def accept(listening: socket.socket) -> None:
        with suppress(OSError):
            while True:
                client, _ = listening.accept()
                to = socket.socket(socket.AF_UNIX)
                to.connect(str(server))
                threading.Thread(
                    target=pass_on, args=(client, to), kwargs={"answers": False}, daemon=True
                ).start()
                threading.Thread(
                    target=pass_on, args=(to, client), kwargs={"answers": True}, daemon=True
                ).start()

    with socket.socket(socket.AF_UNIX) as listening:
        listening.bind(str(path))
        listening.listen()
        threading.Thread(target=accept, args=(listening,), daemon=True).start()
        yield f"unix://{path}", late


def ask_all(
    engine: Engine, stores: dict[str, SegmentStore], prompt: list[int], number: int
) -> dict[str, float]:
    """Seconds to the first token above every store, each time from an empty pool."""
    found, tokens = {}, []
    for side in turned([*stores], number):
        result = answer(engine, prompt, "full", tiers_of(engine, stores[side]), remember=True)
        found[side] = result.report.ttft_s
        tokens.append(result.token_ids)
        if side != SLOW:  # which writes while others are measured, but hardly computes for it
            stores[side].flush()
    require_equal(tokens, tokens[:1] * len(tokens), f"answers of round {number}")
    return found


def row_of(
    kind: str, side: str, seconds: dict[tuple[str, str], list[float]], counts: dict[str, int]
) -> Row:
    plain, mine = seconds[kind, NONE][1:], seconds[kind, side][1:]
    ratios = [b / a for a, b in zip(plain, mine, strict=True)]
    low, high = bootstrap(ratios, of=np.median) if len(ratios) > 1 else (ratios[0], ratios[0])
    shared = {name: count for name, count in sorted(counts.items()) if name.startswith("shared_")}
    return Row(
        kind, side, 1e3 * statistics.median(mine), 1e3 * max(seconds[kind, side]),
        statistics.median(ratios), low, high,
        shared,
    )  # fmt: skip


def report(settings: dict[str, object], rows: list[Row], out: Path | None) -> None:
    if out is not None:
        out.write_text(
            json.dumps({"configuration": settings, "rows": [asdict(row) for row in rows]}, indent=1)
            + "\n"
        )
    console.print(line_of_settings(settings))
    names = [name.replace("_", " ") for name in asdict(rows[0])]
    table = markdown_table(names, ["prompts", "tier", "counts"], "")
    for row in rows:
        *cells, counts = asdict(row).values()
        said = ", ".join(
            f"{name.removeprefix('shared_')} {count}" for name, count in counts.items()
        )
        table.add_row(*map(as_text, cells), said or "-")
    console.print(table)


if __name__ == "__main__":
    typer.run(main)
