import math

import pytest
import torch

from kvgraft.guard.distances import NOT_A_NUMBER, along, along_logprobs, first_token, kl_divergence


def test_kl_divergence():
    # 1/4, 3/4 and 3/4, 1/4
    truth, ours = torch.tensor([0.0, math.log(3.0)]), torch.tensor([math.log(3.0), 0.0])
    expected = 0.25 * math.log(1 / 3) + 0.75 * math.log(3)
    assert float(kl_divergence(truth, ours)) == pytest.approx(expected)
    rows = kl_divergence(torch.stack((truth, truth + 5)), torch.stack((ours, truth)))
    assert rows.tolist() == pytest.approx([expected, 0.0])


def test_distances_of_the_first_token():
    truth = torch.tensor([0.0, math.log(3.0)])  # probabilities 1/4, 3/4
    ours = torch.tensor([math.log(3.0), 0.0])
    found = first_token(ours, truth)
    assert found["kl"] == pytest.approx(0.25 * math.log(1 / 3) + 0.75 * math.log(3))
    assert (found["top1"], found["top10"]) == (0.0, 1.0)
    same = first_token(truth + 5, truth)
    assert same["kl"] == pytest.approx(0, abs=1e-12)
    assert same["top1"] == 1.0
    generator = torch.Generator().manual_seed(0)
    a, b = torch.randn(2, 50, generator=generator)
    shared = set(a.argsort()[-10:].tolist()) & set(b.argsort()[-10:].tolist())
    assert first_token(a, b)["top10"] == len(shared) / 10
    expected = torch.nn.functional.kl_div(
        a.double().log_softmax(0), b.double().softmax(0), reduction="sum"
    )
    assert first_token(a, b)["kl"] == pytest.approx(float(expected))


LN = math.log
TRUTH = torch.tensor([[0.0, LN(3.0)], [LN(9.0), 0.0]])  # probabilities 1/4, 3/4; 9/10, 1/10


def test_distances_along_an_answer_are_means_over_its_places():
    ours = torch.stack([TRUTH[0], torch.zeros(2)])
    found = along(ours, TRUTH, [1, 1])
    assert found["answer_kl"] == pytest.approx((0.9 * LN(0.9 / 0.5) + 0.1 * LN(0.1 / 0.5)) / 2)
    assert found["loglik"] == pytest.approx((LN(0.5) - LN(0.1)) / 2), (
        "the answer is likelier than it was"
    )
    assert found["flips"] == 0.0, "of equal ones the first is the best"
    assert found["kl"] == pytest.approx(0, abs=1e-12), "of the first token"
    assert along(-TRUTH, TRUTH, [1, 0])["flips"] == 1.0
    same = along(TRUTH + 7, TRUTH, [1, 0])
    assert max(abs(same[name]) for name in ("answer_kl", "flips", "loglik")) == pytest.approx(
        0, abs=1e-6
    )


def test_what_a_server_tells_bounds_the_divergence():
    rng = torch.Generator().manual_seed(0)
    truth, ours = torch.randn(2, 6, 50, generator=rng) * 3
    answer = truth.argmax(-1).tolist()
    whole = along(ours, truth, answer)

    def told(logits: torch.Tensor, count: int) -> list[dict[int, float]]:
        places = []
        for place, token in zip(logits.log_softmax(-1), answer, strict=True):
            places.append(
                {int(t): float(place[t]) for t in [token, *place.topk(count).indices.tolist()]}
            )
        return places

    exact = along_logprobs(told(ours, 50), told(truth, 50), answer)
    assert exact == pytest.approx({name: whole[name] for name in exact}, abs=1e-5)
    few = along_logprobs(told(ours, 5), told(truth, 5), answer)
    assert 0 < few["answer_kl"] < whole["answer_kl"], "what is not told cannot differ"
    assert few["loglik"] == pytest.approx(whole["loglik"], abs=1e-5), (
        "the answer's own token is always told"
    )
    assert (few["flips"], few["top1"]) == (whole["flips"], whole["top1"])
    assert along_logprobs(told(ours, 5), told(ours, 5), answer)["answer_kl"] == 0


@pytest.mark.parametrize("wrong", [float("nan"), float("inf"), float("-inf")])
def test_what_is_no_number_is_far_away(wrong: float):
    good, broken = {0: LN(0.9), 1: LN(0.1)}, {0: wrong, 1: LN(0.1)}
    for ours, truth in ((good, broken), (broken, good)):
        found = along_logprobs([good, ours], [good, truth], [0, 0])
        assert (found["flips"], found["answer_kl"], found["loglik"]) == (
            0.5,
            NOT_A_NUMBER / 2,
            -NOT_A_NUMBER / 2,
        )


def test_all_tokens_that_are_not_told_by_both_count_as_one():
    truth, ours = [{0: LN(0.5), 1: LN(0.3)}], [{0: LN(0.25), 2: LN(0.4)}]
    found = along_logprobs(ours, truth, [0])
    assert found["answer_kl"] == pytest.approx(0.5 * LN(0.5 / 0.25) + 0.5 * LN(0.5 / 0.75))
    assert (found["flips"], found["top1"], found["kl"]) == (1.0, 0.0, found["answer_kl"])
