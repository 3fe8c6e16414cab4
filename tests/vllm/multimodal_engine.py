"""What a multimodal model does with grafts where it is compiled, and where it is not: one job as
JSON on stdin, facts as the last line.

    {"model": directory, "policies": [...]}
"""

import json
import os
import sys
from dataclasses import asdict
from pathlib import Path
from typing import IO, Any

TESTS = Path(__file__).parents[1]
sys.path[:0] = [str(TESTS), str(TESTS / "vllm")]

from engines import Ask, words  # noqa: E402
from hosts import Host  # noqa: E402

DOCUMENTS = words(200, 1), words(150, 2)
PROMPT = words(20, 3) + DOCUMENTS[1] + words(10, 4) + DOCUMENTS[0] + words(12, 5)


def answers(job: dict[str, Any], *, enforce_eager: bool) -> dict[str, Any]:
    """The answers under each policy, and how often the model ran as one."""
    from vllm.distributed.kv_transfer import ensure_kv_transfer_shutdown

    host = Host(Path(job["model"]), enforce_eager=enforce_eager)
    host.count_forwards()
    host.read(*DOCUMENTS)
    asks = [Ask(PROMPT, {"policy": policy}, logprobs=True) for policy in job["policies"]]
    found = [asdict(answer) for ask in asks for answer in host.ask(ask)]
    host.llm.llm_engine.engine_core.shutdown()
    ensure_kv_transfer_shutdown()
    return {
        "answers": found,
        "num_forwards": host.num_forwards,
        "num_layers": host.num_layers,
    }


def main(output: IO[str]) -> None:
    job = json.load(sys.stdin)
    facts = {name: answers(job, enforce_eager=name == "eager") for name in ("compiled", "eager")}
    print(json.dumps(facts), file=output, flush=True)


if __name__ == "__main__":
    said = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)  # what vLLM prints is no answer
    main(said)
