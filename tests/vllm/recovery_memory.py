"""Prints, in bytes, the stated bound of a recovery of 32,000 tokens and by how much it really grew
the process."""

import json
import os
import sys
from pathlib import Path

os.environ |= {
    "VLLM_ENABLE_V1_MULTIPROCESSING": "0",
    "HF_HUB_OFFLINE": "1",
    "VLLM_CPU_KVCACHE_SPACE": "1",
}

import numpy as np
from vllm import LLM, SamplingParams

from kvgraft.vllm.compat import WORKER_CLASS, transfer_config
from kvgraft.vllm.worker import recovery_bytes

TOKENS = 32_000


def peak(key: str) -> int:
    """`VmHWM` (highest) or `VmRSS` (now) of this process, bytes."""
    [line] = [
        line for line in Path("/proc/self/status").read_text().splitlines() if line.startswith(key)
    ]
    return 1024 * int(line.split()[1])


def main(model: str, policy: str) -> None:
    """Read documents, then the same in another order under the policy."""
    llm = LLM(
        model=model,
        enforce_eager=True,
        max_model_len=TOKENS + 64,
        max_num_batched_tokens=2048,
        block_size=32,
        worker_cls=WORKER_CLASS,
        kv_transfer_config=transfer_config(policy=policy),
    )
    random = np.random.default_rng(0)
    documents = np.array_split(random.integers(3, 150, TOKENS - 200), 20)

    def ask(parts: list[np.ndarray]) -> int:
        tokens = np.concatenate(
            [random.integers(3, 150, 100), *parts, random.integers(3, 150, 100)]
        ).tolist()
        [answer] = llm.generate(
            {"prompt_token_ids": tokens}, SamplingParams(max_tokens=1), use_tqdm=False
        )
        return answer.kv_transfer_params["kvgraft"]["grafted_tokens"]

    ask(documents)
    before = peak("VmRSS")
    Path("/proc/self/clear_refs").write_text("5")  # the highest so far is now the present
    grafted = ask(documents[::-1])
    grown = peak("VmHWM") - before
    print(
        json.dumps(
            {
                "grafted": grafted,
                "bound": recovery_bytes(llm.llm_engine.vllm_config),
                "grown": grown,
            }
        )
    )


if __name__ == "__main__":
    main(*sys.argv[1:])
