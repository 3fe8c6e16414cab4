"""Which KV tells similar documents apart: oracles by layer and by token.

Prompts of the suite `alike` whose documents were read one by one. *Exact KV* is what full
recomputation computes, put in place of the cached one for nothing; *recomputed* tokens run through
all layers among cached ones, as under any policy.

python -m research.alike --model path/to/Qwen2.5-Coder-0.5B-Instruct --items 2
"""

import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from statistics import mean
from typing import Annotated, ClassVar

import torch
import typer
from rich.console import Console
from rich.table import Table
from torch import Tensor

from kvgraft import Engine, Request, SamplingParams
from kvgraft.cli.progress import progress_bar
from kvgraft.models import find_model
from kvgraft.prefill.context import Hidden, Policy, PrefillContext
from kvgraft_lab.evaluate.metrics import SCORES
from kvgraft_lab.evaluate.prompts import as_parts, find_chat
from kvgraft_lab.evaluate.scoring import send
from kvgraft_lab.evaluate.statistics import bootstrap_share
from kvgraft_lab.evaluate.tasks import Ask, Item, Shape
from kvgraft_lab.evaluate.tasks.alike import make_alike
from kvgraft_lab.evaluate.tasks.alike_forms import NAMES, PARTS, PEOPLE
from research.oracle import Told

NEAR = (1, 3, 8)  # tokens on either side of names and values
_ENTITY = re.compile(rf"(?:{'|'.join(NAMES)}) [a-z]+|load_[a-z]+")


@dataclass(frozen=True, eq=False)
class Exact(Policy):
    """Put exact KV of some grafted tokens, bool [T], into some layers, and recompute nothing."""

    name: ClassVar[str] = "exact"

    kv: Sequence[tuple[Tensor, Tensor]]
    layers: range
    tokens: Tensor
    keys: bool = True
    values: bool = True

    def recover(self, ctx: PrefillContext) -> Hidden:
        """Add what is missing, then compute what is new."""
        ctx.graft(range(ctx.num_layers))
        where = self.tokens & ctx.plan.grafted
        for index in self.layers if where.any() else ():
            pairs = zip(self.kv[index], ctx.kv(index, where), strict=True)
            keys, values = (true[where] - cached for true, cached in pairs)
            ctx.add(index, where, keys * self.keys, values * self.values)
        return ctx.run(range(ctx.num_layers), ctx.embed(ctx.plan.fresh))


def near(where: Tensor, before: int, behind: int) -> Tensor:
    """Return the tokens with `before` and `behind` more around each: bool [T]."""
    wide = where.clone()
    for step in range(1, before + 1):
        wide[:-step] |= where[step:]
    for step in range(1, behind + 1):
        wide[step:] |= where[:-step]
    return wide


def names_and_values(pieces: Sequence[str]) -> tuple[Tensor, Tensor]:
    """Tokens of entities and of values in a prompt of these pieces, bool [T] each."""
    text, ends = "".join(pieces), torch.tensor([len(piece) for piece in pieces]).cumsum(0)
    begins = torch.cat([torch.zeros(1, dtype=ends.dtype), ends[:-1]])
    found = []
    for pattern in (_ENTITY, re.compile("|".join((*PARTS, *PEOPLE)))):
        where = torch.zeros(len(pieces), dtype=torch.bool)
        for match in pattern.finditer(text):
            where |= (begins < match.end()) & (ends > match.start())
        found.append(where)
    return found[0], found[1]


def variants(
    exact: Told, pieces: Sequence[str], num_layers: int, rng: torch.Generator
) -> Iterator[tuple[str, Policy]]:
    """All oracles of one prompt, by name."""
    [grafted], kv, layers = exact.grafted, exact.kv, range(num_layers)
    every, (names, values) = torch.ones_like(grafted), names_and_values(pieces)
    both, half = names | values, num_layers // 2

    for eighths in (2, 3, 4, 6):
        cut = num_layers * eighths // 8
        yield f"exact KV, layers below {cut}", Exact(kv, layers[:cut], every)
        yield f"exact KV, layers from {cut} on", Exact(kv, layers[cut:], every)
    yield "exact keys", Exact(kv, layers, every, values=False)
    yield "exact values", Exact(kv, layers, every, keys=False)

    yield "exact KV of names", Exact(kv, layers, names)
    yield "exact KV of values", Exact(kv, layers, values)
    yield "exact KV of names and values", Exact(kv, layers, both)
    yield "exact KV of all others", Exact(kv, layers, ~both)
    yield f"exact KV of names and values, layers from {half} on", Exact(kv, layers[half:], both)

    yield "names and values recomputed", Told(both & grafted)
    for tokens in NEAR:
        wide = near(both, tokens, tokens) & grafted
        yield f"names and values recomputed, with {tokens} tokens on either side", Told(wide)
    for share in (0.3, 0.6):
        chosen = torch.rand(len(grafted), generator=rng) < share
        yield f"{share:.0%} of the tokens recomputed, at random", Told(chosen & grafted)


def answers(
    engine: Engine, item: Item, policies: Sequence[str], rng: torch.Generator
) -> Iterator[tuple[str, float, float]]:
    """(name, score, FLOPs as a share of those of full) of an item's questions for a single
    value."""
    chat = find_chat(engine.tokenizer)
    engine.clear_cache()
    for segments in item.phase_1:
        reading = as_parts(segments, chat=chat)
        send(engine, Request(reading, "full", SamplingParams(max_tokens=1, ignore_eos=True)))
    reused = {segment for segments in item.phase_1 for segment in segments}

    for ask in item.phase_2:
        if ask.task.endswith("one"):
            yield from _answers(
                engine, ask, as_parts(ask.segments, reused, chat, ask.begun), policies, rng
            )


def _answers(
    engine: Engine, ask: Ask, parts: Sequence[object], policies: Sequence[str], rng: torch.Generator
) -> Iterator[tuple[str, float, float]]:
    asked = Request(parts, "full", SamplingParams(max_tokens=ask.max_tokens), remember=False)  # type: ignore[arg-type]
    exact = Told()
    send(engine, replace(asked, policy=exact))
    pieces = [engine.tokenizer.decode([token]) for token in engine.token_ids(asked)]
    tried: dict[str, str | Policy] = {"full": "full", **{name: name for name in policies}}
    tried |= dict(variants(exact, pieces, engine.config.num_layers, rng))
    whole = 0
    for name, policy in tried.items():
        result = send(engine, replace(asked, policy=policy))
        whole = whole or result.report.flops
        yield name, SCORES[ask.metric](result.text, ask.answers), result.report.flops / whole


def main(
    model: Annotated[Path, typer.Option(help="Directory or name of a model.")],
    policies: Annotated[str, typer.Option(help="Beside the oracles, by semicolons.")] = (
        "naive;spread:alike_share=1.0;epic;cacheblend;transitive;sparsex;"
        "sparsex:boundary_share=0.5,recompute_share=0.0,overflow_blocks=0;spread"
    ),
    patterns: str = "alone",
    items: Annotated[int, typer.Option(help="Texts of each form, with two questions each.")] = 2,
    length: int = 512,
    segments: int = 4,
    seed: int = 60,
    dtype: str = "float32",
) -> None:
    """Ask everything, and print right answers with 95 % intervals."""
    engine = Engine(find_model(model, fetch=True), dtype=dtype, continuation=False)
    rng = torch.Generator().manual_seed(seed)
    made = make_alike("dev").items(seed, items, Shape(length, segments, tuple(patterns.split(","))))  # type: ignore[arg-type]
    found: dict[str, list[tuple[int, float, float]]] = {}
    with progress_bar(Console(stderr=True), "asking") as on_progress:
        for done, item in enumerate(made, 1):
            for name, score, flops in answers(engine, item, policies.split(";"), rng):
                found.setdefault(name, []).append((done, score, flops))
            on_progress(done, len(made))
    table = Table("", "right", "95 %", "FLOPs", title=f"{len(found['full'])} questions")
    for name, rows in found.items():
        clusters, scores, shares = zip(*rows, strict=True)
        low, high = bootstrap_share(scores, clusters)
        table.add_row(
            name, f"{mean(scores):.2f}", f"{low:.2f} to {high:.2f}", f"{mean(shares):.0%}"
        )
    Console(width=110).print(table)


if __name__ == "__main__":
    typer.run(main)
