"""The policy `redknot` in both hosts: the same prompts, answered by the native engine and by vLLM.

    python -m research.redknot.in_vllm                             180 prompts of 1024 tokens
    python -m research.redknot.in_vllm --suites stress --items 1   a few

Rows go to results/redknot/in_vllm/{native,vllm}; it goes on where it was stopped. vLLM computes the
last token of a prompt itself, over everything that its KV heads hold, so first tokens may differ
where local heads see a window."""

from collections.abc import Sequence
from pathlib import Path
from statistics import mean, median
from typing import Annotated

import typer
from rich import box
from rich.console import Console
from rich.table import Table

from kvgraft.cli.progress import progress_bar
from kvgraft_lab.evaluate import runner
from kvgraft_lab.evaluate.hosts import Answer, open_host
from kvgraft_lab.evaluate.runner import EvalRow, EvalSettings
from kvgraft_lab.evaluate.statistics import bootstrap_share
from kvgraft_lab.evaluate.tasks import find_suites
from kvgraft_lab.testbed import MODEL_DIR

POLICIES = ("full", "redknot")
HOSTS = ("native", "vllm")
SUITES = "ruler,multihop,instruction,chat,agents,stress"
SEED = 3000
BLOCK_SIZE = 32  # tokens, as `kvgraft serve` has it on a CPU: what is grafted ends where blocks do


def main(
    suites: Annotated[str, typer.Option(help="By commas.")] = SUITES,
    items: Annotated[int, typer.Option(help="Texts a task.")] = 3,
    length: Annotated[int, typer.Option(help="Tokens of a prompt.")] = 1024,
    model: Annotated[Path, typer.Option(help="With a head map beside its weights.")] = MODEL_DIR,
    seed: int = SEED,
    out: Path = Path("results/redknot/in_vllm"),
) -> None:
    """Answer the prompts in both hosts, and print what is equal."""
    settings = EvalSettings(find_suites(suites), POLICIES, (length,), items=items, seed=seed)
    rows = []
    for name in HOSTS:
        with (
            open_host(
                name, model, dtype="float32", device="cpu", kv_gib=2.0, block_size=BLOCK_SIZE
            ) as host,
            progress_bar(Console(stderr=True), name) as on_progress,
        ):
            rows.append(runner.run(settings, host, out / name, on_progress))
    Console().print(compare(*rows))


def compare(native: Sequence[EvalRow], vllm: Sequence[EvalRow]) -> Table:
    """What the hosts have answered: a column for each."""
    keys = sorted({(row.cluster, row.number) for row in native})
    hosts = [_by_policy(rows, keys) for rows in (native, vllm)]
    (full, ours), (vllm_full, vllm_ours) = hosts
    clusters = [cluster for cluster, _ in keys]

    def equal(left: Sequence[object], right: Sequence[object]) -> str:
        values = [float(a == b) for a, b in zip(left, right, strict=True)]
        low, high = bootstrap_share(values, clusters)
        return f"{mean(values):.3f} ({low:.3f}-{high:.3f})"

    flops = sum(a.flops for a in ours) / sum(a.flops for a in full)
    lines = {
        "full: answers as native": ["", equal(_texts(full), _texts(vllm_full))],
        "redknot: answers as native": ["", equal(_texts(ours), _texts(vllm_ours))],
        "redknot: answers as full": [equal(_texts(a), _texts(b)) for a, b in hosts],
        "grafted tokens as native": [
            "",
            equal([a.grafted for a in ours], [a.grafted for a in vllm_ours]),
        ],
        "promoted heads as native": ["", equal(_promoted(ours), _promoted(vllm_ours))],
        "promoted heads": [f"{mean(_promoted(answers)):.2f}" for _, answers in hosts],
        "first token, times sooner than full": [f"{_sooner(*host):.2f}" for host in hosts],
        "(token, layer) pairs computed": [
            f"{mean(a.computed for a in answers):.1%}" for _, answers in hosts
        ],
        "FLOPs, of full's": [f"{flops:.1%}", "not counted"],
        "fallbacks": [str(sum(a.fallback is not None for a in answers)) for _, answers in hosts],
    }
    table = Table("", *HOSTS, box=box.SIMPLE, title=f"{len(keys)} prompts")
    for name, cells in lines.items():
        table.add_row(name, *cells)
    return table


def _by_policy(rows: Sequence[EvalRow], keys: Sequence[tuple[str, int]]) -> list[list[Answer]]:
    """Under each policy the answers to these prompts."""
    found = {(row.policy, row.cluster, row.number): row.answer for row in rows}
    return [[found[policy, *key] for key in keys] for policy in POLICIES]


def _texts(answers: Sequence[Answer]) -> list[list[str]]:
    return [answer.text.split() for answer in answers]


def _promoted(answers: Sequence[Answer]) -> list[int]:
    """Local heads that saw everything, over all layers."""
    return [answer.counts.get("promoted_heads", 0) for answer in answers]


def _sooner(full: Sequence[Answer], ours: Sequence[Answer]) -> float:
    return median(a.ttft_s / b.ttft_s for a, b in zip(full, ours, strict=True))


if __name__ == "__main__":
    typer.run(main)
