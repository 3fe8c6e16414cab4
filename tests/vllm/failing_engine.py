"""An engine with our connector whose recoveries fail: one job as JSON on stdin, its answers as the
last line.

    {"model": directory, "read": token ids, "prompts": [token ids], "where": [of `FailsOnRank`],
     "engine": {arguments of vllm.LLM}}

Every prompt is asked at one of the places; the answers are a list of {tokens, reason} or of {died:
name of an error}, each with its seconds, up to the engine's death."""

import json
import os
import sys
import time
from pathlib import Path
from typing import IO, Any

sys.path.insert(0, str(Path(__file__).parent))

import failing_policies  # noqa: F401


def main(answers: IO[str]) -> None:
    from vllm import LLM, SamplingParams
    from vllm.v1.engine.exceptions import EngineDeadError

    from kvgraft.vllm.compat import WORKER_CLASS, transfer_config

    job = json.load(sys.stdin)
    llm = LLM(
        job["model"],
        **job["engine"],
        dtype="float32",
        block_size=32,
        max_model_len=2048,
        enforce_eager=True,
        kv_cache_memory_bytes=1 << 26,
        worker_cls=WORKER_CLASS,
        kv_transfer_config=transfer_config(costs="tokens"),
    )

    def ask(tokens: list[int], options: dict[str, Any]) -> dict[str, Any]:
        extra = {"kv_transfer_params": {"kvgraft": options}}
        params = SamplingParams(max_tokens=16, temperature=0.0, ignore_eos=True, extra_args=extra)
        started = time.monotonic()
        try:
            [answer] = llm.generate([{"prompt_token_ids": tokens}], params, use_tqdm=False)
        except EngineDeadError as error:
            return {"died": type(error).__name__, "seconds": time.monotonic() - started}
        reason = answer.kv_transfer_params["kvgraft"]["reason"]
        return {
            "tokens": answer.outputs[0].token_ids,
            "reason": reason,
            "seconds": time.monotonic() - started,
        }

    ask(job["read"], {"reuse": "off"})
    answered: list[dict[str, Any]] = []
    for tokens, where in zip(job["prompts"], job["where"], strict=True):
        answered.append(
            ask(tokens, {"policy": "fails", "where": where} if where else {"reuse": "off"})
        )
        if "died" in answered[-1]:
            break
    print(json.dumps(answered), file=answers, flush=True)


if __name__ == "__main__":
    os.environ.setdefault("VLLM_CPU_KVCACHE_SPACE", "1")
    output = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)  # what vLLM prints is no answer
    main(output)
