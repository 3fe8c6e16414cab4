"""The guard of a server's answers: it draws requests, says at which level each is answered, and bounds what is scored.

It knows no host: whoever scores an answer tells it the distances.
"""

import logging
import time
from collections import OrderedDict
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

from kvgraft.guard.bounds import ConfidenceSequence
from kvgraft.guard.breaker import Breaker, Level, Transition
from kvgraft.guard.sampling import Sampling
from kvgraft.guard.target import CLIP, Measure, Target, as_share
from kvgraft.prefill.context import Policy
from kvgraft.prefill.policies import with_options

logger = logging.getLogger("kvgraft")
ANSWER_TOKENS = 128  # of an answer, that are scored at most
MOST_POLICIES = 32  # that are guarded at a time: those that requests have named last
LARGER = 4.0  # times the share of tokens that a policy recomputes
MEASURES: tuple[Measure, ...] = ("flips", "kl")


@dataclass(frozen=True)
class Ticket:
    """A request on its way.

    Attributes:
        policy: that it asks for. `level`: at which it is answered.
        is_watched: whether its answer may be scored.
    """

    policy: str
    level: Level
    is_watched: bool


class Guard:
    """Of all requests of a server.

    Args:
        share: of the answers on approximate KV, that are scored.
        target: when the breaker of a policy trips; None: never.
        on_transition: called with the policy when its breaker changes the level.
    """

    def __init__(
        self,
        share: float,
        target: Target | None = None,
        *,
        seed: int | None = None,
        clock: Callable[[], float] = time.monotonic,
        on_transition: Callable[[str, Transition], None] | None = None,
    ) -> None:
        self._sampling, self.target, self._clock = Sampling(share, seed), target, clock
        self._on_transition = on_transition
        self._policies: OrderedDict[str, _Guarded] = OrderedDict()
        self._tenants: dict[str, _Bounds] = {}
        self.num_approximate = self.num_scored = 0

    def admit(self, policy: Policy, *, guarded: bool = True) -> Ticket:
        """A request arrives.

        Args:
            guarded: whether the breaker may answer it otherwise than it asks for.
        """
        known = self._find(policy)
        watched, level = self._sampling.draw(), Level.AS_ASKED
        if guarded and known.breaker is not None:
            level = known.breaker.level_of(drawn=watched)
        return Ticket(str(policy), level, watched)

    def chooses(self, ticket: Ticket, depth: int, grafted_share: float) -> bool:
        """Whether this answer, which has ended and rests on approximate KV, is to be scored: all trials are."""
        self.num_approximate += 1
        known = self._policies.get(ticket.policy)
        if not ticket.is_watched or known is None:
            return False
        tries = known.breaker is not None and ticket.level != known.breaker.level
        return tries or self._sampling.choose((ticket.policy, ticket.level, depth, int(4 * grafted_share)))

    def add(self, ticket: Ticket, tenant: str, distances: Mapping[str, float]) -> None:
        """An answer has been scored; `distances` as `distances.along`."""
        self.num_scored += 1
        shares = {measure: as_share(measure, distances) for measure in MEASURES}
        if (known := self._policies.get(ticket.policy)) is not None:
            known.bounds.setdefault(ticket.level, _Bounds()).add(shares)
            if known.breaker is not None and self.target is not None:
                known.breaker.add(ticket.level, shares[self.target.measure])
        self._tenants.setdefault(tenant, _Bounds()).add(shares)

    def level(self, policy: str) -> Level:
        """At which requests with this policy are answered that are not drawn."""
        known = self._policies.get(policy)
        return known.breaker.level if known is not None and known.breaker is not None else Level.AS_ASKED

    def policy_view(self, policy: str) -> dict[str, Any]:
        """What is known of a policy: its level, and the bounds of the answers at each level."""
        known = self._policies.get(policy)
        bounds = {} if known is None else {level.name.lower(): one.view() for level, one in known.bounds.items()}
        return {"level": self.level(policy).name.lower(), **bounds}

    def view(self, tenant: str | None = None) -> dict[str, Any]:
        """What is known, by policy and by tenant; of one tenant only what is known of its own answers."""
        tenants = self._tenants if tenant is None else {tenant: self._tenants.get(tenant, _Bounds())}
        return {
            "share": self._sampling.share,
            "share_reached": self.num_scored / self.num_approximate if self.num_approximate else 0.0,
            "target": str(self.target) if self.target else None,
            "policies": {name: self.policy_view(name) for name in self._policies} if tenant is None else {},
            "tenants": {name: bounds.view() for name, bounds in tenants.items()},
        }

    def _find(self, policy: Policy) -> "_Guarded":
        name = str(policy)
        if name not in self._policies:
            if len(self._policies) >= MOST_POLICIES:
                calm = (name for name, one in self._policies.items() if not (one.breaker and one.breaker.is_tripped))
                del self._policies[next(calm, next(iter(self._policies)))]
            self._policies[name] = self._make(policy)
        self._policies.move_to_end(name)
        return self._policies[name]

    def _make(self, policy: Policy) -> "_Guarded":
        if self.target is None:
            return _Guarded(None, {})
        grows = with_larger_budget(policy) is not None
        levels = tuple(level for level in Level if grows or level is not Level.LARGER_BUDGET)
        name = str(policy)
        return _Guarded(Breaker(self.target.share, levels, self._clock, lambda one: self._tell(name, one)), {})

    def _tell(self, policy: str, transition: Transition) -> None:
        logger.warning(
            "guard: policy %s: %s to %s: %s after %d scored answers, whose mean is %.4f (target %s)",
            policy, transition.before.name.lower(), transition.after.name.lower(), transition.reason,
            transition.answers, transition.mean, self.target,
        )  # fmt: skip
        if self._on_transition is not None:
            self._on_transition(policy, transition)


@dataclass(frozen=True)
class _Guarded:
    """A policy: its breaker, and bounds of the answers at each level."""

    breaker: Breaker | None
    bounds: "dict[Level, _Bounds]"


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
    share = getattr(policy, "recompute_share", 0.0)
    return with_options(policy, {"recompute_share": min(1.0, LARGER * share)}) if 0 < share < 1 else None
