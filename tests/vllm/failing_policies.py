"""Policies that fail on one tensor-parallel rank, each at another place; workers import this
module."""

import os
import signal
from collections.abc import Callable
from dataclasses import dataclass
from typing import ClassVar

from torch import Tensor

from kvgraft.core.plan import Plan
from kvgraft.policies import POLICIES
from kvgraft.prefill.context import Hidden, Policy, PrefillContext
from kvgraft.prefill.spreading import Spreading


def fail() -> None:
    """A bug."""
    raise RuntimeError("a policy's own bug")


def die() -> None:
    """No exception: the process is gone."""
    os.kill(os.getpid(), signal.SIGKILL)


def on_rank_one(what: Callable[[], None]) -> None:
    """Only there."""
    from vllm.distributed import get_tensor_model_parallel_rank

    if get_tensor_model_parallel_rank() == 1:
        what()


class FailsInside(Spreading):
    """What is spread inside a layer, when its KV is stored and before it attends."""

    def __init__(self, plan: Plan) -> None:
        super().__init__(plan, plan.segments >= 0, plan.grafted, distance=1.0)

    def interpolate(self, changes: Tensor) -> Tensor:
        on_rank_one(fail)
        return super().interpolate(changes)


@dataclass(frozen=True)
class FailsOnRank(Policy):
    """Recomputes everything, but for what happens at `where`.

    Args:
        where: first (before any collective), between (two layers), inside (a layer, before its
            all-reduce), last (after the last one), everywhere (as first, on all ranks), dies (as
            between, without an exception).
    """

    name: ClassVar[str] = "fails"
    where: str = "first"

    def recover(self, ctx: PrefillContext) -> Hidden:
        if self.where == "everywhere":
            fail()
        self._at("first", fail)
        ctx.graft(range(ctx.num_layers))
        hidden = ctx.layer(0, ctx.embed(ctx.plan.active))
        self._at("between", fail)
        self._at("dies", die)
        hidden = ctx.layer(1, hidden, FailsInside(ctx.plan) if self.where == "inside" else None)
        hidden = ctx.run(range(2, ctx.num_layers), hidden)
        self._at("last", fail)
        return hidden

    def _at(self, where: str, what: Callable[[], None]) -> None:
        if self.where == where:
            on_rank_one(what)


POLICIES[FailsOnRank.name] = FailsOnRank
