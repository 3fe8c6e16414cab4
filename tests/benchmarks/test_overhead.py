"""The cost without reuse is measured on both sides of one engine."""

import json
import subprocess
import sys
from pathlib import Path

import pytest

import servers

pytestmark = pytest.mark.vllm


@pytest.mark.soak
def test_both_sides_are_measured():
    script = Path(servers.__file__).parent / "overhead.py"
    options = ["--tokens", "64", "--turns", "2", "--layers", "1", "--rounds", "3", "--json"]
    ended = subprocess.run(
        [sys.executable, script, *options], capture_output=True, text=True, timeout=300, check=True
    )
    result = json.loads(ended.stdout.splitlines()[-1])
    assert (result["configuration"]["tokens"], result["configuration"]["turns"]) == (64, 2)
    assert 0 < result["low"] <= result["ratio"] <= result["high"]
    assert min(result["plain_ms"], result["ours_ms"]) > 0
