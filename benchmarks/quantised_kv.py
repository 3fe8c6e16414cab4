"""What an FP8 KV cache costs a real model in vLLM, and what of it is due to grafted keys, which are
rounded once more.

Every prompt is answered in full without quantisation; then under full recomputation and each
policy, with that answer given, in each of these caches:

unquantised     vLLM's `auto`
fp8             as served: vLLM rounds what it computes, we round what we turn, to nearest
backend  the same, but grafted keys are rounded as vLLM's backend does (towards zero on a CPU)
not again  FP8 in name only: numbers are rounded as vLLM does but lie in float32, so that turned
           keys need not be
                rounded again; what is left is the policy on FP8 KV

KL is over the tokens that both sides name among the most likely ones, all others as one: a lower
bound.

    python benchmarks/quantised_kv.py --model smollm2 --items 4
"""

import json
import os
import subprocess
import sys
from collections.abc import Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from statistics import mean
from typing import Annotated, Any

import torch
import typer
from rich.console import Console
from rich.table import Table

from kvgraft.engine.text import load_tokenizer, opening_ids
from kvgraft.guard.distances import along_logprobs
from kvgraft.models import find_model
from kvgraft_lab.evaluate.jsonl import check_config
from kvgraft_lab.evaluate.prompts import as_text, find_chat
from kvgraft_lab.evaluate.statistics import bootstrap, paired_difference
from kvgraft_lab.evaluate.tasks import Shape, find_suites
from tables import markdown_table

FULL, FP8 = "full", "fp8"
CACHES = ("unquantised", FP8, "backend", "not again")
MOST_LIKELY = 100
STEP, BLOCK = 1024, 32
ENVIRONMENT = {
    "HF_HUB_OFFLINE": "1", "VLLM_ENABLE_V1_MULTIPROCESSING": "0", "VLLM_LOGGING_LEVEL": "ERROR",
    "VLLM_CPU_OMP_THREADS_BIND": "nobind",
}  # fmt: skip
Places = list[dict[int, float]]
Answers = list[dict[str, "Told"]]  # per prompt, by policy


@dataclass(frozen=True)
class Prompt:
    """Token ids of what is read before, and of the prompt; `answer` is the full one's, once it is
    known."""

    item: str
    pattern: str
    read: tuple[tuple[int, ...], ...]
    tokens: tuple[int, ...]
    answer: tuple[int, ...] = ()


@dataclass(frozen=True)
class Told:
    """What the model thought of the next token at each place of the answer that was given."""

    answer: tuple[int, ...]
    places: Places
    grafted: int
    recomputed: int


def make_prompts(
    model: Path, items: int, length: int, seed: int, patterns: Sequence[str]
) -> list[Prompt]:
    """Questions about installed documentation, in the model's chat template."""
    tokenizer = load_tokenizer(model)
    chat = find_chat(tokenizer)

    def encode(segments: Sequence[str], begun: str = "") -> tuple[int, ...]:
        text = as_text(segments, chat, begun)
        return (
            *opening_ids(tokenizer, text),
            *tokenizer(text, add_special_tokens=False)["input_ids"],
        )

    [suite] = find_suites("docs", "test")
    made = enumerate(suite.items(seed, items, Shape(length, 4, tuple(patterns))))  # type: ignore[arg-type]
    return [
        Prompt(
            str(number),
            item.pattern,
            tuple(map(encode, item.phase_1)),
            encode(ask.segments, ask.begun),
        )
        for number, item in made
        for ask in item.phase_2[:2]
    ]


def answer_inside(
    model: str, cache: str, policies: Sequence[str], prompts: Sequence[Prompt], most: int
) -> list[dict[str, Any]]:
    """What the process of one cache does: per prompt, by policy, a `ReplayedState`."""
    from vllm import LLM, SamplingParams

    from kvgraft.vllm.compat import WORKER_CLASS, transfer_config

    _arrange(cache)
    llm = LLM(
        model, dtype="float32", enforce_eager=True, block_size=BLOCK, kv_cache_memory_bytes=1 << 29,
        max_model_len=4096,
        max_num_batched_tokens=STEP, enable_prefix_caching=True, max_logprobs=MOST_LIKELY,
        worker_cls=WORKER_CLASS,
        kv_cache_dtype=FP8 if cache in (FP8, "backend") else "auto",
        kv_transfer_config=transfer_config(costs="tokens", continuation=False, max_depth=0),
    )  # fmt: skip

    def ask(tokens: Sequence[int], options: dict[str, Any], salt: str, number: int) -> Told:
        extra = {"kv_transfer_params": {"kvgraft": options}}
        sampling = SamplingParams(
            max_tokens=number, temperature=0, logprobs=MOST_LIKELY, extra_args=extra
        )
        sampling.ignore_eos = "forced_output" in options
        [found] = llm.generate(
            [{"prompt_token_ids": list(tokens), "cache_salt": salt}], sampling, use_tqdm=False
        )
        answer, report = found.outputs[0], found.kv_transfer_params["kvgraft"]
        places = [
            {token: told.logprob for token, told in place.items()} for place in answer.logprobs
        ]
        return Told(
            tuple(answer.token_ids), places, report["grafted_tokens"], report["recomputed_tokens"]
        )

    answers = []
    for number, prompt in enumerate(prompts):
        given = {"forced_output": list(prompt.answer)} if prompt.answer else {}
        found = {
            FULL: ask(
                prompt.tokens,
                {"reuse": "off", **given},
                f"{number} in full",
                len(prompt.answer) or most,
            )
        }
        given = {"forced_output": list(found[FULL].answer)}
        for text in () if number and prompt.item == prompts[number - 1].item else prompt.read:
            ask(text, {"reuse": "off"}, prompt.item, 1)
        for policy in policies:
            found[policy] = ask(
                prompt.tokens, {"policy": policy, **given}, prompt.item, len(given["forced_output"])
            )
        answers.append({policy: asdict(told) for policy, told in found.items()})
        print(cache, number, file=sys.stderr, flush=True)
    return answers


def _arrange(cache: str) -> None:
    """Change what this process loads, for the caches that nobody is served with."""
    from vllm.v1.attention.backends.cpu_attn import CPUAttentionBackendImpl

    from kvgraft.vllm.compat.model import ModelHost

    if cache == "backend":
        ModelHost.write = ModelHost._update  # type: ignore[method-assign]
    elif cache == "not again":
        update = CPUAttentionBackendImpl.do_kv_cache_update

        def rounding(
            self: Any, layer: Any, key: torch.Tensor, value: torch.Tensor, *where: Any
        ) -> None:
            update(self, layer, towards_zero(key), towards_zero(value), *where)

        def write(
            self: Any, index: int, keys: torch.Tensor, values: torch.Tensor, slots: torch.Tensor
        ) -> None:
            layer = self.attentions[index]
            update(layer.impl, layer, keys.contiguous(), values.contiguous(), layer.kv_cache, slots)

        CPUAttentionBackendImpl.do_kv_cache_update = rounding
        ModelHost.write = ModelHost.write_codes = write  # type: ignore[method-assign]


def towards_zero(numbers: torch.Tensor) -> torch.Tensor:
    """What vLLM's CPU kernels make of numbers in FP8 (e4m3, scale 1), in their own dtype."""
    limit = torch.finfo(torch.float8_e4m3fn).max
    codes = numbers.clamp(-limit, limit).to(torch.float8_e4m3fn)
    beyond = codes.to(numbers.dtype).abs() > numbers.abs()
    return (
        (codes.view(torch.uint8) - beyond.to(torch.uint8))
        .view(torch.float8_e4m3fn)
        .to(numbers.dtype)
    )


def answer(
    out: Path,
    model: Path,
    cache: str,
    policies: Sequence[str],
    prompts: Sequence[Prompt],
    most: int,
) -> Answers:
    """What `answer_inside` tells in a process of its own, or has told before."""
    told = out / f"{cache.replace(' ', '-')}.json"
    if not told.is_file():
        job = json.dumps(
            [str(model), cache, policies, [asdict(prompt) for prompt in prompts], most]
        )
        done = subprocess.run(
            [sys.executable, __file__, "--inside"], input=job, stdout=subprocess.PIPE, text=True,
            check=True,
            env=os.environ | ENVIRONMENT,
        )  # fmt: skip
        told.write_text(done.stdout.splitlines()[-1])
    return [
        {policy: _told(read) for policy, read in of.items()} for of in json.loads(told.read_text())
    ]


def _told(read: dict[str, Any]) -> Told:
    places = [{int(token): value for token, value in place.items()} for place in read["places"]]
    return Told(tuple(read["answer"]), places, read["grafted"], read["recomputed"])


def kl(ours: Told, truth: Told) -> float:
    """Mean KL(truth || ours) along the answer, nats."""
    if ours.answer != truth.answer:
        raise ValueError(f"the answer {truth.answer} was given, and {ours.answer} came back")
    return along_logprobs(ours.places, truth.places, truth.answer)["answer_kl"]


def tabled(found: dict[str, Answers], policies: Sequence[str], prompts: Sequence[Prompt]) -> Table:
    """Each side, against which, its mean KL with an interval by item, and its greatest one."""
    plain, eight, backend, not_again = CACHES
    pairs = [((policy, cache), (FULL, cache)) for policy in policies for cache in CACHES]
    pairs += [((name, eight), (FULL, plain)) for name in (FULL, *policies)]
    pairs += [((FULL, not_again), (FULL, eight)), ((FULL, backend), (FULL, eight))]
    table = markdown_table(["ours", "against", "KL, nats", "95 %", "greatest"], ("ours", "against"))
    for (name, cache), (truth, other) in pairs:
        values = distances(found, (name, cache), (truth, other))
        low, high = bootstrap(values, [prompt.item for prompt in prompts])
        figures = f"{mean(values):.4f}", f"{low:.4f}-{high:.4f}", f"{max(values):.3f}"
        table.add_row(f"{name}, {cache}", f"{truth}, {other}", *figures)
    return table


def added(found: dict[str, Answers], policies: Sequence[str], prompts: Sequence[Prompt]) -> Table:
    """How much greater a policy's KL from full is in one cache than in another, prompt by
    prompt."""
    plain, eight, backend, not_again = CACHES
    table = markdown_table(["added to KL", "nats", "95 %"], ("added to KL",))
    for name in policies:
        for cache, other in ((eight, not_again), (backend, eight), (eight, plain)):
            ours, theirs = (distances(found, (name, side), (FULL, side)) for side in (cache, other))
            more = paired_difference(ours, theirs, [prompt.item for prompt in prompts])
            table.add_row(
                f"{name}, {cache} less {other}",
                f"{more.value:+.4f}",
                f"{more.low:+.4f} to {more.high:+.4f}",
            )
    return table


def distances(
    found: dict[str, Answers], ours: tuple[str, str], truth: tuple[str, str]
) -> list[float]:
    """KL(truth || ours) of every prompt; each side is a policy in a cache."""
    pairs = zip(found[ours[1]], found[truth[1]], strict=True)
    return [kl(one[ours[0]], other[truth[0]]) for one, other in pairs]


def main(
    model: Annotated[str, typer.Option(help="A known model, or a directory.")] = "smollm2",
    items: Annotated[int, typer.Option(help="Items of at most two prompts, of each task.")] = 4,
    length: Annotated[int, typer.Option(help="Tokens of a prompt, about.")] = 1024,
    patterns: Annotated[
        str, typer.Option(help="How prompts reuse what was read, by commas.")
    ] = "alone,reordered",
    policies: Annotated[str, typer.Option(help="By semicolons.")] = "spread;naive",
    tokens: Annotated[int, typer.Option(help="Of an answer, at most.")] = 16,
    seed: int = 9000,
    out: Annotated[Path, typer.Option(help="Directory; what it holds is not asked again.")] = Path(
        "results/quantised-kv"
    ),
    inside: Annotated[bool, typer.Option(hidden=True)] = False,
) -> None:
    """Measure, and print a table."""
    if inside:
        given, cache, named, asked, most = json.load(sys.stdin)
        output = os.fdopen(os.dup(1), "w")
        os.dup2(2, 1)  # what vLLM prints is no answer
        print(
            json.dumps(answer_inside(given, cache, named, [_prompt(p) for p in asked], most)),
            file=output,
            flush=True,
        )
        return
    directory, named = find_model(model), policies.split(";")
    out.mkdir(parents=True, exist_ok=True)
    settings = {
        "model": model,
        "items": items,
        "length": length,
        "patterns": patterns,
        "policies": policies,
    }
    check_config(out / "config.json", {**settings, "tokens": tokens, "seed": seed})
    prompts = make_prompts(directory, items, length, seed, patterns.split(","))
    found = {CACHES[0]: answer(out, directory, CACHES[0], named, prompts, tokens)}
    prompts = [
        replace(prompt, answer=of[FULL].answer)
        for prompt, of in zip(prompts, found[CACHES[0]], strict=True)
    ]
    found |= {cache: answer(out, directory, cache, named, prompts, tokens) for cache in CACHES[1:]}
    lengths, grafted = (
        [len(p.tokens) for p in prompts],
        sum(of[named[0]].grafted for of in found[FP8]),
    )
    console = Console(width=160)
    console.print(
        f"{len(prompts)} prompts of {min(lengths)} to {max(lengths)} tokens, "
        f"{grafted / sum(lengths):.0%} grafted, "
        f"answers of {mean(len(p.answer) for p in prompts):.1f} tokens"
    )
    for table in (tabled, added):
        console.print(table(found, named, prompts))


def _prompt(read: dict[str, Any]) -> Prompt:
    return Prompt(
        read["item"],
        read["pattern"],
        tuple(map(tuple, read["read"])),
        tuple(read["tokens"]),
        tuple(read["answer"]),
    )


if __name__ == "__main__":
    typer.run(main)
