"""What `make gpu` does, tried without a device."""

import json
from pathlib import Path

import pytest
import torch
import typer
from typer.testing import CliRunner

import gpu

runner = CliRunner()


def invoke(*arguments: str) -> tuple[int, str]:
    app = typer.Typer()
    app.command()(gpu.main)
    result = runner.invoke(app, [*arguments])
    return result.exit_code, result.output


@pytest.mark.slow
@pytest.mark.parametrize(
    "name",
    [
        "align-paged",
        "kernel-rates",
        "vllm-exact",
        "flows",
        *(
            pytest.param(name, marks=pytest.mark.soak)
            for name in (
                "tests",
                "vllm-eager",
                "vllm-streams",
                "vllm-profile",
                "first-tokens-8k",
                "align",
                "segpaged",
                "topk",
                "capacity",
            )
        ),
    ],
)
def test_every_command_gives_rows(name: str, tmp_path: Path):
    code, output = invoke("--device", "cpu", "--small", "--only", name, "--out", str(tmp_path))
    assert code == 0, output
    [result] = json.loads((tmp_path / "gpu.json").read_text())["results"]
    assert result["rows"]
    assert result["printed"]
    assert result["seconds"] > 0
    page = (tmp_path / "gpu.md").read_text()
    assert all(f"| {what} | {figure} |" in page for what, figure in result["rows"])


def test_the_plugin_comes_first_and_nothing_may_last_longer_than_a_call():
    todo = gpu.measurements("cuda")
    assert [each.name for each in todo[:3]] == ["vllm-exact", "vllm-compiled", "vllm-eager"]
    assert gpu.LIMIT_S <= 480
    [grid] = [each.at_size for each in todo if each.name == "vllm-compiled"]
    shares = (0, 50, 75, 90, 98)
    expected = {f"{size}k-{share}" for size in (8, 32) for share in shares}
    assert {word for word in grid if "k-" in word} == expected


def test_what_fails_and_prints_is_on_the_page_with_its_rows(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    code = "import sys; print('{\"a\": 1}'); sys.exit('it broke')"
    both = gpu.Measurement(
        "both", "Both", "nothing", ("-c", code), (), (), lambda found: [("a", str(found["a"]))]
    )
    monkeypatch.setattr(gpu, "measurements", lambda device: [both])
    status, _ = invoke("--device", "cpu", "--small", "--out", str(tmp_path))
    page = (tmp_path / "gpu.md").read_text()
    assert status == 1
    assert "exit status 1: it broke" in page
    assert "| a | 1 |" in page


def test_a_measurement_that_fails_is_on_the_page(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    broken = gpu.Measurement(
        "broken", "Broken", "nothing", ("benchmarks/align.py",), (), ("--dtype", "int8"), list
    )
    missing = gpu.Measurement(
        "missing", "Missing", "nothing", ("-c", ""), (), (), list, needs="no_such_package"
    )
    monkeypatch.setattr(gpu, "measurements", lambda device: [broken, missing])
    code, _ = invoke(
        "--device",
        "cpu",
        "--small",
        "--only",
        "broken",
        "--only",
        "missing",
        "--out",
        str(tmp_path),
    )
    page = (tmp_path / "gpu.md").read_text()
    assert code == 1
    assert "exit status 2" in page
    assert "no_such_package is not installed" in page


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a device")
def test_without_a_device_nothing_is_written(tmp_path: Path):
    code, output = invoke("--out", str(tmp_path / "none"))
    assert code == 2
    assert "no CUDA device" in output
    assert not (tmp_path / "none").exists()


def test_unknown_names_are_refused(tmp_path: Path):
    code, output = invoke("--only", "allign", "--out", str(tmp_path))
    assert code == 2
    assert "allign" in output
