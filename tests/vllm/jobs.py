"""Jobs for engines in processes of their own, and what they ask: `graft` (`grafting_engine.py`) and
`follow` (`sparse_engine.py`)."""

from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

import warm
from engines import ALONE, ENVIRONMENT, TWO_RANKS, Ask, words

from kvgraft import Engine, Request, SamplingParams

HERE = Path(__file__).parent
SMALL = {"num_gpu_blocks_override": 41, "max_model_len": 1024}
KNOWN = words(600, 1)
MOVED = [10, 11, 12, 13, 14, 15, 16, *KNOWN[32:]]
MIXED = [Ask(words(length, length), max_tokens=24) for length in (900, 40, 420, 1200, 96)]


def graft(
    prompts: list[list[int]],
    options: list[dict[str, Any]],
    read: list[list[int]],
    ranks: int = 1,
    adapters: Sequence[Path | None] = (None,),
    engine: dict[str, Any] | None = None,
    **settings: Any,
) -> Any:
    """What `grafting_engine.py` says."""
    lora = {"enable_lora": True, "max_loras": 4} if any(adapters) else {}
    engine = SMALL | {"tensor_parallel_size": ranks} | lora | (engine or {})
    job = {
        "read": read,
        "prompts": prompts,
        "options": options,
        "engine": engine,
        "settings": settings,
    }
    job["adapters"] = [path and str(path) for path in adapters]
    return warm.run(HERE / "grafting_engine.py", job, **TWO_RANKS if ranks > 1 else ALONE)


def follow(model: Path, flow: str, *rounds: list[Ask], **more: Any) -> dict[str, Any]:
    """What `sparse_engine.py` says."""
    given = {
        "model": str(model),
        "flow": flow,
        "rounds": [[asdict(a) for a in asks] for asks in rounds],
    } | more
    said: dict[str, Any] = warm.run(HERE / "sparse_engine.py", given, **ENVIRONMENT)
    return said


def natively(engine: Engine, flow: str, asks: list[Ask]) -> list[list[int]]:
    """What the native engine answers, in a batch."""
    requests = [
        Request(
            list(a.prompt),
            "full",
            SamplingParams(a.max_tokens, ignore_eos=True),
            remember=False,
            flow=flow,
        )
        for a in asks
    ]
    return [result.token_ids for result in engine.generate(requests)]
