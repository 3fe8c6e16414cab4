"""`redknot` in vLLM, through the stock layers in three steps: what the native engine computes on
the same head map."""

from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any, ClassVar

import pytest
import torch
from engines import BLOCK, EVERY_HEAD, OFF, Answer, Ask, words
from hosts import Host
from processes import HostProcess
from torch import Tensor

from kvgraft import Engine, Request, SamplingParams
from kvgraft.kv.heads import HEAD_MAP_FILE, HeadClass, HeadMap
from kvgraft.methods import count_layers
from kvgraft.policies import POLICIES, RedKnot
from kvgraft.prefill.context import Hidden, PrefillContext

DOCUMENTS = [words(10 * BLOCK, 1), words(7 * BLOCK, 2)]
NUM_KNOWN = sum(map(len, DOCUMENTS))
QUESTION, WINDOW = 17, 24  # tokens; what local heads see
# of three chunks of rows
PROMPT = words(21, 4) + DOCUMENTS[1] + words(3, 5) + DOCUMENTS[0] + words(QUESTION, 6)
SMALL = {"recent_tokens": 8, "min_ffn_tokens": 4}
# what vLLM, which computes the last token of a prompt itself, computes as the native engine
SEES_ALL = [
    SMALL | {"windows": "off"},
    SMALL | {"windows": "off", "dense_layers": 0, "mass_share": 0.8, "last_mass_share": 0.2},
    SMALL | {"edge_mass_share": 0.0},  # every local head is promoted
]
SEES_WINDOWS = [
    SMALL,
    SMALL | {"edge_mass_share": 1.0, "dense_layers": 1, "repair": "off"},
    SMALL | {"reuse": "off", "unit": "block"},
]
# KV of the layers, last states, counts
Found = list[tuple[list[tuple[Tensor, Tensor]], Tensor, dict[str, int]]]


@dataclass(frozen=True)
class Watched(RedKnot):
    """Tells what it has computed."""

    name: ClassVar[str] = "watched"
    found: ClassVar[Found] = []

    def recover(self, ctx: PrefillContext) -> Hidden:
        hidden = super().recover(ctx)
        everything = torch.ones_like(hidden.where)
        # vLLM's have a residual
        states = hidden.states if hidden.states.dim() == 2 else hidden.states.sum(1)
        layers = [ctx.kv(index, everything) for index in range(ctx.num_layers)]
        self.found.append((layers, states, dict(ctx.counts[0])))
        return hidden


def asking(options: dict[str, Any], name: str = "redknot") -> dict[str, str]:
    """As a request says it; its own `reuse` is another thing than the policy's."""
    return {
        "policy": f"{name}:{','.join(f'{option}={value}' for option, value in options.items())}"
    }


@pytest.fixture
def found(monkeypatch: pytest.MonkeyPatch) -> Found:
    monkeypatch.setitem(POLICIES, Watched.name, Watched)
    Watched.found.clear()
    return Watched.found


@pytest.fixture
def reader(host: Host) -> Host:
    """Has read the documents."""
    host.read(*DOCUMENTS)
    return host


@pytest.fixture(scope="module")
def native(model: Path) -> Iterator[Engine]:
    engine = Engine(model, dtype="float32", costs="tokens", block_size=BLOCK)
    for document in DOCUMENTS:
        engine.generate([Request(document, "full", SamplingParams(max_tokens=1, ignore_eos=True))])
    yield engine
    engine.check()


@pytest.mark.parametrize("options", [*SEES_ALL, *SEES_WINDOWS], ids=str)
def test_states_keys_and_values_are_those_of_the_native_engine(
    reader: Host, native: Engine, found: Found, options: dict[str, Any]
):
    compare(reader, native, found, options, PROMPT, NUM_KNOWN)


@pytest.mark.parametrize("options", [SEES_ALL[1], SMALL], ids=str)
def test_they_are_behind_an_exact_prefix_too(
    reader: Host, native: Engine, found: Found, options: dict[str, Any]
):
    prompt = (
        DOCUMENTS[0] + PROMPT[: len(PROMPT) - QUESTION - len(DOCUMENTS[0])] + words(QUESTION, 7)
    )
    answer = compare(reader, native, found, options, prompt, len(DOCUMENTS[1]))
    assert answer.report["prefix_tokens"] == len(DOCUMENTS[0])


@pytest.mark.parametrize("options", [SEES_ALL[1], SMALL], ids=str)
def test_they_are_where_vllm_s_kernel_takes_no_heads_apart(
    reader: Host,
    native: Engine,
    found: Found,
    monkeypatch: pytest.MonkeyPatch,
    options: dict[str, Any],
):
    """Our own attention of all heads, as on GPUs."""
    assert reader.model.attends_by_head
    monkeypatch.setattr(type(reader.model), "attends_by_head", False)
    compare(reader, native, found, options, PROMPT, NUM_KNOWN)


def compare(
    reader: Host,
    native: Engine,
    found: Found,
    options: dict[str, Any],
    prompt: list[int],
    num_grafted: int,
) -> Answer:
    """Keys and values of all tokens, what leaves the last layer, and counts, of both hosts."""
    native.generate(
        [Request(prompt, Watched(**options), SamplingParams(max_tokens=1), remember=False)]
    )
    [answer] = reader.ask(Ask(prompt, asking(options, "watched")))
    expected, ours = found
    assert answer.grafted == num_grafted
    torch.testing.assert_close(ours[0], expected[0], atol=1e-4, rtol=1e-4)
    logits = [native.decoder.logits(states[-1:]) for _, states, _ in (ours, expected)]
    torch.testing.assert_close(*logits, atol=1e-3, rtol=1e-3)
    assert answer.report["counts"] == ours[2] == expected[2]
    return answer


@pytest.mark.parametrize("options", SEES_ALL, ids=str)
def test_answers_and_reports_are_those_of_the_native_engine(
    reader: Host, native: Engine, options: dict[str, Any]
):
    sampling = SamplingParams(max_tokens=12, ignore_eos=True)
    [expected] = native.generate(
        [Request(PROMPT, RedKnot(**options), sampling, remember=False, return_logits=True)]
    )
    [answer] = reader.ask(Ask(PROMPT, asking(options), max_tokens=12, logprobs=True))
    assert answer.tokens == expected.token_ids
    assert answer.report["counts"] == dict(expected.report.counts)
    assert answer.report["computed_share"] == pytest.approx(expected.report.computed_share)
    assert expected.logits is not None
    likely = torch.log_softmax(expected.logits, dim=-1)[range(12), answer.tokens]
    assert answer.logprobs == pytest.approx(likely.tolist(), abs=1e-3)


def test_leaving_out_nothing_is_exact(reader: Host, plain: HostProcess):
    """Also beside others, and in as many steps of vLLM as its budget makes of it."""
    other = words(200, 9)
    decoding = reader.add(Ask(other, OFF, max_tokens=60))
    names = [reader.add(Ask(PROMPT, EVERY_HEAD, max_tokens=40)) for _ in range(2)]
    steps = reader.step_until(lambda: all(name in reader.outputs for name in names))
    assert steps >= 2 * len(PROMPT) // 256
    answers = reader.finish(*names, decoding)
    assert [answer.grafted for answer in answers[:2]] == [NUM_KNOWN] * 2
    assert [answer.tokens for answer in answers[:2]] == plain.tokens(PROMPT, PROMPT, max_tokens=40)
    assert [answers[2].tokens] == plain.tokens(other, max_tokens=60)


@pytest.mark.parametrize("repair", ["on", "off"])
def test_reused_heads_keep_what_was_grafted(reader: Host, model: Path, repair: str):
    """Of tokens that were grafted, in deep layers, but for those that the question sees; all else
    is computed."""
    reader.poison(reader.blocks_with_content())
    options = SMALL | {"edge_mass_share": 1.0, "repair": repair}
    name = reader.add(Ask(PROMPT, asking(options), max_tokens=2))
    reader.step_until(lambda: name in reader.outputs)
    values = reader.read_kv(reader.slots(name)[: len(PROMPT)])[1]  # [L, n, Hkv, d]
    [answer] = reader.finish(name)
    grafted = [
        t
        for start, stop, kind in answer.report["spans"]
        if kind == "grafted"
        for t in range(start, stop)
    ]
    assert len(grafted) == NUM_KNOWN
    is_grafted = torch.zeros(len(PROMPT), dtype=torch.bool)
    is_grafted[grafted] = True
    if repair == "on":
        is_grafted[len(PROMPT) - QUESTION - WINDOW + 1 :] = False
    head_map, shallow = (
        HeadMap.load(model / HEAD_MAP_FILE),
        count_layers(None, RedKnot.dense_share, len(values)),
    )
    for layer, of_layer in enumerate(values):
        reused = torch.tensor(head_map.heads(layer, HeadClass.LOCAL, HeadClass.RETRIEVAL)) & (
            layer >= shallow
        )
        kept = is_grafted[:, None] & reused
        assert (of_layer == -3.0).all(-1).equal(kept)
    assert 0 < shallow < len(values)


@pytest.mark.parametrize(
    ("missing", "reason"),
    [("_has_head_map", "no_head_map"), ("_works_by_head", "unsupported_model")],
)
def test_without_what_it_needs_nothing_is_reused(
    reader: Host, plain: HostProcess, monkeypatch: pytest.MonkeyPatch, missing: str, reason: str
):
    monkeypatch.setattr(reader.side.intake.eligibility, missing, False)
    [answer] = reader.ask(Ask(PROMPT, {"policy": "redknot"}))
    assert (answer.report["outcome"], answer.report["reason"], answer.grafted) == ("off", reason, 0)
    assert [answer.tokens] == plain.tokens(PROMPT)
