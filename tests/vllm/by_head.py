"""An engine of vLLM whose local heads keep sinks and windows, driven step by step in a process of
its own.

Run as a script it reads one JSON object of arguments and of rounds of prompts, and prints what
became of them."""

import json
import os
import sys
from pathlib import Path
from typing import Any

TESTS = Path(__file__).parents[1]
sys.path[:0] = [str(TESTS), str(TESTS / "vllm")]

from engines import ENVIRONMENT, Ask, as_prompt, as_sampling, start_engine  # noqa: E402


def main(given: dict[str, Any]) -> dict[str, Any]:
    """Answer the rounds one after the other, the prompts of each together."""
    llm = start_engine(Path(given["model"]), with_kvgraft=False, **given["settings"])
    engine = llm.llm_engine
    scheduler = engine.engine_core.engine_core.scheduler
    pool = scheduler.kv_cache_manager.block_pool
    managers = scheduler.kv_cache_manager.coordinator.single_type_managers
    total, rounds, most, preempted = pool.get_num_free_blocks(), [], 0, 0
    preempt = scheduler._preempt_request

    def counted(*args: Any, **kwargs: Any) -> Any:
        nonlocal preempted
        preempted += 1
        return preempt(*args, **kwargs)

    scheduler._preempt_request = counted
    for number, asks in enumerate(given["rounds"]):
        if number in given.get("evict_before", {}).get("rounds", []):
            for group in given["evict_before"]["groups"]:  # as if others had needed what is free
                for block in pool.blocks:
                    if block.block_hash is not None and _group_of(block) == group:
                        pool._maybe_evict_cached_block(block)
        for index, (prompt, max_tokens) in enumerate(asks):
            ask = Ask(prompt, max_tokens=max_tokens, logprobs=True)
            engine.add_request(f"{number}-{index}", as_prompt(ask), as_sampling(ask))
        outputs, held = {}, []
        while engine.has_unfinished_requests():
            for output in engine.step():
                outputs[output.request_id] = output
            decoding = [
                r for r in scheduler.running if r.num_computed_tokens >= r.num_prompt_tokens
            ]
            most = max(most, len(decoding))
            if len(decoding) == 1 == len(scheduler.running):
                request = decoding[0].request_id
                held.append(
                    [sum(not b.is_null for b in m.req_to_blocks.get(request, ())) for m in managers]
                )
        rounds.append({
            "tokens": [list(outputs[f"{number}-{i}"].outputs[0].token_ids) for i in range(len(asks))],
            "cached": [outputs[f"{number}-{i}"].num_cached_tokens for i in range(len(asks))],
            "likely": [
                next(iter(outputs[f"{number}-{i}"].outputs[0].logprobs[0].values())).logprob
                for i in range(len(asks))
            ],
            "held": held,
        })  # fmt: skip
    groups = [
        (type(group.kv_cache_spec).__name__, len(group.layer_names))
        for group in scheduler.kv_cache_config.kv_cache_groups
    ]
    layers = engine.vllm_config.compilation_config.static_forward_context.values()
    left = pool.get_num_free_blocks()
    counts = [block.ref_cnt for block in pool.blocks if not block.is_null]
    return {
        "rounds": rounds, "groups": groups, "blocks": total, "left": left, "refs": sum(counts),
        "apart": sum(len(module.apart) for module in layers if hasattr(module, "apart")),
        "most_decoding": most, "preempted": preempted,
        "zeroes": scheduler.kv_cache_config.needs_kv_cache_zeroing,
        "additional_config": engine.vllm_config.additional_config,
    }  # fmt: skip


def _group_of(block: Any) -> int:
    from vllm.v1.core.kv_cache_utils import get_group_id

    return int(get_group_id(block.block_hash))


if __name__ == "__main__":
    os.environ |= ENVIRONMENT
    answers = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)  # what vLLM prints is no answer
    print(json.dumps(main(json.loads(sys.stdin.read()))), file=answers, flush=True)
