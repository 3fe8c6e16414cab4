"""The last token of a recovered prompt sees all of its window, wherever windows and blocks end:
vLLM computes it again, after the recovery."""

from pathlib import Path
from typing import Any

import pytest
from engines import EVERYTHING, OFF, words
from families import make_family
from jobs import KNOWN, graft

# all places of a block of 32 at which a prompt can end; a chunk of Llama 4 ends at the last one
LENGTHS = range(481, 513)


def check_every_end(engine: dict[str, Any]) -> None:
    """Recompute all of prompts of known text, and compare with plain vLLM's answers."""
    engine |= {"num_gpu_blocks_override": 41 * 4, "prefix_cache_retention_interval": None}
    prompts = [words(7, length) + KNOWN[: length - 7] for length in LENGTHS]
    answers = graft(prompts, [EVERYTHING, OFF], [KNOWN], engine=engine)
    for length, (recomputed, plain) in zip(LENGTHS, answers, strict=True):
        assert recomputed["report"]["grafted_tokens"] >= length - 8 - 32
        assert recomputed["tokens"] == plain["tokens"], length


@pytest.mark.slow
@pytest.mark.parametrize(
    "family",
    ["Llama 4", *(pytest.param(name, marks=pytest.mark.soak) for name in ("Gemma 3", "gpt-oss"))],
)
def test_layers_with_windows(family: str, tmp_path: Path):
    check_every_end({"model": str(make_family(family, tmp_path / "model"))})
