"""What any choice of tokens can reach: an oracle that knows what full recomputation computes.

What cached keys and values cost the answer, the KL along full's own, is attributed to single tokens
in single layers: by its gradient along the line from cached to exact KV (integrated gradients,
Sundararajan et al. 2017), whose sum over all is that KL. Two oracles follow:

token  the tokens that cost most are recomputed, as any policy would: half of them, then those that
       cost
                   most after that
token and layer  the tokens that cost, or help, most in a layer have their exact KV there, for
                 nothing

python -m research.oracle --suites "docs;own" --patterns alone,reordered
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from statistics import mean
from typing import Annotated, ClassVar

import msgspec
import torch
import torch.nn.functional as F
import typer
from rich.console import Console
from rich.table import Table
from torch import Tensor

from kvgraft import Engine, Request, SamplingParams
from kvgraft.cli.progress import progress_bar
from kvgraft.engine.decoder import Decoder, causal_attention
from kvgraft.guard.distances import kl_divergence
from kvgraft.models import find_model
from kvgraft.prefill.context import Hidden, Policy, PrefillContext
from kvgraft_lab.evaluate.jsonl import check_config, read_lines
from kvgraft_lab.evaluate.prompts import as_parts, find_chat
from kvgraft_lab.evaluate.scoring import ANSWER_TOKENS, native_distances, send
from kvgraft_lab.evaluate.statistics import bootstrap
from kvgraft_lab.evaluate.tasks import Item, Shape, TaskSuite, find_suites
from kvgraft_lab.evaluate.tasks.own import make_own
from kvgraft_lab.evaluate.tasks.packages import read_documentation

POLICIES = (
    "naive;epic;cacheblend:recompute_share=0.07;prophet:recompute_share=0.05;"
    "transitive:recompute_share=0.08;spread"
)
STEPS = 4  # on the line from cached to exact KV
ROWS, CONFIG = "rows.jsonl", "config.json"


class Reached(msgspec.Struct, frozen=True):
    """One prompt under a policy or an oracle: `flops` of the prefill as a share of full's, KL along
    full's answer."""

    suite: str
    pattern: str
    item: int
    name: str
    flops: float
    kl: float


@dataclass(frozen=True, eq=False)
class Told(Policy):
    """Recomputes the tokens that it is told, bool [T] (None: all), and keeps the KV that this leads
    to.

    Attributes:
        grafted: one bool [T] after a prompt: what was copied.
        kv: layer by layer keys and values [T, Hkv, d].
    """

    name: ClassVar[str] = "told"

    tokens: Tensor | None = None
    grafted: list[Tensor] = field(default_factory=list)
    kv: list[tuple[Tensor, Tensor]] = field(default_factory=list)

    def recover(self, ctx: PrefillContext) -> Hidden:
        """As any policy that has chosen."""
        plan, layers = ctx.plan, range(ctx.num_layers)
        ctx.graft(layers)
        hidden = ctx.run(
            layers, ctx.embed(plan.active if self.tokens is None else plan.fresh | self.tokens)
        )
        self.grafted.append(plan.grafted)
        self.kv.extend(ctx.kv(index, torch.ones_like(plan.fresh)) for index in layers)
        return hidden


class Attribution:
    """The KL of one prompt, as it is attributed to tokens and layers.

    Args:
        exact: the prompt as full recomputation leaves it.
        tokens: of prompt and answer.
        truth: full's logits [n, V] at the places of the answer.
    """

    def __init__(self, decoder: Decoder, exact: Told, tokens: Sequence[int], truth: Tensor) -> None:
        self._decoder, self._exact, self._truth = decoder, exact.kv, truth
        [self.grafted] = exact.grafted
        # what follows the last token is not asked
        known, total = self.grafted.nonzero()[:, 0], len(tokens) - 1
        self._known, self._prompt = known, len(self.grafted)
        computed = torch.ones(total, dtype=torch.bool)
        computed[known] = False
        self._rows = computed.nonzero()[:, 0]
        self._ids = torch.tensor(tokens)[self._rows]
        self._table = decoder.config.rope.fresh_table(self._rows)
        self._visible = torch.arange(total) <= self._rows[:, None]

    def logits(self, kv: Sequence[tuple[Tensor, Tensor]]) -> Tensor:
        """At the places of the answer, float32 [n, V], when the grafted tokens have these keys and
        values [g, Hkv, d]."""
        decoder, config = self._decoder, self._decoder.config
        hidden = decoder.embed(self._ids)
        for index, (keys, values) in enumerate(kv):
            query, new_keys, new_values = decoder.project(index, hidden, *self._table)
            keys, values = self._whole(keys, new_keys), self._whole(values, new_values)
            attended = causal_attention(query, keys, values, config.attention_scale, self._visible)
            hidden = _feed_forward(
                decoder, index, decoder.add_attention(index, hidden, attended.flatten(1))
            )
        return decoder.logits(hidden[self._rows >= self._prompt - 1])

    def kl(self, found: Told, exact: Tensor) -> float:
        """Of what a policy has found, if the (token, layer) pairs in `exact` bool [g, L] had their
        exact KV."""
        with torch.no_grad():
            mixed = [
                (torch.where(chosen, true_keys, keys), torch.where(chosen, true_values, values))
                for chosen, ((keys, true_keys), (values, true_values)) in zip(
                    exact.T[:, :, None, None], self._pairs(found), strict=True
                )
            ]
            return float(kl_divergence(self._truth, self.logits(mixed)).mean())

    def costs(self, found: Told) -> Tensor:
        """Nats by grafted token and layer, float32 [g, L], of what a policy has found; their sum is
        about its KL."""
        total = torch.zeros(len(self._known), self._decoder.config.num_layers)
        for step in range(STEPS):
            way, mixed = (step + 0.5) / STEPS, []
            for (keys, true_keys), (values, true_values) in self._pairs(found):
                both = torch.lerp(keys, true_keys, way), torch.lerp(values, true_values, way)
                mixed.append((both[0].requires_grad_(), both[1].requires_grad_()))
            loss = kl_divergence(self._truth, self.logits(mixed)).mean()
            gradients = torch.autograd.grad(loss, [part for pair in mixed for part in pair])
            for index, pair in enumerate(self._pairs(found)):
                for (old, true), gradient in zip(
                    pair, gradients[2 * index : 2 * index + 2], strict=True
                ):
                    total[:, index] -= ((true - old) * gradient).sum((1, 2)).float() / STEPS
        return total

    def _pairs(self, found: Told) -> Iterator[tuple[tuple[Tensor, Tensor], tuple[Tensor, Tensor]]]:
        """Layer by layer the grafted tokens' keys as found and exact, then values."""
        for (keys, values), (true_keys, true_values) in zip(found.kv, self._exact, strict=True):
            yield (
                (keys[self.grafted], true_keys[self.grafted]),
                (values[self.grafted], true_values[self.grafted]),
            )

    def _whole(self, known: Tensor, new: Tensor) -> Tensor:
        whole = new.new_zeros(self._visible.shape[1], *new.shape[1:])
        return whole.index_put((self._rows,), new).index_put((self._known,), known)


def measure(
    engine: Engine, item: Item, policies: Sequence[str], shares: Sequence[float]
) -> Iterator[tuple[str, float, float]]:
    """The item's first prompt under all policies, and under oracles of so many tokens, or (token,
    layer) pairs, as shares of the grafted ones: name, FLOPs as a share of full's, KL in nats."""
    chat, ask = find_chat(engine.tokenizer) if item.chat else None, item.phase_2[0]
    engine.clear_cache()
    for segments in item.phase_1:
        send(
            engine,
            Request(
                as_parts(segments, chat=chat), "full", SamplingParams(max_tokens=1, ignore_eos=True)
            ),
        )
    reused = {segment for segments in item.phase_1 for segment in segments}
    parts, sampling = (
        as_parts(ask.segments, reused, chat, ask.begun),
        SamplingParams(ANSWER_TOKENS, ignore_eos=True),
    )
    asked = Request(parts, "full", sampling, remember=False, return_logits=True)
    truth = send(engine, asked)

    def outcome(policy: str | Policy) -> tuple[float, float]:
        request = replace(asked, policy=policy)
        result = send(engine, request)
        kl = native_distances(engine, request, result, truth)["answer_kl"]
        return result.report.flops / truth.report.flops, kl

    for policy in policies:
        yield policy, *outcome(policy)
    if not shares:
        return
    prompt = engine.token_ids(asked)
    naive, exact = Told(torch.zeros(len(prompt), dtype=torch.bool)), Told()
    for told in (naive, exact):
        send(engine, replace(asked, policy=told))
    if truth.logits is None:
        raise ValueError("the answer needs its logits")
    attribution = Attribution(engine.decoder, exact, [*prompt, *truth.token_ids], truth.logits)
    costs, grafted = attribution.costs(naive), attribution.grafted
    for share in shares:
        first = _greatest(costs.sum(1), share / 2)
        half = Told(torch.zeros_like(grafted).masked_scatter(grafted, first))
        send(engine, replace(asked, policy=half))
        both = _greatest(attribution.costs(half).sum(1).masked_fill(first, torch.inf), share)
        told = Told(torch.zeros_like(grafted).masked_scatter(grafted, both))
        yield f"oracle by token, {share:.0%}", *outcome(told)
    for share in shares:
        chosen = _greatest(costs.abs().flatten(), share).view_as(costs)
        yield f"oracle by token and layer, {share:.0%}", 0.0, attribution.kl(naive, chosen)


def _greatest(costs: Tensor, share: float) -> Tensor:
    """bool [n]."""
    chosen = torch.zeros_like(costs, dtype=torch.bool)
    chosen[costs.topk(round(share * len(costs))).indices] = True
    return chosen


def _feed_forward(decoder: Decoder, layer: int, hidden: Tensor) -> Tensor:
    """As `Decoder.feed_forward`, which works in place and so has no gradient."""
    weights = decoder.weights.layers[layer]
    if weights.router is not None:
        raise ValueError(
            "a model with experts has no attribution: only its other layers have a gradient here"
        )
    normed = F.rms_norm(hidden, weights.post_norm.shape, weights.post_norm, decoder.config.norm_eps)
    gate, up = F.linear(normed, weights.gate_up, weights.gate_up_bias).chunk(2, dim=-1)
    return hidden + F.linear(F.silu(gate) * up, weights.down, weights.down_bias)


def _suites(names: str, split: str) -> Iterator[TaskSuite]:
    """As `kvgraft eval --suite` names them; `own` are open questions about documentation of
    installed packages."""
    for name in names.split(";"):
        if name == "own":
            texts = {
                one.name: " ".join(sentence for _, sentence in one.sentences)
                for one in read_documentation()
            }
            yield make_own(texts, split)
        else:
            yield from find_suites(name, split)


def main(
    model: Annotated[Path, typer.Option(help="Directory or name of a model.")] = Path("smollm2"),
    suites: Annotated[
        str, typer.Option(help="As of `kvgraft eval`, by semicolons, and `own`.")
    ] = "docs;own",
    patterns: str = "alone,reordered",
    policies: Annotated[str, typer.Option(help="Beside the oracles, by semicolons.")] = POLICIES,
    shares: Annotated[
        str, typer.Option(help="Of the tokens, that oracles choose; none: no oracles.")
    ] = "0.04,0.08,0.16",
    items: Annotated[int, typer.Option(help="Prompts of each suite, pattern and task.")] = 4,
    length: int = 2048,
    segments: int = 6,
    split: str = "dev",
    seed: int = 1000,
    out: Path = Path("results/oracle"),
) -> None:
    """Measure the prompts that the directory does not hold yet, and print means with 95 %
    intervals."""
    engine = Engine(find_model(model, fetch=True), dtype="float32", continuation=False)
    named, parts = policies.split(";"), [float(share) for share in shares.split(",") if share]
    check_config(out / CONFIG, {
        "model": engine.config.identity, "suites": suites, "patterns": patterns, "policies": named,
        "shares": parts,
        "items": items, "length": length, "segments": segments, "split": split, "seed": seed,
    })  # fmt: skip
    found = {(row.suite, row.pattern, row.item): row for row in read_lines(out / ROWS, Reached)}
    work = [
        (suite.name, pattern, number, replace(item, chat=suite.real_text))
        for suite in _suites(suites, split)
        for pattern in patterns.split(",")
        for number, item in enumerate(suite.items(seed, items, Shape(length, segments, (pattern,))))  # type: ignore[arg-type]
    ]
    with (
        (out / ROWS).open("ab") as file,
        progress_bar(Console(stderr=True), "asking") as on_progress,
    ):
        for done, (suite, pattern, number, item) in enumerate(work, 1):
            if (suite, pattern, number) not in found:
                rows = [
                    Reached(suite, pattern, number, name, flops, kl)
                    for name, flops, kl in measure(engine, item, named, parts)
                ]
                file.writelines(msgspec.json.encode(row) + b"\n" for row in rows)
                file.flush()
            on_progress(done, len(work))
    Console().print(render(read_lines(out / ROWS, Reached)))


def render(rows: Sequence[Reached]) -> Table:
    """A line for each suite, pattern and name."""
    table = Table(title=f"along {ANSWER_TOKENS} tokens of full's answers", title_justify="left")
    for name in ("suite", "pattern", "policy", "FLOPs", "KL, nats", "95 %"):
        table.add_column(
            name, justify="left" if name in ("suite", "pattern", "policy") else "right"
        )
    groups: dict[tuple[str, str, str], list[Reached]] = {}
    for row in rows:
        groups.setdefault((row.suite, row.pattern, row.name), []).append(row)
    for (suite, pattern, name), mine in groups.items():
        low, high = bootstrap([row.kl for row in mine])
        kl, flops = mean(row.kl for row in mine), mean(row.flops for row in mine)
        table.add_row(
            suite,
            pattern,
            name,
            f"{flops:.1%}" if flops else "-",
            f"{kl:.4f}",
            f"{low:.4f}-{high:.4f}",
        )
    return table


if __name__ == "__main__":
    typer.run(main)
