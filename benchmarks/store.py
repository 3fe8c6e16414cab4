"""What the tiers below the KV pool give and cost: reading back against computing again, and the
critical path.

    python benchmarks/store.py reading [--tokens 256 --tokens 4096] [--form float32:int8] [--json]
    python benchmarks/store.py cost [--tokens 1024] [--json]

All sides answer in turn; medians of paired ratios are printed. The page cache cannot be emptied by
who is not root. What can be: each payload file is dropped from it where the file system heeds that,
which is tried and printed; caches of the disk and of a hypervisor stay as they are."""

import json
import os
import statistics
import time
from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import asdict, dataclass
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Annotated, Any

import numpy as np
import torch
import typer
from rich.console import Console

from kvgraft import Engine, Request, Result, SamplingParams
from kvgraft.cli.progress import progress_bar
from kvgraft.core.matches import MatchQuery
from kvgraft.engine.store_tier import StoreTier
from kvgraft.store import SegmentStore, StoreOptions
from kvgraft_lab.evaluate.statistics import bootstrap
from tables import line_of_settings, markdown_table
from ttft import ONE_TOKEN, SHAPE, make_model

app = typer.Typer(add_completion=False, help=__doc__)
FORMS = ("float32", "bfloat16", "float32:int8", "bfloat16:int8")
LENGTHS = (256, 512, 1024, 2048, 4096)
DISK, CACHED, MEMORY = "disk", "page cache", "host memory"  # where a text lies, alone
NEW_TOKENS = 16  # of a prompt, behind what is known
VOCABULARY = 4096
JsonOption = Annotated[bool, typer.Option("--json", help="Print one JSON object.")]
DirOption = Annotated[
    Path | None, typer.Option("--dir", help="Make the stores in here.", show_default="temporary")
]
console, error_console = Console(), Console(stderr=True)


@dataclass(frozen=True)
class Reading:
    """A text that nobody has but one place, and a prompt that begins with it. Medians.

    Attributes:
        mib: of the payload as it is stored.
        full_ms, ttft_ms: time to the first token if all is computed, and with the store.
        gain: how many times faster that is.
        fetch_ms, gib_per_s: of `SegmentStore.fetch` alone; what is in host memory and not int8
            moves no bytes there.
        fetch_gain: how many times faster than computing it that is.
    """

    form: str
    tokens: int
    place: str
    mib: float
    full_ms: float
    ttft_ms: float
    gain: float
    fetch_ms: float
    fetch_gain: float
    gib_per_s: float | None


@app.command()
def reading(
    tokens: Annotated[list[int], typer.Option(help="Of the text (repeatable).", min=16)] = list(  # noqa: B006
        LENGTHS
    ),
    form: Annotated[list[str], typer.Option(help=" | ".join(FORMS) + " (repeatable).")] = list(  # noqa: B006
        FORMS[:3]
    ),
    layers: Annotated[int, typer.Option(help="Of the random model.", min=1)] = 12,
    rounds: Annotated[int, typer.Option(help="Measured, after one that warms up.", min=1)] = 5,
    directory: DirOption = None,
    as_json: JsonOption = False,
) -> None:
    """Disk and host memory against prefill: the whole way to the first token, and the store
    alone."""
    if unknown := [one for one in form if one not in FORMS]:
        raise typer.BadParameter(f"form {unknown[0]!r}: allowed are {', '.join(FORMS)}")
    rows: list[Reading] = []
    with (
        TemporaryDirectory(dir=directory) as name,
        progress_bar(error_console, "reading") as on_progress,
    ):
        folder = Path(name)
        make_model(folder / "model", layers, max(tokens) + 2 * NEW_TOKENS)
        settings = configuration(layers, "/".join(form), rounds) | {
            "page cache is dropped": drops(folder / "probe")
        }
        for number, one in enumerate(form):
            dtype, _, suffix = one.partition(":")
            engine = make_engine(folder / "model", dtype, max(tokens))
            for at, length in enumerate(tokens):
                with places(engine, folder / f"{number}-{length}", int8=bool(suffix)) as tiers:
                    rows += read_back(
                        engine, tiers, folder / f"{number}-{length}", one, length, rounds
                    )
                on_progress(number * len(tokens) + at + 1, len(form) * len(tokens))
    report(settings, rows, as_json)


def read_back(
    engine: Engine,
    tiers: Mapping[str, StoreTier],
    directory: Path,
    form: str,
    length: int,
    rounds: int,
) -> list[Reading]:
    """All places in turn, and an engine that has none; every answer must be the right one."""
    rng = np.random.default_rng(length)
    known = rng.integers(1, VOCABULARY, length // 16 * 16).tolist()
    prompt = [*known, *rng.integers(1, VOCABULARY, NEW_TOKENS).tolist()]
    policy = "naive" if form.endswith(":int8") else "full"
    for place in (DISK, MEMORY):
        answer(engine, known, "full", tiers[place], remember=True)
        tiers[place].store.flush()
    expected = engine.generate([Request(prompt, "full", ONE_TOKEN, remember=False)])[0].token_ids
    seconds: dict[str, list[float]] = defaultdict(list)
    for number in range(rounds + 1):
        for place in turned(["", DISK, CACHED, MEMORY], number):
            if place == DISK:
                drop_page_cache(directory)
            result = answer(engine, prompt, policy, tiers.get(place))
            if policy == "full" and (place or form == "float32"):
                require_equal(result.token_ids, expected, f"{form}, {length} tokens, {place}")
            require_equal(
                result.report.counts["restored_blocks"], len(known) // 16 if place else 0, place
            )
            seconds[place].append(result.report.ttft_s)
        for place in turned([DISK, CACHED, MEMORY], number):
            if place == DISK:
                drop_page_cache(directory)
            seconds["fetch " + place].append(fetch(engine, tiers[place].store, known))
    mib = tiers[MEMORY].store.ram_nbytes / 2**20
    timed = {name: times[1:] for name, times in seconds.items()}
    return [row_of(form, len(known), place, mib, timed) for place in (DISK, CACHED, MEMORY)]


def row_of(
    form: str, length: int, place: str, mib: float, seconds: Mapping[str, list[float]]
) -> Reading:
    full, ttft, alone = seconds[""], seconds[place], seconds["fetch " + place]
    fetch_s = statistics.median(alone)
    moves = place != MEMORY or form.endswith(":int8")
    return Reading(
        form, length, place, mib, 1e3 * statistics.median(full), 1e3 * statistics.median(ttft),
        ratio(full, ttft),
        1e3 * fetch_s, ratio(full, alone), mib / 2**10 / fetch_s if moves else None,
    )  # fmt: skip


def fetch(engine: Engine, store: SegmentStore, known: Sequence[int]) -> float:
    """Seconds in which the store gives out a text that it has."""
    scope = engine.scope_of("default")
    blocks = [
        block
        for match in store.match(MatchQuery(np.array(known), (scope,)))
        for block in match.pages.tolist()
    ]
    start = time.perf_counter()
    found = store.fetch(blocks, scope)
    seconds = time.perf_counter() - start
    require_equal(sum(block is not None for block in found), len(known) // 16, "blocks fetched")
    return seconds


@contextmanager
def places(engine: Engine, directory: Path, *, int8: bool) -> Iterator[dict[str, StoreTier]]:
    """StoreTier that have content on disk only, and in host memory only."""
    options = {
        DISK: StoreOptions(directory, ram_gib=0, int8=int8),
        MEMORY: StoreOptions(ram_gib=4, int8=int8),
    }
    with ExitStack() as stack:
        tiers = {
            place: tiers_of(engine, stack.enter_context(opened(engine, o)))
            for place, o in options.items()
        }
        yield tiers | {CACHED: tiers[DISK]}


def opened(engine: Engine, options: StoreOptions) -> SegmentStore:
    return options.open(engine.memory.pool.block_size)


def tiers_of(engine: Engine, store: SegmentStore) -> StoreTier:
    return StoreTier(store, engine.memory.pool, engine.memory.cache, engine.index)


def answer(
    engine: Engine,
    prompt: list[int],
    policy: str,
    tiers: StoreTier | None,
    *,
    remember: bool = False,
) -> Result:
    """An answer from an empty pool above these tiers."""
    engine.clear_cache()
    engine.memory.store = tiers
    [result] = engine.generate([Request(prompt, policy, ONE_TOKEN, remember=remember)])
    if result.error or result.report.fallback:
        raise RuntimeError(f"{policy}: {result.error or result.report.fallback}")
    return result


@dataclass(frozen=True)
class Cost:
    """What a store costs requests that find nothing in it: median time, median ratio to no store,
    its bounds (95 %)."""

    store: str
    time: str
    ms: float
    ratio: float
    low: float
    high: float


@app.command()
def cost(
    tokens: Annotated[int, typer.Option(help="Of a prompt; every one is new.", min=16)] = 1024,
    steps: Annotated[int, typer.Option(help="Decode steps of an answer.", min=1)] = 64,
    layers: Annotated[int, typer.Option(help="Of the random model.", min=1)] = 12,
    dtype: str = "float32",
    rounds: Annotated[int, typer.Option(help="Measured, after two that warm up.", min=1)] = 20,
    directory: DirOption = None,
    as_json: JsonOption = False,
) -> None:
    """Time to first token and of a decode step while the store writes behind, against no store."""
    times: dict[str, list[tuple[float, float, float]]] = defaultdict(list)
    with (
        TemporaryDirectory(dir=directory) as name,
        progress_bar(error_console, "prompts") as on_progress,
    ):
        make_model(Path(name) / "model", layers, tokens + steps + 16)
        engine = make_engine(Path(name) / "model", dtype, tokens + steps)
        options = {MEMORY: StoreOptions(), f"{MEMORY}, {DISK}": StoreOptions(Path(name) / "store")}
        with ExitStack() as stack:
            sides = {
                name: tiers_of(engine, stack.enter_context(opened(engine, o)))
                for name, o in options.items()
            }
            for number in range(rounds + 2):
                for side, found in ask_all(
                    engine, {"none": None, **sides}, number, tokens, steps
                ).items():
                    times[side].append(found)
                on_progress(number + 1, rounds + 2)
    settings = configuration(layers, dtype, rounds) | {"tokens": tokens, "decode steps": steps}
    timed = {side: list(zip(*found[2:], strict=True)) for side, found in times.items()}
    settings["ms until all is written"] = {
        side: round(1e3 * statistics.median(found[2]), 1) for side, found in timed.items()
    }
    report(settings, [row for side in timed for row in costs_of(side, timed)], as_json)


def ask_all(
    engine: Engine, sides: Mapping[str, StoreTier | None], number: int, tokens: int, steps: int
) -> dict[str, tuple[float, float, float]]:
    """A new prompt with every store: seconds to the first token, of a step, and until all is
    written."""
    prompt = np.random.default_rng(number).integers(1, VOCABULARY, tokens).tolist()
    request = Request(prompt, "full", SamplingParams(max_tokens=1 + steps, ignore_eos=True))
    found, answers = {}, []
    for side in turned([*sides], number):
        engine.clear_cache()
        tiers = engine.memory.store = sides[side]
        start = time.perf_counter()
        events = engine.stream([request])
        # behind what the store does when the prompt ends, which `ttft_s` does not see
        last = next(events)
        first_at = time.perf_counter()
        for event in events:
            last = event
        end = time.perf_counter()
        if tiers is not None:
            tiers.store.flush()  # the next one shall not pay for it
        found[side] = first_at - start, (end - first_at) / steps, time.perf_counter() - end
        answers.append(last.result.token_ids if last.result else [])
    require_equal(answers, answers[:1] * len(answers), f"answers of round {number}")
    return {side: found[side] for side in sides}


def costs_of(side: str, seconds: Mapping[str, Sequence[tuple[float, ...]]]) -> list[Cost]:
    """Both times; `seconds` has, by store, a column for each of what `ask_all` measures."""
    rows = []
    for what, mine, plain in zip(
        ("first token", "decode step"), seconds[side], seconds["none"], strict=False
    ):
        ratios = [b / a for a, b in zip(plain, mine, strict=True)]
        low, high = bootstrap(ratios, of=np.median)
        rows.append(
            Cost(side, what, 1e3 * statistics.median(mine), statistics.median(ratios), low, high)
        )
    return rows


def make_engine(model: Path, dtype: str, tokens: int) -> Engine:
    return Engine(model, dtype=dtype, num_pages=5 * (tokens + NEW_TOKENS) // 2 // 16 + 8)


def drop_page_cache(directory: Path) -> None:
    """Let the payload files be read from the disk, where the file system heeds it."""
    for path in directory.rglob("*.safetensors"):
        with path.open("rb") as file:
            os.posix_fadvise(file.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)


def drops(path: Path) -> bool | str:
    """Whether the file system heeds it: then a file has nothing that can be read without
    waiting."""
    path.mkdir()
    probe = path / "probe.safetensors"
    probe.write_bytes(bytes(1 << 20))
    with probe.open("rb") as file:
        os.fsync(file.fileno())
        drop_page_cache(path)
        try:
            os.preadv(file.fileno(), [bytearray(1)], 1 << 19, os.RWF_NOWAIT)
        except BlockingIOError:
            return True
        except OSError as error:
            return f"unknown: {error}"
    return False


def turned(sides: list[str], number: int) -> list[str]:
    """Another one first in every round."""
    return sides[number % len(sides) :] + sides[: number % len(sides)]


def ratio(plain: Sequence[float], ours: Sequence[float]) -> float:
    """How many times faster."""
    return statistics.median(a / b for a, b in zip(plain, ours, strict=True))


def require_equal(found: object, expected: object, where: str) -> None:
    if found != expected:
        raise RuntimeError(f"{where}: {found}, expected {expected}")


def configuration(layers: int, dtype: str, rounds: int) -> dict[str, Any]:
    shape = ", ".join(f"{name} {value}" for name, value in SHAPE.items())
    return {
        "model": f"random Qwen3, {layers} layers, {shape}", "dtype": dtype, "block size": 16,
        "rounds": rounds,
        "threads": torch.get_num_threads(), "cores": os.cpu_count(), "torch": torch.__version__,
    }  # fmt: skip


def report(settings: dict[str, Any], rows: Sequence[Any], as_json: bool) -> None:
    """All rows, of one dataclass; a table for each value of the first field, if there are several
    rows of each."""
    found = [asdict(row) for row in rows]
    if as_json:
        print(json.dumps({"configuration": settings, "rows": found}))
        return
    console.print(line_of_settings(settings))
    first = next(iter(found[0]))
    groups = {
        title: [row for row in found if row[first] == title]
        for title in {row[first]: 0 for row in found}
    }
    if len(groups) == len(found):
        print_table("", found)
        return
    for title, group in groups.items():
        print_table(
            title, [{name: value for name, value in row.items() if name != first} for row in group]
        )


def print_table(title: str, rows: list[dict[str, Any]]) -> None:
    first = {name.replace("_", " "): value for name, value in rows[0].items()}
    table = markdown_table(
        [*first], [name for name, value in first.items() if isinstance(value, str)], title
    )
    for row in rows:
        table.add_row(*map(as_text, row.values()))
    console.print(table)


def as_text(value: str | float | None) -> str:
    if isinstance(value, float):
        return f"{value:.0f}" if value >= 100 else f"{value:.3g}"
    return "-" if value is None else str(value)


if __name__ == "__main__":
    app()
