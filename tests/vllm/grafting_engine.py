"""An engine with our connector in a process of its own: one job as JSON on stdin, its answers as
the last line.

    {"read": [token ids], "prompts": [token ids], "options": [kvgraft options], "engine": {arguments of vllm.LLM},
     "settings": {settings of the connector}, "adapters": [null or a path]}

Texts are read under the first of the adapters (null is none, and the default). Every prompt is
asked once under each of them with each of the options, of which `reuse: off` has to be the last, as
it leaves exact hits; the answers are a list of lists of {tokens, logprobs (one for each), cached,
report}."""

import json
import os
import sys
from pathlib import Path
from typing import IO, Any


def main(answers: IO[str]) -> None:
    from vllm import LLM, SamplingParams
    from vllm.lora.request import LoRARequest

    from kvgraft.vllm.compat import WORKER_CLASS, transfer_config
    from kvgraft_lab.testbed import MODEL_DIR

    job = json.load(sys.stdin)
    arguments: dict[str, Any] = {
        "model": str(MODEL_DIR),
        "dtype": "float32",
        "max_model_len": 4096,
        "block_size": 32,
    }
    llm = LLM(
        **arguments | job.get("engine", {}),
        enforce_eager=True,
        kv_cache_memory_bytes=1 << 28,
        worker_cls=WORKER_CLASS,
        kv_transfer_config=transfer_config(**{"costs": "tokens"} | job.get("settings", {})),
    )

    paths = job.get("adapters", [None])
    adapters = [
        path and LoRARequest(Path(path).name, number, path) for number, path in enumerate(paths, 1)
    ]

    def ask(
        tokens: list[int], options: dict[str, Any], adapter: LoRARequest | None
    ) -> dict[str, Any]:
        extra = {"kv_transfer_params": {"kvgraft": options}}
        params = SamplingParams(
            max_tokens=16, temperature=0.0, ignore_eos=True, logprobs=0, extra_args=extra
        )
        [answer] = llm.generate(
            [{"prompt_token_ids": tokens}], params, use_tqdm=False, lora_request=adapter
        )
        [generated], report = answer.outputs, answer.kv_transfer_params["kvgraft"]
        steps = zip(generated.token_ids, generated.logprobs, strict=True)
        logprobs = [step[token].logprob for token, step in steps]
        told = {
            "tokens": generated.token_ids,
            "logprobs": logprobs,
            "cached": answer.num_cached_tokens,
        }
        return told | {"report": report}

    for tokens in job["read"]:
        ask(tokens, {"reuse": "off"}, adapters[0])
    pairs = [(options, adapter) for adapter in adapters for options in job["options"]]
    answered = [[ask(tokens, *pair) for pair in pairs] for tokens in job["prompts"]]
    print(json.dumps(answered), file=answers, flush=True)


if __name__ == "__main__":
    os.environ.setdefault("VLLM_CPU_KVCACHE_SPACE", "1")
    output = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)  # what vLLM prints is no answer
    main(output)
