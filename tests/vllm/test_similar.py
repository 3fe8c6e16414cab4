"""Near-duplicates inside vLLM: what exact matching misses is grafted, and recomputing all of it is plain vLLM."""

import json
import os
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest

from kvgraft.engine.text import load_tokenizer
from kvgraft.testbed import MODEL_DIR

pytestmark = pytest.mark.vllm
ENGINE = Path(__file__).with_name("grafting_engine.py")
EVERYTHING = {"policy": "sparsex", "topk": 1.0}


def test_near_duplicates_are_grafted():
    vocabulary = len(load_tokenizer(MODEL_DIR))
    known = np.random.default_rng(0).integers(10, vocabulary, 600)
    edited = np.where(np.arange(600) % 30 == 29, (known + 1) % vocabulary, known)
    # in this order, since what is computed in full is an exact hit of the next
    options = [EVERYTHING | {"match": match} for match in ("similar", "exact")] + [{"reuse": "off"}]
    job = {
        "read": [known.tolist()],
        "prompts": [[*range(10, 17), *edited.tolist()]],
        "options": options,
        "settings": {"match": "similar:tau=0.4"},
    }
    env = os.environ | {"HF_HUB_OFFLINE": "1", "VLLM_LOGGING_LEVEL": "ERROR"}
    done = subprocess.run(
        [sys.executable, ENGINE], input=json.dumps(job), capture_output=True, text=True, env=env, check=False
    )
    assert done.returncode == 0, done.stderr[-4000:]
    [[similar, exact, off]] = json.loads(done.stdout.splitlines()[-1])
    assert exact["report"]["grafted_tokens"] == 0  # no block of 32 tokens is left as it was
    assert similar["report"]["grafted_tokens"] > 480
    assert exact["tokens"] == similar["tokens"] == off["tokens"]
