"""Which features a server refuses together is what the page says."""

import os
import subprocess
import sys
from pathlib import Path

import pytest
from combination_table import written
from engines import ENVIRONMENT
from multimodal import PYTHONPATH

pytestmark = pytest.mark.slow
SCRIPT = Path(__file__).with_name("combination_table.py")


def test_the_table_of_combinations_is_what_servers_refuse():
    """Made again by: python tests/vllm/combination_table.py"""
    done = subprocess.run(
        [sys.executable, str(SCRIPT), "--print"],
        env={**os.environ, **ENVIRONMENT, "PYTHONPATH": PYTHONPATH},
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stderr[-4000:]
    assert done.stdout == written()
