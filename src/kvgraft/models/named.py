"""Where models that have a name lie, and which of them are whole."""

import fcntl
import re
import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

import msgspec
from platformdirs import user_cache_path

NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]{0,63}")
RECORD = "kvgraft.json"


class ModelRecord(msgspec.Struct, frozen=True):
    """What lies beside the weights: where they come from, and which files there must be.

    Attributes:
        source: a requirement that pip was given, or the path of a file.
        licence: None where nobody has said.
        sha256: hexadecimal, of the GGUF file that the weights were read from.
        files: size in bytes by name.
    """

    name: str
    source: str
    licence: str | None
    sha256: str
    files: dict[str, int]


@dataclass(frozen=True)
class NamedModel:
    """A whole model."""

    directory: Path
    record: ModelRecord

    @property
    def num_bytes(self) -> int:
        """Of all its files."""
        return sum(self.record.files.values())


def home() -> Path:
    """The directory of all models that have a name."""
    return user_cache_path("kvgraft") / "models"


def check_name(name: str) -> None:
    """Raise ValueError unless a model can have this name."""
    if not NAME.fullmatch(name):
        raise ValueError(
            f"a model cannot be named {name!r}: up to 64 letters, digits, '.', '_' and '-', the "
            "first a letter or digit"
        )


def find_named(name: str) -> NamedModel | None:
    """The model of this name, if it is here and whole: its record can be read, and all files have
    their size."""
    directory = home() / name
    try:
        record = msgspec.json.decode((directory / RECORD).read_bytes(), type=ModelRecord)
        whole = all(
            (directory / file).stat().st_size == size for file, size in record.files.items()
        )
    except (OSError, msgspec.DecodeError):
        return None
    return NamedModel(directory, record) if whole and record.name == name else None


def named_models() -> list[NamedModel]:
    """All models that are here and whole, by name."""
    names = sorted(path.name for path in home().glob("*") if NAME.fullmatch(path.name))
    return [model for name in names if (model := find_named(name)) is not None]


@contextmanager
def workshop(name: str) -> Iterator[Path]:
    """An empty directory to make a model in, gone afterwards. Who makes the same model waits for
    whoever does already; what a killed process has left is removed."""
    home().mkdir(parents=True, exist_ok=True)
    folder = home() / f".{name}.part"
    with (home() / f".{name}.lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)  # until the file is closed, or the process has ended
        _remove(folder)
        folder.mkdir()
        try:
            yield folder
        finally:
            _remove(folder)


def _remove(folder: Path) -> None:
    if folder.exists():
        shutil.rmtree(folder)


def put_in_place(
    made: Path, folder: Path, *, name: str, source: str, licence: str | None, sha256: str
) -> NamedModel:
    """Give what was made in the workshop `folder` its name, all at once; what had that is not
    whole."""
    files = {path.name: path.stat().st_size for path in sorted(made.iterdir())}
    record = ModelRecord(name, source, licence, sha256, files)
    (made / RECORD).write_bytes(msgspec.json.format(msgspec.json.encode(record), indent=2))
    final = home() / name
    if final.exists():
        final.rename(folder / "replaced")
    made.rename(final)
    return NamedModel(final, record)
