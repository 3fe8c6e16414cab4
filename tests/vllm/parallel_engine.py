"""vLLM over several stages or replicas: one job as JSON on stdin, its answers as the last line.

    {"model": directory, "with_kvgraft": bool, "engine": {arguments of AsyncEngineArgs},
     "asks": [[token ids, kvgraft options, number of the replica or null]]}

The answers are a list of {tokens, grafted, reason}, each asked when the one before has ended; or,
where the engine does not start, {"refused": what it said}."""

import asyncio
import json
import os
import sys
from pathlib import Path
from typing import IO, Any

TESTS = Path(__file__).parents[1]
sys.path[:0] = [str(TESTS), str(TESTS / "vllm")]

from engines import Ask, as_answer, as_prompt, as_sampling  # noqa: E402


async def answer(job: dict[str, Any]) -> list[dict[str, Any]]:
    """What the module says."""
    from vllm.engine.arg_utils import AsyncEngineArgs
    from vllm.sampling_params import RequestOutputKind
    from vllm.v1.engine.async_llm import AsyncLLM

    from kvgraft.vllm.compat import WORKER_CLASS, transfer_config

    ours = {"worker_cls": WORKER_CLASS, "kv_transfer_config": transfer_config(costs="tokens")}
    engine = AsyncLLM.from_engine_args(
        AsyncEngineArgs(
            job["model"],
            dtype="float32",
            block_size=32,
            max_model_len=2048,
            enforce_eager=True,
            kv_cache_memory_bytes=1 << 26,
            **ours if job["with_kvgraft"] else {},
            **job["engine"],
        )
    )
    found = []
    for number, (tokens, options, replica) in enumerate(job["asks"]):
        ask = Ask(tokens, options)
        sampling = as_sampling(ask, output_kind=RequestOutputKind.FINAL_ONLY)
        async for output in engine.generate(
            as_prompt(ask), sampling, str(number), data_parallel_rank=replica
        ):
            said = as_answer(output)
        report = said.report
        found.append(
            {
                "tokens": said.tokens,
                "grafted": report.get("grafted_tokens"),
                "reason": report.get("reason"),
            }
        )
    engine.shutdown()
    return found


def main(answers: IO[str]) -> None:
    job = json.load(sys.stdin)
    try:
        found: Any = asyncio.run(answer(job))
    except (RuntimeError, ValueError) as error:
        found = {"refused": str(error)}
    print(json.dumps(found), file=answers, flush=True)


if __name__ == "__main__":
    output = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)  # what vLLM prints is no answer
    main(output)
