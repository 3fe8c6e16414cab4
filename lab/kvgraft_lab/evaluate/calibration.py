"""Calibration: choose a policy for a model and the user's texts on some prompts, then measure it on
others, with both matchings and with flows.
"""

import dataclasses
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from math import isnan
from pathlib import Path

import numpy as np
from msgspec.structs import replace
from rich.console import Group, RenderableType
from rich.table import Table
from rich.text import Text

from kvgraft.cli.progress import OnProgress
from kvgraft.engine.engine import Engine
from kvgraft.flows import DENSE
from kvgraft.methods import require_at_least
from kvgraft.policies import parse_policy
from kvgraft.policies.auto import auto_of, can_choose
from kvgraft.policies.profile import (
    Interval,
    MeasuredFlow,
    MeasuredMatching,
    MeasuredPolicy,
    PolicyProfile,
)
from kvgraft_lab.evaluate.conditions import WITH, check_condition
from kvgraft_lab.evaluate.decoding import speedups
from kvgraft_lab.evaluate.heads import measure, own_samples
from kvgraft_lab.evaluate.hosts import Match, NativeHost
from kvgraft_lab.evaluate.runner import EvalRow, EvalSettings, run
from kvgraft_lab.evaluate.scoring import ORDER_NOISE
from kvgraft_lab.evaluate.statistics import Estimate
from kvgraft_lab.evaluate.summaries import Summary, summarise
from kvgraft_lab.evaluate.tasks import GENERATED
from kvgraft_lab.evaluate.tasks.alike import make_alike
from kvgraft_lab.evaluate.tasks.items import QUESTIONS, Suite
from kvgraft_lab.evaluate.tasks.own import edit_known, make_own

CANDIDATES = (
    "naive",
    "epic:start_tokens=8",
    "cacheblend:recompute_share=0.05",
    "prophet:recompute_share=0.05",
    "sparsex:boundary_share=0.25",
    "transitive:recompute_share=0.04",
    "transitive:recompute_share=0.08",
    "spread",
    "spread:recompute_share=0.05",
    "spread:recompute_share=0.1",
    "samkv",
    "condense",
)
# candidates that need a head map, by `kvgraft profile-heads`
WITH_HEAD_MAP = ("redknot",)
# flows that are tried with the chosen policy
FLOWS = ("quest", "block_topk")
# least speed of a flow, relative to dense attention, for which it is recommended
LEAST_FASTER = 1.1
# share of full's floating-point operations; TTFT is then about 4 times shorter than full's
BUDGET = 0.25
# patterns in which only the instruction before the known text changes
SAME_CONTEXT = ("instruction", "tail")
# greatest KL there of a policy with less work, as a share of the chosen one's KL over all patterns,
# and of order noise in those prompts that check
NEAR, NEAR_NOISE = 0.5, 0.1
# least number of prompts of these patterns in each of the two evaluations
LEAST_PROMPTS = 8
# names of the evaluations' directories
CHOOSING, ALIKE, CHECKING, WITH_FLOWS = "choosing", "alike", "checking", "flows"
EDITED: Mapping[Match, str] = {"exact": "edited-exact", "similar": "edited-similar"}
# share of the words that are edited in the prompts that choose the matching
EDITED_SHARE = 0.02
# tokens and segments of prompts about similar documents
ALIKE_LENGTH, ALIKE_SEGMENTS = 512, 4
# samples for the measurement of heads
SAMPLES, SAMPLE_TOKENS, SINKS, WINDOW = 2, 1024, 4, 256


@dataclass(frozen=True)
class CalibrationSettings:
    """Settings of a calibration.

    Attributes:
        texts: texts by name.
        described: a short description of the texts.
        policies: candidates, without `full`.
        flows: flows to try with the chosen policy.
        items: prompts of each of the two evaluations; a multiple of 12 has each pattern of reuse
            and kind of question equally often.
        length: approximate tokens of a prompt.
        segments: segments of known text in a prompt.
        budget: maximum share of full's floating-point operations for the chosen policy, fresh
            tokens included.
        seed: seed of the prompts.
    """

    texts: Mapping[str, str]
    described: str
    policies: Sequence[str] = CANDIDATES
    items: int = 12
    length: int = 1536
    segments: int = 5
    budget: float = BUDGET
    seed: int = 0
    flows: Sequence[str] = FLOWS

    def __post_init__(self) -> None:
        require_at_least("items", self.items, 2)
        if not 0 < self.budget <= 1:
            raise ValueError(f"budget must be a share above 0, up to 1, got {self.budget}")
        if "full" in self.policies:
            raise ValueError("policies must be others than full, with which they are compared")
        for policy in self.policies:
            parse_policy(policy)
        for flow in self.flows:
            check_condition(f"full{WITH}{flow}")

    def evaluation(self, policies: Sequence[str], *, checks: bool) -> EvalSettings:
        """Return the settings of the evaluation that chooses, or of the one that checks.

        Both have every pattern of reuse. Only the second has order noise, because it takes as long
        as all other work.
        """
        suite = make_own(self.texts, "test" if checks else "dev")
        return dataclasses.replace(self._evaluation(suite, policies), order_noise=checks)

    def edited_evaluation(self, policy: str) -> EvalSettings:
        """Return the settings of prompts whose known texts have been edited since they were read.

        They are otherwise those that check.
        """
        return self._evaluation(edit_known(make_own(self.texts, "test"), EDITED_SHARE), (policy,))

    def flow_evaluation(self, conditions: Sequence[str]) -> EvalSettings:
        """Return the settings of the prompts that check, under policies with flows."""
        return self._evaluation(make_own(self.texts, "test"), conditions)

    def _evaluation(self, suite: Suite, policies: Sequence[str]) -> EvalSettings:
        per_task = -(-self.items // len(suite.tasks))
        return EvalSettings(
            (suite,), ("full", *policies), (self.length,), self.segments, items=per_task,
            seed=self.seed,
        )  # fmt: skip

    def alike_evaluation(self, policies: Sequence[str], *, testbed: bool) -> EvalSettings:
        """Return the settings of prompts with right answers about similar documents, each computed
        alone.
        """
        suite = GENERATED["sheets"] if testbed else make_alike("dev")
        suite = dataclasses.replace(suite, tasks=suite.tasks[: self.items])
        items = -(-2 * self.items // (QUESTIONS * len(suite.tasks)))
        return EvalSettings(
            (suite,),
            ("full", *policies),
            (ALIKE_LENGTH,),
            ALIKE_SEGMENTS,
            ("alone",),
            items,
            self.seed,
        )


def candidates(engine: Engine) -> tuple[str, ...]:
    """Return the default candidates that the engine can run."""
    return (*CANDIDATES, *WITH_HEAD_MAP) if engine.head_map else CANDIDATES


def calibrate(
    engine: Engine,
    settings: CalibrationSettings,
    directory: Path,
    on_progress: OnProgress | None = None,
    *,
    testbed: bool = False,
) -> PolicyProfile:
    """Try all policies, choose one, and measure it on other prompts. Results in the directory are
    not computed again.

    Args:
        testbed: True for the bundled model, which reads no English.

    Raises:
        ValueError: the texts are too short, no policy is within the budget, the engine cannot run
            a flow, or the directory holds another calibration.
    """
    for flow in settings.flows:
        engine.scheduler.flows.find(flow)
    host, policies = NativeHost(engine, match="exact"), tuple(dict.fromkeys(settings.policies))
    choosing = run(
        settings.evaluation(policies, checks=False), host, directory / CHOOSING, on_progress
    )
    full, *others = summarise(choosing, "all")
    asking = NativeHost(engine, distances=False, match="exact")
    alike = run(
        settings.alike_evaluation(policies, testbed=testbed), asking, directory / ALIKE, on_progress
    )
    less = {one.policy: _difference(one) for one in summarise(alike, "all")}
    kept = {one.policy: one for one in _same_context(choosing)}
    tried = tuple(
        replace(
            _measured(one),
            alike=less[one.policy],
            same_context=_interval(kept[one.policy].answer_kl)
            if one.policy in kept and kept[one.policy].prompts >= LEAST_PROMPTS
            else None,
        )
        for one in others
    )
    chosen = choose(tried, settings.budget)
    policy, cheaper = chosen.policy, choose_cheaper(tried, chosen)
    checked: tuple[str, ...] = (policy,)
    if cheaper is not None:
        checked = policy, cheaper.policy, auto_of(cheaper.policy, policy)
    checking = run(
        settings.evaluation(checked, checks=True), host, directory / CHECKING, on_progress
    )
    if cheaper is not None and is_confirmed(_same_context(checking), cheaper.policy):
        policy = checked[-1]
    found = {one.policy: one for one in summarise(checking, "all")}
    noise = _interval(found[ORDER_NOISE].answer_kl)
    asked, edited = settings.edited_evaluation(policy), []
    for match, name in EDITED.items():
        rows = run(asked, NativeHost(engine, match=match), directory / name, on_progress)
        _, one = summarise(rows, "all")
        edited.append(MeasuredMatching(match, one.flops, _interval(one.answer_kl)))

    flows = _measure_flows(engine, settings, policy, directory, on_progress)
    return PolicyProfile(
        model=engine.config.identity,
        policy=policy,
        expected=replace(_measured(found[policy]), alike=chosen.alike),
        order_noise=noise,
        texts=settings.described,
        prompts=full.prompts,
        tokens=settings.length,
        tried=tried,
        budget=settings.budget,
        match=choose_matching(edited, noise),
        edited=tuple(edited),
        flow=choose_flow(flows, noise),
        flows=flows,
        far_mass=_far_mass(engine, settings),
    )


def choose(tried: Sequence[MeasuredPolicy], budget: float) -> MeasuredPolicy:
    """Return the policy within the budget that is nearest to full recomputation.

    Policies with worse answers about similar documents are left out. If all have them, return the
    one with the most right answers.

    Raises:
        ValueError: no policy is within the budget.
    """
    within, right = _remaining(tried, budget)
    if not within:
        least = min(tried, key=lambda one: one.flops)
        raise ValueError(
            f"no policy is within a budget of {budget:.1%}: {least.policy} takes {least.flops:.1%}"
        )
    if right:
        return min(right, key=lambda one: one.kl[0])
    return max(within, key=lambda one: ((one.alike or (0.0,))[0], -one.kl[0]))


def _same_context(rows: Sequence[EvalRow]) -> list[Summary]:
    """Return summaries of the prompts in which only the instruction changes."""
    return summarise([row for row in rows if row.pattern in SAME_CONTEXT], "all")


def choose_cheaper(
    tried: Sequence[MeasuredPolicy], chosen: MeasuredPolicy
) -> MeasuredPolicy | None:
    """Return the policy with the least work for prompts whose known text keeps its context.

    The 95 % interval of its KL in these prompts ends at `NEAR` times the KL of the chosen policy
    over all prompts, or below. None if no policy with less work than the chosen one does.
    """
    if not can_choose(parse_policy(chosen.policy)):
        return None
    near = [
        one
        for one in tried
        if one.flops < chosen.flops
        and one.same_context is not None
        and one.same_context[2] <= NEAR * chosen.kl[0]
        and can_choose(parse_policy(one.policy))
    ]
    return min(near, key=lambda one: one.flops, default=None)


def is_confirmed(kept: Sequence[Summary], policy: str) -> bool:
    """Return whether the 95 % interval of a policy's KL ends at `NEAR_NOISE` times order noise, or
    below, on the prompts of these summaries."""
    found = {one.policy: one for one in kept}
    return (
        policy in found
        and found[policy].prompts >= LEAST_PROMPTS
        and found[policy].answer_kl.high <= NEAR_NOISE * found[ORDER_NOISE].answer_kl.value
    )


def choose_matching(edited: Sequence[MeasuredMatching], order_noise: Interval) -> str:
    """Return the matching with the least work, among those whose KL is at most order noise; `exact`
    if there is none."""
    near = [one for one in edited if one.kl[0] <= order_noise[0]]
    return min(near, key=lambda one: one.flops).match if near else "exact"


def _measure_flows(
    engine: Engine,
    settings: CalibrationSettings,
    policy: str,
    directory: Path,
    on_progress: OnProgress | None,
) -> tuple[MeasuredFlow, ...]:
    """Measure the chosen policy with each flow, on the prompts that check."""
    under = {flow: f"{policy}{WITH}{flow}" for flow in dict.fromkeys(settings.flows)}
    if not under:
        return ()
    asked = settings.flow_evaluation(tuple(under.values()))
    rows = run(asked, NativeHost(engine, match="exact"), directory / WITH_FLOWS, on_progress)
    found = {one.policy: one for one in summarise(rows, "all")}
    speed = speedups(engine, list(under), settings.length)
    return tuple(
        MeasuredFlow(flow, _interval(found[name].answer_kl), round(speed[flow][1], 2))
        for flow, name in under.items()
    )


def choose_flow(flows: Sequence[MeasuredFlow], order_noise: Interval) -> str:
    """Return the fastest flow, among those that are at least `LEAST_FASTER` times as fast as dense
    attention, with a KL of at most order noise; `dense` if there is none."""
    within = [one for one in flows if one.kl[0] <= order_noise[0] and one.faster >= LEAST_FASTER]
    return max(within, key=lambda one: one.faster).flow if within else DENSE


def explain(profile: PolicyProfile) -> str:
    """Return in words why the policy was chosen, and why the others were not."""
    within, right = _remaining(profile.tried, profile.budget)
    by_name = {one.policy: one for one in profile.tried}
    chosen, *cheaper = (by_name[name] for name in profile.chosen)
    over = [one.policy for one in profile.tried if one not in within]
    failed = [one.policy for one in within if one.fails_alike and one != chosen]
    rivals = sorted((one for one in right if one != chosen), key=lambda one: one.kl[0])

    lines = [
        f"Chosen: {chosen.policy}. It has the least KL of the {len(right)} policies that are left."
        if right
        else f"Chosen: {chosen.policy}. Every policy within the budget answers fewer questions "
        "right than full recomputation about similar documents; it loses the fewest."
    ]
    if over:
        lines.append(f"Over the budget of {profile.budget:.0%} of the FLOPs: {', '.join(over)}.")
    if failed and right:
        lines.append(f"Fewer right answers about similar documents: {', '.join(failed)}.")
    for one in rivals[:1]:
        overlap = one.kl[1] <= chosen.kl[2]
        lines.append(
            f"Next: {one.policy}, with {one.kl[0] / max(chosen.kl[0], 1e-9):.2f} times the KL"
            f"{' (the intervals overlap)' if overlap else ''} at {one.flops:.0%} of the FLOPs."
        )
    for one in cheaper:
        if one.same_context is not None:
            lines.append(
                f"Where only the instruction before known text changes: {one.policy}, with a KL of "
                f"{one.same_context[0]:.4f} there, and {one.flops:.0%} of the FLOPs over all "
                "patterns."
            )
    if profile.edited:
        measured = ", ".join(
            f"{one.match} matching computes {one.flops:.0%} of the FLOPs at KL {one.kl[0]:.4f}"
            for one in profile.edited
        )
        lines.append(
            f"Matching: {profile.match}. Where {EDITED_SHARE:.0%} of the words have been edited, "
            f"{measured} (order noise {profile.order_noise[0]:.4f})."
        )
    if profile.flows:
        measured = ", ".join(
            f"{one.flow} is {one.faster:.2f} times as fast as dense attention, at KL "
            f"{one.kl[0]:.4f}"
            for one in profile.flows
        )
        lines.append(
            f"Flow: {profile.flow_setting or 'none'}. After {profile.tokens} "
            f"tokens, {measured}. Recommended from {LEAST_FASTER} times, within order noise; set "
            "with --flow."
        )
    return "\n".join(lines)


def _remaining(
    tried: Sequence[MeasuredPolicy], budget: float
) -> tuple[list[MeasuredPolicy], list[MeasuredPolicy]]:
    """Return the policies within the budget, and those that are also right about similar
    documents."""
    within = [one for one in tried if one.flops <= budget]
    return within, [one for one in within if not one.fails_alike]


LEGEND = (
    "FLOPs: of full's; KL: full against policy, nats, along full's own answer; / noise: KL divided "
    "by that of full "
    "with the segments in another order; flips: places of that answer where the best token is "
    "another; alike: "
    "answers that are right about similar documents, less full's"
)


def render(profile: PolicyProfile) -> RenderableType:
    """Return a line for each policy, and the choice, for a rich console."""
    unit = profile.order_noise[0]
    title = f"{profile.prompts} prompts of about {profile.tokens} tokens: {profile.texts}"
    table = Table(title=title, title_justify="left", pad_edge=False, collapse_padding=True)
    table.add_column("policy", overflow="fold")
    for name in ("FLOPs", "KL", "95 %", "/ noise", "flips", "alike", "95 %"):
        table.add_column(name, justify="right", no_wrap=True)

    for one in sorted(profile.tried, key=lambda one: one.flops):
        value, low, high = one.kl
        table.add_row(
            f"[bold]{one.policy}[/bold]" if one.policy in profile.chosen else one.policy,
            f"{one.flops:.1%}", f"{value:.4f}", f"{low:.4f}-{high:.4f}",
            f"{value / unit:.2f}" if unit else "-",
            f"{one.flips[0]:.1%}", *_alike(one.alike),
        )  # fmt: skip

    return Group(
        table,
        Text(LEGEND, style="dim"),
        Text(explain(profile)),
        Text(f"{profile}, on as many prompts that have chosen nothing"),
    )


def _alike(difference: Interval | None) -> tuple[str, str]:
    if difference is None:
        return "-", ""
    value, low, high = difference
    return f"{value:+.0%}", f"{low:+.0%} to {high:+.0%}"


def _measured(summary: Summary) -> MeasuredPolicy:
    return MeasuredPolicy(
        summary.policy, summary.flops, _interval(summary.answer_kl), _interval(summary.flips)
    )


def _difference(summary: Summary) -> Interval:
    """Return the score minus full's, with its interval; -1 to 1 for a single text."""
    low, high = (
        (-1.0, 1.0) if isnan(summary.beyond_low) else (summary.beyond_low, summary.beyond_high)
    )
    return round(summary.beyond_full, 6), round(low, 6), round(high, 6)


def _interval(estimate: Estimate) -> Interval:
    value, low, high = (
        round(figure, 6) for figure in (estimate.value, estimate.low, estimate.high)
    )
    return value, low, high


def _far_mass(engine: Engine, settings: CalibrationSettings) -> tuple[tuple[float, ...], ...]:
    """Return the attention outside sinks and window, [L][Hkv]; empty if the texts are too short."""
    try:
        samples = own_samples(
            engine, settings.texts, seed=settings.seed, count=SAMPLES, length=SAMPLE_TOKENS
        )
    except ValueError:
        return ()
    found = np.mean(
        [measure(engine.decoder, sample, SINKS, WINDOW)[1] for sample in samples], axis=0
    )
    return tuple(tuple(round(float(value), 3) for value in row) for row in found)
