"""`kvgraft calibrate`, and what takes the profile that it writes."""

import dataclasses
import errno
import json
from collections.abc import Sequence
from io import StringIO
from pathlib import Path
from random import Random
from typing import Any

import msgspec
import pytest
from msgspec.structs import replace
from rich.console import Console

from kvgraft import Engine, Request
from kvgraft.cli import app, run
from kvgraft.policies import parse_policy
from kvgraft.policies.auto import auto_of
from kvgraft.policies.profile import (
    POLICY_FILE,
    Interval,
    MeasuredFlow,
    MeasuredMatching,
    MeasuredPolicy,
    PolicyProfile,
)
from kvgraft.vllm.settings import KVGraftSettings
from kvgraft_lab.evaluate.calibration import (
    ALIKE,
    CANDIDATES,
    CHECKING,
    CHOOSING,
    EDITED,
    WITH_FLOWS,
    CalibrationSettings,
    candidates,
    choose,
    choose_cheaper,
    choose_flow,
    choose_matching,
    explain,
    is_confirmed,
    render,
)
from kvgraft_lab.evaluate.hosts import Answer
from kvgraft_lab.evaluate.runner import ROWS, EvalRow, read_rows
from kvgraft_lab.evaluate.scoring import ORDER_NOISE
from kvgraft_lab.evaluate.summaries import summarise
from kvgraft_lab.evaluate.tasks.items import PATTERNS, Shape
from kvgraft_lab.evaluate.tasks.own import make_own
from kvgraft_lab.testbed import MODEL_DIR
from kvgraft_lab.traffic.texts import read_messages
from models import link_model

SMALL = (
    "--items",
    "2",
    "--length",
    "512",
    "--segments",
    "3",
    "--policies",
    "naive;transitive",
    "--budget",
    "1.0",
    "--flows",
    "quest:topk_blocks=1",
)


def measured(policy: str, flops: float, kl: float, alike: Interval | None = None) -> MeasuredPolicy:
    return MeasuredPolicy(policy, flops, (kl, kl, kl), (0.0, 0.0, 0.0), alike)


def profile_of(model: str, policy: str = "naive") -> PolicyProfile:
    one = measured(policy, 0.1, 0.05)
    return PolicyProfile(model, policy, one, (0.1, 0.1, 0.1), "texts", 2, 512, (one,))


def test_the_nearest_to_full_within_the_budget_is_chosen():
    tried = [
        measured("naive", 0.03, 0.2),
        measured("spread", 0.12, 0.02),
        measured("epic", 0.1, 0.1),
    ]
    assert choose(tried, 0.15).policy == "spread"
    assert choose(tried, 0.11).policy == "epic"
    with pytest.raises(
        ValueError, match=r"no policy is within a budget of 1\.0%: naive takes 3\.0%"
    ):
        choose(tried, 0.01)


def test_what_answers_wrong_about_documents_that_look_alike_is_not_chosen():
    wrong, worse, right = (-0.4, -0.6, -0.2), (-0.5, -0.7, -0.3), (-0.1, -0.3, 0.1)
    tried = [measured("naive", 0.03, 0.2, worse), measured("spread", 0.12, 0.02, wrong)]
    assert choose([*tried, measured("sparsex", 0.2, 0.1, right)], 0.25).policy == "sparsex"
    assert choose([*tried, measured("sparsex", 0.2, 0.1, right)], 0.15).policy == "spread"
    assert choose([*tried, measured("epic", 0.1, 0.01, worse)], 0.15).policy == "spread"


def test_the_choice_is_explained_in_words():
    worse = (-0.5, -0.7, -0.3)
    tried = (
        measured("naive", 0.03, 0.2, worse),
        measured("spread", 0.12, 0.02, (-0.1, -0.3, 0.1)),
        MeasuredPolicy("epic", 0.1, (0.03, 0.01, 0.05), (0.0, 0.0, 0.0)),
        measured("sparsex", 0.4, 0.01),
    )

    def explained(policy: str, *tried: MeasuredPolicy) -> list[str]:
        noise = (0.1, 0.1, 0.1)
        return explain(
            PolicyProfile("m", policy, tried[0], noise, "texts", 2, 512, tried, 0.25)
        ).splitlines()

    assert explained("spread", *tried) == [
        "Chosen: spread. It has the least KL of the 2 policies that are left.",
        "Over the budget of 25% of the FLOPs: sparsex.",
        "Fewer right answers about similar documents: naive.",
        "Next: epic, with 1.50 times the KL (the intervals overlap) at 10% of the FLOPs.",
    ]
    assert explained("naive", tried[0], measured("epic", 0.1, 0.1, worse)) == [
        "Chosen: naive. Every policy within the budget answers fewer questions right than full "
        "recomputation about similar documents; it loses the fewest."
    ]


def test_a_cheaper_policy_is_chosen_where_the_context_is_the_same():
    def tried(name: str, flops: float, kl: float, same: float | None) -> MeasuredPolicy:
        interval = None if same is None else (same / 2, 0.0, same)
        return replace(measured(name, flops, kl), same_context=interval)

    spread = tried("spread", 0.2, 0.02, 0.001)
    naive, epic = tried("naive", 0.1, 0.2, 0.009), tried("epic:start_tokens=8", 0.12, 0.1, 0.001)
    assert choose_cheaper([spread, naive, epic], spread) == naive
    assert (
        choose_cheaper([spread, replace(naive, same_context=(0.0, 0.0, 0.011)), epic], spread)
        == epic
    )
    for none in (
        tried("naive", 0.1, 0.2, None),
        tried("condense", 0.1, 0.2, 0.0),
        tried("sparsex", 0.2, 0.2, 0.0),
    ):
        assert choose_cheaper([spread, none], spread) is None
    condense = tried("condense", 0.2, 0.02, 0.0)
    assert choose_cheaper([condense, naive], condense) is None

    auto = auto_of("epic:start_tokens=8", "spread:hops=0,tail_tokens=9")
    noise, listed = (0.1, 0.1, 0.1), (tried("spread:hops=0,tail_tokens=9", 0.2, 0.02, 0.0), epic)
    profile = PolicyProfile("m", auto, spread, noise, "texts", 2, 512, listed, 0.25)
    assert profile.chosen == ("spread:hops=0,tail_tokens=9", "epic:start_tokens=8")
    assert explain(profile).splitlines()[-1] == (
        "Where only the instruction before known text changes: epic:start_tokens=8, with a KL of "
        "0.0005 there, and 12% of the FLOPs over all patterns."
    )
    assert [one.name for one in parse_policy(auto).choices] == ["spread", "epic"]
    own = replace(profile, tried=(*listed, tried(auto, 0.2, 0.02, 0.0)))
    assert own.chosen == (auto,)


@pytest.mark.parametrize(
    ("kl", "prompts", "confirmed"), [(0.009, 8, True), (0.011, 8, False), (0.0, 7, False)]
)
def test_a_cheaper_policy_is_confirmed_on_other_prompts(kl: float, prompts: int, confirmed: bool):
    answer = Answer("a", 1.0, 100, 0, 90, 0, 10, 0.1, None)
    rows = [
        EvalRow(
            f"own/512/{number}", 0, "own", "continuation", "tail", 512, False, policy, (), 1, 0, 0,
            dataclasses.replace(answer, distances=dict.fromkeys(("answer_kl", "flips"), value)),
        )
        for number in range(prompts)
        for policy, value in (("full", 0.0), ("naive", kl), (ORDER_NOISE, 0.1))
    ]  # fmt: skip
    assert is_confirmed(summarise(rows, "all"), "naive") == confirmed
    assert not is_confirmed(summarise(rows, "all"), "epic")


def test_a_calibration_writes_auto_and_an_engine_takes_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    """With limits that any policy is within."""
    for name, value in {"NEAR": 1e9, "NEAR_NOISE": 1e9, "LEAST_PROMPTS": 2}.items():
        monkeypatch.setattr(f"kvgraft_lab.evaluate.calibration.{name}", value)
    monkeypatch.setattr(
        "kvgraft_lab.evaluate.calibration.choose",
        lambda tried, _: max(tried, key=lambda o: o.flops),
    )
    model = link_model(tmp_path / "model")
    small = [
        "--items",
        "12",
        *SMALL[2:-2],
        "--flows",
        "dense",
        "--results",
        str(tmp_path / "results"),
    ]
    assert run(app, ["calibrate", str(model), *small]) == 0
    profile = PolicyProfile.load(model / POLICY_FILE)
    assert profile.policy == "auto:same_context=naive,new_context=transitive"
    assert profile.chosen == ("transitive", "naive")
    assert profile.expected.policy == profile.policy
    checked = read_rows(tmp_path / "results" / CHECKING)
    assert {row.policy for row in checked} == {
        "full",
        "transitive",
        "naive",
        profile.policy,
        ORDER_NOISE,
    }
    asked = {(row.cluster, row.number, row.policy): row.answer for row in checked}
    same = set()
    for row in checked:
        if row.policy == profile.policy:
            naive, other = (
                asked[row.cluster, row.number, one].flops for one in ("naive", "transitive")
            )
            same.add((row.pattern, naive == row.answer.flops != other))
    # the other order of three texts may be the same one
    allowed = {"instruction", "tail", "reordered"}
    assert {pattern for pattern, is_naive in same if is_naive} <= allowed
    assert any(is_naive for _, is_naive in same)
    assert str(Engine(model, num_pages=32).policy) == str(parse_policy(profile.policy))
    assert KVGraftSettings(profile=str(model / POLICY_FILE)).default_policy == profile.policy


def test_the_cheapest_matching_within_order_noise_is_chosen():
    noise = (0.02, 0.01, 0.03)

    def chosen(exact: tuple[float, float], similar: tuple[float, float]) -> str:
        return choose_matching(
            [
                MeasuredMatching("exact", exact[0], (exact[1],) * 3),
                MeasuredMatching("similar", similar[0], (similar[1],) * 3),
            ],
            noise,
        )

    assert chosen((0.5, 0.01), (0.2, 0.015)) == "similar"
    assert chosen((0.5, 0.01), (0.2, 0.05)) == "exact"
    assert chosen((0.2, 0.01), (0.3, 0.01)) == "exact"
    assert chosen((0.5, 0.05), (0.2, 0.05)) == "exact"


def test_the_fastest_flow_within_order_noise_is_recommended():
    noise = (0.02, 0.01, 0.03)

    def chosen(*flows: tuple[str, float, float]) -> str:
        return choose_flow(
            [MeasuredFlow(name, (kl,) * 3, speed) for name, kl, speed in flows], noise
        )

    assert chosen(("quest", 0.01, 1.5), ("block_topk", 0.015, 1.9)) == "block_topk"
    assert chosen(("quest", 0.01, 1.5), ("block_topk", 0.03, 1.9)) == "quest"
    assert chosen(("quest", 0.01, 1.05)) == "dense"
    assert chosen() == "dense"

    flow = MeasuredFlow("quest", (0.01,) * 3, 1.52)
    profile = msgspec.structs.replace(profile_of("m"), flow="quest", flows=(flow,))
    assert (
        "; --flow quest:from_tokens=512 decodes 1.5 times as fast after 512 tokens, at KL 0.01"
        in str(profile)
    )
    assert "Flow: quest:from_tokens=512. After 512 tokens, quest is 1.52 times as fast" in explain(
        profile
    )
    assert "--flow" not in str(msgspec.structs.replace(profile, flow="dense"))


def test_an_engine_and_a_server_match_as_the_profile_says(tmp_path: Path):
    model = link_model(tmp_path / "model")
    exact = profile_of(Engine(model, num_pages=32).config.identity)
    for profile in (exact, msgspec.structs.replace(exact, match="similar")):
        file = tmp_path / f"{profile.match}.json"
        profile.save(file)
        similar = profile.match == "similar"
        assert Engine(model, num_pages=32, profile=file).index.knows_similar == similar
        assert not Engine(model, num_pages=32, profile=file, match="exact").index.knows_similar
        settings = KVGraftSettings(profile=str(file))
        assert (settings.default_match, settings.similarity is not None) == (profile.match, similar)
        assert KVGraftSettings(profile=str(file), match="exact").similarity is None

    file = tmp_path / "policy.json"
    msgspec.structs.replace(exact, policy="similar").save(file)
    assert Engine(model, num_pages=32, profile=file).index.knows_similar
    assert KVGraftSettings(profile=str(file)).similarity is not None
    exact.save(file)
    assert Engine(model, num_pages=32, profile=file, policies=["similar"]).index.knows_similar


def test_redknot_is_tried_where_there_is_a_head_map(tmp_path: Path):
    model = link_model(tmp_path / "model")
    (model / "heads.json").unlink()
    assert candidates(Engine(model, num_pages=32)) == CANDIDATES
    assert candidates(Engine(MODEL_DIR, num_pages=32)) == (*CANDIDATES, "redknot")


@pytest.fixture(scope="module")
def calibrated(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A model directory beside whose weights a calibration has left its profile."""
    model = link_model(tmp_path_factory.mktemp("calibrated") / "model")
    assert run(app, ["calibrate", str(model), *SMALL, "--results", str(model / "results")]) == 0
    return model


def test_a_profile_says_what_chose_and_what_to_expect(calibrated: Path):
    profile = PolicyProfile.load(calibrated / POLICY_FILE)
    chose, checked = (read_rows(calibrated / "results" / name) for name in (CHOOSING, CHECKING))
    assert [one.policy for one in profile.tried] == ["naive", "transitive"]
    assert (
        profile.policy
        == min(profile.tried, key=lambda one: one.kl[0]).policy
        == profile.expected.policy
    )
    assert {row.policy for row in checked} == {"full", profile.policy, ORDER_NOISE}
    under = f"{profile.policy} with quest:topk_blocks=1"
    flowing = read_rows(calibrated / "results" / WITH_FLOWS)
    assert {row.policy for row in flowing} == {"full", under}
    [flow] = profile.flows
    kl = [row.answer.distances["answer_kl"] for row in flowing if row.policy == under]
    assert flow.kl[0] == pytest.approx(sum(kl) / len(kl), abs=1e-6)
    assert flow.flow == "quest:topk_blocks=1"
    assert flow.faster > 0
    assert profile.flow == choose_flow(profile.flows, profile.order_noise)
    assert {row.cluster for row in chose} == {"own/512/0", "own/512/1"}
    kl = [row.answer.distances["answer_kl"] for row in checked if row.policy == profile.policy]
    assert profile.expected.kl[0] == pytest.approx(sum(kl) / len(kl), abs=1e-6)
    assert profile.order_noise[0] > 0
    alike = read_rows(calibrated / "results" / ALIKE)
    assert {(row.suite, row.pattern, row.policy) for row in alike} == {
        ("sheets", "alone", policy) for policy in ("full", "naive", "transitive")
    }
    assert all(one.alike is not None for one in profile.tried)
    assert [one.match for one in profile.edited] == ["exact", "similar"]
    assert profile.match == choose_matching(profile.edited, profile.order_noise)
    for match, name in EDITED.items():
        rows = read_rows(calibrated / "results" / name)
        [one] = [one for one in profile.edited if one.match == match]
        kl = [row.answer.distances["answer_kl"] for row in rows if row.policy == profile.policy]
        assert one.kl[0] == pytest.approx(sum(kl) / len(kl), abs=1e-6)
    assert len(profile.far_mass) == 8
    assert all(0 <= mass <= 1 for row in profile.far_mass for mass in row)
    assert (calibrated / "results" / "calibration.png").stat().st_size > 5000


def test_prompts_that_check_hold_no_passage_of_those_that_choose():
    texts = {"one": " ".join(f"word{n}" for n in range(40_000))}
    settings = CalibrationSettings(texts, "one", ("naive",), segments=3)
    drawn = []
    for checks in (False, True):
        [suite] = settings.evaluation(("naive",), checks=checks).suites
        items = suite.items(0, 12, Shape(1536, 3))
        assert [item.pattern for item in items] == [*PATTERNS] * 4
        drawn.append(
            {
                text
                for item in items
                for text in item.phase_2[0].segments[1:-1]
                if text in texts["one"]
            }
        )
    assert not drawn[0] & drawn[1]


def test_a_calibration_that_was_stopped_goes_on(
    calibrated: Path, capsys: pytest.CaptureFixture[str], tmp_path: Path
):
    results = tmp_path / "results"
    for name in (CHOOSING, ALIKE, CHECKING, WITH_FLOWS, *EDITED.values()):
        (results / name).mkdir(parents=True)
        for file in (calibrated / "results" / name).iterdir():
            (results / name / file.name).write_bytes(file.read_bytes())
    rows = results / CHOOSING / ROWS
    rows.write_bytes(rows.read_bytes()[:-300])  # as a kill would leave it
    arguments = [
        "calibrate",
        str(calibrated),
        *SMALL,
        "--results",
        str(results),
        "-o",
        str(tmp_path / "p.json"),
    ]
    assert run(app, [*arguments, "--json"]) == 0
    told = json.loads(capsys.readouterr().out)
    before = msgspec.to_builtins(PolicyProfile.load(calibrated / POLICY_FILE))
    assert told["policy"] == before["policy"]
    assert [one["kl"][0] for one in told["tried"]] == pytest.approx(
        [one["kl"][0] for one in before["tried"]], abs=1e-5
    )
    assert run(app, [*arguments, "--seed", "1"]) == 2
    assert "other settings" in capsys.readouterr().err


def test_a_profile_that_cannot_be_written_is_printed_all_the_same(
    calibrated: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
):
    def refuse(*_: Any) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    before = PolicyProfile.load(calibrated / POLICY_FILE)
    monkeypatch.setattr(PolicyProfile, "save", refuse)
    assert (
        run(
            app,
            [
                "calibrate",
                str(calibrated),
                *SMALL,
                "--results",
                str(calibrated / "results"),
                "--json",
            ],
        )
        == 2
    )
    captured = capsys.readouterr()
    assert json.loads(captured.out)["policy"] == before.policy
    assert "No space left on device" in captured.err


def test_an_engine_takes_the_profile_beside_the_weights(calibrated: Path):
    profile = PolicyProfile.load(calibrated / POLICY_FILE)
    engine = Engine(calibrated, num_pages=32)
    assert str(engine.policy) == profile.policy or engine.policy.name == profile.policy
    own, named = engine.generate(
        ["the code of lamp is 42 .", Request("the code of lamp is 43 .", policy="naive")]
    )
    assert (own.report.profile, named.report.profile) == (profile.name, None)
    assert Engine(calibrated, num_pages=32, policy="naive").profile is None


def test_the_command_line_takes_it_too(calibrated: Path, capsys: pytest.CaptureFixture[str]):
    for options, named in (([], True), (["--policy", "naive"], False)):
        asked = [
            "generate",
            "question : code of lamp ?",
            "--model",
            str(calibrated),
            "--max-tokens",
            "1",
            "--json",
        ]
        assert run(app, [*asked, *options]) == 0
        assert (json.loads(capsys.readouterr().out)["report"]["profile"] is not None) == named


def test_a_profile_of_another_checkpoint_is_refused_or_ignored(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
):
    model = link_model(tmp_path / "model")
    profile_of("0" * 64).save(model / POLICY_FILE)
    engine = Engine(model, num_pages=8)
    assert (engine.profile, engine.policy.name) == (
        None,
        Engine(MODEL_DIR, num_pages=8).policy.name,
    )
    assert "is not used: the policy profile was made for model 000000000000" in caplog.text
    with pytest.raises(
        ValueError, match="the policy profile was made for model 000000000000, this one is"
    ):
        Engine(model, profile=model / POLICY_FILE)
    with pytest.raises(ValueError, match="either a policy or a profile, got naive and"):
        Engine(model, policy="naive", profile=model / POLICY_FILE)
    (tmp_path / "bad.json").write_text('{"model": "m"}')
    with pytest.raises(ValueError, match=r"bad.json is no policy profile: .*policy"):
        Engine(model, profile=tmp_path / "bad.json")


def test_a_profile_names_a_policy_that_exists():
    with pytest.raises(ValueError, match="unknown policy 'magic'"):
        profile_of("m", "magic")


def test_passages_are_cut_at_white_space_and_of_any_text():
    text = '{"key": "' + "x" * 2000 + '"} ' + " ".join(f"w{n}" for n in range(3000))
    suite = make_own({"a": text, "b": "too short"})
    [item, other] = suite.items(3, 1, Shape(512, 3))
    for one in (item, other):
        [ask] = one.phase_2
        assert all(
            segment in text for segment in ask.segments[1:-1] if not segment.startswith("Part")
        )
    with pytest.raises(
        ValueError, match=r"the texts have 0 passages of 522 characters, and 3 segments are wanted"
    ):
        make_own({"b": "too short"}).items(0, 1, Shape(512, 3))
    with pytest.raises(ValueError, match="texts must hold some text"):
        make_own({"a": " "})


def trace_of(tmp_path: Path, texts: Sequence[str]) -> Path:
    path = tmp_path / "trace.jsonl"
    bodies = [{"messages": [{"role": "user", "content": text}]} for text in texts]
    path.write_text("".join(json.dumps(body) + "\n" for body in bodies))
    return path


def test_texts_are_read_from_files_and_from_requests(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
):
    rng = Random(0)
    nouns = ["lamp", "bell", "door", "river"]
    texts = [
        " ".join(f"the code of {rng.choice(nouns)} is {rng.randrange(99)} ." for _ in range(150))
        for _ in "ab"
    ]
    trace = trace_of(tmp_path, [*texts, texts[0]])
    assert sorted(read_messages([trace]).values()) == sorted(texts), "each once"
    file = tmp_path / "text.txt"
    file.write_text("\n".join(texts))
    described = []
    for source in (["--texts", str(file)], ["--trace", str(trace)]):
        out, results = tmp_path / "p.json", tmp_path / source[0].strip("-")
        arguments = [
            "calibrate",
            *SMALL,
            "--policies",
            "naive",
            *source,
            "-o",
            str(out),
            "--results",
            str(results),
        ]
        assert run(app, arguments) == 0, capsys.readouterr().err
        described.append(PolicyProfile.load(out).texts)
    assert described == ["text.txt", "messages of trace.jsonl"]


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--texts", "nowhere.txt"], "nowhere.txt"),
        (["--texts", "a", "--trace", "b"], "give either --texts or --trace, not both"),
        (["--budget", "0"], "budget must be a share above 0, up to 1, got 0.0"),
        (["--items", "1"], "items must be an integer of at least 2, got 1"),
        (["--policies", "full;naive"], "policies must be others than full"),
        (["--policies", "magic"], "unknown policy 'magic'"),
        (["-o", "nowhere/p.json"], "there is no directory nowhere"),
    ],
)
def test_what_calibrate_refuses_is_one_line(
    arguments: list[str], message: str, capsys: pytest.CaptureFixture[str], tmp_path: Path
):
    assert (
        run(
            app,
            ["calibrate", "-o", str(tmp_path / "p.json"), "--results", str(tmp_path), *arguments],
        )
        == 2
    )
    error = capsys.readouterr().err
    assert message in error
    assert error.count("\n") == 1


def test_the_table_is_whole_on_a_terminal_of_80_columns():
    name = "spread:alike_share=1.0,recompute_share=0.4"
    tried = (
        MeasuredPolicy("full", 1.0, (0.0, 0.0, 0.0), (0.0, 0.0, 0.0)),
        MeasuredPolicy(
            name, 0.123, (0.0151, 0.0076, 0.0302), (0.031, 0.01, 0.05), (-0.31, -0.4, -0.2)
        ),
    )
    profile = PolicyProfile("m", name, tried[1], (0.05, 0.01, 0.1), "docs", 12, 1024, tried)
    console = Console(width=80, record=True, file=StringIO())
    console.print(render(profile))
    [row] = [
        line for line in console.export_text().splitlines() if "0.0151" in line and "│" in line
    ]
    assert [cell.strip() for cell in row.split("│")[2:-1]] == [
        "12.3%", "0.0151", "0.0076-0.0302", "0.30", "3.1%", "-31%", "-40% to -20%",
    ]  # fmt: skip
