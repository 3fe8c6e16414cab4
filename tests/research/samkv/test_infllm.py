"""Multi-InfLLM: who stands for a block, what is always kept, and an exact answer's own tokens where
all is."""

from dataclasses import dataclass
from pathlib import Path
from typing import ClassVar

import pytest
import torch
from torch import Tensor

from kvgraft import Engine, Request, SamplingParams
from kvgraft.core.prompt import Part, Segment
from kvgraft.policies import Condense
from kvgraft.prefill.documents.context import DocumentContext, DocumentLayout
from models import VOCAB_SIZE
from research.samkv.infllm import MultiInfLLM, mean_logits


def words(count: int, seed: int) -> str:
    generator = torch.Generator().manual_seed(seed)
    return " ".join(
        f"w{token}"
        for token in torch.randint(3, VOCAB_SIZE - 3, (count,), generator=generator).tolist()
    )


@pytest.fixture(scope="module")
def engine(model_dirs: dict[str, Path]) -> Engine:
    return Engine(model_dirs["qwen3"], dtype="float32", poison_dropped_pages=True)


@pytest.mark.parametrize("window", [1, 3, 99])
def test_a_token_is_worth_what_those_behind_it_give(window: int):
    query, keys = torch.randn(9, 4, 2), torch.randn(9, 2, 2)
    found = mean_logits(query, keys, window)
    for token in range(9):
        behind = range(token + 1, min(token + 1 + window, 9))
        given = [
            sum(float(query[other, head] @ keys[token, head // 2]) for head in range(4))
            for other in behind
        ]
        assert float(found[token]) == pytest.approx(sum(given) / max(len(given), 1), abs=1e-4)


def test_the_ends_of_the_one_context_are_always_kept():
    policy = MultiInfLLM(block_tokens=8, kept_share=0.0)
    # one block of the first document, two of the last: 8 and 4 tokens
    assert policy.num_kept([100, 80, 60]) == 8 + 12
    assert policy.num_kept([5]) == 5
    assert policy.num_kept([]) == 0
    assert MultiInfLLM(block_tokens=8).num_kept([1000] * 4) == 600


def test_everything_kept_answers_as_any_policy_that_keeps_everything(engine: Engine):
    prompt: list[Part] = [Segment(words(70, 1)), words(5, 2), Segment(words(90, 3)), words(9, 4)]
    sampling = SamplingParams(6, ignore_eos=True)
    policies = (
        MultiInfLLM(block_tokens=8, kept_share=1.0),
        Condense(kept_share=1.0, recomputed="none"),
    )
    one, other = (
        engine.generate([Request(prompt, policy, sampling)])[0].token_ids for policy in policies
    )
    assert one == other


@dataclass(frozen=True)
class Watched(MultiInfLLM):
    """Notes what is kept."""

    seen: ClassVar[list[tuple[DocumentLayout, Tensor]]] = []

    def choose(self, ctx: DocumentContext) -> Tensor:
        kept = super().choose(ctx)
        self.seen.append((ctx.layout, kept))
        return kept


def test_a_part_is_kept_in_each_layer_its_own(engine: Engine):
    prompt: list[Part] = [Segment(words(120, 5)), Segment(words(100, 6)), words(9, 7)]
    policy = Watched(block_tokens=8, kept_share=0.4)
    [result] = engine.generate([Request(prompt, policy, SamplingParams(4, ignore_eos=True))])
    assert result.error is None
    [(layout, kept)] = Watched.seen
    first, last = layout.placed
    assert kept[:, first.start : first.start + 8].all()
    assert kept[:, last.stop - 12 : last.stop].all()
    assert not all(torch.equal(kept[0], other) for other in kept[1:])
    assert result.report.counts["kept_tokens"] == int(0.4 * 220)
    assert result.report.recomputed_tokens == 0
