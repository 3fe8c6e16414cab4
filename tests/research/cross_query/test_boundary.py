"""The true KL of what is reused: nothing where all is computed, something where the context was
another."""

from collections.abc import Sequence

import numpy as np
import pytest
import torch

from kvgraft import Engine, Request, Result, SamplingParams
from kvgraft.core.prompt import Part, Segment
from kvgraft.core.segmentation import Similarity
from kvgraft.guard.distances import kl_divergence
from kvgraft.policies import Full, Naive, Similar, Transitive
from kvgraft.prefill.context import Policy
from kvgraft_lab.testbed import MODEL_DIR
from research.cross_query.boundary import EDGE, Seen, Truth, Watched
from research.cross_query.proposals import Proposer

PAGE = (
    "the old river slept . the paint of bell is grey . the quiet road waited near the hill . " * 4
)
QUESTION = "question : note of bell ? answer :"


@pytest.fixture(scope="module")
def engine() -> Engine:
    engine = Engine(MODEL_DIR, dtype="float32", residual_layers=(3,))
    send(engine, ["note grey means 77 . ", Segment(PAGE), QUESTION], Full(), remember=True)
    return engine


def send(
    engine: Engine, parts: Sequence[Part], policy: Policy, *, remember: bool = False, name: str = ""
) -> Result:
    sampling = SamplingParams(max_tokens=1)
    request = Request(
        parts, policy, sampling, name or "default", remember=remember, return_logits=True
    )
    return engine.generate([request])[0]


def watch(engine: Engine, policy: Policy) -> tuple[Seen, torch.Tensor]:
    """What is seen where another note stands before the page, and the truth at its boundary and its
    last token."""
    parts, seen = ["note grey means 51 . ", Segment(PAGE), QUESTION], Seen()
    send(engine, parts, Watched(policy, seen))
    where = seen.edges.clone()
    where[-1] = True
    truth = Truth(where)
    send(engine, parts, truth, name="elsewhere")
    return seen, truth.logits[0]


def test_nothing_diverges_where_all_is_computed(engine: Engine):
    seen, truth = watch(engine, Full())
    assert not seen.edges.any()
    assert seen.last is not None
    assert float(kl_divergence(truth[-1:], seen.last[None])) < 1e-6


def test_naive_reuse_in_another_context_diverges(engine: Engine):
    seen, truth = watch(engine, Naive())
    assert seen.last is not None
    assert float(kl_divergence(truth[-1:], seen.last[None])) > 0.1
    assert seen.final is None  # its boundary tokens are not computed


def test_boundary_tokens_are_seen_before_and_after_the_probe(engine: Engine):
    seen, truth = watch(engine, Similar(halo_tokens=2, max_kl=0.0))
    assert seen.plan is not None
    assert seen.final is not None
    assert seen.trusting is not None
    assert int(seen.edges.sum()) == 2 * EDGE == len(truth) - 1
    assert set(seen.probed) == {0}
    assert seen.rejected.equal(seen.plan.grafted)
    assert float(kl_divergence(truth[:-1], seen.final).max()) < 1e-5  # all rejected: computed
    assert float(kl_divergence(truth[:-1], seen.trusting).max()) > 1e-5


@pytest.mark.parametrize(
    "policy", [Similar(), Transitive(), Naive()], ids=lambda policy: policy.name
)
def test_watching_changes_nothing(engine: Engine, policy: Policy):
    parts = ["note grey means 51 . ", Segment(PAGE), QUESTION]
    plain, watched = send(engine, parts, policy), send(engine, parts, Watched(policy))
    assert torch.equal(plain.first_logits, watched.first_logits)  # type: ignore[arg-type]
    assert plain.report.counts == watched.report.counts
    assert plain.report.computed_share == watched.report.computed_share


def test_proposals_know_how_much_is_the_same():
    rng = np.random.default_rng(0)
    prompt = rng.integers(4, 400, 600).tolist()
    proposer = Proposer(Similarity(tau=0.5), ())
    assert proposer.propose(prompt) == []
    edited = [*rng.integers(4, 400, 33).tolist(), *prompt]
    edited[300] = 3
    found = proposer.propose(edited)
    assert found
    assert all(one.is_right and one.stop - one.start >= 64 for one in found)
    assert proposer.known == 600 - 1
    assert 0.5 * proposer.known < proposer.covered <= proposer.known
