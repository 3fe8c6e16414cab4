"""The guard of a server's answers: it draws requests, says at which level each is answered, and
bounds what is scored.

It knows no host: whoever scores an answer tells it the distances.
"""

import logging
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

from kvgraft.guard.bounds import ConfidenceSequence
from kvgraft.guard.breaker import Breaker, Level, Transition
from kvgraft.guard.sampling import Sampling
from kvgraft.guard.target import CLIP, Measure, Target, as_share
from kvgraft.prefill.context import Policy
from kvgraft.prefill.policies import with_options
from kvgraft.segments.matches import depth_name

logger = logging.getLogger("kvgraft")
ANSWER_TOKENS = 128  # of an answer, that are scored at most
# option of policies: the share of tokens that it recomputes, times that
BUDGET, LARGER = "recompute_share", 4.0
MEASURES: tuple[Measure, ...] = ("flips", "kl")


@dataclass(frozen=True)
class Ticket:
    """A request on its way.

    Attributes:
        name: under which the policy is guarded that it asks for.
        policy: with which it is answered, unless its level is EXACT.
        is_watched: whether its answer may be scored.
        is_trial: whether it tries the level below.
    """

    name: str
    policy: Policy
    level: Level = Level.AS_ASKED
    is_watched: bool = False
    is_trial: bool = False


class Guard:
    """Of all requests of a server. The default policy is guarded on its own, other options of the
    same method and other methods by method: clients cannot make up more.

    Args:
        share: of the answers on approximate KV, that are scored.
        target: when the breaker of a policy trips; None: never.
        default: the policy of requests that name none.
        on_transition: called with the policy when its breaker changes the level.
    """

    def __init__(
        self,
        share: float,
        target: Target | None = None,
        *,
        default: Policy | None = None,
        seed: int | None = None,
        clock: Callable[[], float] = time.monotonic,
        on_transition: Callable[[str, Transition], None] | None = None,
    ) -> None:
        self._sampling, self.target, self._clock = Sampling(share, seed), target, clock
        self._on_transition = on_transition
        self._default = default
        self._policies: dict[str, _Guarded] = {}
        self._tenants: dict[str, _Bounds] = {}
        self.num_approximate = self.num_scored = 0

    def admit(self, policy: Policy, *, guarded: bool = True, can_be_watched: bool = True) -> Ticket:
        """A request arrives.

        Args:
            guarded: whether the breaker may answer it otherwise than it asks for.
            can_be_watched: whether its answer could be scored.
        """
        name = f"{policy.name} (default)" if policy == self._default else policy.name
        breaker = self._policies.setdefault(name, _Guarded(self._breaker(name, policy))).breaker
        drawn = can_be_watched and self._sampling.draw()
        if breaker is None or not guarded:
            return Ticket(name, policy, is_watched=drawn)
        level = breaker.level_of(tries=drawn and self._sampling.tries())
        if level is Level.LARGER_BUDGET:
            policy = with_larger_budget(policy) or policy
        return Ticket(
            name, policy, level, drawn and level is not Level.EXACT, level is not breaker.level
        )

    def chooses(self, ticket: Ticket, depth: int, grafted_share: float) -> bool:
        """Whether this answer, which has ended and rests on approximate KV, is to be scored: all
        trials are."""
        self.num_approximate += 1
        breaker = self._policies[ticket.name].breaker
        if ticket.is_trial and breaker is not None:
            breaker.tried()
        kind = ticket.name, ticket.level, depth_name(depth), int(4 * grafted_share)
        return ticket.is_watched and (ticket.is_trial or self._sampling.choose(kind))

    def add(self, ticket: Ticket, tenant: str, distances: Mapping[str, float]) -> None:
        """An answer has been scored; `distances` as `distances.along`. Bounds are of equal shares
        of all answers: not of trials, which are all scored."""
        self.num_scored += 1
        shares, known = (
            {measure: as_share(measure, distances) for measure in MEASURES},
            self._policies[ticket.name],
        )
        breaker = known.breaker
        if (
            breaker is not None
            and self.target is not None
            and (ticket.is_trial or ticket.level is breaker.level)
        ):
            breaker.add(ticket.level, shares[self.target.measure])
        if not ticket.is_trial:
            known.bounds.setdefault(ticket.level, _Bounds()).add(shares)
            self._tenants.setdefault(tenant, _Bounds()).add(shares)

    @property
    def share_reached(self) -> float:
        """Of the answers on approximate KV, that have been scored."""
        return self.num_scored / self.num_approximate if self.num_approximate else 0.0

    def policy_view(self, name: str) -> dict[str, Any]:
        """What is known of a policy: its level, and the bounds of the answers at each level."""
        known = self._policies[name]
        bounds = {level.name.lower(): one.view() for level, one in known.bounds.items()}
        return {"level": known.level.name.lower(), **bounds}

    def view(self, tenant: str | None = None) -> dict[str, Any]:
        """What is known, by policy and by tenant; of one tenant only what is known of its own
        answers."""
        tenants = (
            self._tenants if tenant is None else {tenant: self._tenants.get(tenant, _Bounds())}
        )
        return {
            "share": self._sampling.share,
            "share_reached": self.share_reached if tenant is None else None,
            "target": str(self.target) if self.target else None,
            "policies": {name: self.policy_view(name) for name in self._policies}
            if tenant is None
            else {},
            "tenants": {name: bounds.view() for name, bounds in tenants.items()},
        }

    def _breaker(self, name: str, policy: Policy) -> Breaker | None:
        if self.target is None:
            return None
        grows = hasattr(policy, BUDGET)
        levels = tuple(level for level in Level if grows or level is not Level.LARGER_BUDGET)
        return Breaker(self.target.share, levels, self._clock, lambda one: self._tell(name, one))

    def _tell(self, name: str, transition: Transition) -> None:
        logger.warning(
            "guard: policy %s: from level %s to level %s: %s, %d scored answers with a mean of "
            "%.4f (target %s)",
            name, transition.before.name.lower(), transition.after.name.lower(), transition.reason,
            transition.answers, transition.mean, self.target,
        )  # fmt: skip
        if self._on_transition is not None:
            self._on_transition(name, transition)


@dataclass(frozen=True)
class _Guarded:
    """A policy: its breaker, and bounds of the answers at each level."""

    breaker: Breaker | None
    bounds: "dict[Level, _Bounds]" = field(default_factory=dict)

    @property
    def level(self) -> Level:
        """At which requests are answered that are not drawn."""
        return Level.AS_ASKED if self.breaker is None else self.breaker.level


class _Bounds:
    """Of all measures."""

    def __init__(self) -> None:
        self._sequences = {measure: ConfidenceSequence() for measure in MEASURES}

    def add(self, shares: Mapping[Measure, float]) -> None:
        for measure, sequence in self._sequences.items():
            sequence.add(shares[measure])

    def view(self) -> dict[str, Any]:
        """`answers`, and mean, low and high of each measure: flips as a share, KL in nats."""
        flips, kl = (self._sequences[measure] for measure in MEASURES)
        found: dict[str, Any] = {"answers": flips.count}
        for name, sequence, unit in (("flips", flips, 1.0), ("kl", kl, CLIP)):
            low, high = sequence.interval
            found[name] = {"mean": unit * sequence.mean, "low": unit * low, "high": unit * high}
        return found


def with_larger_budget(policy: Policy) -> Policy | None:
    """The policy with more recomputed tokens; None if it has no such budget, or recomputes all."""
    share = getattr(policy, BUDGET, 0.0)
    return with_options(policy, {BUDGET: min(1.0, LARGER * share)}) if 0 < share < 1 else None
