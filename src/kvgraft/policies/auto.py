"""Auto: one of two policies for each prompt, by the context of its known text."""

from dataclasses import dataclass
from functools import cached_property
from typing import ClassVar

from torch import Tensor

from kvgraft.core.plan import Plan
from kvgraft.methods import make, parse
from kvgraft.policies.cacheblend import CacheBlend
from kvgraft.policies.epic import Epic
from kvgraft.policies.naive import Naive
from kvgraft.policies.prophet import Prophet
from kvgraft.policies.sparsex import SparseX
from kvgraft.policies.spread import Spread
from kvgraft.policies.transitive import Transitive
from kvgraft.prefill.context import Hidden, Policy, PrefillContext
from kvgraft.prefill.contrast import shares_wording

CHOICES: dict[str, type[Policy]] = {
    policy.name: policy
    for policy in (Naive, Epic, CacheBlend, Prophet, SparseX, Transitive, Spread)
}


@dataclass(frozen=True)
class Auto(Policy):
    """Recover prompts whose known text has kept its context by one policy, and all others by
    another.

    The context is the same if `Plan.same_context` is true, and the new text before the known one
    does not share its wording: values of similar documents are told apart only if they were read
    together. KVGraft's own method. `kvgraft calibrate` measures which policy is near enough where
    the context is the same; docs/results/auto.md has the study.

    Raises:
        ValueError: a policy that it cannot choose, or an option of it out of range.
    """

    name: ClassVar[str] = "auto"

    # policies; options as in `spread:recompute_share=0.05/start_tokens=16`
    same_context: str = "spread"
    new_context: str = "spread"

    def __post_init__(self) -> None:
        _ = self._policies

    @property
    def recovers_in_place(self) -> bool:  # type: ignore[override]
        """Same as that of `new_context`, which recovers prompts that continue others."""
        return self._policies[1].recovers_in_place

    @property
    def choices(self) -> tuple[str, str]:
        """The policies as texts: `new_context` first."""
        return self.new_context.replace("/", ","), self.same_context.replace("/", ",")

    @property
    def careful(self) -> Policy:
        return self._policies[1]

    def chosen_for(self, plan: Plan, token_ids: Tensor) -> Policy:
        before = token_ids[plan.fresh & ~plan.question]
        is_same = all(plan.same_context) and not shares_wording(before, token_ids[plan.grafted])
        return self._policies[0 if is_same else 1]

    def residual_layers(self, num_layers: int) -> tuple[int, ...]:
        """The layers of both policies."""
        both = {layer for one in self._policies for layer in one.residual_layers(num_layers)}
        return tuple(sorted(both))

    def recover(self, ctx: PrefillContext) -> Hidden:
        """Recover by the chosen policy. Hosts call that themselves, prompt by prompt."""
        return self.chosen_for(ctx.plan, ctx.token_ids).recover(ctx)

    @cached_property
    def _policies(self) -> tuple[Policy, Policy]:
        """The policies for the same and for a new context."""
        return _nested("same_context", self.same_context), _nested("new_context", self.new_context)


def auto_of(same_context: str, new_context: str) -> str:
    """Return `auto` with two policies, each `name:option=value,option=value`."""
    nested = (policy.replace(",", "/") for policy in (same_context, new_context))
    return "auto:same_context={},new_context={}".format(*nested)


def can_choose(policy: Policy) -> bool:
    """Return whether `Auto` can choose this policy."""
    return type(policy) in CHOICES.values()


def _nested(option: str, given: object) -> Policy:
    """Return the policy that an option names.

    Raises:
        ValueError: it is none that `Auto` can choose.
    """
    if not isinstance(given, str):
        raise ValueError(f"{option} must name a policy, got {given!r}")
    name, options = parse("policy", given.replace("/", ","))
    return make(option, CHOICES, name, options)
