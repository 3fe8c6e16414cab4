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

    The context is the same if `Plan.same_context` is true, and no text before the known one shares
    its wording: else values of similar documents are confused (docs/results/alike.md). KVGraft's
    own method. `kvgraft calibrate` measures which policy is near enough where the context is the
    same.

    Raises:
        ValueError: a policy that it cannot choose, or an option of it out of range.
    """

    name: ClassVar[str] = "auto"

    # policies; options as in `spread:recompute_share=0.05/start_tokens=16`
    same_context: str = "spread"
    new_context: str = "spread"

    def __post_init__(self) -> None:
        _ = self.choices

    @cached_property
    def choices(self) -> tuple[Policy, ...]:
        return _nested("new_context", self.new_context), _nested("same_context", self.same_context)

    @property
    def recovers_in_place(self) -> bool:  # type: ignore[override]
        """Same as that of `new_context`, since a prompt that continues another has a new one."""
        return self.choices[0].recovers_in_place

    def chosen_for(self, plan: Plan, token_ids: Tensor) -> Policy:
        is_same = (
            plan.same_context == (True,)
            and plan.grafted.any()
            and not shares_wording(token_ids[: int(plan.graft_targets[0])], token_ids[plan.grafted])
        )
        return self.choices[1 if is_same else 0]

    def residual_layers(self, num_layers: int) -> tuple[int, ...]:
        """The layers of both policies."""
        both = {layer for one in self.choices for layer in one.residual_layers(num_layers)}
        return tuple(sorted(both))

    def recover(self, ctx: PrefillContext) -> Hidden:
        """Recover by the chosen policy; a batch by that for a new context. Hosts call the chosen
        policy themselves, prompt by prompt."""
        return self.chosen_for(ctx.plan, ctx.token_ids).recover(ctx)


def auto_of(same_context: str, new_context: str) -> str:
    """Return `auto` with two policies, each `name:option=value,option=value`."""
    nested = (policy.replace(",", "/") for policy in (same_context, new_context))
    return "auto:same_context={},new_context={}".format(*nested)


def chosen_by(auto: Auto) -> tuple[str, str]:
    """Return the policies that `auto_of` was given, that for a new context first."""
    return auto.new_context.replace("/", ","), auto.same_context.replace("/", ",")


def can_choose(policy: Policy) -> bool:
    """Return whether `Auto` can choose this policy."""
    return type(policy) in CHOICES.values()


def _nested(option: str, given: object) -> Policy:
    """Return the policy that an option names.

    Raises:
        ValueError: it is none that `Auto` can choose; the message names the option.
    """
    if not isinstance(given, str) or "," in given:
        raise ValueError(
            f"{option} must be a policy, name:option=value/option=value, got {given!r}"
        )
    try:
        name, options = parse("policy", given.replace("/", ","))
        return make("policy", CHOICES, name, options)
    except ValueError as error:
        raise ValueError(f"{option}={given}: {error}") from error
