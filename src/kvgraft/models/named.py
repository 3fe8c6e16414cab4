"""Directories of installed models, and checks that they are complete."""

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
    """Record in a model's directory: the source of the weights, and the required files.

    Attributes:
        name: name of the model.
        source: requirement for pip, or path of a file.
        licence: licence of the weights; None if unknown.
        sha256: hexadecimal SHA-256 of the GGUF file with the weights.
        files: size in bytes by name.
    """

    name: str
    source: str
    licence: str | None
    sha256: str
    files: dict[str, int]


@dataclass(frozen=True)
class NamedModel:
    """A complete installed model."""

    directory: Path
    record: ModelRecord

    @property
    def num_bytes(self) -> int:
        """Size of all its files."""
        return sum(self.record.files.values())


def home() -> Path:
    """Return the directory of all installed models."""
    return user_cache_path("kvgraft") / "models"


def check_name(name: str) -> None:
    """Raise ValueError unless the name is allowed for a model."""
    if not NAME.fullmatch(name):
        raise ValueError(
            f"a model cannot be named {name!r}: up to 64 letters, digits, '.', '_' and '-', the "
            "first a letter or digit"
        )


def find_named(name: str) -> NamedModel | None:
    """Return the model of this name, or None unless it is complete: its record is valid, and all
    files have their size.
    """
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
    """Return all complete installed models, by name."""
    names = sorted(path.name for path in home().glob("*") if NAME.fullmatch(path.name))
    return [model for name in names if (model := find_named(name)) is not None]


@contextmanager
def workshop(name: str) -> Iterator[Path]:
    """Create an empty directory for the conversion of a model, and remove it afterwards.

    A second process that installs the same model waits for the first. Files of a killed process are
    removed.
    """
    home().mkdir(parents=True, exist_ok=True)
    folder = home() / f".{name}.part"
    with (home() / f".{name}.lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)  # held until the file is closed or the process ends
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
    """Rename a converted model from the directory `folder` to its name, in one step. An incomplete
    model of that name is replaced.
    """
    files = {path.name: path.stat().st_size for path in sorted(made.iterdir())}
    record = ModelRecord(name, source, licence, sha256, files)
    (made / RECORD).write_bytes(msgspec.json.format(msgspec.json.encode(record), indent=2))
    final = home() / name
    if final.exists():
        final.rename(folder / "replaced")
    made.rename(final)
    return NamedModel(final, record)
