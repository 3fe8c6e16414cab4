"""Commands about a chunk store on disk, for its operator. Processes may be using it."""

import sqlite3
import time
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from datetime import datetime
from pathlib import Path
from typing import Annotated, Any

import typer
from rich import box
from rich.table import Column, Table
from rich.text import Text

from kvgraft.cli.options import JsonOption, app, console, find, print_json, progress_console
from kvgraft.cli.progress import progress_bar
from kvgraft.methods import require_amount
from kvgraft.store import StoreDirectory, StoreOptions
from kvgraft.store.catalogue import CatalogueDamaged, CatalogueRow
from kvgraft.store.secret import CACHE_SECRET, given_secret

# hexadecimal digits of a key in tables
SHORT_KEY = 12
store_app = typer.Typer(name="store", help="What a store holds on disk.", no_args_is_help=True)
app.add_typer(store_app)
DirOption = Annotated[Path, typer.Option("--dir", help="Directory of the store.")]
KeysArgument = Annotated[
    list[str], typer.Argument(metavar="KEY...", help="Keys, or what only they begin with.")
]


@store_app.command("list")
def list_chunks(
    directory: DirOption,
    namespace: Annotated[
        str | None, typer.Option(help="Only this one's, as it is listed.", show_default="all")
    ] = None,
    as_json: JsonOption = False,
) -> None:
    """What is stored, least recently used first, and how much of it belongs to whom."""
    with _opened(directory) as store:
        rows = store.list(namespace)
    sums = {
        name: _sums(row for row in rows if _namespace(row) == name)
        for name in sorted({*map(_namespace, rows)})
    }
    total = _sums(rows)
    if as_json:
        print_json({"chunks": [_entry(row) for row in rows], "namespaces": sums, "total": total})
        return
    if rows:
        console.print(_table(rows, time.time()))
    console.print(_sums_table(sums, total))


@store_app.command("show")
def show_chunk(
    key: Annotated[str, typer.Argument(metavar="KEY", help="A key, or what only it begins with.")],
    directory: DirOption,
    model: Annotated[
        Path | None,
        typer.Option(
            help="Print the text, too: directory or name of the model that has its tokenizer."
        ),
    ] = None,
    as_json: JsonOption = False,
) -> None:
    """Everything about one chunk."""
    with _opened(directory) as store:
        row = _find(store, [key])[0]
    text = None if model is None else _text(row, model)
    if as_json:
        tokens = row.record.chunk.tokens.tolist()
        print_json(_details(row) | {"token_ids": tokens} | ({} if text is None else {"text": text}))
        return
    grid = Table.grid(padding=(0, 2))
    for name, value in _details(row).items():
        grid.add_row(name.replace("_", " "), _printable(_shown(name, value)))
    console.print(grid)
    if text is not None:
        console.print(_printable(text), soft_wrap=True)


@store_app.command("pin")
def pin_chunks(keys: KeysArgument, directory: DirOption, as_json: JsonOption = False) -> None:
    """Never evict these chunks."""
    _set_pinned(keys, directory, True, as_json)


@store_app.command("unpin")
def unpin_chunks(keys: KeysArgument, directory: DirOption, as_json: JsonOption = False) -> None:
    """Allow that these chunks are evicted."""
    _set_pinned(keys, directory, False, as_json)


@store_app.command("drop")
def drop_chunks(
    keys: KeysArgument,
    directory: DirOption,
    shared: Annotated[
        str | None,
        typer.Option(
            metavar="URL", help="Remove them from this shared tier, too, and from all who share it."
        ),
    ] = None,
    as_json: JsonOption = False,
) -> None:
    """Remove these chunks; none if one of the keys is wrong."""
    with _opened(directory) as store:
        rows = _find(store, keys)
        if shared is not None:
            _remove_shared(rows, directory.resolve(), shared)
        rows = [store.drop(row.key.hex()) for row in rows]
    _tell(rows, "dropped", as_json)


@store_app.command("verify")
def verify_chunks(directory: DirOption, as_json: JsonOption = False) -> None:
    """Read every chunk and remove those that cannot be used; exit code 1 if there were any."""
    with _opened(directory) as store, progress_bar(progress_console, "verifying") as on_progress:
        counts = store.verify(on_progress)

    conditions = {
        condition: counts[condition] for condition in ("whole", "missing", "damaged", "foreign")
    }
    num_removed = counts.total() - counts["whole"]
    if as_json:
        print_json(conditions)
    else:
        console.print(
            (_listed(conditions) or "nothing is stored")
            + (f": {num_removed} removed" if num_removed else "")
        )
    if num_removed:
        raise typer.Exit(1)


@store_app.command("gc")
def collect_garbage(
    directory: DirOption,
    disk_gib: Annotated[
        float | None,
        typer.Option(help="Evict the least recently used above so much.", show_default="no limit"),
    ] = None,
    quota: Annotated[
        float | None,
        typer.Option(help="Share of it that one namespace may take.", show_default="1"),
    ] = None,
    as_json: JsonOption = False,
) -> None:
    """Remove what killed processes have left, and what is too much; nobody may be using the
    directory."""
    if disk_gib is not None:
        require_amount("--disk-gib", disk_gib)
    elif quota is not None:
        raise ValueError(f"--quota {quota} is a share of --disk-gib: give that, too")

    with _opened(directory) as store:
        counts = store.gc(
            None if disk_gib is None else int(disk_gib * 2**30), 1.0 if quota is None else quota
        )

    removed = {what: counts[what] for what in ("temporaries", "orphans", "missing", "evicted")}
    if as_json:
        print_json(removed)
    else:
        console.print(
            f"removed: {_listed(removed)}" if any(removed.values()) else "nothing to remove"
        )


@contextmanager
def _opened(directory: Path) -> Iterator[StoreDirectory]:
    """Open the directory of a store. Raise ValueError for errors that an operator can fix."""
    if not directory.is_dir():
        raise NotADirectoryError(f"{directory} is not a directory")
    try:
        with StoreDirectory(directory) as store:
            yield store
    except KeyError as error:
        raise ValueError(error.args[0]) from error
    except RuntimeError as error:
        raise ValueError(str(error)) from error
    except (CatalogueDamaged, sqlite3.Error) as error:
        raise ValueError(f"the catalogue of {directory} cannot be used: {error}") from error


def _find(store: StoreDirectory, keys: Iterable[str]) -> list[CatalogueRow]:
    """Return the rows of keys, each once, before any of them is changed."""
    if not all(keys):
        raise ValueError("a key must have at least one digit")
    found = {row.key: row for row in map(store.show, keys)}
    return list(found.values())


def _remove_shared(rows: Iterable[CatalogueRow], directory: Path, url: str) -> None:
    """Remove chunks from the shared tier of servers with this directory, which may be a rank's.
    Raise ValueError if that fails.
    """
    rank = directory.name.removeprefix("rank-") if directory.name.startswith("rank-") else None
    base = directory if rank is None else directory.parent
    if given_secret() is None and not (base / "secret").exists():
        raise ValueError(f"{base} has no secret: set {CACHE_SECRET} to that of the servers")

    options = StoreOptions(
        base, shared_url=url, shared_timeout_s=30.0, rank=None if rank is None else int(rank)
    )

    try:
        if options.sharing is not None:
            options.sharing.remove(row.record for row in rows)
    except Exception as error:  # clients raise errors of many types
        raise ValueError(
            f"the shared tier cannot be used, nothing was dropped: {error!r}"
        ) from error


def _set_pinned(keys: list[str], directory: Path, pinned: bool, as_json: bool) -> None:
    with _opened(directory) as store:
        rows = [
            replace(store.pin(row.key.hex(), pinned), pinned=pinned) for row in _find(store, keys)
        ]
    _tell(rows, "pinned" if pinned else "not pinned", as_json)


def _tell(rows: Sequence[CatalogueRow], what: str, as_json: bool) -> None:
    """Print the result of a change to chunks."""
    if as_json:
        print_json([_entry(row) for row in rows])
        return
    for row in rows:
        tokens = len(row.record.chunk.tokens)
        console.print(
            _printable(f"{row.key.hex()[:SHORT_KEY]} {what}: {tokens} tokens of {_namespace(row)}")
        )


def _listed(counts: dict[str, int]) -> str:
    return ", ".join(f"{number} {name}" for name, number in counts.items() if number)


def _namespace(row: CatalogueRow) -> str:
    return row.record.chunk.namespace


def _entry(row: CatalogueRow) -> dict[str, Any]:
    """Return a chunk as one line; times in seconds since the epoch."""
    chunk = row.record.chunk
    return {
        "key": row.key.hex(), "namespace": chunk.namespace, "tokens": len(chunk.tokens),
        "start": chunk.source_start,
        "bytes": row.num_bytes, "pinned": row.pinned, "created": row.created, "used": row.used,
    }  # fmt: skip


def _details(row: CatalogueRow) -> dict[str, Any]:
    """Return `_entry` with all other data of the chunk except its tokens."""
    chunk = row.record.chunk
    return _entry(row) | {
        "blocks": chunk.num_blocks, "block_size": chunk.block_size, "source": chunk.source,
        "int8": row.record.int8,
        "tensors": {name: f"{dtype} {list(shape)}" for name, (dtype,
        shape) in row.record.tensors.items()},
        "scope": chunk.scope.hex(), "chain": chunk.chains[-1].hex(), "digest": row.digest.hex(),
    }  # fmt: skip


def _sums(rows: Iterable[CatalogueRow]) -> dict[str, int]:
    entries = [_entry(row) for row in rows]
    return {"chunks": len(entries)} | {
        name: sum(e[name] for e in entries) for name in ("tokens", "bytes", "pinned")
    }


def _table(rows: Iterable[CatalogueRow], now: float) -> Table:
    table = Table(
        "key", Column("namespace", overflow="fold"), box=box.SIMPLE_HEAD, padding=(0, 1, 0, 0)
    )
    for name in ("tokens", "start", "MiB", "pinned", "created", "last used"):
        table.add_column(name, justify="right", no_wrap=True)

    for row in rows:
        entry = _entry(row)
        key, namespace = (
            Text(entry["key"][:SHORT_KEY], no_wrap=True),
            _printable(entry["namespace"]),
        )
        size, pinned = f"{entry['bytes'] / 2**20:.2f}", "yes" if row.pinned else ""
        times = _ago(now - row.created), _ago(now - row.used)
        table.add_row(
            key, namespace, str(entry["tokens"]), str(entry["start"]), size, pinned, *times
        )

    return table


def _sums_table(sums: dict[str, dict[str, int]], total: dict[str, int]) -> Table:
    first = Column("namespace", "total", overflow="fold")
    table = Table(first, box=box.SIMPLE_HEAD, padding=(0, 1, 0, 0), show_footer=True)
    for name, value in total.items():
        table.add_column(
            "MiB" if name == "bytes" else name, _amount(name, value), justify="right", no_wrap=True
        )
    for namespace, mine in sums.items():
        table.add_row(
            _printable(namespace), *(_amount(name, value) for name, value in mine.items())
        )
    return table


def _amount(name: str, value: int) -> str:
    return f"{value / 2**20:.2f}" if name == "bytes" else str(value)


def _ago(seconds: float) -> str:
    """Return a time in its largest unit."""
    for size, unit in ((86400, "d"), (3600, "h"), (60, "min")):
        if seconds >= size:
            return f"{seconds // size:.0f} {unit} ago"
    return f"{max(seconds, 0.0):.0f} s ago"


def _shown(name: str, value: Any) -> str:
    if name in ("created", "used"):
        return datetime.fromtimestamp(value).astimezone().isoformat(" ", "seconds")
    if isinstance(value, dict):
        return "\n".join(f"{part} {form}" for part, form in value.items())
    return ("no", "yes")[value] if isinstance(value, bool) else str(value)


def _text(row: CatalogueRow, model: Path) -> str:
    """Return the text of a chunk. Raise ValueError if the model does not have its tokens."""
    from kvgraft.engine.text import load_tokenizer

    tokenizer, tokens = load_tokenizer(find(model)), row.record.chunk.tokens
    if (last := int(tokens.max())) >= len(tokenizer):
        raise ValueError(
            f"token {last} is none of the {len(tokenizer)} of {model}: another model has read this"
        )
    return str(tokenizer.decode(tokens.tolist()))


def _printable(text: str) -> Text:
    """Return text of others without terminal control codes."""
    return Text(
        "".join(c if c.isprintable() or c in "\n\t" else "\N{REPLACEMENT CHARACTER}" for c in text)
    )
