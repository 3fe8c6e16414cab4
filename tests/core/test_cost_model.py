"""What is grafted: only what saves more than what becomes approximate is worth."""

from pathlib import Path

import numpy as np
import pytest

from kvgraft import Engine, Request, SamplingParams
from kvgraft.core.cost_model import WORK, CostEstimate, CostModel, Work
from kvgraft.core.costs import TOKENS, Costs
from kvgraft.core.matches import Match
from kvgraft.prefill import DEFAULT_POLICY
from models import VOCAB_SIZE

FLAT = Costs(pass_s=0.0, token_s=1.0, pair_s=0.0, copy_s=0.0)


def match(start: int, length: int) -> Match:
    return Match(start, length, 0, np.zeros(-(-length // 16), np.int32), 0, 0)


def seconds(costs: Costs, where: np.ndarray) -> float:
    """Of computing some tokens of a prompt, bool [T]."""
    return float(costs.token_s * where.sum() + costs.pair_s * (np.flatnonzero(where) + 1).sum())


@pytest.mark.parametrize(
    "costs", [FLAT, TOKENS, Costs(3e-3, 2e-4, 5e-8, 1e-6)], ids=["flat", "tokens", "measured"]
)
@pytest.mark.parametrize("approximate", [False, True])
def test_it_is_the_best_of_all_places_to_begin(costs: Costs, approximate: bool):
    rng = np.random.default_rng(0)
    taken = []
    for _ in range(200):
        cuts = np.sort(
            rng.choice(np.arange(64, 2000), 2 * int(rng.integers(1, 6)), replace=False)
        ).tolist()
        matches = [match(a, b - a) for a, b in zip(cuts[::2], cuts[1::2], strict=True)]
        model = CostModel(costs, exactness_weight=0.1)
        chosen, found = model.choose(matches, 2000, 48, "p", approximate=approximate)
        active = np.arange(2000) >= 48
        gains = [0.0]
        for number in range(len(matches)):
            grafted = np.zeros(2000, bool)
            for one in matches[number:]:
                grafted[one.start : one.start + one.length] = True
            behind = active & ~grafted & (np.arange(2000) >= matches[number].start)
            saved = (
                (1 - WORK) * seconds(costs, grafted) - costs.pass_s - costs.copy_s * grafted.sum()
            )
            gains.append(saved - (0.0 if approximate else 0.1) * seconds(costs, behind))
        best = int(np.argmax(gains))
        assert [one.start for one in chosen] == [
            one.start for one in (matches[best - 1 :] if best else [])
        ]
        assert found.full_s == pytest.approx(costs.pass_s + seconds(costs, active))
        assert (found.reuse_s < found.full_s) == bool(best)
        taken.append(len(matches) - len(chosen))
    assert 0 in taken
    assert approximate or max(taken) > 0


def test_a_graft_in_front_of_much_new_text_must_save_more():
    small, large = match(100, 50), match(3000, 900)
    model = CostModel(FLAT)
    assert model.choose([small, large], 4000, 0, "p")[0] == [large]
    assert model.choose([small, large], 4000, 0, "p", approximate=True)[0] == [small, large]
    assert model.choose([small], 160, 0, "p")[0] == [small]
    assert CostModel(FLAT, exactness_weight=0.0).choose([small], 4000, 0, "p")[0] == [small]
    assert model.choose([small], 4000, 0, "p") == (
        [],
        CostEstimate(4000.0, 4000.0, "too_little_known"),
    )
    assert model.choose([], 4000, 1000, "p") == ([], CostEstimate(3000.0, 3000.0))


@pytest.mark.parametrize(
    ("length", "new_behind", "reason"),
    [
        (38, 0, "too_short"),
        (39, 0, None),
        (38, 500, "too_short"),
        (39, 500, "too_little_known"),
        (100, 500, None),
    ],
)
def test_by_tokens_39_are_the_least_that_is_grafted(
    length: int, new_behind: int, reason: str | None
):
    chosen, estimate = CostModel().choose([match(20, length)], 20 + length + new_behind, 0, "p")
    assert (bool(chosen), estimate.reason) == (reason is None, reason)


def test_what_a_policy_computes_is_learned():
    model = CostModel(FLAT)
    grafts = [match(0, 100)]
    for _ in range(30):
        model.learn("all", 105.0, 100, 10)
    assert model.choose(grafts, 110, 0, "all")[0] == [], "it computes all that is grafted"
    assert model.choose(grafts, 110, 0, "another")[0] == grafts
    for _ in range(100):
        model.choose(grafts, 110, 0, "all")
    assert model.choose(grafts, 110, 0, "all")[0] == grafts, "it is tried again"
    for _ in range(100):
        model.learn("all", 5.0, 100, 10)
    assert model.work["all"].shares[0] == pytest.approx(0.05, abs=0.01)
    model.learn("nothing", 5.0, 0, 10)
    assert "nothing" not in model.work


def test_what_is_computed_twice_of_new_text_is_not_laid_on_the_grafts():
    """Seen with two layers: a graft among much new text took longer than without, and no other was
    tried again."""
    model, rng = CostModel(FLAT), np.random.default_rng(0)
    model.learn("p", 0.1 * 691 + 0.5 * 1976, 691, 1976)
    assert model.choose([match(0, 1900)], 2000, 0, "p")[0], (
        "mostly grafts: one recovery does not rule them out"
    )
    for num_grafted in rng.integers(100, 1900, 30).tolist():
        model.learn(
            "p", 0.1 * num_grafted + 0.5 * (2000 - num_grafted), num_grafted, 2000 - num_grafted
        )
    assert model.work["p"].shares == pytest.approx((0.1, 0.5), abs=0.05)
    assert model.choose([match(0, 400)], 2000, 0, "p")[0] == []
    assert model.choose([match(0, 1500)], 2000, 0, "p")[0]


@pytest.mark.parametrize("recoveries", [[(50, 10)], [(0, 900), (500, 20)]])
def test_no_share_of_work_is_below_nothing(recoveries: list[tuple[float, int]]):
    work = Work()
    for num_recovered, num_grafted in recoveries:
        work.learn(num_recovered, num_grafted, 1000 - num_grafted)
    assert min(work.shares) >= 0


def test_costs_are_kept_in_a_file(tmp_path: Path):
    path, costs = tmp_path / "costs.json", Costs(1.0, 2.0, 3.0, 4.0)
    costs.save(path)
    assert Costs.load(path) == costs
    for text, message in (
        ("{", "holds no costs"),
        ("[]", "must hold pass_s, token_s, pair_s, copy_s"),
        ('{"pass_s": 1}', "must hold pass_s"),
        (
            '{"pass_s": 1, "token_s": -1, "pair_s": 0, "copy_s": 0}',
            "token_s must be a number of seconds",
        ),
        (
            '{"pass_s": 1, "token_s": "x", "pair_s": 0, "copy_s": 0}',
            "token_s must be a number of seconds",
        ),
    ):
        path.write_text(text)
        with pytest.raises(ValueError, match=message):
            Costs.load(path)
    with pytest.raises(FileNotFoundError):
        Costs.load(tmp_path / "none")


def words(count: int, seed: int) -> list[int]:
    return np.random.default_rng(seed).integers(3, VOCAB_SIZE, count).tolist()


def ask(engine: Engine, prompt: list[int], policy: str = DEFAULT_POLICY) -> object:
    return engine.generate(
        [Request(prompt, policy, SamplingParams(max_tokens=1, ignore_eos=True))]
    )[0].report


def test_the_engine_grafts_what_is_worth_it(model_dirs: dict[str, Path], tmp_path: Path):
    FLAT.save(tmp_path / "costs.json")
    engine = Engine(
        model_dirs["qwen3"], dtype="float32", costs=tmp_path / "costs.json", exactness_weight=0.5
    )
    document = words(160, 1)
    ask(engine, document, "full")
    report = ask(engine, words(20, 2) + document + words(20, 3))
    assert report.grafted_tokens >= 144
    assert report.estimated_full_s == 200
    assert 40 <= report.estimated_reuse_s < 100
    assert 0 < engine.memory.admission.cost_model.work[str(engine.policy)].shares[0] < 0.5
    for unknown, reason in ((4, "too_short"), (100, "no_known_text")):
        report = ask(engine, document[:144] + words(unknown, 6))
        assert (report.prefix_tokens, report.outcome, report.reason) == (144, "prefix_only", reason)
    report = ask(engine, words(4, 7))
    assert (report.outcome, report.reason) == ("miss", "too_short")
    report = ask(engine, words(20, 4) + document[:64] + words(400, 5))
    assert (report.grafted_tokens, report.outcome, report.reason) == (0, "miss", "too_little_known")
    assert report.estimated_full_s == report.estimated_reuse_s == 484


def test_costs_can_be_measured(model_dirs: dict[str, Path]):
    engine = Engine(model_dirs["qwen3"], dtype="float32", costs="measured")
    costs = engine.memory.admission.cost_model.costs
    assert costs.copy_s > 0
    assert costs.pass_s + costs.token_s + costs.pair_s > 0
    document = words(160, 1)
    truth = Engine(model_dirs["qwen3"], dtype="float32")
    sampling = SamplingParams(max_tokens=9, ignore_eos=True)
    expected, found = (
        one.generate([Request(document, "full", sampling)])[0] for one in (truth, engine)
    )
    assert found.token_ids == expected.token_ids, "nothing is left of the measurement"
    engine.check()
