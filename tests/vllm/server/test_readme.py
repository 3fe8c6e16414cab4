"""The first commands of the README, as they stand there."""

import json
import shutil
import subprocess
from pathlib import Path

import pytest

from kvgraft.server.process import serving

ROOT = Path(__file__).parents[3]


@pytest.mark.slow
@pytest.mark.skipif(shutil.which("curl") is None, reason="curl is not installed")
def test_the_second_prompt_of_the_readme_is_grafted():
    text = (ROOT / "README.md").read_text(encoding="utf-8").partition("## Install and serve")[2]
    block = text.split("```")[1].strip().splitlines()
    setup, activate, serve, ask = (line.partition("  # ")[0].strip() for line in block)
    assert (setup, activate) == ("make demo", ". .venv/bin/activate")
    program, command, *arguments = serve.split()
    assert (program, command) == ("kvgraft", "serve")

    with serving(*arguments) as server:
        here = ask.replace("localhost:8000", server.url.removeprefix("http://"))
        assert here != ask
        shell = ["bash", "-c", here]
        done = subprocess.run(shell, cwd=ROOT, capture_output=True, text=True, check=True)

    first, end = json.JSONDecoder().raw_decode(done.stdout)
    second, _ = json.JSONDecoder().raw_decode(done.stdout[end:].lstrip())
    reports = [answer["kv_transfer_params"]["kvgraft"] for answer in (first, second)]
    assert [report["grafted_tokens"] > 0 for report in reports] == [False, True]
