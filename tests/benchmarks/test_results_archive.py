import os
import tarfile
from pathlib import Path

import pytest

from results_archive import archive, main, publish


def make(root: Path, **files: str) -> None:
    for name, text in files.items():
        path = root / name.replace("__", "/").replace("_dot_", ".")
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)


def test_equal_results_give_equal_archives(tmp_path: Path):
    one, other = tmp_path / "one", tmp_path / "other"
    files = {
        "results__b__rows_dot_jsonl": "{}\n",
        "results__a_dot_csv": "1",
        "docs__results__c_dot_json": "[]",
    }
    make(one, **files, docs__results__page_dot_md="of the repository")
    make(other, **dict(reversed(files.items())))
    os.utime(other / "results" / "a.csv", (1, 1))
    packed = archive(one, "1.2")
    assert packed == one / "build" / "kvgraft-results-1.2.tar.gz"
    assert packed.read_bytes() == archive(other, "1.2").read_bytes()
    with tarfile.open(packed) as tar:
        names = [
            f"kvgraft-results-1.2/{name}"
            for name in ("results/a.csv", "results/b/rows.jsonl", "docs/results/c.json")
        ]
        assert tar.getnames() == names
        assert tar.extractfile(names[1]).read() == b"{}\n"  # type: ignore[union-attr]
        assert {(member.mtime, member.uid, member.uname) for member in tar} == {(0, 0, "")}


def test_pages_take_what_they_show(tmp_path: Path):
    make(
        tmp_path,
        results__quality__main__tables_dot_md="new",
        results__quality__main__by_all_dot_csv="rows",
    )
    make(tmp_path, docs__results__quality__main__tables_dot_md="old")
    page = tmp_path / "docs" / "results" / "quality" / "main" / "tables.md"
    assert publish(tmp_path) == [page]
    assert page.read_text() == "new"
    assert len(list((tmp_path / "docs").rglob("*.*"))) == 1


@pytest.mark.parametrize("command", ["archive", "publish"])
def test_without_results_there_is_nothing_to_do(
    command: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
):
    assert main([command], tmp_path) == 2
    assert "results holds nothing: run an experiment first" in capsys.readouterr().err
    assert not (tmp_path / "build").exists()
