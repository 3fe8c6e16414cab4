"""What is recomputed is exact, what is grafted is its source moved, and exact prefixes stay exact
beside both."""

from dataclasses import dataclass
from typing import Any, ClassVar

import pytest
import torch
from engines import BLOCK, EVERYTHING, NAIVE, OFF, Ask, words
from hosts import Host
from processes import HostProcess
from vllm.sampling_params import RequestOutputKind

from kvgraft.kv.rope import rotate
from kvgraft.policies import POLICIES
from kvgraft.prefill.context import Hidden, Policy, PrefillContext

TOLERANCE = 1e-4  # keys and values of order 3 in float32
RECOMPUTED = [
    EVERYTHING,
    {"policy": "sparsex", "boundary_layers": 0, "recompute_share": 1.0},
    {"policy": "sparsex", "boundary_layers": 4},  # every layer is dense
    {"policy": "sparsex", "boundary_layers": 0, "recompute_share": 0.0, "overflow_blocks": 99},
    {"policy": "scattered"},
    {"policy": "amended"},
    {"policy": "spread", "recompute_share": 1.0},
]
DOCUMENT, OTHER = words(300, 1), words(200, 2)
OPENING = words(100, 3)


@dataclass(frozen=True)
class Scattered(Policy):
    """A policy of the test's own: every layer in three passes over some tokens, in runs of one or
    two, near and far."""

    name: ClassVar[str] = "scattered"

    def recover(self, ctx: PrefillContext) -> Hidden:
        ctx.graft(range(ctx.num_layers))
        hidden = ctx.embed(ctx.plan.active)
        for layer in range(ctx.num_layers):
            # the keys and values of all of them, so that each pass sees the others'
            ctx.project(layer, hidden)
            states = torch.empty_like(hidden.states)
            for some in (
                ctx.plan.active & (ctx.plan.positions**2 % 7 % 3 == number) for number in range(3)
            ):
                states[some[hidden.where]] = ctx.layer(layer, hidden.only(some)).states
            hidden = hidden.with_states(states)
        return hidden


@dataclass(frozen=True)
class Amended(Policy):
    """A policy of the test's own: computes everything, copies the grafted KV over it again, and
    adds the difference."""

    name: ClassVar[str] = "amended"

    def recover(self, ctx: PrefillContext) -> Hidden:
        hidden, grafted = ctx.embed(ctx.plan.active), ctx.plan.grafted
        positions = ctx.plan.positions[grafted]
        for layer in range(ctx.num_layers):
            hidden = ctx.layer(layer, hidden)
            computed = ctx.kv(layer, grafted)
            ctx.graft(range(layer, layer + 1))
            keys, values = (
                new - old for new, old in zip(computed, ctx.kv(layer, grafted), strict=True)
            )
            ctx.add(
                layer,
                grafted,
                ctx.rotate_keys(positions)(layer, ctx.rotate_keys(-positions)(layer, keys)),
                values,
            )
        return hidden


@pytest.fixture(autouse=True)
def _own_policies(monkeypatch: pytest.MonkeyPatch) -> None:
    for policy in (Scattered, Amended):
        monkeypatch.setitem(POLICIES, policy.name, policy)


def kv_while_decoding(
    host: Host, prompt: list[int], options: dict[str, Any], salt: str | None = None
) -> Any:
    """Keys and values [L, n, Hkv, d] of a prompt, read when its first token has been generated, and
    its answer."""
    name = host.add(Ask(prompt, options, salt, max_tokens=3))
    host.step_until(lambda: name in host.outputs)
    keys, values = host.read_kv(host.slots(name)[: len(prompt)])
    return keys, values, host.finish(name)[0]


@pytest.mark.parametrize("options", RECOMPUTED, ids=str)
def test_recomputing_everything_answers_as_plain_vllm(
    host: Host, plain: HostProcess, options: dict[str, Any]
):
    """Several requests in a step, longer than a step, with and without an exact prefix before the
    first graft."""
    host.read(OPENING + DOCUMENT, OTHER)
    prompts = [
        words(10, 4) + OTHER + DOCUMENT + words(5, 5),
        OPENING + words(40, 6) + OTHER + words(33, 7),
        words(1, 8) + DOCUMENT,
        words(90, 9),
    ]
    together = host.ask(*[Ask(prompt, options) for prompt in prompts])
    assert [answer.tokens for answer in together] == plain.tokens(*prompts)
    assert [answer.report["prefix_tokens"] for answer in together] == [0, 96, 0, 0]
    assert [answer.grafted > 150 for answer in together] == [True, True, True, False]
    assert host.stats.data.get("kvgraft:fallbacks_total") is None


@pytest.mark.parametrize("options", RECOMPUTED, ids=str)
def test_recomputing_everything_leaves_the_keys_and_values_of_full_prefill(
    host: Host, options: dict[str, Any]
):
    host.read(OPENING + DOCUMENT, OTHER)
    prompt = OPENING + words(40, 6) + OTHER + words(7, 7) + DOCUMENT[50:250]
    keys, values, answer = kv_while_decoding(host, prompt, options)
    exact_keys, exact_values, exact = kv_while_decoding(host, prompt, OFF, salt="another")
    assert (answer.report["prefix_tokens"], exact.cached) == (96, 0)
    assert answer.grafted > 300
    torch.testing.assert_close(keys, exact_keys, atol=TOLERANCE, rtol=0)
    torch.testing.assert_close(values, exact_values, atol=TOLERANCE, rtol=0)


def test_changes_are_spread_before_any_row_of_a_layer_attends(
    host: Host, monkeypatch: pytest.MonkeyPatch
):
    """Also where a layer takes its rows in several parts."""
    prompt = words(70, 4) + DOCUMENT + words(40, 5)
    found = []
    for salt, policy, max_rows in (
        ("none", "spread:recompute_share=0.1,spread_share=0.0", host.model.max_rows),
        ("whole", "spread:recompute_share=0.1", host.model.max_rows),
        ("parts", "spread:recompute_share=0.1", 64),
    ):
        host.read(OPENING + DOCUMENT, salt=salt)
        monkeypatch.setattr(host.model, "max_rows", max_rows)
        keys, values, answer = kv_while_decoding(host, prompt, {"policy": policy}, salt=salt)
        assert answer.grafted >= 256
        assert answer.report["fresh_tokens"] + answer.report["recomputed_tokens"] > 64
        found.append((keys, values))
    for none, whole, parts in zip(*found, strict=True):
        torch.testing.assert_close(parts, whole, atol=TOLERANCE, rtol=0)
        assert (whole - none).abs().max() > 100 * TOLERANCE


@pytest.mark.parametrize("moved", [-77, 45])
def test_a_graft_is_its_source_moved(host: Host, moved: int):
    """The source is overwritten: its values must arrive untouched, its keys turned by the distance,
    at any offset."""
    before = words(128, 3)
    name = host.add(Ask(before + DOCUMENT, OFF, max_tokens=2))
    host.step_until(lambda: name in host.outputs)
    source = host.slots(name)[len(before) : len(before) + 288]
    host.finish(name)
    shape = (host.model.num_layers, len(source), host.model.num_kv_heads, host.model.head_dim)
    generator = torch.Generator().manual_seed(0)
    written = [torch.randn(shape, generator=generator) for _ in range(2)]
    host.write_kv(source, *written)

    prompt = words(len(before) + moved, 4) + DOCUMENT
    keys, values, answer = kv_while_decoding(host, prompt, NAIVE)
    [grafted] = [(a, b) for a, b, kind in answer.report["spans"] if kind == "grafted"]
    assert grafted[0] == len(before) + moved
    assert answer.grafted == grafted[1] - grafted[0] == 288
    assert torch.equal(values[:, grafted[0] : grafted[1]], written[1])
    cos, sin = host.model.plain_rope.table(torch.full((288,), moved))
    turned = torch.stack([rotate(layer, cos, sin) for layer in written[0]])
    torch.testing.assert_close(keys[:, grafted[0] : grafted[1]], turned, atol=1e-5, rtol=0)


@pytest.mark.parametrize("moved", [-77, 45])
def test_grafted_keys_of_the_first_layer_are_those_of_full_prefill(host: Host, moved: int):
    """They depend on token and position only; those of deeper layers also on what stood before the
    text."""
    host.read(words(128, 3) + DOCUMENT)
    prompt = words(128 + moved, 4) + DOCUMENT
    keys, _, answer = kv_while_decoding(host, prompt, NAIVE)
    exact, _, _ = kv_while_decoding(host, prompt, OFF, salt="another")
    assert answer.grafted == 288
    grafted = slice(128 + moved, 128 + moved + 288)

    def difference(layer: int) -> float:
        return float((keys[layer, grafted] - exact[layer, grafted]).abs().max())

    assert difference(0) < TOLERANCE
    assert all(difference(layer) > 0.01 for layer in range(1, host.model.num_layers))


def test_exact_prefixes_are_never_contaminated(host: Host, plain: HostProcess):
    """Neither the grafted blocks nor what was generated after them can be found under vLLM's own
    hashes."""
    host.read(DOCUMENT)
    prompt = words(50, 4) + DOCUMENT + words(20, 5)
    [wrong], [right] = (
        host.ask(Ask(prompt, NAIVE, max_tokens=100)),
        plain.tokens(prompt, max_tokens=100),
    )
    assert wrong.grafted >= 280
    assert wrong.tokens != right  # else this test shows nothing
    [again] = host.ask(Ask(prompt, OFF, max_tokens=100))
    assert again.cached == BLOCK  # the block before the first grafted token
    assert again.tokens == right
    [continued] = host.ask(Ask(prompt + wrong.tokens, OFF))
    # those of `again`; of what was generated then, nothing
    assert continued.cached == len(prompt) // BLOCK * BLOCK
    assert [continued.tokens] == plain.tokens(prompt + wrong.tokens)
    [longer] = host.ask(Ask(prompt + right, OFF))
    assert longer.cached == (len(prompt) + 99) // BLOCK * BLOCK


def test_a_hit_on_blocks_that_the_same_step_computes(host: Host, plain: HostProcess):
    """vLLM names blocks when it schedules them; a recovery must not read them before they are
    computed."""
    host.read(DOCUMENT)
    first, second = OPENING + words(20, 4), OPENING + words(8, 5) + DOCUMENT + words(3, 6)
    names = [host.add(Ask(first, OFF)), host.add(Ask(second, EVERYTHING))]
    host.step()
    assert host.request(names[0]).num_computed_tokens == len(first)
    assert host.state(names[1]).admitted  # in the same step
    answers = host.finish(*names)
    assert [answer.tokens for answer in answers] == plain.tokens(first, second)
    assert answers[1].report["prefix_tokens"] == 96
    assert answers[1].grafted >= 280
    assert answers[1].report["reason"] is None


def test_prompt_logprobs_are_of_the_whole_prompt(host: Host, plain: HostProcess):
    """vLLM gives up every claim of such a request, so it must not be recovered either."""
    host.read(DOCUMENT)
    prompt = words(9, 4) + DOCUMENT
    name = host.add(Ask(prompt, EVERYTHING), prompt_logprobs=1)
    [answer] = host.finish(name)
    assert answer.cached == answer.grafted == 0
    assert answer.report["reason"] == "prompt_logprobs"
    assert [answer.tokens] == plain.tokens(prompt)
    assert len(host.outputs[name].prompt_logprobs) == len(prompt)
    assert host.count("fallbacks_total") == 0


def test_several_samples_of_a_prompt_share_it(host: Host, plain: HostProcess):
    host.read(DOCUMENT)
    prompt = words(9, 4) + DOCUMENT
    name = host.add(
        Ask(prompt, EVERYTHING),
        n=3,
        temperature=1,
        top_k=1,
        output_kind=RequestOutputKind.FINAL_ONLY,
    )
    host.step_until(lambda: name in host.outputs and host.outputs[name].finished)
    samples = [list(sample.token_ids) for sample in host.outputs[name].outputs]
    assert samples == plain.tokens(prompt) * 3
    assert host.count("requests_total", "grafted") == 3
