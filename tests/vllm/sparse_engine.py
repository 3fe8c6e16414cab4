"""An engine of vLLM that follows a flow, in a process of its own.

Run as a script it reads one JSON object, `model`, `flow`, `settings` and what to do, and prints
what became of it: `rounds` of `Ask`, those of a round together; with `everything` no request is too
short to be decoded sparsely; with `scales` layers have these scales of keys and values; `latent`
says that the model has MLA; the requests of `trouble` come first, are preempted and aborted, and
their blocks overwritten."""

import json
import os
import sys
from pathlib import Path
from typing import Any

TESTS = Path(__file__).parents[1]
sys.path[:0] = [str(TESTS), str(TESTS / "vllm")]

import torch  # noqa: E402
from engines import ENVIRONMENT, Ask, as_answer, as_prompt, as_sampling, start_engine  # noqa: E402
from family_engine import allow_prefixes_with_latents  # noqa: E402
from hosts import Host  # noqa: E402


@torch.inference_mode()
def main(given: dict[str, Any]) -> dict[str, Any]:
    """Answer the rounds one after the other."""
    from kvgraft.decode.flow import Program
    from kvgraft.vllm.compat import FLOW, WORKER_CLASS

    if given.get("everything"):
        Program.most = property(lambda self: 0)  # type: ignore[method-assign, assignment]
    if given.get("latent"):
        allow_prefixes_with_latents()
    settings = {"additional_config": {FLOW: given["flow"]}} | given.get("settings", {})
    rounds = [[Ask(**ask) for ask in asks] for asks in given["rounds"]]
    if not given.get("reuse", True):
        plain = {"worker_cls": WORKER_CLASS, "enable_prefix_caching": False}
        llm = start_engine(Path(given["model"]), with_kvgraft=False, **plain, **settings)
        scheduler = llm.llm_engine.engine_core.engine_core.scheduler
        preempted = _count(scheduler, "_preempt_request")
        found = [[as_answer(output) for output in _generate(llm, asks)] for asks in rounds]
        return {
            "tokens": [[a.tokens for a in answers] for answers in found],
            "preempted": preempted[0],
        }
    host = Host(Path(given["model"]), **settings)
    if "scales" in given:  # as a checkpoint sets them
        for attention in host.model.attentions:
            attention._k_scale_float, attention._v_scale_float = given["scales"]
    if given.get("trouble"):
        _trouble(host, [Ask(**ask) for ask in given["trouble"]])
    found = [host.ask(*asks) for asks in rounds]
    host.settle()
    return {
        "tokens": [[answer.tokens for answer in answers] for answers in found],
        "cached": [[answer.cached for answer in answers] for answers in found],
        "grafted": [
            [answer.report.get("grafted_tokens", 0) for answer in answers] for answers in found
        ],
        **_count_rows(host),
        "accepted": host.num_accepted,
        "problems": host.problems(),
    }


def _generate(llm: Any, asks: list[Ask]) -> list[Any]:
    prompts, sampling = [as_prompt(ask) for ask in asks], [as_sampling(ask) for ask in asks]
    outputs: list[Any] = llm.generate(prompts, sampling, use_tqdm=False)
    return outputs


def _count(owner: Any, name: str) -> list[int]:
    """How often a method is called, as the only entry of a list."""
    calls, method = [0], getattr(owner, name)

    def counting(*args: Any, **kwargs: Any) -> Any:
        calls[0] += 1
        return method(*args, **kwargs)

    setattr(owner, name, counting)
    return calls


def _trouble(host: Host, asks: list[Ask]) -> None:
    """Everything that befalls blocks: preemption in the middle of an answer, loss of what was
    cached, abortion."""
    names = [host.add(ask) for ask in asks]
    host.step_until(lambda: all(host.request(name).num_output_tokens >= 3 for name in names))
    host.preempt(names[0])
    host.step_until(lambda: host.request(names[0]).num_output_tokens >= 5)
    host.abort(names[1])
    host.step()
    host.finish(names[0])
    host.settle()
    host.evict(sorted(host.blocks_with_content())[::2])


def _count_rows(host: Host) -> dict[str, int]:
    """Rows of all layers that the flow has taken up, how many of them are not what the blocks as
    they are give, and how many layers read keys or values that the blocks do not hold."""
    from kvgraft.decode.indexer import Indexer

    taken_up = stale = misread = 0
    for number, attention in enumerate(host.model.attentions):
        caches = getattr(attention.impl, "_caches", None)
        if caches is None:
            continue
        pages = _taken_up(host, caches)
        misread += not _reads_well(host, number, pages)
        indexer, rows = caches.indexer, caches.rows(pages)
        taken_up += len(rows)
        like, _ = host.model.read(number, host.slots_of([]))
        refilled = Indexer(indexer.program, len(caches.written) * caches.num_heads, like)
        pools = attention.impl.layout.pages(attention, caches.kv_cache)
        refilled.at(slice(None), *pools).fill(rows)
        for name, cache in indexer.caches.items():
            stale += int((cache[rows] != refilled.caches[name][rows]).flatten(1).any(1).sum())
    return {"taken_up": taken_up, "stale": stale, "misread": misread}


def _taken_up(host: Host, caches: Any) -> torch.Tensor:
    """The blocks of a layer whose rows are not due to be filled again, int64 [n].

    Where layers with windows write to the same memory, these are blocks that the layer's own group
    holds: it writes others before it reads them.
    """
    from vllm.v1.core.kv_cache_utils import get_group_id

    taken_up: torch.Tensor = ~caches.written
    groups, blocks = host.known.pool.groups, host.manager.block_pool.blocks
    if groups.others:
        own = [
            block.block_hash is not None and get_group_id(block.block_hash) == groups.main
            for block in blocks
        ]
        taken_up &= torch.tensor(own)
    return taken_up.nonzero()[:, 0]


def _reads_well(host: Host, number: int, pages: torch.Tensor) -> bool:
    """Whether the flow of a layer reads the codes that recoveries copy, times their scales."""
    attention = host.model.attentions[number]
    caches = attention.impl._caches
    own = attention.impl.layout.pages(attention, caches.kv_cache)
    slots = host.slots_of(pages.tolist())
    codes = host.model.read_codes(number, slots)
    scales = attention._k_scale_float, attention._v_scale_float
    for read, expected, scale in zip(own, codes, scales, strict=True):
        if not expected.numel():  # latents are keys and values
            continue
        # [n * Hkv, N, d] and [n * N, Hkv, d]
        found = read[caches.rows(pages)].unflatten(0, (len(pages), caches.num_heads))
        if not torch.equal(found.transpose(1, 2).flatten(0, 1), expected.float() * scale):
            return False
    return True


if __name__ == "__main__":
    os.environ |= ENVIRONMENT
    answers = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)  # what vLLM prints is no answer
    print(json.dumps(main(json.loads(sys.stdin.read()))), file=answers, flush=True)
