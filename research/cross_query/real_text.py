"""H1 and H2 on a real model: near-duplicates of documentation, behind another instruction, under
`similar` and others.

python -m research.cross_query.real_text [--model smollm2] [--items 6] [--edits 0.02]
"""

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from random import Random
from statistics import mean, median
from typing import Annotated

import msgspec
import typer
from rich.console import Console
from rich.table import Table

from kvgraft import Engine, Request, SamplingParams
from kvgraft.cli.progress import progress_bar
from kvgraft.engine.request import Result
from kvgraft.models import find_model
from kvgraft.policies import Policy, Similar, parse_policy
from kvgraft_lab.evaluate.prompts import as_text, find_chat
from kvgraft_lab.evaluate.scoring import ANSWER_TOKENS, native_distances
from kvgraft_lab.evaluate.statistics import bootstrap
from kvgraft_lab.evaluate.tasks import Shape, find_suites
from kvgraft_lab.evaluate.tasks.texts import edit_words
from research.cross_query.boundary import Seen, Truth, Watched
from research.cross_query.divergence import MovedSegment, moved_segments

POLICIES = ("similar", "similar:probe_tokens=0", "transitive", "spread")
LENGTH, SEGMENTS = 2048, 6


@dataclass(frozen=True)
class Outcome:
    """One prompt under one policy. Seconds to the first token, and floating-point operations, as
    shares of full's; `kl` along full's answer, nats; `edges`: mean KL of the boundary tokens of
    each accepted segment."""

    policy: str
    seconds: float
    flops: float
    reused: float
    kl: float
    edges: list[float]
    rejected: int


def main(
    model: Annotated[Path, typer.Option(help="Directory or name of a model.")] = Path("smollm2"),
    items: Annotated[int, typer.Option(help="Prompts.")] = 6,
    edits: Annotated[
        float, typer.Option(help="Share of the words that differ from what has been read.")
    ] = 0.02,
    seed: int = 1000,
    out: Path = Path("results/cross_query_real_text.json"),
) -> None:
    """Measure, print, and write every prompt."""
    engine = Engine(
        find_model(model, fetch=True), dtype="float32", policies=["similar"], continuation=False
    )
    chat, rng = find_chat(engine.tokenizer), Random(seed)  # noqa: S311
    [suite] = find_suites("docs")
    made = suite.items(
        seed, -(-items // len(suite.tasks)), Shape(LENGTH, SEGMENTS, ("instruction",))
    )[:items]
    found: list[Outcome] = []
    with progress_bar(Console(stderr=True), "asking") as on_progress:
        for number, item in enumerate(made, 1):
            engine.clear_cache()
            for read in item.phase_1:
                edited = [read[0], *(edit_words(rng, text, edits) for text in read[1:])]
                _ask(engine, as_text(edited, chat), "full", 1, remember=True)
            ask = item.phase_2[0]
            prompt = as_text(ask.segments, chat, ask.begun)
            truth = _ask(engine, prompt, "full", ANSWER_TOKENS)
            found += [_outcome(engine, prompt, policy, truth) for policy in POLICIES]
            on_progress(number, len(made))
    out.parent.mkdir(parents=True, exist_ok=True)
    out.write_bytes(msgspec.json.format(msgspec.json.encode(found), indent=1) + b"\n")
    Console().print(render(found))


def _ask(
    engine: Engine, prompt: str, policy: str | Policy, most: int, *, remember: bool = False
) -> Result:
    namespace = "default" if remember or policy != "full" else "truth"
    sampling = SamplingParams(max_tokens=most, ignore_eos=True)
    request = Request(
        prompt, policy, sampling, namespace, remember, return_logits=True, match="similar"
    )
    [result] = engine.generate([request])
    if result.error:
        raise ValueError(result.error)
    return result


def _outcome(engine: Engine, prompt: str, name: str, truth: Result) -> Outcome:
    policy = parse_policy(name)
    ours = _ask(engine, prompt, policy, ANSWER_TOKENS)
    request = Request(
        prompt, policy, namespace="default", remember=False, return_logits=True, match="similar"
    )
    kl = native_distances(engine, request, ours, truth)["answer_kl"]
    report = ours.report
    moved = _edges(engine, prompt, policy)
    return Outcome(
        name, report.ttft_s / truth.report.ttft_s, report.flops / truth.report.flops,
        report.grafted_tokens / report.prompt_tokens, kl,
        [one.final for one in moved if one.accepted and one.final],
        sum(not one.accepted for one in moved),
    )  # fmt: skip


def _edges(engine: Engine, prompt: str, policy: Policy) -> tuple[MovedSegment, ...]:
    """The segments, with what is known at their edges; nothing of a policy that drops tokens before
    the last layer."""
    seen = Seen()
    _ask(engine, prompt, Watched(policy, seen), 1)
    where = seen.edges.clone()
    where[-1] = True
    full = Truth(where)
    [_] = engine.generate(
        [Request(prompt, full, SamplingParams(max_tokens=1), "truth", remember=False)]
    )
    halo = policy.halo_tokens if isinstance(policy, Similar) else 0
    return moved_segments(seen, full.logits[0], halo)


def render(found: Sequence[Outcome]) -> Table:
    """A line for each policy."""
    table = Table(
        title=f"near-duplicates, {len(found) // len(POLICIES)} prompts", title_justify="left"
    )
    for name in (
        "policy",
        "reused",
        "FLOPs",
        "first token, of full's",
        "KL, nats",
        "edges: KL",
        "95 %",
        "rejected",
    ):
        table.add_column(name, justify="left" if name == "policy" else "right", overflow="fold")
    for policy in POLICIES:
        mine = [one for one in found if one.policy == policy]
        edges = [value for one in mine for value in one.edges]
        low, high = bootstrap(edges) if edges else (float("nan"), float("nan"))
        table.add_row(
            policy, f"{mean(one.reused for one in mine):.0%}",
            f"{mean(one.flops for one in mine):.0%}",
            f"{median(one.seconds for one in mine):.2f}", f"{mean(one.kl for one in mine):.4f}",
            f"{mean(edges):.4f} of {len(edges)}" if edges else "-", f"{low:.4f}-{high:.4f}",
            str(sum(one.rejected for one in mine)),
        )  # fmt: skip
    return table


if __name__ == "__main__":
    typer.run(main)
