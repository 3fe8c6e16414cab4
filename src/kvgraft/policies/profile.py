"""Policy profile of a model: the policy that `kvgraft calibrate` has chosen, stored as JSON with
the weights."""

from collections.abc import Iterable
from functools import cached_property
from hashlib import sha256

import msgspec

from kvgraft.core.segmentation import parse_match
from kvgraft.flows import DENSE, with_default
from kvgraft.kv.profiles import ModelProfile
from kvgraft.policies import Auto, parse_policy
from kvgraft.policies.auto import chosen_by
from kvgraft.prefill.context import Policy

POLICY_FILE = "policy.json"  # in a model directory
Interval = tuple[float, float, float]  # mean, and the ends of its 95 % interval


class MeasuredPolicy(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """Means over some prompts, along full recomputation's own answers
    (`kvgraft.guard.distances.along`).

    Attributes:
        flops: floating-point operations of the prefill, as a share of full recomputation.
        kl: KL(full || policy) in nats.
        flips: share of positions where the most likely token differs.
        alike: share of right answers about similar documents, minus that of full recomputation,
            from -1 to 1; None if not measured.
        same_context: `kl` of the prompts whose known text stands in the context that it was read in
            (`Plan.same_context`); None if not measured.
    """

    policy: str
    flops: float
    kl: Interval
    flips: Interval
    alike: Interval | None = None
    same_context: Interval | None = None

    @property
    def fails_alike(self) -> bool:
        """Return whether it answers significantly worse than full recomputation about similar
        documents."""
        return self.alike is not None and self.alike[2] < 0


class MeasuredMatching(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """Means over prompts whose known texts have been edited since they were read.

    Attributes:
        match: `exact` or `similar`.
        flops, kl: see `MeasuredPolicy`.
    """

    match: str
    flops: float
    kl: Interval


class MeasuredFlow(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """The chosen policy, with answers decoded under a flow.

    Attributes:
        flow: `name:option=value,...` or a file.
        kl: see `MeasuredPolicy`.
        faster: speed of a decode step relative to dense attention, after a prompt of the
            calibration's length.
    """

    flow: str
    kl: Interval
    faster: float


class PolicyProfile(ModelProfile, frozen=True, dict=True, forbid_unknown_fields=True):
    """The policy that was chosen for a checkpoint, and its expected quality.

    Attributes:
        policy: `name:option=value,...`, for requests that name none.
        expected: its distances from full recomputation on held-out prompts.
        order_noise: distances of full recomputation from itself with the reused texts in other
            orders, on the same prompts: the unit.
        texts: origin of the texts in the prompts.
        prompts: number of prompts that the choice was made on, of about `tokens` tokens each.
        tried: every policy, on these prompts.
        budget: greatest share of full recomputation's floating-point operations that was allowed.
        match: matching of known text, `exact` or `similar`, where no setting names one.
        edited: the chosen policy with both, on texts that have been edited.
        flow: recommended flow, `dense` for none. It is not applied by itself.
        flows: the chosen policy with each flow that was tried.
        far_mass: [L][Hkv] share of each KV head's attention outside sinks and a window, a hint for
            `profile-heads`; empty if the texts were too short.
    """

    policy: str
    expected: MeasuredPolicy
    order_noise: Interval
    texts: str
    prompts: int
    tokens: int
    tried: tuple[MeasuredPolicy, ...]
    budget: float = 1.0
    match: str = "exact"
    edited: tuple[MeasuredMatching, ...] = ()
    flow: str = "dense"
    flows: tuple[MeasuredFlow, ...] = ()
    far_mass: tuple[tuple[float, ...], ...] = ()

    def __post_init__(self) -> None:
        parse_policy(self.policy)
        parse_match(self.match)

    @classmethod
    def describe(cls) -> str:
        return "policy profile"

    @property
    def chosen(self) -> tuple[str, ...]:
        """The policies of `tried` that it names: one, or two that `auto` chooses from, that for a
        new context first."""
        policy, was_tried = parse_policy(self.policy), {one.policy for one in self.tried}
        if isinstance(policy, Auto) and self.policy not in was_tried:
            return chosen_by(policy)
        return (self.policy,)

    @property
    def flow_setting(self) -> str | None:
        """The recommended flow, for sequences of at least the measured length; None without one."""
        return None if self.flow == DENSE else with_default(self.flow, "from_tokens", self.tokens)

    @cached_property
    def name(self) -> str:
        """Name in reports: eight hexadecimal digits of its SHA-256."""
        return sha256(msgspec.json.encode(self)).hexdigest()[:8]

    def __str__(self) -> str:
        noise = self.expected.kl[0] / self.order_noise[0] if self.order_noise[0] else float("nan")
        return (
            f"policy {self.policy} by profile {self.name} ({self.texts}): expected are "
            f"{self.expected.flops:.0%} of "
            f"the FLOPs, KL {self.expected.kl[0]:.4f} nats ({noise:.2f} of order noise), "
            f"{self.expected.flips[0]:.1%} of the tokens others than full's{self._of_alike}"
            f"{self._of_flow}"
        )

    @property
    def _of_alike(self) -> str:
        if self.expected.alike is None:
            return ""
        warning = (
            " (a warning: no policy within the budget does better)"
            if self.expected.fails_alike
            else ""
        )
        return (
            f", {self.expected.alike[0]:+.0%} right answers about documents that look "
            f"alike{warning}"
        )

    @property
    def _of_flow(self) -> str:
        for one in self.flows:
            if one.flow == self.flow:
                return (
                    f"; --flow {self.flow_setting} decodes {one.faster:.1f} times as fast after "
                    f"{self.tokens} tokens, at KL {one.kl[0]:.4f}"
                )
        return ""


def default_match(policies: Iterable[Policy], profile: PolicyProfile | None) -> str:
    """Return the matching where no setting names one: `similar` if a policy or the profile needs
    it, else `exact`."""
    named = {policy.match for policy in policies} | ({profile.match} if profile else set())
    return "similar" if "similar" in named else "exact"
