"""RedKnot: a model most of whose KV heads need a window only, and what that saves. How it answers:
`research.quality`.

segpaged      attention alone, at the shape of Qwen3-32B
head_paging   the native engine, dense and by head
in_vllm       the policy in both hosts
by_head       how the model is trained (`make testbed-by-head`)
"""

from pathlib import Path

MODEL_DIR: Path = Path(__file__).parent / "model"
"""The bundled model, trained on so that 25 of its 32 KV heads need sinks and a window only."""
