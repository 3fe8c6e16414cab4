"""Whether vLLM with KVGraft answers as plain vLLM where it must, on any device: a tiny random
model, in a minute.

Two processes ask the same: plain vLLM, and vLLM with KVGraft, whose KV is overwritten at the end. A
kernel of half precision rounds differently in other batches, so beside tokens the first token's
log-probabilities are compared.

    python benchmarks/exactness.py --device cuda --dtype bfloat16 [--attention-backend TRITON_ATTN]
"""

import json
import multiprocessing
import os
import tempfile
from concurrent.futures import ProcessPoolExecutor
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Annotated, Any

import numpy as np
import typer
from rich.console import Console
from rich.table import Table

from kvgraft.server.process import ENVIRONMENT
from ttft import SHAPE, make_model

LAYERS, VOCAB, BLOCK, NUM_BLOCKS, MAX_LENGTH = 4, 4096, 32, 512, 2048
EVERYTHING = {
    "sparsex": {"policy": "sparsex", "recompute_share": 1.0},
    "spread": {"policy": "spread", "recompute_share": 1.0},
}
OTHER_NAMESPACE, OVERWRITTEN = "other namespace", "naive, overwritten"
POISON = 3.0
# of the first token's log-probability
ROUNDING = {"float32": 1e-3, "bfloat16": 0.05, "float16": 0.02}
LIKELIEST = 5  # tokens whose log-probabilities are compared


def words(number: int, seed: int) -> list[int]:
    """Random ordinary tokens."""
    return np.random.default_rng(seed).integers(3, VOCAB, number).tolist()


DOCUMENTS = [words(300, 1), words(230, 2)]
PROMPT = words(100, 3) + DOCUMENTS[0] + words(40, 5) + DOCUMENTS[1] + words(9, 4)


@dataclass
class Answer:
    """Generated tokens, log-probabilities of the likeliest first ones, and KVGraft's report."""

    tokens: list[int]
    first: dict[int, float]
    report: dict[str, Any] = field(default_factory=dict)

    def distance(self, other: "Answer") -> float:
        """The largest difference of a log-probability; infinite if no token is likely in both."""
        common = self.first.keys() & other.first.keys()
        return max(
            (abs(self.first[token] - other.first[token]) for token in common), default=float("inf")
        )


@dataclass(frozen=True)
class Fact:
    """Something that must hold."""

    name: str
    holds: bool
    found: str


def answers(model: str, with_kvgraft: bool, settings: dict[str, Any]) -> dict[str, dict[str, Any]]:
    """All answers of an engine in this process, by name."""
    from vllm import LLM, SamplingParams

    if with_kvgraft:
        from kvgraft.vllm.compat import WORKER_CLASS, transfer_config

        settings = settings | {
            "worker_cls": WORKER_CLASS,
            "kv_transfer_config": transfer_config(costs="tokens"),
        }
    engine = LLM(model, **settings)

    def ask(
        prompt: list[int], options: dict[str, Any] | None = None, salt: str | None = None
    ) -> Answer:
        extra = {"kv_transfer_params": {"kvgraft": options}} if options else None
        sampling = SamplingParams(
            max_tokens=8, temperature=0, ignore_eos=True, logprobs=LIKELIEST, extra_args=extra
        )
        given = {"prompt_token_ids": prompt} | ({"cache_salt": salt} if salt else {})
        [output] = engine.generate([given], sampling, use_tqdm=False)
        [completion] = output.outputs
        first = {token: found.logprob for token, found in completion.logprobs[0].items()}
        return Answer(
            list(completion.token_ids), first, (output.kv_transfer_params or {}).get("kvgraft", {})
        )

    if not with_kvgraft:
        return {"plain": asdict(ask(PROMPT))}
    policies: dict[str, Any] = {
        **EVERYTHING,
        "default": {"policy": "spread"},
        "naive": {"policy": "naive"},
    }
    found = {}
    for name, options in {
        **policies,
        OTHER_NAMESPACE: None,
        OVERWRITTEN: policies["naive"],
    }.items():
        engine.reset_prefix_cache()
        for document in DOCUMENTS:
            ask(document, {"reuse": "off"})
        if name == OVERWRITTEN:
            engine.collective_rpc(_overwrite)
        found[name] = ask(PROMPT, options, "salt" if name == OTHER_NAMESPACE else None)
    return {name: asdict(answer) for name, answer in found.items()}


def _overwrite(worker: Any) -> None:
    for cache in worker.model_runner.kv_caches:
        cache.fill_(POISON)


def facts_of(plain: Answer, ours: dict[str, Answer], dtype: str) -> list[Fact]:
    """What must hold of them."""
    exact = [*EVERYTHING, OTHER_NAMESPACE]
    facts = []
    for name in exact:
        distance, same = ours[name].distance(plain), ours[name].tokens == plain.tokens
        facts.append(
            Fact(
                f"{name}: as plain vLLM",
                distance <= ROUNDING[dtype] and (same or dtype != "float32"),
                f"tokens {'equal' if same else 'differ'}, log-probabilities differ by "
                f"{distance:.1e} at most",
            )
        )
    for name in (*EVERYTHING, "default", "naive"):
        report = ours[name].report
        grafted, recomputed = report["grafted_tokens"], report["recomputed_tokens"]
        wanted = {"default": recomputed < grafted, "naive": not recomputed}.get(
            name, recomputed == grafted
        )
        why = f" ({report['reason']})" if report.get("reason") else ""
        found = f"{grafted} tokens grafted, {recomputed} recomputed{why}"
        facts.append(Fact(f"{name}: grafts", grafted > 480 and wanted, found))
    elsewhere = ours[OTHER_NAMESPACE].report.get("grafted_tokens", 0)
    facts.append(
        Fact("another namespace finds nothing", not elsewhere, f"{elsewhere} tokens grafted")
    )
    differs = ours[OVERWRITTEN].distance(ours["naive"])
    facts.append(
        Fact(
            "grafts read their source",
            differs > ROUNDING[dtype],
            f"{differs:.2f} apart if overwritten",
        )
    )
    return facts


def main(
    device: Annotated[str, typer.Option(help="cpu or cuda: what vLLM here is built for.")] = "cpu",
    dtype: Annotated[str, typer.Option(help=", ".join(ROUNDING))] = "float32",
    attention_backend: Annotated[
        str, typer.Option(help="Of vLLM.", show_default="vLLM's choice")
    ] = "",
    compiled: Annotated[bool, typer.Option("--compiled", help="Without enforce_eager.")] = False,
    as_json: Annotated[bool, typer.Option("--json", help="Print JSON instead of a table.")] = False,
) -> None:
    """Ask both, compare, and end with status 1 if something does not hold."""
    if dtype not in ROUNDING:
        raise typer.BadParameter(f"--dtype {dtype!r} is not one of {', '.join(ROUNDING)}")
    settings: dict[str, Any] = {
        "dtype": dtype, "enforce_eager": not compiled, "block_size": BLOCK,
        "num_gpu_blocks_override": NUM_BLOCKS,
        "max_model_len": MAX_LENGTH, "max_num_batched_tokens": 256, "max_num_seqs": 16,
        "enable_prefix_caching": True,
    }  # fmt: skip
    if attention_backend:
        settings["attention_backend"] = attention_backend
    if device != "cpu":
        settings["gpu_memory_utilization"] = 0.3
    os.environ.update(
        {**ENVIRONMENT, "VLLM_ENABLE_V1_MULTIPROCESSING": "0", "VLLM_LOGGING_LEVEL": "ERROR"}
    )
    found: dict[bool, dict[str, Answer]] = {}
    with tempfile.TemporaryDirectory() as folder:
        make_model(Path(folder), LAYERS, MAX_LENGTH, SHAPE)
        for with_kvgraft in (False, True):
            context = multiprocessing.get_context("spawn")
            with ProcessPoolExecutor(1, context) as process, Console(stderr=True).status("asking"):
                made = process.submit(answers, folder, with_kvgraft, settings).result()
            found[with_kvgraft] = {name: Answer(**answer) for name, answer in made.items()}
    facts = facts_of(found[False]["plain"], found[True], dtype)
    if as_json:
        print(
            json.dumps(
                {"device": device, "settings": settings, "facts": [asdict(fact) for fact in facts]}
            )
        )
    else:
        table = Table("", "holds", "found")
        for fact in facts:
            table.add_row(fact.name, "yes" if fact.holds else "NO", fact.found)
        Console().print(table)
    if not all(fact.holds for fact in facts):
        raise typer.Exit(1)


if __name__ == "__main__":
    typer.run(main)
