"""What a family does in vLLM with our connector, and then without: one job as JSON on stdin, facts
as the last line.

    {"model": directory, "engine": {arguments of vLLM's LLM}, "latent": whether it keeps latents (MLA),
     "requests": how many of the random traffic, "image": token that stands for one, if any}

Both engines live in this process, one after the other.
"""

import json
import os
import sys
from dataclasses import asdict, replace
from pathlib import Path
from typing import IO, Any

TESTS = Path(__file__).parents[1]
sys.path[:0] = [str(TESTS), str(TESTS / "vllm")]

import numpy as np  # noqa: E402
import torch  # noqa: E402
from engines import (  # noqa: E402
    EVERY_HEAD,
    EVERYTHING,
    NAIVE,
    OFF,
    Answer,
    Ask,
    as_answer,
    as_prompt,
    as_sampling,
    start_engine,
    words,
)  # fmt: skip
from hosts import Host  # noqa: E402
from traffic import LONG, Traffic  # noqa: E402
from vllm.v1.core.kv_cache_utils import get_group_id  # noqa: E402

from kvgraft.core.segmentation import Similarity  # noqa: E402
from kvgraft.store import StoredBlock, StoreOptions  # noqa: E402
from kvgraft.vllm.compat.families import architecture_of  # noqa: E402
from kvgraft.vllm.compat.support import UnsupportedConfiguration  # noqa: E402
from kvgraft.vllm.connector.metadata import CHUNK_BLOCKS, Load  # noqa: E402
from kvgraft.vllm.connector.store_worker import StoreWorker  # noqa: E402
from kvgraft.vllm.patches.requests import set_known_prompt  # noqa: E402

DOCUMENTS = [words(300, 1), words(230, 2)]
PROMPT = words(100, 3) + DOCUMENTS[0] + words(40, 5) + DOCUMENTS[1] + words(9, 4)
SPREAD = {"policy": "spread", "recompute_share": 1.0}
DEFAULT = {"policy": "spread"}
COLOURS = (220, 10, 10), (10, 10, 220)
RECOMPUTED = {"sparsex": EVERYTHING, "spread": SPREAD}
WITH_WINDOWS = {"policy": "redknot:recent_tokens=8,min_ffn_tokens=4"}
POISON = 3.0
TIE = 1e-4  # of log-probabilities
EDITED = [11 if place % 40 == 17 else word for place, word in enumerate(PROMPT)]


def grafted(
    host: Host, options: dict[str, Any], *, poisoned: bool = False, salt: str | None = None
) -> Answer:
    """The prompt, its documents read before, perhaps by sources that were never computed."""
    host.forget()
    host.read(*DOCUMENTS)
    if poisoned:
        host.poison(host.blocks_with_content(), POISON)
    [answer] = host.ask(Ask(PROMPT, options, salt))
    return answer


def values_of(host: Host, options: dict[str, Any]) -> torch.Tensor:
    """Values [L', n, Hkv, d] of the prompt in the layers of the main group, when its first token is
    there; of latents those channels that do not turn."""
    name = host.add(Ask(PROMPT, options, max_tokens=2))
    host.step_until(lambda: name in host.outputs)
    layers = [number for number, group in enumerate(host.model.group_of) if group == 0]
    found = [host.model.read(index, host.slots(name)) for index in layers]
    values = torch.stack(
        [-keys[..., :256] if host.model.is_latent else values for keys, values in found]
    )
    host.finish(name)
    return values


def ours(host: Host, num_requests: int) -> dict[str, Any]:
    """Everything that does not need the truth."""
    facts: dict[str, Any] = {
        "groups": [
            type(g.kv_cache_spec).__name__ for g in host.manager.kv_cache_config.kv_cache_groups
        ]
    }
    facts |= {name: asdict(grafted(host, options)) for name, options in RECOMPUTED.items()}
    facts["naive"] = asdict(grafted(host, NAIVE))
    facts["default"] = asdict(grafted(host, DEFAULT))
    facts["redknot"] = asdict(grafted(host, EVERY_HEAD))
    facts["with windows"] = asdict(grafted(host, WITH_WINDOWS))
    facts["poisoned"] = asdict(grafted(host, NAIVE, poisoned=True))
    facts["elsewhere"] = grafted(host, NAIVE, salt="another").grafted
    facts["documents"] = grafted(host, {"policy": "condense", "kept_share": 0.5}).report
    host.forget()
    host.read(*DOCUMENTS)
    host.poison(host.blocks_with_content(), POISON)
    where = [
        tokens
        for start, stop, kind in facts["naive"]["report"]["spans"]
        if kind == "grafted"
        for tokens in range(start, stop)
    ]
    facts["copied"] = bool((values_of(host, NAIVE)[:, where] == -POISON).all())
    [follower] = host.ask(Ask(PROMPT[:96] + words(60, 7), OFF))
    facts["beginning"] = follower.cached
    host.forget()
    facts["near_duplicates"] = near_duplicates(host)
    facts["stored"] = stored(host)
    host.forget()
    traffic = Traffic(
        host, np.random.default_rng(5), [OFF, EVERYTHING], [None, NAIVE], LONG, (1, 4, 20, 60)
    )
    traffic.run(num_requests)
    host.settle()
    facts["problems"] = host.problems()
    facts["counts"] = dict(traffic.counts) | {
        "evictions": host.num_evictions,
        "preemptions": host.num_preemptions,
    }
    facts["exact"] = [(asdict(ask), asdict(answer)) for ask, answer in traffic.ended]
    return facts


def with_image(token: int, image: tuple[int, int, int]) -> Ask:
    """The prompt with an image between its documents."""
    return Ask([*PROMPT[:400], token, *PROMPT[400:]], NAIVE, image=image)


def with_images(host: Host, token: int) -> dict[str, Any]:
    """What prompts with images get, whose texts have been read before, and what they leave."""
    host.forget()
    host.read(*DOCUMENTS)
    answers = [asdict(answer) for answer in host.ask(*(with_image(token, one) for one in COLOURS))]
    [off] = host.ask(replace(with_image(token, COLOURS[0]), options=OFF))
    host.forget()
    host.ask(with_image(token, COLOURS[0]))
    [follower] = host.ask(Ask(PROMPT, NAIVE))
    return {"answers": answers, "left": follower.grafted, "off": off.report["reason"]}


def positions_of_another_prompt(host: Host) -> int | None:
    """How many positions a worker has after a prompt has become longer; None without M-RoPE."""
    runner = host.worker._runner
    if not runner.uses_mrope:
        return None
    name = host.add(Ask(PROMPT, max_tokens=4))
    host.step_until(lambda: name in host.outputs)
    request_id = host.request(name).request_id
    set_known_prompt(runner, request_id, words(200, 8))
    found = int(runner.requests[request_id].mrope_positions.shape[1])
    set_known_prompt(runner, request_id, PROMPT)
    host.finish(name)
    return found


def near_duplicates(host: Host) -> dict[str, Any]:
    """A prompt of documents in which every fortieth word is another one, all of it recomputed."""
    host.forget()
    host.side.intake.eligibility._default = replace(
        host.side.intake.eligibility._default, match_similar=True
    )
    host.known.index.cuts = (Similarity(), [])
    host.known.index.clear()
    host.read(*DOCUMENTS)
    [answer] = host.ask(Ask(EDITED, EVERYTHING))
    host.side.intake.eligibility._default = replace(
        host.side.intake.eligibility._default, match_similar=False
    )
    return asdict(answer)


def stored(host: Host) -> bool:
    """Whether what a store of this worker has taken comes back to other blocks as it was, in all
    groups of layers."""
    worker = StoreWorker(host.model, StoreOptions(ram_gib=0.1), 0, 1)
    pool, blocks = host.known.pool, host.manager.block_pool.blocks
    of_main = [
        page
        for page in sorted(host.blocks_with_content())
        if get_group_id(blocks[page].block_hash) == pool.groups.main
    ]
    whole = zip(of_main, pool.complete(of_main), strict=True)
    held = [page for page, is_whole in whole if is_whole][:CHUNK_BLOCKS]
    pool.acquire(held)
    there, elsewhere = pool.tables_of(held), pool.tables_of(pool.allocate(len(held)))
    payload, tokens = worker._read(there), np.zeros(pool.block_size, np.int32)
    parts = [range(n * pool.block_size, (n + 1) * pool.block_size) for n in range(len(held))]
    read = [
        StoredBlock(
            {name: part[:, at] for name, part in payload.items()}, tokens, b"", b"", 0, 0, True
        )
        for at in parts
    ]
    arrived = worker._take_in(Load(0, [], elsewhere), read)
    slots = [worker._slots_of(tables) for tables in (there, elsewhere)]
    for pages in (held, elsewhere[0].tolist()):
        pool.release(pages)
    worker.close()
    pairs = [
        pair
        for index in range(host.model.num_layers)
        for pair in zip(*(host.model.read_layer(index, one) for one in slots), strict=True)
    ]
    return bool(held) and all(arrived) and all(torch.equal(*pair) for pair in pairs)


def followed(model: Path, engine: dict[str, Any]) -> dict[str, Any]:
    """The answer where decode steps do not follow the flow that they followed before, and whether
    log-probabilities differ under it; or why vLLM is not started with one."""
    from vllm.v1.attention.selector import _cached_get_attn_backend

    from kvgraft.vllm.compat import FLOW, WORKER_CLASS
    from kvgraft.vllm.sparse.program import LAYERS

    _cached_get_attn_backend.cache_clear()  # this process has chosen before
    settings = {"additional_config": {FLOW: "quest:topk_blocks=2"}, "enable_prefix_caching": False}
    try:
        llm = start_engine(model, with_kvgraft=False, worker_cls=WORKER_CLASS, **engine | settings)
    except UnsupportedConfiguration as error:
        return {"refused": str(error)}
    runner = llm.llm_engine.engine_core.engine_core.model_executor.driver_worker.worker.model_runner
    ask, answers = Ask(PROMPT, logprobs=True), []
    for _ in range(2):
        [output] = llm.generate([as_prompt(ask)], [as_sampling(ask)], use_tqdm=False)
        answers.append(as_answer(output))
        for module in runner.get_model().modules():
            if isinstance(module, LAYERS):
                module.impl.follow(None)
    sparse, dense = answers
    apart = max(abs(a - b) for a, b in zip(sparse.logprobs, dense.logprobs, strict=True))
    return {"dense": dense.tokens, "is_followed": apart > 1e-3}


def differs(tokens: list[int], truth: Any) -> bool:
    """Whether an answer is another one than plain vLLM's, unless two tokens were as likely to it in
    float32: then vLLM's own answer depends on what else is in its batch."""
    theirs = list(truth.token_ids)
    if tokens == theirs:
        return False
    place = next(
        at for at, pair in enumerate(zip(tokens, theirs, strict=True)) if pair[0] != pair[1]
    )
    likely = {token: found.logprob for token, found in truth.logprobs[place].items()}
    return abs(likely.get(tokens[place], -1e9) - likely[theirs[place]]) > TIE


def allow_prefixes_with_latents() -> None:
    """vLLM switches prefix caching and chunked prefill off for MLA on CPUs without AMX, whose
    kernels are slow, not wrong: leave them on."""
    from vllm.platforms import current_platform

    platform, check = type(current_platform), current_platform.check_and_update_config

    def check_and_update_config(config: Any) -> None:
        tokens = config.scheduler_config.max_num_batched_tokens
        prefixes = config.cache_config.enable_prefix_caching
        check(config)
        config.cache_config.enable_prefix_caching = prefixes
        config.scheduler_config.enable_chunked_prefill = True
        config.scheduler_config.max_num_batched_tokens = tokens

    platform.check_and_update_config = staticmethod(check_and_update_config)


def main(answers: IO[str]) -> None:
    from vllm.distributed.kv_transfer import ensure_kv_transfer_shutdown

    job = json.load(sys.stdin)
    image = job.get("image")
    if job["latent"]:
        allow_prefixes_with_latents()
    host = Host(Path(job["model"]), **job["engine"])
    facts = ours(host, job["requests"])
    config = host.model.config
    facts["architecture"] = config.model_config.architecture
    facts["language model"] = architecture_of(config)
    facts["positions"] = positions_of_another_prompt(host)
    if image:
        facts["images"] = with_images(host, image)
    host.llm.llm_engine.engine_core.shutdown()
    ensure_kv_transfer_shutdown()
    plain = start_engine(Path(job["model"]), with_kvgraft=False, **job["engine"])
    asks = [
        Ask(PROMPT),
        Ask(EDITED),
        *[Ask(ask["prompt"], max_tokens=ask["max_tokens"]) for ask, _ in facts["exact"]],
    ]
    outputs = plain.generate(
        [as_prompt(ask) for ask in asks],
        [as_sampling(ask, logprobs=5) for ask in asks],
        use_tqdm=False,
    )
    facts["plain"], facts["plain_edited"], *_ = [as_answer(output).tokens for output in outputs]
    pairs = zip(facts.pop("exact"), outputs[2:], strict=True)
    facts["wrong"] = [
        ask["options"] for (ask, mine), truth in pairs if differs(mine["tokens"], truth.outputs[0])
    ]
    facts["num_exact"] = len(outputs) - 2
    for place, colour in enumerate(COLOURS if image else ()):
        ask = with_image(image, colour)
        [truth] = plain.generate([as_prompt(ask)], [as_sampling(ask, logprobs=5)], use_tqdm=False)
        answer = facts["images"]["answers"][place]
        answer["wrong"] = differs(answer["tokens"], truth.outputs[0])
    plain.llm_engine.engine_core.shutdown()
    facts["flow"] = followed(Path(job["model"]), job["engine"])
    print(json.dumps(facts), file=answers, flush=True)


if __name__ == "__main__":
    output = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)  # what vLLM prints is no answer
    main(output)
