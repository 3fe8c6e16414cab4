"""Evaluations end to end on the bundled model: rows, resume, tables, pictures."""

import csv
import json
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import httpx
import msgspec
import pytest

from kvgraft import Engine
from kvgraft.prefill import DEFAULT_POLICY
from kvgraft_lab.evaluate import plots, results, runner
from kvgraft_lab.evaluate.hosts import Answer, HttpHost, NativeHost, Orders, open_host
from kvgraft_lab.evaluate.prompts import Chat, as_text
from kvgraft_lab.evaluate.runner import EvalRow, EvalSettings
from kvgraft_lab.evaluate.scoring import ORDER_NOISE
from kvgraft_lab.evaluate.tasks import Ask, Item, Shape, TaskSuite, find_suites, load_suite
from kvgraft_lab.testbed import MODEL_DIR
from research.sparsex.curves import write_curves

POLICIES = ("full", "naive", "sparsex:recompute_share=1.0,boundary_layers=1")
SETTINGS = EvalSettings(
    find_suites("instruction"), POLICIES, (400,), 4, ("alone", "tail"), items=2, seed=5
)


@pytest.fixture(scope="module")
def host() -> NativeHost:
    return NativeHost(Engine(MODEL_DIR, dtype="float32"))


@pytest.fixture(scope="module")
def rows(host: NativeHost, tmp_path_factory: pytest.TempPathFactory) -> list[EvalRow]:
    return runner.run(SETTINGS, host, tmp_path_factory.mktemp("whole"))


class Dying:
    """A host that is killed after some answers."""

    def __init__(self, host: NativeHost, lives: int) -> None:
        self.host, self.lives = host, lives
        self.chat: Chat | None = host.chat

    def describe(self) -> dict[str, Any]:
        return self.host.describe()

    def answers(
        self, item: Item, policies: Sequence[str], orders: Orders = ()
    ) -> Iterator[tuple[int, str, Answer]]:
        for answer in self.host.answers(item, policies, orders):
            if not self.lives:
                raise KeyboardInterrupt
            self.lives -= 1
            yield answer


def meaning(row: EvalRow) -> tuple[object, ...]:
    """A row without its times."""
    return (
        row.cluster,
        row.number,
        row.policy,
        row.score,
        row.answer.text,
        row.answer.grafted,
        row.answer.computed,
    )


def test_every_prompt_has_a_row_for_each_policy(rows: list[EvalRow]):
    assert len(rows) == 2 * 4 * 3
    assert {(row.suite, row.task, row.length, row.crosses) for row in rows} == {
        ("instruction", "glossary", 400, True)
    }
    for row in rows:
        answer = row.answer
        assert answer.prefix + answer.grafted + answer.fresh == answer.prompt
        assert (answer.grafted > 200) == (row.policy != "full")
        assert (answer.distances["kl"] < 1e-6) == (row.policy != "naive")
        assert answer.fallback is None


def test_patterns_of_reuse_are_drawn_evenly_over_suites_and_lengths(tmp_path: Path):
    class Noting:
        """A host that notes the pattern of each item and answers nothing."""

        chat = None

        def __init__(self) -> None:
            self.patterns: Counter[str] = Counter()

        def describe(self) -> dict[str, Any]:
            return {}

        def answers(
            self, item: Item, policies: Sequence[str], orders: Orders = ()
        ) -> Iterator[tuple[int, str, Answer]]:
            self.patterns[item.pattern] += 1
            return iter(())

    host = Noting()
    runner.run(
        EvalSettings(find_suites("instruction,chat"), ("full",), (300, 400), items=2, seed=5),
        host,
        tmp_path,
    )
    assert sum(host.patterns.values()) == 2 * 2 * (1 + 3)
    assert set(host.patterns.values()) == {2, 3}


def test_a_killed_evaluation_goes_on(host: NativeHost, rows: list[EvalRow], tmp_path: Path):
    with pytest.raises(KeyboardInterrupt):
        runner.run(SETTINGS, Dying(host, 15), tmp_path)
    with (tmp_path / runner.ROWS).open("ab") as file:
        file.write(b'{"cluster": "instr')  # cut off in the middle of a line
    counted: list[tuple[int, int]] = []
    resumed = runner.run(
        SETTINGS, Dying(host, 12), tmp_path, lambda done, total: counted.append((done, total))
    )
    assert sorted(map(meaning, resumed)) == sorted(map(meaning, rows))
    assert counted == [(15, 24), (24, 24)]
    assert runner.read_rows(tmp_path) == resumed
    again = runner.run(SETTINGS, Dying(host, 0), tmp_path)  # nothing is left to be asked
    assert again == resumed


def test_scores_alone_are_those_of_an_evaluation_with_distances(
    host: NativeHost, rows: list[EvalRow], tmp_path: Path
):
    scoring = NativeHost(host.engine, distances=False)
    found = runner.run(replace(SETTINGS, order_noise=True), scoring, tmp_path / "scores")
    assert all(row.answer.distances == {} for row in found)
    assert {row.policy for row in found} == {*POLICIES, ORDER_NOISE}
    texts = {(row.cluster, row.number, row.policy): (row.score, row.answer.text) for row in rows}
    mine = {(row.cluster, row.number, row.policy): (row.score, row.answer.text) for row in found}
    assert {key: mine[key] for key in texts} == texts
    results.write_tables(found, tmp_path, "scores only")
    with pytest.raises(ValueError, match="distances"):
        runner.run(replace(SETTINGS, order_noise=True), host, tmp_path / "scores")


def test_another_evaluation_needs_another_directory(host: NativeHost, tmp_path: Path):
    runner.run(SETTINGS, host, tmp_path)
    other = EvalSettings(SETTINGS.suites, ("full", "epic"), (400,), 4, ("alone",), items=2, seed=5)
    with pytest.raises(
        ValueError,
        match=r"other settings \(patterns was .* policies was .*: choose another directory",
    ):
        runner.run(other, host, tmp_path)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"policies": ("naive",)}, "policies must begin with full"),
        ({"policies": ()}, "policies must begin with full"),
        ({"policies": ("full", "magic")}, "unknown policy 'magic'"),
        ({"policies": ("full", "naive", "naive")}, "policies must differ"),
        ({"policies": ("full",), "lengths": ()}, "lengths must name at least one"),
    ],
)
def test_settings_that_cannot_be(arguments: dict, message: str):
    with pytest.raises(ValueError, match=message):
        EvalSettings(find_suites("ruler"), **arguments)


def test_answers_are_decoded_under_the_flow_that_a_policy_names(host: NativeHost, tmp_path: Path):
    policies = ("full", "full with quest:topk_blocks=1", "full with quest:topk_blocks=29")
    rows = runner.run(replace(SETTINGS, policies=policies, items=1), host, tmp_path)
    far = {name: [row.answer.distances["answer_kl"] for row in rows if row.policy == name]
           for name in policies}  # fmt: skip
    assert max(far[policies[1]]) > 0.0 == max(far[policies[2]]) == max(far["full"])
    assert len({row.answer.flops for row in rows if row.number == 0}) == len(
        {row.cluster for row in rows}
    )


@pytest.mark.parametrize(
    ("name", "message"),
    [
        ("full with magic", "unknown flow 'magic'"),
        ("full with quest:topk_blocks=0", "topk_blocks must be an integer of at least 1"),
        ("magic with quest", "unknown policy 'magic'"),
    ],
)
def test_an_unknown_flow_is_refused_before_anything_is_asked(name: str, message: str):
    with pytest.raises(ValueError, match=message):
        replace(SETTINGS, policies=("full", name))


def test_hosts_that_are_not_there():
    options: dict[str, Any] = {"dtype": None, "device": "cpu", "kv_gib": 0.1}
    with (
        pytest.raises(ValueError, match="'full with quest': a server has one flow"),
        open_host("vllm", MODEL_DIR, policies=("full", "full with quest"), **options),
    ):
        pass
    with (
        pytest.raises(ValueError, match="unknown host 'moon': choose native, vllm"),
        open_host("moon", MODEL_DIR, **options),
    ):
        pass
    with (
        pytest.raises(ValueError, match="no OpenAI-compatible server answers"),
        open_host("http://127.0.0.1:9", MODEL_DIR, **options),
    ):
        pass


@pytest.mark.soak
@pytest.mark.vllm
def test_vllm_answers_as_the_native_engine_does(rows: list[EvalRow], tmp_path: Path):
    with open_host("vllm", MODEL_DIR, dtype="float32", device="cpu", kv_gib=1.0) as served:
        theirs = runner.run(replace(SETTINGS, order_noise=True), served, tmp_path)
        assert served.describe() == {"host": "http", "model": str(MODEL_DIR)}
        with pytest.raises(ValueError, match="refused a prompt"):
            list(
                served.answers(
                    Item("alone", (("x " * 5000,),), (Ask("task", ("x",), ("y",), 1),)),
                    ("full", "naive"),
                )
            )
    ours = {(row.cluster, row.number, row.policy): row for row in rows}
    far = {summary.policy: summary for summary in results.summarise(theirs, "all")}
    assert far[POLICIES[2]].answer_kl.value < 1e-4 < far["naive"].answer_kl.value
    assert far[POLICIES[2]].flips.value == 0 < far["naive"].flips.value
    assert far["naive"].kl_per_noise.value == pytest.approx(
        far["naive"].answer_kl.value / far[ORDER_NOISE].answer_kl.value
    )
    for row in theirs:
        if row.policy == ORDER_NOISE:
            continue
        mine = ours[row.cluster, row.number, row.policy].answer
        assert row.answer.prompt == mine.prompt
        assert row.answer.fallback is None or row.policy == "full"
        if row.policy == "naive":
            assert row.answer.grafted > 200
        else:
            assert row.answer.text.split() == mine.text.split()


def made_up(policy: str, number: int, score: float, **answer: Any) -> EvalRow:
    told = {
        "prompt": 100,
        "prefix": 0,
        "grafted": 80,
        "recomputed": 8,
        "fresh": 20,
        "computed": 0.4,
    }
    return EvalRow(
        f"c{number // 2}", number, "suite", f"task{number % 2}", "alone", 400, number % 2 == 0,
        policy, ("42",), score,
        score, score, Answer("42", **{"ttft_s": 0.1} | told | answer),
    )  # fmt: skip


HOTPOT = {
    "question": "code of grey ?",
    "answer": "42",
    "context": [
        [f"doc {number} :", [f"the code of {word} is {number} . " * 9]]
        for number, word in enumerate(("grey", "red"))
    ],
}


@pytest.fixture
def file(tmp_path: Path) -> TaskSuite:
    (tmp_path / "dev.json").write_text(json.dumps([HOTPOT]))
    return load_suite(tmp_path / "dev.json")


def test_real_text_is_asked_in_the_chat_template_of_the_model(
    host: NativeHost, file: TaskSuite, tmp_path: Path
):
    settings = EvalSettings(
        (file, *SETTINGS.suites), ("full", "naive"), (300,), 4, ("alone",), items=1, seed=5
    )
    tokens = {}
    for chat in (None, True, False):
        out = tmp_path / str(chat)
        rows = runner.run(replace(settings, chat=chat), host, out)
        assert json.loads((out / runner.CONFIG).read_text())["chat"] == (chat is not False)
        assert json.loads((out / runner.CONFIG).read_text())["texts"] == {
            "dev": "HotpotQA: dev.json"
        }
        tokens[chat] = {row.suite: row.answer.prompt for row in rows}
        assert all(
            row.answer.grafted > 50 for row in rows if (row.suite, row.policy) == ("dev", "naive")
        )
    assert tokens[None] == tokens[True]
    assert tokens[True]["dev"] == tokens[False]["dev"] + 6  # <system> : <user> : <assistant> :
    assert tokens[True]["instruction"] == tokens[False]["instruction"], (
        "what is generated has its own words for that"
    )
    with pytest.raises(ValueError, match=r"other settings \(chat was False, is True\)"):
        runner.run(settings, host, tmp_path / "False")


def test_a_chat_template_that_is_wanted_must_be_there(
    host: NativeHost, file: TaskSuite, tmp_path: Path
):
    with pytest.raises(
        ValueError, match=r"real text \(docs, files\), and these are generated: instruction"
    ):
        replace(SETTINGS, chat=False)
    silent = Dying(host, 0)
    silent.chat = None
    with pytest.raises(ValueError, match="the model has no chat template to write prompts in"):
        runner.run(replace(SETTINGS, suites=(file,), chat=True), silent, tmp_path / "out")


def test_over_http_chat_templates_are_those_of_the_tokenizer_on_this_machine(
    monkeypatch: pytest.MonkeyPatch, file: TaskSuite
):
    sent = []

    def respond(request: httpx.Request) -> httpx.Response:
        if request.url.path == "/v1/models":
            return httpx.Response(200, json={"data": [{"id": "a model"}]})
        sent.append(json.loads(request.content)["prompt"])
        report = {
            f"{kind}_tokens": 1 for kind in ("prompt", "prefix", "grafted", "recomputed", "fresh")
        }
        told = {"tokens": ["token_id:5"], "top_logprobs": [{"token_id:5": -0.1}]}
        last = {
            "choices": [{"text": "42", "logprobs": told}],
            "kv_transfer_params": {"kvgraft": {**report, "computed_share": 1, "reason": None}},
        }
        return httpx.Response(200, text=f"data: {json.dumps(last)}\n\n")

    monkeypatch.setattr(
        httpx, "Client", partial(httpx.Client, transport=httpx.MockTransport(respond))
    )
    [item] = file.items(1, 1, Shape(400, 2, ("instruction",)))
    known = HttpHost("http://localhost", MODEL_DIR)
    assert len(list(known.answers(replace(item, chat=True), ("full", "naive")))) == 2
    *_, question = item.phase_2[0].segments
    assert [text.startswith("<system> :") and text.endswith("<assistant> :") for text in sent] == [
        True
    ] * 4
    assert sent[-1] == as_text(item.phase_2[0].segments, known.chat)
    assert question in sent[-1]
    assert len(list(HttpHost("http://localhost").answers(item, ("full",)))) == 1
    assert sent[-1] == as_text(item.phase_2[0].segments)
    with pytest.raises(
        ValueError,
        match="serves a model, whose chat template is not on this machine: give the directory",
    ):
        list(HttpHost("http://localhost").answers(replace(item, chat=True), ("full",)))


@pytest.mark.parametrize(
    ("reason", "fallback"),
    [("no_known_text", None), ("off", None), (None, None), ("non_finite", "non_finite")],
)
def test_misses_of_a_server_are_no_fallbacks(
    monkeypatch: pytest.MonkeyPatch, reason: str | None, fallback: str | None
):
    counted = [f"{kind}_tokens" for kind in ("prompt", "prefix", "grafted", "recomputed", "fresh")]
    report = {**dict.fromkeys([*counted, "computed_share"], 1), "reason": reason}
    told = {"tokens": ["token_id:5"], "top_logprobs": [{"token_id:5": -0.1, "token_id:6": -3.0}]}
    last = {
        "choices": [{"text": "42", "logprobs": told}],
        "kv_transfer_params": {"kvgraft": report},
    }

    def respond(request: httpx.Request) -> httpx.Response:
        if request.url.path == "/v1/models":
            return httpx.Response(200, json={"data": [{"id": "a model"}]})
        return httpx.Response(200, text=f"data: {json.dumps(last)}\n\ndata: [DONE]\n\n")

    monkeypatch.setattr(
        httpx, "Client", partial(httpx.Client, transport=httpx.MockTransport(respond))
    )
    [item, *_] = find_suites("instruction")[0].items(1, 1, Shape(400, 4))
    [*answers] = HttpHost("http://localhost").answers(item, ("full", "naive"))
    assert {answer.fallback for *_, answer in answers} == {fallback}
    assert {answer.text for *_, answer in answers} == {"42"}


def test_another_server_answers_full(monkeypatch: pytest.MonkeyPatch):
    counted = [f"{kind}_tokens" for kind in ("prompt", "prefix", "grafted", "recomputed", "fresh")]
    report = {**dict.fromkeys([*counted, "computed_share"], 1), "reason": None}
    asked: list[tuple[str, str, str]] = []

    def respond(request: httpx.Request) -> httpx.Response:
        host = request.url.host
        if request.url.path == "/v1/models":
            return httpx.Response(200, json={"data": [{"id": f"model of {host}"}]})
        body = json.loads(request.content)
        options = body["kv_transfer_params"]["kvgraft"]
        asked.append((host, body["model"], options.get("policy", options.get("reuse"))))
        token, text = (5, "42") if host == "dense" or "forced_output" in options else (6, "43")
        logprobs = {
            "tokens": [f"token_id:{token}"],
            "top_logprobs": [{"token_id:5": -0.1, "token_id:6": -3.0}],
        }
        last = {
            "choices": [{"text": text, "logprobs": logprobs}],
            "kv_transfer_params": {"kvgraft": report},
        }
        return httpx.Response(200, text=f"data: {json.dumps(last)}\n\ndata: [DONE]\n\n")

    monkeypatch.setattr(
        httpx, "Client", partial(httpx.Client, transport=httpx.MockTransport(respond))
    )
    [item, *_] = find_suites("instruction")[0].items(1, 1, Shape(400, 4))
    with open_host("http://sparse", MODEL_DIR, dtype=None, full="http://dense") as host:
        orders = [[ask] for ask in item.phase_2]
        [*answers] = host.answers(item, ("full", "naive"), orders)
    assert {(policy, answer.text) for _, policy, answer in answers} == {
        ("full", "42"),
        ("naive", "43"),
        (ORDER_NOISE, "42"),
    }
    assert set(asked) == {
        ("dense", "model of dense", "exact"),
        ("sparse", "model of sparse", "exact"),  # texts that are read first
        ("sparse", "model of sparse", "naive"),
    }
    with (
        pytest.raises(
            ValueError, match="goes with the URL of a server as --host, not with 'native'"
        ),
        open_host("native", MODEL_DIR, dtype=None, full="http://dense"),
    ):
        pass


def test_policies_are_paired_prompt_by_prompt(tmp_path: Path):
    scores = {
        "full": [1.0] * 12,
        DEFAULT_POLICY: [1.0, 0.0] * 6,
        "naive": [0.0, 0.0] * 6,
        "epic": [0.0, 1.0] * 6,
    }
    rows = [
        made_up(policy, n, score)
        for policy, values in scores.items()
        for n, score in enumerate(values)
    ]
    header, *lines = results.paired_table(rows, DEFAULT_POLICY)
    assert header[1] == f"score less that of {DEFAULT_POLICY}"
    p = 3 * 2 / 2**6  # of six texts, times three tests
    assert lines == [
        ["full", "+0.500", "+0.500 to +0.500", f"{p:.3f}"], ["naive", "-0.500", "-0.500 to -0.500",
        f"{p:.3f}"],
        ["epic", "+0.000", "+0.000 to +0.000", "1.000"],
    ]  # fmt: skip
    with pytest.raises(
        ValueError, match=f"no answers under 'magic': there are those of full, {DEFAULT_POLICY}"
    ):
        results.paired_table(rows, "magic")
    results.write_tables(rows, tmp_path, "a command")
    assert (
        f"## Beside {DEFAULT_POLICY}, the default, prompt by prompt"
        in (tmp_path / "tables.md").read_text()
    )


def test_summaries():
    full = [
        made_up("full", n, 1.0, grafted=0, recomputed=0, fresh=100, computed=1.0, ttft_s=0.4)
        for n in range(4)
    ]
    ours = [made_up("naive", n, float(n > 0), distances={"kl": float(n)}) for n in range(4)]
    [of_full, of_ours] = results.summarise([*full, *ours], "all")
    assert (of_full.score, of_full.of_full, of_full.work, of_full.recomputed, of_full.speedup) == (
        1,
        1,
        0,
        0,
        1,
    )
    assert (of_ours.score, of_ours.of_full, of_ours.kl, of_ours.prompts) == (0.75, 0.75, 1.5, 4)
    assert of_ours.work == pytest.approx((0.4 * 100 - 20) / 80)
    assert (of_ours.recomputed, of_ours.reused) == (0.1, 0.8)
    assert of_ours.speedup == pytest.approx(4)
    assert of_ours.low <= 0.75 <= of_ours.high
    by_task = results.summarise([*full, *ours], "task")
    assert [(s.group, s.policy) for s in by_task] == [
        ("suite/task0", "full"), ("suite/task0", "naive"), ("suite/task1", "full"), ("suite/task1",
        "naive"),
    ]  # fmt: skip
    across = results.summarise([*full, *ours], "across segments")
    assert [s.group for s in across if s.policy == "naive"] == [
        "facts in several segments", "facts in one segment",
    ]  # fmt: skip


def test_tables_and_pictures_are_written(rows: list[EvalRow], tmp_path: Path):
    results.write_tables(rows, tmp_path, "kvgraft eval ...")
    text = (tmp_path / "tables.md").read_text()
    assert "`kvgraft eval ...`" in text
    assert "| sparsex:recompute_share=1.0,boundary_layers=1 |" in text
    with (tmp_path / "by_pattern.csv").open() as file:
        lines = list(csv.DictReader(file))
    assert {line["group"] for line in lines} == {"alone", "tail"}
    assert [float(line["work"]) == 0 for line in lines if line["policy"] == "naive"] == [True, True]
    pictures = plots.write_plots(rows, tmp_path)
    assert [path.stem for path in pictures] == [
        "quality_ttft",
        "quality_work",
        "quality_kl",
        "quality_kl_pattern",
        "quality_pattern",
    ]
    pictures.append(write_curves(rows, tmp_path, {"reuse": POLICIES[1:], "one": POLICIES[1:2]}))
    less = [
        msgspec.structs.replace(row, answer=replace(row.answer, kv_bytes=2**20))
        for row in rows
        if row.policy != "full"
    ]
    full = [row for row in rows if row.policy == "full"]
    assert "quality_memory.png" in [
        path.name for path in plots.write_plots([*full, *less], tmp_path)
    ]
    for path in pictures:
        assert path.read_bytes().startswith(b"\x89PNG")


def test_what_a_host_does_not_tell_is_a_dash(rows: list[EvalRow]):
    silent = [
        msgspec.structs.replace(row, answer=replace(row.answer, flops=0, distances={}))
        for row in rows
    ]
    [header, *lines] = results.overview_table(results.summarise(silent, "all"))
    for line in lines:
        shown = dict(zip(header, line, strict=True))
        assert (shown["FLOPs"], shown["KL"], shown["top-1"]) == ("-", "-", "-")


def test_the_fewer_are_columns(rows: list[EvalRow]):
    by_pattern = results.scores_table(results.summarise(rows, "pattern"))
    assert by_pattern[0] == ["", "alone", "tail"]
    assert [line[0] for line in by_pattern[1:]] == list(POLICIES)
    [header, *lines] = results.scores_table(
        results.summarise([r for r in rows if r.policy != "naive"], "pattern")
    )
    assert header == ["", "full", POLICIES[2]]
    assert [line[0] for line in lines] == ["alone", "tail"]


def test_rows_are_lines_of_json(host: NativeHost, tmp_path: Path):
    settings = EvalSettings(SETTINGS.suites, ("full",), (300,), 4, ("alone",), items=1, seed=5)
    runner.run(settings, host, tmp_path)
    [line, *_] = (tmp_path / runner.ROWS).read_text().splitlines()
    assert json.loads(line)["answer"]["prompt"] > 200
    config = json.loads((tmp_path / runner.CONFIG).read_text())
    assert (config["seed"], config["host"], config["policies"]) == (5, "native", ["full"])
    # a directory is never continued with another model
    assert config["model"] == host.engine.config.identity
