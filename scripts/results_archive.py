"""What runs have left in results/: an archive of all of it for a release, or what the pages of
docs/results show of it.

    # build/kvgraft-results-VERSION.tar.gz: equal files, equal bytes
    python scripts/results_archive.py archive
    # newer tables and pictures to docs/results, over those that are there
    python scripts/results_archive.py publish

Commands of research/ and `kvgraft eval` write their rows, tables and pictures to results/, which
git does not hold."""

import argparse
import gzip
import shutil
import sys
import tarfile
from collections.abc import Iterator
from pathlib import Path

from kvgraft import __version__

ROOT = Path(__file__).parent.parent


def archive(root: Path, version: str) -> Path:
    """Pack all files of results/, and the figures in JSON of docs/results, in order and without
    times and owners.

    Raises:
        FileNotFoundError: there are no results.
    """
    path, name = root / "build" / f"kvgraft-results-{version}.tar.gz", f"kvgraft-results-{version}"
    files = [*results(root), *sorted((root / "docs" / "results").rglob("*.json"))]
    path.parent.mkdir(exist_ok=True)
    with (
        path.open("wb") as raw,
        gzip.GzipFile("", "wb", 9, raw, mtime=0) as packed,
        tarfile.open(fileobj=packed, mode="w", format=tarfile.PAX_FORMAT) as tar,
    ):
        for file in files:
            member = tarfile.TarInfo(f"{name}/{file.relative_to(root)}")
            member.size = file.stat().st_size
            with file.open("rb") as content:
                tar.addfile(member, content)
    return path


def publish(root: Path) -> list[Path]:
    """Copy what docs/results has a file of the same place and name for; returns the copies.

    Raises:
        FileNotFoundError: there are no results.
    """
    pages = root / "docs" / "results"
    found = [(file, pages / file.relative_to(root / "results")) for file in results(root)]
    kept = [(file, page) for file, page in found if page.is_file()]
    for file, page in kept:
        shutil.copyfile(file, page)
    return [page for _, page in kept]


def results(root: Path) -> Iterator[Path]:
    """All files of results/, by name."""
    files = sorted(path for path in (root / "results").rglob("*") if path.is_file())
    if not files:
        raise FileNotFoundError(
            f"{root / 'results'} holds nothing: run an experiment first (research/README.md)"
        )
    yield from files


def main(arguments: list[str], root: Path = ROOT) -> int:
    """Run the command line; returns its exit code."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("command", choices=["archive", "publish"])
    try:
        if parser.parse_args(arguments).command == "archive":
            print(archive(root, __version__))
        else:
            print(*publish(root), sep="\n")
    except FileNotFoundError as error:
        print(error, file=sys.stderr)
        return 2
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
