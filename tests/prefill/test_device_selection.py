"""Tokens that a CUDA device chooses, of which the host learns when all work is launched."""

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from fake_device import FakeDevice, FakeTensor, Kind
from kvgraft import Engine, Request, Result, SamplingParams
from kvgraft.engine.config import load_config
from kvgraft.engine.prefill import NativePrefill
from kvgraft.kv.heads import HeadMap
from kvgraft.prefill.context import Hidden
from launches import MAX_LENGTH, SHAPE, count_of
from ttft import make_model

LAYERS, VOCAB = 3, 4096
POLICIES = (
    "spread",
    "spread:recompute_share=0.2,start_share=1.0,spread_share=1.0",
    "spread:hops=0,score_layer=0",
    "spread:hops=3,score_layer=2,recompute_share=0.3,start_tokens=0",
    "spread:rows=all_fresh,reduction=max,tail_tokens=4,first_share=0.1",
    "spread:recompute_share=0,alike_share=0",
    "transitive",
    "prophet",
)


SETTINGS: dict[str, Any] = {
    "dtype": "float32", "num_pages": 400, "max_prefill_tokens": 8192, "enforce_eager": True,
}  # fmt: skip


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("model")
    make_model(folder, LAYERS, MAX_LENGTH, SHAPE, dtype="float32")
    return folder


def prompts(count: int) -> tuple[list[list[int]], list[list[int]]]:
    """(documents, prompts that have some of them between new text): the second has none, the others
    have one more each. Two documents have the wording of others."""
    random = np.random.default_rng(count)
    documents = [random.integers(1, VOCAB, size).tolist() for size in (90, 33, 40, 7, 64)]
    for number in (0, 2):
        other = list(documents[number])
        other[20:22] = [5, 6]
        documents.append(other)
    made = []
    for number in range(count):
        parts = [random.integers(1, VOCAB, 9).tolist()]
        for document in random.permutation(len(documents))[: (number != 1) * (3 + number)]:
            between = random.integers(1, VOCAB, random.integers(0, 20)).tolist()
            parts += [documents[document], between]
        parts.append(random.integers(1, VOCAB, 5).tolist())
        made.append([token for part in parts for token in part])
    return documents, made


def later(values: torch.Tensor) -> torch.Tensor:
    """Less than what tells scores apart, and different for all tokens."""
    return torch.arange(len(values), device=values.device) * 1e-6


def recovered(
    model: Path,
    device: str,
    count: int,
    monkeypatch: pytest.MonkeyPatch,
    policies: Sequence[str] = POLICIES,
    **settings: Any,
) -> dict[str, tuple[torch.Tensor, list[Result]]]:
    """Results of all prompts in one pass, and the tokens that the last layer computed."""
    engine = Engine(model, device=device, **SETTINGS, **settings)
    documents, asked = prompts(count)
    engine.generate([Request(text, "full", SamplingParams(max_tokens=1)) for text in documents])
    found, passes = {}, list[Hidden]()
    last_hidden = NativePrefill.last_hidden
    monkeypatch.setattr(
        NativePrefill,
        "last_hidden",
        lambda ctx, hidden: (passes.append(hidden), last_hidden(ctx, hidden))[1],
    )
    # Else tokens that no query sees would have equal scores.
    monkeypatch.setattr(NativePrefill, "over_heads", lambda ctx, values, *_: values + later(values))
    for policy in policies:
        passes.clear()
        sampling = SamplingParams(max_tokens=1, ignore_eos=True)
        requests = [
            Request(prompt, policy, sampling, remember=False, return_logits=True)
            for prompt in asked
        ]
        results = engine.generate(requests)
        assert [result.error for result in results] == [None] * count
        found[policy] = passes[0].where, results
    return found


def check_equal(
    found: dict[str, tuple[torch.Tensor, list[Result]]],
    expected: dict[str, tuple[torch.Tensor, list[Result]]],
) -> None:
    for policy, (theirs, others) in expected.items():
        mine, results = found[policy]
        assert torch.equal(mine, theirs), policy
        for result, other in zip(results, others, strict=True):
            assert result.report.recomputed_tokens == other.report.recomputed_tokens
            # The device computes all new tokens between documents in each round, and has no round
            # that chooses nothing.
            more = result.report.flops / other.report.flops
            least = 0.9 if "recompute_share=0," in policy else 1
            assert least <= more < (1.15 if policy.startswith("spread") else 1 + 1e-12), policy
            torch.testing.assert_close(logits_of(result), other.logits, atol=1e-5, rtol=1e-4)
        assert sum(result.report.recomputed_tokens for result in results) > 0


def logits_of(result: Result) -> torch.Tensor | None:
    return result.logits.held if isinstance(result.logits, FakeTensor) else result.logits


@pytest.mark.parametrize("count", [1, 4])
def test_a_device_chooses_what_the_cpu_chooses(
    model: Path, count: int, monkeypatch: pytest.MonkeyPatch
):
    expected = recovered(model, "cpu", count, monkeypatch)
    with torch.inference_mode(), FakeDevice():
        found = recovered(model, "cuda", count, monkeypatch)
    check_equal(found, expected)


@pytest.mark.slow
def test_kernels_choose_and_spread_what_the_cpu_does(model: Path, monkeypatch: pytest.MonkeyPatch):
    """In Triton's interpreter."""
    expected = recovered(model, "cpu", 1, monkeypatch, POLICIES[:1])
    with torch.inference_mode(), FakeDevice(interprets=True):
        found = recovered(model, "cuda", 1, monkeypatch, POLICIES[:1])
    check_equal(found, expected)


def test_heads_with_pages_of_their_own(model: Path, monkeypatch: pytest.MonkeyPatch):
    """Local heads have lost most of what is grafted at its source."""
    heads = HeadMap(load_config(model).identity, 4, 30, (("global", "local"),) * LAYERS)
    settings = {"head_map": heads, "head_paging": True, "block_size": 4}
    given = monkeypatch, POLICIES[:1]
    expected = recovered(model, "cpu", 3, *given, **settings)
    with torch.inference_mode(), FakeDevice():
        found = recovered(model, "cuda", 3, *given, **settings)
    check_equal(found, expected)


def test_among_tokens_in_place_the_cpu_chooses(model: Path):
    """They count less than others, so that only the choice tells how many are left to choose."""
    found = {}
    documents, [asked] = prompts(1)
    turns = [asked, [*asked, *range(100, 160)]]
    for device in ("cpu", "cuda"):
        with torch.inference_mode(), FakeDevice() as fake:
            engine = Engine(model, device=device, **SETTINGS)
            sampling = SamplingParams(max_tokens=1, ignore_eos=True)
            engine.generate([Request(text, "full", sampling) for text in documents])
            for turn in turns:
                request = Request(turn, "spread", sampling, return_logits=True)
                with fake.counting() as operations:
                    [found[device]] = engine.generate([request])
    assert found["cuda"].report.continued_tokens > 0
    assert found["cuda"].report.recomputed_tokens == found["cpu"].report.recomputed_tokens > 0
    torch.testing.assert_close(
        logits_of(found["cuda"]), logits_of(found["cpu"]), atol=1e-5, rtol=1e-4
    )
    assert count_of(operations, Kind.WAIT, inside="recover") > 0
