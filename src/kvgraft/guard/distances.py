"""How far two answers' next-token distributions are apart: of logits, or of what a server tells of
them."""

from collections.abc import Mapping, Sequence

import numpy as np
import torch
from torch import Tensor

NOT_A_NUMBER = 20.0  # nats that a place counts as where there is none
# of float32 log-probabilities: less than that is not known of the tokens that nobody names
ROUNDING = 1e-7


def kl_divergence(truth: Tensor, ours: Tensor) -> Tensor:
    """KL(truth || ours) in nats of each row of logits [..., V], float64 [...]."""
    p, q = truth.double().log_softmax(-1), ours.double().log_softmax(-1)
    return (p.exp() * (p - q)).sum(-1).clamp(min=0)


def first_token(ours: Tensor, truth: Tensor) -> dict[str, float]:
    """Distances of two logit vectors [V]: KL(truth || ours) in nats, agreement of the best and of
    the ten best tokens (shares), cosine."""
    ten = min(10, truth.numel())
    common = set(truth.topk(ten).indices.tolist()) & set(ours.topk(ten).indices.tolist())
    return {
        "kl": float(kl_divergence(truth, ours)),
        "top1": float(int(truth.argmax()) == int(ours.argmax())),
        "top10": len(common) / ten,
        "cosine": float(
            torch.nn.functional.cosine_similarity(truth.double(), ours.double(), dim=0)
        ),
    }


def along(ours: Tensor, truth: Tensor, answer: Sequence[int]) -> dict[str, float]:
    """Distances of logits [n, V] at the n places of full's answer: those of its first token, and,
    as means over the places, `answer_kl` (KL(truth || ours) in nats), `flips` (whether the best
    token is another), and `loglik` (how much more likely, in nats, the answer's token is than under
    the truth)."""
    chosen = torch.tensor(answer)[:, None]
    likely = [logits.double().log_softmax(-1).gather(1, chosen).mean() for logits in (ours, truth)]
    return first_token(ours[0], truth[0]) | {
        "answer_kl": float(kl_divergence(truth, ours).mean()),
        "flips": float((ours.argmax(-1) != truth.argmax(-1)).double().mean()),
        "loglik": float(likely[0] - likely[1]),
    }


def along_logprobs(
    ours: Sequence[Mapping[int, float]], truth: Sequence[Mapping[int, float]], answer: Sequence[int]
) -> dict[str, float]:
    """As `along`, of what a server says of each place: log-probabilities of the answer's token and
    of those that are most likely. KL is over the tokens that both name; all others count as one, so
    it is a lower bound."""
    pairs = [*zip(ours, truth, strict=True)]
    known = [bool(np.isfinite([*here.values(), *there.values()]).all()) for here, there in pairs]
    kl = [
        _logprobs_kl(*pair) if right else NOT_A_NUMBER
        for pair, right in zip(pairs, known, strict=True)
    ]
    flips = [
        not right or _best(pair[0]) != _best(pair[1])
        for pair, right in zip(pairs, known, strict=True)
    ]
    loglik = [
        here[token] - there[token] if right else -NOT_A_NUMBER
        for (here, there), token, right in zip(pairs, answer, known, strict=True)
    ]
    means = {
        name: float(np.mean(of))
        for name, of in (("answer_kl", kl), ("flips", flips), ("loglik", loglik))
    }
    return {"kl": kl[0], "top1": float(not flips[0])} | means


def _logprobs_kl(ours: Mapping[int, float], truth: Mapping[int, float]) -> float:
    """KL(truth || ours) of the tokens that both name and of one more that stands for all others."""
    both = sorted(ours.keys() & truth.keys())
    p, q = (np.exp([place[token] for token in both]) for place in (truth, ours))
    p, q = (np.append(named, max(1.0 - named.sum(), ROUNDING)) for named in (p, q))
    return float(max(0.0, (p * np.log(p / q)).sum()))


def _best(place: Mapping[int, float]) -> int:
    return max(place, key=lambda token: (place[token], -token))
