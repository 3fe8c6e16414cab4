"""Distances between the next-token distributions of two answers, from logits or from
log-probabilities."""

from collections.abc import Mapping, Sequence

import numpy as np
import torch
from torch import Tensor

# nats; value of a position with a log-probability that is not finite
NOT_A_NUMBER = 20.0
# minimum probability of the tokens without a log-probability; float32 knows no smaller remainder
ROUNDING = 1e-7


def kl_divergence(truth: Tensor, ours: Tensor) -> Tensor:
    """Return KL(truth || ours) in nats, float64 [...], for logits [..., V]."""
    p, q = truth.double().log_softmax(-1), ours.double().log_softmax(-1)
    return (p.exp() * (p - q)).sum(-1).clamp(min=0)


def first_token(ours: Tensor, truth: Tensor) -> dict[str, float]:
    """Return distances of two logit vectors [V].

    Returns:
        `kl`: KL(truth || ours) in nats; `top1`: 1 if the best token is the same; `top10`: share of
        common tokens among the ten best; `cosine`: cosine similarity of the logits.
    """
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
    """Return distances of logits [n, V] at the n tokens of an answer.

    Args:
        ours: logits on approximate KV.
        truth: logits on exact KV.
        answer: token ids of the answer, the same on both.

    Returns:
        Distances of the first token (`first_token`), and means over the answer. `answer_kl`:
        KL(truth || ours) in nats. `flips`: share of the tokens whose best token differs. `loglik`:
        log-likelihood of the answer's token minus that under `truth`, in nats.
    """
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
    """Return the distances of `along` from log-probabilities of a few tokens per position.

    A server gives the log-probabilities of the answer's token and of the most likely tokens. The KL
    is over the tokens that both sides name. All others count as one token, so the KL is a lower
    bound. `top10` and `cosine` are not known.
    """
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
    """Return KL(truth || ours) over the tokens that both name and one token for all others."""
    both = sorted(ours.keys() & truth.keys())
    p, q = (np.exp([place[token] for token in both]) for place in (truth, ours))
    p, q = (np.append(named, max(1.0 - named.sum(), ROUNDING)) for named in (p, q))
    return float(max(0.0, (p * np.log(p / q)).sum()))


def _best(place: Mapping[int, float]) -> int:
    """Return the most likely token; of equally likely ones the one with the least id."""
    return max(place, key=lambda token: (place[token], -token))
