"""Multi-InfLLM, the baseline of SamKV's Table 3, beside samkv and condense: quality and the share
that is kept.

    python -m research.samkv.infllm [--policies "samkv;condense;multi_infllm"] [--segments 8]
        [--length 4250]

SamKV says (section 4.1): the caches of all documents are concatenated to one, and InfLLM's
sparsification of a single context is applied (Xiao et al., "InfLLM: Training-Free Long-Context
Extrapolation for LLMs with an Efficient Context Memory", 2024, section 3)."""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Annotated, ClassVar
from weakref import WeakKeyDictionary

import torch
import typer
from rich.console import Console
from torch import Tensor

from kvgraft.cli.progress import progress_bar
from kvgraft.kv.documents import Document
from kvgraft.methods import require_at_least
from kvgraft.policies import POLICIES
from kvgraft.policies.samkv import match
from kvgraft.prefill.documents.context import DocumentContext, Placed
from kvgraft.prefill.documents.keeping import KeepsDocuments, Recomputed
from kvgraft.prefill.documents.partial import PartialPrefill
from kvgraft_lab.evaluate import results, runner
from kvgraft_lab.evaluate.hosts import open_host
from kvgraft_lab.evaluate.runner import EvalSettings
from kvgraft_lab.evaluate.tasks import find_suites
from kvgraft_lab.testbed import MODEL_DIR


@dataclass(frozen=True)
class MultiInfLLM(KeepsDocuments):
    """Keeps the initial blocks of the first document, the local blocks of the last one, and in each
    layer the blocks whose representative tokens fit the question best; recomputes nothing.

    Representative are the tokens of a block to which those behind them give most, by mean logits
    (InfLLM, Eq. 1); a block is worth the sum of inner products of the question's queries with their
    keys (Eq. 2), and is looked up in a layer over what was looked up in those below. Two
    differences: blocks are looked up once, for the question, not anew for every token of the
    answer; and what is kept has its positions, not one and the same.

    Raises:
        ValueError: an option outside its range.
    """

    name: ClassVar[str] = "multi_infllm"

    recomputed: Recomputed = "none"
    representatives: int = 4  # tokens that stand for a block (r_k)
    window_tokens: int = 4096  # behind a token, whose logits count (l_L)

    def __post_init__(self) -> None:
        super().__post_init__()
        require_at_least("representatives", self.representatives, 1)
        require_at_least("window_tokens", self.window_tokens, 1)

    def num_kept(self, lengths: Sequence[int]) -> int:
        """`kept_share`, or what is always kept if that is more."""
        if not lengths:
            return 0
        initial, local = self._initial(lengths[0]), self._local(lengths[-1])
        return max(len(initial) + len(local), int(self.kept_share * sum(lengths) + 1e-9))

    def choose(self, ctx: DocumentContext) -> Tensor:
        """Layer by layer: look up, then attend to what was found."""
        layout, fresh, question = ctx.layout, ctx.plan.fresh, ctx.plan.question
        layout.placed = tuple(Placed(at.start, self._represented(ctx, at)) for at in layout.placed)
        always, first, last = torch.zeros_like(fresh), layout.placed[0], layout.placed[-1]
        for at, tokens in (
            (first, self._initial(layout.lengths[0])),
            (last, self._local(layout.lengths[-1])),
        ):
            always[at.start + tokens.start : at.start + tokens.stop] = True
        is_ranked = ~always[layout.starts]
        room = self.num_kept(layout.lengths) - int(always.sum())
        kept, hidden, nothing = (
            always.repeat(ctx.num_layers, 1),
            ctx.embed(fresh),
            torch.zeros_like(fresh),
        )
        for index in range(ctx.num_layers):
            ctx.layer(index, hidden, sees=fresh, writes=fresh, outputs=nothing)  # for its queries
            asked = ctx.query()[question[fresh]].float().sum(0)
            worth = torch.cat(
                [
                    match(asked, ctx.block_keys(index, number))
                    for number in range(len(layout.placed))
                ]
            )
            ranking = ctx.over_heads(worth).cpu().argsort(descending=True, stable=True)
            kept[index] |= layout.fill(ranking[is_ranked[ranking]], room)
            hidden = ctx.layer(index, hidden, sees=kept[index] | fresh, writes=fresh, outputs=fresh)
        return kept

    def _initial(self, num_tokens: int) -> range:
        """The tokens of the initial blocks of a document."""
        return range(self.blocks.middle_tokens(num_tokens).start)

    def _local(self, num_tokens: int) -> range:
        """Those of its local blocks."""
        return range(self.blocks.middle_tokens(num_tokens).stop, num_tokens)

    def _represented(self, ctx: DocumentContext, at: Placed) -> Document:
        """The document with the mean key of its representative tokens in the place of that of all
        tokens. It is read once more for that, since nobody keeps its queries: times and FLOPs of
        its first prompt include it."""
        known = _REPRESENTED.setdefault(at.document, {})
        key = self.representatives, self.window_tokens
        if key not in known:
            known[key] = replace(at.document, block_keys=self._block_keys(ctx, at))
        return known[key]

    def _block_keys(self, ctx: DocumentContext, at: Placed) -> Tensor:
        """[L, B, Hkv, d]"""
        if not isinstance(ctx, PartialPrefill):
            raise TypeError(
                f"a document is read once more by PartialPrefill only, got {type(ctx).__name__}"
            )
        mine = torch.zeros_like(ctx.plan.fresh)
        mine[at.start : at.stop] = True
        nothing, hidden, found = torch.zeros_like(mine), ctx.embed(mine), []
        for index in range(ctx.num_layers):
            outputs = mine if index < ctx.num_layers - 1 else nothing
            hidden = ctx.layer(index, hidden, sees=nothing, writes=mine, outputs=outputs)
            received = mean_logits(
                ctx.query(), ctx.computed()[0].transpose(0, 1), self.window_tokens
            )
            received = ctx.over_heads(received).cpu()
            keys = at.document.keys[index].transpose(0, 1)  # [n, Hkv, d]
            parts = zip(
                received.split(self.block_tokens), keys.split(self.block_tokens), strict=True
            )
            best = [
                part[given.topk(min(self.representatives, len(part))).indices]
                for given, part in parts
            ]
            found.append(torch.stack([part.float().mean(0) for part in best]).to(keys.dtype))
        return torch.stack(found)


_REPRESENTED: WeakKeyDictionary[Document, dict[tuple[int, int], Document]] = WeakKeyDictionary()


def mean_logits(query: Tensor, keys: Tensor, window: int) -> Tensor:
    """What each token receives of those within `window` behind it, on average: query [n, Hq, d] and
    keys [n, Hkv, d], rotated -> float32 [n], summed over heads; the last token receives nothing."""
    grouped = query.float().unflatten(1, (keys.shape[1], -1)).sum(2)  # [n, Hkv, d]
    logits = torch.einsum("ihd,jhd->ij", grouped, keys.float())  # of token i to token j
    here = torch.arange(len(query), device=query.device)
    distance = here[:, None] - here
    counts = (distance > 0) & (distance <= window)
    return (logits * counts).sum(0) / counts.sum(0).clamp(min=1)


def main(
    policies: Annotated[str, typer.Option(help="Beside full, by semicolons.")] = (
        "samkv:block_tokens=8,kept_share=0.15;condense;multi_infllm:block_tokens=8;multi_infllm"
    ),
    segments: Annotated[int, typer.Option(help="Documents of a prompt.")] = 8,
    length: Annotated[int, typer.Option(help="Tokens of a prompt.")] = 4250,
    items: Annotated[int, typer.Option(help="Texts a task.")] = 6,
    seed: int = 2000,
    out: Annotated[Path, typer.Option(help="Where rows and tables go.")] = Path(
        "results/quality/infllm"
    ),
) -> None:
    """Answers of every policy to questions over many documents."""
    POLICIES[MultiInfLLM.name] = MultiInfLLM
    names = ("full", *policies.split(";"))
    settings = EvalSettings(
        find_suites("multidoc"), names, (length,), segments, ("alone",), items, seed
    )
    with (
        open_host("native", MODEL_DIR, dtype="float32", device="cpu", kv_gib=0.5) as host,
        progress_bar(Console(stderr=True), "infllm") as on_progress,
    ):
        rows = runner.run(settings, host, out, on_progress)
    command = (
        f"python -m research.samkv.infllm --segments {segments} --length {length} --items {items} "
        f"--seed {seed}"
    )
    results.write_tables(rows, out, command)
    Console().print(results.render(rows))


if __name__ == "__main__":
    typer.run(main)
