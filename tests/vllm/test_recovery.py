"""A recovery that goes wrong: the prompt is computed in full, with a reason, and nothing of it is
left."""

import logging
from collections.abc import Callable
from dataclasses import dataclass
from typing import ClassVar

import pytest
import torch
from engines import BLOCK, EVERYTHING, NAIVE, NUM_BLOCKS, OFF, Ask, words
from hosts import Host
from processes import HostProcess

from kvgraft.policies import POLICIES
from kvgraft.prefill.context import Hidden, Policy, PrefillContext

DOCUMENT = words(300, 1)


@dataclass(frozen=True)
class Failing(Policy):
    """Fails in its third layer: after some of its work, and in a later step of vLLM than it
    began."""

    name: ClassVar[str] = "failing"

    def recover(self, ctx: PrefillContext) -> Hidden:
        ctx.graft(range(ctx.num_layers))
        ctx.run(range(2), ctx.embed(ctx.plan.active))
        raise RuntimeError("a policy's own bug")


@dataclass(frozen=True)
class Forgetful(Policy):
    """Returns no hidden state for the last token."""

    name: ClassVar[str] = "forgetful"

    def recover(self, ctx: PrefillContext) -> Hidden:
        ctx.graft(range(ctx.num_layers))
        return ctx.embed(ctx.plan.grafted)


@pytest.fixture(autouse=True)
def _policies(monkeypatch: pytest.MonkeyPatch) -> None:
    for policy in (Failing, Forgetful):
        monkeypatch.setitem(POLICIES, policy.name, policy)


def spoil_values(host: Host) -> None:
    """NaN in everything that is known."""
    keys, values = host.read_kv(slots := host.slots_of(host.blocks_with_content()))
    host.write_kv(slots, keys, torch.full_like(values, torch.nan))


def raise_in_policy(host: Host) -> None:
    """Nothing to prepare."""


FAILURES = pytest.mark.parametrize(
    ("options", "prepare", "reason"),
    [
        (NAIVE, spoil_values, "non_finite"),
        ({"policy": "sparsex", "boundary_layers": 1}, spoil_values, "non_finite"),
        ({"policy": "failing"}, raise_in_policy, "error"),
        ({"policy": "forgetful"}, raise_in_policy, "error"),
    ],
    ids=["naive", "sparsex", "failing", "forgetful"],
)


@FAILURES
def test_a_failed_recovery_is_computed_in_full(
    host: Host,
    plain: HostProcess,
    options: dict[str, str],
    prepare: Callable[[Host], None],
    reason: str,
):
    host.read(DOCUMENT)
    prompt = words(50, 2) + DOCUMENT + words(20, 3)
    prepare(host)
    [answer] = host.ask(Ask(prompt, options, max_tokens=80))
    assert [answer.tokens] == plain.tokens(prompt, max_tokens=80)
    report = answer.report
    assert (answer.cached, report["grafted_tokens"], report["recomputed_tokens"]) == (0, 0, 0)
    assert (report["reason"], report["fresh_tokens"]) == (reason, len(prompt))
    assert report["spans"] == [[0, len(prompt), "fresh"]]
    assert host.count("fallbacks_total", reason) == 1


@FAILURES
def test_blocks_of_a_failed_recovery_are_exact_and_shared_again(
    host: Host,
    plain: HostProcess,
    options: dict[str, str],
    prepare: Callable[[Host], None],
    reason: str,
):
    """Those of the prompt and those of what was generated: as exact prefixes, and as sources."""
    host.read(DOCUMENT)
    prompt = words(50, 2) + DOCUMENT + words(20, 3)
    prepare(host)
    [failed] = host.ask(Ask(prompt, options, max_tokens=80))
    assert failed.report["reason"] == reason
    assert failed.report["registered_blocks"] >= 12
    [again, continued] = host.ask(Ask(prompt, OFF), Ask(prompt + failed.tokens, OFF))
    assert again.cached == len(prompt) // BLOCK * BLOCK
    assert continued.cached == (len(prompt) + 79) // BLOCK * BLOCK
    assert [continued.tokens] == plain.tokens(prompt + failed.tokens)
    [moved] = host.ask(Ask(words(5, 4) + prompt + failed.tokens, EVERYTHING))
    assert moved.grafted >= 400


def test_a_failed_recovery_keeps_its_exact_prefix(host: Host, plain: HostProcess):
    """Also when the failing request runs beside others of its batch, which are not touched."""
    opening, good = words(100, 4), words(200, 5)
    host.read(DOCUMENT)
    spoil_values(host)
    host.read(opening, good)
    prompts = [opening + words(9, 6) + DOCUMENT, words(30, 7) + good]
    failed, fine = host.ask(*[Ask(prompt, NAIVE) for prompt in prompts])
    assert (failed.report["reason"], fine.report["reason"]) == ("non_finite", None)
    assert (failed.cached, failed.report["prefix_tokens"], failed.report["fresh_tokens"]) == (
        96,
        96,
        313,
    )
    assert fine.grafted >= 160
    assert [failed.tokens] == plain.tokens(prompts[0])


def test_nothing_that_is_not_finite_is_left_in_the_pool(host: Host):
    """A block's unused tail is multiplied by zero, not skipped: a NaN there makes the next holder's
    answer wrong."""
    host.read(DOCUMENT)
    spoilt = host.blocks_with_content()
    spoil_values(host)
    name = host.add(Ask(words(50, 2) + DOCUMENT + words(20, 3), NAIVE))
    state = host.state(name)
    host.step_until(lambda: state.refusal == "non_finite")
    _, values = host.read_kv(host.slots_of(set(range(1, NUM_BLOCKS + 1)) - spoilt))
    assert torch.isfinite(values).all()


def test_a_policy_that_fails_hurts_nobody_else(
    host: Host, plain: HostProcess, caplog: pytest.LogCaptureFixture
):
    host.read(DOCUMENT)
    prompts = [words(10 + seed, seed) + DOCUMENT for seed in range(3)]
    options = [{"policy": "failing"}, EVERYTHING, {"policy": "failing"}]
    stream = host.add(Ask(words(70, 9), OFF, max_tokens=60))
    host.step_until(lambda: stream in host.outputs)
    with caplog.at_level(logging.ERROR, "kvgraft"):
        answers = host.ask(*[Ask(p, o) for p, o in zip(prompts, options, strict=True)])
    assert [answer.tokens for answer in answers] == plain.tokens(*prompts)
    assert [answer.report["reason"] for answer in answers] == ["error", None, "error"]
    assert [answer.tokens for answer in host.finish(stream)] == plain.tokens(
        words(70, 9), max_tokens=60
    )
    assert "a policy's own bug" in caplog.text


def test_an_abort_in_a_recovery_that_fails(host: Host):
    long_document = words(600, 1)
    host.read(long_document)
    name = host.add(Ask(words(9, 2) + long_document, {"policy": "failing"}))
    host.step()
    assert host.state(name).recovering
    host.abort(name)
    host.settle()


def test_an_abort_that_comes_too_late_is_forgotten(host: Host):
    """With asynchronous scheduling a recovery may have ended when the workers hear that nobody
    wants it."""
    host.read(DOCUMENT)
    name = host.add(Ask(words(9, 2) + DOCUMENT, NAIVE))
    host.step()
    host.finish(name)
    host.queue.cancel({name})
    host.settle()


def test_a_request_fails_once(host: Host, plain: HostProcess, monkeypatch: pytest.MonkeyPatch):
    """What has failed is not tried again, whatever else becomes known while it waits."""
    host.read(DOCUMENT)
    tries = []
    recover = Failing.recover
    monkeypatch.setattr(
        Failing, "recover", lambda self, ctx: (tries.append(1), recover(self, ctx))[1]
    )
    prompt = words(9, 2) + DOCUMENT
    assert [host.ask(Ask(prompt, {"policy": "failing"}))[0].tokens] == plain.tokens(prompt)
    assert len(tries) == 1
