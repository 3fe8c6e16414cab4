import json
import subprocess
import sys
from pathlib import Path

import pytest

pytest.importorskip("vllm", reason="vLLM is not installed")

from kvgraft.kv.heads import HEAD_MAP_FILE
from models import make_head_map, make_model


@pytest.mark.soak
@pytest.mark.parametrize("policy", ["sparsex:boundary_layers=1,recompute_share=0.1", "redknot"])
@pytest.mark.skipif(
    not Path("/proc/self/clear_refs").exists(), reason="needs Linux's account of peak memory"
)
def test_a_recovery_of_32000_tokens_stays_within_its_stated_bound(tmp_path: Path, policy: str):
    model = make_model(
        tmp_path / "model",
        "qwen3",
        hidden_size=512,
        num_attention_heads=8,
        head_dim=64,
        max_position_embeddings=40_000,
    )
    if policy == "redknot":
        make_head_map(model).save(model / HEAD_MAP_FILE)
    script = Path(__file__).parent / "recovery_memory.py"
    done = subprocess.run(
        [sys.executable, str(script), str(model), policy],
        capture_output=True,
        text=True,
        timeout=600,
    )
    assert done.returncode == 0, done.stderr[-3000:]
    measured = json.loads(done.stdout.splitlines()[-1])
    print(measured)
    assert measured["grafted"] > 31_000
    assert 0.2 * measured["bound"] < measured["grown"] <= measured["bound"]
