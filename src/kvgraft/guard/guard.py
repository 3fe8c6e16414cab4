"""Guard of one server's answers: it draws requests, chooses their level and bounds the scores.

The guard does no scoring itself. Its caller scores an answer and passes the distances to
`Guard.add`.
"""

import logging
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

from kvgraft.core.matches import depth_name
from kvgraft.guard.bounds import ConfidenceSequence
from kvgraft.guard.breaker import Breaker, Level, Transition
from kvgraft.guard.sampling import Sampling
from kvgraft.guard.target import CLIP, Measure, Target, as_share
from kvgraft.policies import with_options
from kvgraft.prefill.context import Policy

logger = logging.getLogger("kvgraft")
# maximum number of tokens of an answer that are scored
ANSWER_TOKENS = 128
# the policies' option for the share of recomputed tokens, and the factor of a larger budget
BUDGET, LARGER = "recompute_share", 4.0
MEASURES: tuple[Measure, ...] = ("flips", "kl")


@dataclass(frozen=True)
class Ticket:
    """The guard's decision on one request.

    Attributes:
        name: guarded policy to which the request belongs.
        policy: the policy that answers it, unless its level is EXACT.
        level: the level at which it is answered.
        is_watched: whether its answer may be scored.
        is_trial: whether it tries the level below the breaker's present one.
    """

    name: str
    policy: Policy
    level: Level = Level.AS_ASKED
    is_watched: bool = False
    is_trial: bool = False


class Guard:
    """Guard of all requests of a server.

    The default policy, with its options, is guarded on its own. All other requests are guarded by
    method, with all options together, so clients cannot add more groups.

    Args:
        share: share of the answers on approximate KV that are scored, from 0 to 1.
        target: greatest mean before the circuit breaker of a policy trips; None: no breaker.
        default: the policy of requests that name none.
        seed: of the sampling.
        clock: returns seconds.
        on_transition: called with the guarded policy's name when its breaker changes the level.
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
        """Decide the level of a new request, and whether its answer may be scored.

        Args:
            guarded: whether the breaker may change how the request is answered.
            can_be_watched: whether its answer can be scored.
        """
        name = policy.name
        if (careful := policy.choices[0]) is not policy:
            name = f"{name} with {careful.name}"
        name = f"{name} (default)" if policy == self._default else name
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
        """Return whether to score an answer on approximate KV that has ended; True for every trial.

        Args:
            depth: depth of the approximation.
            grafted_share: share of the prompt that was grafted, from 0 to 1.
        """
        self.num_approximate += 1
        breaker = self._policies[ticket.name].breaker
        if ticket.is_trial and breaker is not None:
            breaker.tried()
        kind = ticket.name, ticket.level, depth_name(depth), int(4 * grafted_share)
        return ticket.is_watched and (ticket.is_trial or self._sampling.choose(kind))

    def add(self, ticket: Ticket, tenant: str, distances: Mapping[str, float]) -> None:
        """Add a scored answer to the bounds and to the breaker.

        The bounds are over equal shares of all answers. Trials are left out, because all of them
        are scored.

        Args:
            distances: those of `distances.along`.
        """
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
        """Share of the answers on approximate KV that have been scored."""
        return self.num_scored / self.num_approximate if self.num_approximate else 0.0

    def policy_view(self, name: str) -> dict[str, Any]:
        """Return the level of a guarded policy, and the bounds of the answers at each level."""
        known = self._policies[name]
        bounds = {level.name.lower(): one.view() for level, one in known.bounds.items()}
        return {"level": known.level.name.lower(), **bounds}

    def view(self, tenant: str | None = None) -> dict[str, Any]:
        """Return the results by policy and by tenant.

        Args:
            tenant: name of the tenant whose answers are shown, without policies; None: all.
        """
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
        """Return a circuit breaker with the levels that a policy supports; None without a
        target."""
        if self.target is None:
            return None
        grows = hasattr(policy.choices[0], BUDGET)
        levels = tuple(level for level in Level if grows or level is not Level.LARGER_BUDGET)
        return Breaker(self.target.share, levels, self._clock, lambda one: self._tell(name, one))

    def _tell(self, name: str, transition: Transition) -> None:
        """Log a transition and pass it to `on_transition`."""
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
    """A guarded policy: its circuit breaker, and bounds of the answers at each level."""

    breaker: Breaker | None
    bounds: "dict[Level, _Bounds]" = field(default_factory=dict)

    @property
    def level(self) -> Level:
        """Level of requests that are not trials."""
        return Level.AS_ASKED if self.breaker is None else self.breaker.level


class _Bounds:
    """Confidence sequences of all measures."""

    def __init__(self) -> None:
        self._sequences = {measure: ConfidenceSequence() for measure in MEASURES}

    def add(self, shares: Mapping[Measure, float]) -> None:
        """Add the measures of one answer, as shares in [0, 1]."""
        for measure, sequence in self._sequences.items():
            sequence.add(shares[measure])

    def view(self) -> dict[str, Any]:
        """Return the number of `answers`, and mean, low and high of each measure.

        Flips are shares, KL is in nats.
        """
        flips, kl = (self._sequences[measure] for measure in MEASURES)
        found: dict[str, Any] = {"answers": flips.count}
        for name, sequence, unit in (("flips", flips, 1.0), ("kl", kl, CLIP)):
            low, high = sequence.interval
            found[name] = {"mean": unit * sequence.mean, "low": unit * low, "high": unit * high}
        return found


def with_larger_budget(policy: Policy) -> Policy | None:
    """Return the policy with a larger share of recomputed tokens.

    If it chooses by prompt, this is the most careful of its choices, for all prompts.

    Returns:
        None if the policy has no such option, or recomputes nothing or everything.
    """
    policy = policy.choices[0]
    share = getattr(policy, BUDGET, 0.0)
    return with_options(policy, {BUDGET: min(1.0, LARGER * share)}) if 0 < share < 1 else None
