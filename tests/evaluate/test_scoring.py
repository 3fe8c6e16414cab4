"""Measures along full's own answer, and order noise, on the bundled model: what must be 0 is 0,
what differs is not."""

import json
from collections.abc import Sequence
from math import isnan
from pathlib import Path

import msgspec
import pytest

from kvgraft import Engine
from kvgraft.cli import app, run
from kvgraft.core.prompt import mark
from kvgraft_lab.evaluate import hosts, plots, results, runner, summaries
from kvgraft_lab.evaluate.compare import Case, run_compare
from kvgraft_lab.evaluate.hosts import NativeHost
from kvgraft_lab.evaluate.runner import EvalRow, EvalSettings
from kvgraft_lab.evaluate.scoring import ORDER_NOISE, ScoredPlaces, distances, other_orders
from kvgraft_lab.evaluate.summaries import Summary
from kvgraft_lab.evaluate.tasks import Ask, Item, Shape, find_suites
from kvgraft_lab.testbed import MODEL_DIR

TOLERANCE = 1e-6  # nats, of float32 logits that are computed in another order
EVERYTHING = "sparsex:recompute_share=1.0,boundary_layers=1"
POLICIES = ("full", "naive", EVERYTHING)
SETTINGS = EvalSettings(
    find_suites("instruction"), POLICIES, (400,), 4, ("alone",), items=2, seed=5, order_noise=True
)


@pytest.fixture(scope="module")
def host() -> NativeHost:
    return NativeHost(Engine(MODEL_DIR, dtype="float32"))


@pytest.fixture(scope="module")
def rows(host: NativeHost, tmp_path_factory: pytest.TempPathFactory) -> list[EvalRow]:
    return runner.run(SETTINGS, host, tmp_path_factory.mktemp("noise"))


@pytest.fixture(scope="module")
def by_policy(rows: list[EvalRow]) -> dict[str, Summary]:
    return {summary.policy: summary for summary in summaries.summarise(rows, "all")}


def test_who_computes_everything_is_nowhere_else_than_full(
    rows: list[EvalRow], by_policy: dict[str, Summary]
):
    assert len(rows) == 2 * 4 * 4
    for row in rows:
        far = row.answer.distances
        if row.policy in ("full", EVERYTHING):
            assert far["answer_kl"] < TOLERANCE
            assert abs(far["loglik"]) < 1e-4
            assert (far["flips"], row.answer.kl_tokens) == (0.0, 0)
        if row.policy == "full":
            assert far["answer_kl"] == far["loglik"] == 0.0
    assert by_policy["naive"].answer_kl.value > 0.1
    assert by_policy["naive"].flips.value > 0
    assert by_policy["naive"].loglik.value < 0, "full's own answer is less likely"
    assert by_policy["full"].same_answer == by_policy[EVERYTHING].same_answer == 1
    others = [row.answer.text for row in rows if row.policy == "naive"]
    fulls = [row.answer.text for row in rows if row.policy == "full"]
    equal = sum(ours == full for ours, full in zip(others, fulls, strict=True))
    assert by_policy["naive"].same_answer == equal / len(fulls) < 1


def test_order_noise_is_the_unit(rows: list[EvalRow], by_policy: dict[str, Summary]):
    noise = by_policy[ORDER_NOISE]
    assert noise.answer_kl.value > 0
    assert (noise.kl_per_noise.value, noise.kl_per_noise.low, noise.kl_per_noise.high) == (
        1.0,
        1.0,
        1.0,
    )
    naive = by_policy["naive"]
    assert naive.kl_per_noise.value == pytest.approx(naive.answer_kl.value / noise.answer_kl.value)
    assert naive.kl_per_noise.low <= naive.kl_per_noise.value <= naive.kl_per_noise.high
    assert by_policy["full"].kl_per_noise.value == 0
    assert noise.work == 0, "nothing is grafted"
    without = [row for row in rows if row.policy != ORDER_NOISE]
    assert all(isnan(summary.kl_per_noise.value) for summary in summaries.summarise(without, "all"))


def test_tables_and_pictures_have_them(rows: list[EvalRow], tmp_path: Path):
    results.write_tables(rows, tmp_path, "kvgraft eval ...")
    [header, *lines] = results.overview_table(summaries.summarise(rows, "all"))
    shown = {line[0]: dict(zip(header, line, strict=True)) for line in lines}
    assert (shown["full"]["same"], shown["naive"]["same"][-1]) == ("100%", "%")
    assert (shown["full"]["answer KL"], shown["full"]["flips"], shown[ORDER_NOISE]["/ noise"]) == (
        "0.0000",
        "0.0%",
        "1.00",
    )
    assert float(shown["naive"]["/ noise"]) > float(shown[EVERYTHING]["/ noise"])
    text = (tmp_path / "by_all.csv").read_text()
    assert "answer_kl,answer_kl_low,answer_kl_high," in text
    assert "kl_per_noise,kl_per_noise_low,kl_per_noise_high" in text
    assert f"\n{ORDER_NOISE}," not in text
    assert f"all,{ORDER_NOISE}," in text
    assert (tmp_path / "quality_kl.png") in plots.write_plots(rows, tmp_path)
    header, *lines = results.paired_table(rows, "naive", "answer KL")
    assert header[1] == "answer KL less that of naive"
    assert {line[0]: line[1][0] for line in lines} == {
        "full": "-",
        EVERYTHING: "-",
        ORDER_NOISE: "-",
    }


def test_what_one_document_has_no_order(host: NativeHost, tmp_path: Path):
    document, question = (
        "code of lamp is 42 . the old river slept .",
        "question : code of lamp ? answer :",
    )
    item = Item(
        "alone",
        (("note grey means 51 .", document),),
        (Ask("needle", (document, question), ("42",), 2),),
    )
    settings = EvalSettings(SETTINGS.suites, ("full", "naive"), order_noise=True)
    [orders] = runner._orders(settings, "c", item)
    assert orders == []
    answers = {
        policy: answer for _, policy, answer in host.answers(item, settings.policies, [orders])
    }
    noise = answers[ORDER_NOISE]
    assert (noise.distances["answer_kl"], noise.distances["flips"], noise.distances["loglik"]) == (
        0,
        0,
        0,
    )
    assert noise.text == answers["full"].text


def test_orders_move_known_segments_only_and_are_drawn_by_the_seed():
    parts = ("instruction", "a", "note", "b", "c", "question")
    found = other_orders(parts, [1, 3, 4], "seed")
    assert len({parts, *found}) == 3
    for order in found:
        assert (order[0], order[2], order[5]) == ("instruction", "note", "question")
        assert sorted(order) == sorted(parts)
    assert other_orders(parts, [1, 3, 4], "seed") == found
    assert other_orders(parts, [1, 3], "seed") == [
        ("instruction", "b", "note", "a", "c", "question")
    ]
    assert other_orders(parts, [1], "seed") == other_orders(("a", "a", "q"), [0, 1], "seed") == []
    drawn = {tuple(other_orders(range(9), range(8), f"seed {n}")) for n in range(5)}
    assert len(drawn) == 5


def test_an_answer_is_given_where_ours_is_another_and_only_there():
    asked: list[tuple[int, ...]] = []

    def give(answer: tuple[int, ...]) -> ScoredPlaces[list[dict[int, float]]]:
        asked.append(answer)
        return ScoredPlaces(answer if len(asked) == 1 else (9,), [{9: -1.0}] * len(answer))

    def measure(
        ours: Sequence[object], truth: Sequence[object], answer: Sequence[int]
    ) -> dict[str, float]:
        return {
            "places": float(len(ours)),
            "theirs": float(len(truth)),
            "answer": float(len(answer)),
        }

    places = [{3: -0.1}] * 40
    truth = ScoredPlaces(tuple(range(40)), places)
    found = distances(ScoredPlaces((*range(32), 77), places[:33]), truth, give, measure)
    assert found == {"places": 32.0, "theirs": 32.0, "answer": 32.0}
    assert asked == []
    distances(ScoredPlaces((5,), places[:1]), truth, give, measure)
    assert asked == [tuple(range(32))]
    with pytest.raises(ValueError, match=r"the answer \[0, 1, .*\] was given, and \[9\] came back"):
        distances(ScoredPlaces((5,), places[:1]), truth, give, measure)


def test_forced_answers_have_the_same_distances_together_and_alone(
    host: NativeHost, monkeypatch: pytest.MonkeyPatch
):
    [item, *_] = find_suites("instruction")[0].items(7, 1, Shape(400, 4, ("alone",)))
    policies = ("full", "naive", "epic:start_tokens=1", "epic:start_tokens=2", "epic", "sparsex")
    found = []
    for number in (1, 4):
        monkeypatch.setattr(hosts, "FORCED_TOGETHER", number)
        answers = host.answers(item, policies)
        found += [{(n, policy): answer.distances for n, policy, answer in answers}]
    alone, together = found
    assert sum(far["answer_kl"] > 0.01 for far in alone.values()) > 4
    assert together.keys() == alone.keys()
    for key, far in alone.items():
        assert together[key]["answer_kl"] == pytest.approx(far["answer_kl"], abs=1e-5)


def test_order_noise_is_another_evaluation(host: NativeHost, rows: list[EvalRow], tmp_path: Path):
    first = EvalSettings(SETTINGS.suites, ("full",), (300,), 4, ("alone",), items=1, seed=5)
    runner.run(first, host, tmp_path)
    assert ORDER_NOISE not in json.loads((tmp_path / runner.CONFIG).read_text())
    noisy = EvalSettings(
        SETTINGS.suites, ("full",), (300,), 4, ("alone",), items=1, seed=5, order_noise=True
    )
    with pytest.raises(ValueError, match="order noise was None, is True"):
        runner.run(noisy, host, tmp_path)


@pytest.fixture(scope="module")
def case() -> Case:
    """What documents mean is said in front of them, and they have been read behind something
    else."""
    [item, *_] = find_suites("instruction")[0].items(5, 1, Shape(400, 4, ("alone",)))
    instruction, *documents, question = item.phase_2[0].segments
    prompt = " ".join([instruction, *map(mark, documents), question])
    return Case(
        prompt, tuple(map(" ".join, item.phase_1)), ("naive", EVERYTHING), max_tokens=3, repeats=1
    )


def test_compare_has_the_same_measures(host: NativeHost, case: Case):
    host.engine.clear_cache()
    found = {
        outcome.policy: outcome for outcome in run_compare(host.engine, case, order_noise=True)
    }
    assert list(found) == ["full", "naive", EVERYTHING, ORDER_NOISE]
    assert found["full"].answer_kl == found["full"].flips == found["full"].kl_per_noise == 0
    assert found[EVERYTHING].answer_kl < TOLERANCE < found["naive"].answer_kl
    assert found[ORDER_NOISE].kl_per_noise == 1.0
    assert found["naive"].kl_per_noise == found["naive"].answer_kl / found[ORDER_NOISE].answer_kl
    plain = run_compare(host.engine, case)
    assert [outcome.kl_per_noise for outcome in plain] == [None] * 3
    assert msgspec.json.decode(msgspec.json.encode(plain[1]))["answer_kl"] == plain[1].answer_kl
    with pytest.raises(ValueError, match="needs a prompt with two different segments"):
        run_compare(host.engine, Case("no segments here", policies=("naive",)), order_noise=True)


def test_the_commands_ask_for_it(case: Case, tmp_path: Path, capsys: pytest.CaptureFixture[str]):
    (tmp_path / "case.json").write_bytes(msgspec.json.encode(case))
    assert run(app, ["compare", str(tmp_path / "case.json"), "--order-noise"]) == 0
    printed = capsys.readouterr().out
    assert "/ noise" in printed
    assert ORDER_NOISE in printed
