"""Flows judged: in stages, resumable, and by what they leave out; explained with what the planner
does."""

import re
from pathlib import Path

import msgspec
import pytest

from kvgraft import Engine
from kvgraft.decode import FlowError, ops
from kvgraft.decode.flow import trace
from kvgraft.flows import FLOWS, parse_flow
from kvgraft_lab.evaluate import flows as judging
from kvgraft_lab.evaluate.decoding import speedups
from kvgraft_lab.evaluate.explain import explain, render
from kvgraft_lab.evaluate.flows import FlowRow, FlowScore, FlowStage
from kvgraft_lab.evaluate.plots import write_pareto
from kvgraft_lab.testbed import MODEL_DIR

DOCS = Path(__file__).parents[2] / "docs"
FIRST = FlowStage("first", {"ruler": ("needles",)}, 1, 0.9)
SECOND = FlowStage("second", {"multihop": ("hop",)}, 1)


@pytest.fixture(scope="module")
def engine() -> Engine:
    return Engine(MODEL_DIR, dtype="float32")


def test_flows_that_fail_a_stage_do_not_go_on(engine: Engine, tmp_path: Path):
    flows = ["quest:topk_blocks=29", "streaming:topk_blocks=2", "h2o:topk_blocks=200"]
    rows = judging.evaluate(engine, flows, tmp_path, seed=3, length=2048, stages=(FIRST, SECOND))
    found = {one.flow: one for one in judging.summarise(rows)}
    assert found["dense"].score > 0.9
    assert found["quest:topk_blocks=29"].of_dense > 0.9
    assert found["h2o:topk_blocks=200"].stages == found["dense"].stages, (
        "which attends to everything"
    )
    assert found["streaming:topk_blocks=2"].stages.keys() == {"first"}, (
        "the needle is not among the last blocks"
    )
    assert found["streaming:topk_blocks=2"].score < 0.5
    assert [one.flow for one in judging.summarise(rows)][-1] == "streaming:topk_blocks=2"


def test_what_is_known_is_not_asked_again(
    engine: Engine, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    first = judging.evaluate(engine, ["quest"], tmp_path, seed=3, length=512, stages=(FIRST,))
    path = tmp_path / judging.ROWS
    whole = path.read_bytes()
    path.write_bytes(whole[:-7])  # killed while it wrote
    again = judging.evaluate(engine, ["quest"], tmp_path, seed=3, length=512, stages=(FIRST,))
    assert path.read_bytes() == whole
    assert sorted(map(str, again)) == sorted(map(str, first))
    monkeypatch.setattr(engine, "generate", None)
    assert (
        len(judging.evaluate(engine, [], tmp_path, seed=3, length=512, stages=(FIRST,)))
        == len(first) // 2
    )


def test_a_flow_that_is_wrong_stops_all_before_anything_is_asked(engine: Engine, tmp_path: Path):
    path = tmp_path / "wrong.py"
    path.write_text((DOCS / "my_flow.py").read_text().replace("dim=2), dim=3)", "dim=2), dim=2)"))
    with pytest.raises(FlowError, match=r"wrong.py:\d+: Reshape: .* cannot become \[1, B, 1\]"):
        judging.evaluate(engine, ["quest", str(path)], tmp_path / "out")
    assert not (tmp_path / "out").exists()


def row(flow: str, score: float, stage: str = "first") -> FlowRow:
    return FlowRow(stage, "t", 0, 0, flow, score, "")


def test_the_frontier_is_of_flows_that_no_other_beats_in_both(tmp_path: Path):
    rows = [
        row(flow, score)
        for flow, score in (("dense", 1), ("a", 0.9), ("b", 0.8), ("c", 0.7), ("d", 0.6))
    ]
    rows += [row(flow, 1.0, "second") for flow in ("dense", "a", "b", "c")]
    speed = {
        "dense": (10.0, 1.0),
        "a": (20.0, 2.0),
        "b": (15.0, 1.5),
        "c": (30.0, 3.0),
        "d": (90.0, 9.0),
    }
    found = judging.summarise(rows, speed)
    assert [one.flow for one in judging.frontier(found)] == ["c", "a", "dense"]
    assert found[-1].flow == "d", "it has not been asked everything"
    write_pareto(found, judging.frontier(found), tmp_path)
    assert (tmp_path / "flows.png").stat().st_size > 10_000
    assert msgspec.json.decode(judging.as_json(found), type=list[FlowScore]) == found


def test_speed_is_measured_and_the_engine_is_as_before(engine: Engine):
    found = speedups(engine, ["dense", "quest:topk_blocks=3"], 1024, rounds=2)
    assert found.keys() == {"dense", "quest:topk_blocks=3"}
    assert min(rate for rate, _ in found.values()) > 0
    engine.check()
    assert engine.memory.pool.num_used == 0


def test_an_explanation_counts_what_is_moved():
    program = trace(FLOWS["block_topk"](topk_blocks=13), 16, 64, 4)
    found = explain(program, 2 * 64, 16 * 1000)
    assert [(line.operator, line.group) for line in found.lines] == [
        ("Mean", None), ("Transpose", 0), ("GeMM", 1), ("Max", 1), ("topK", 2),
    ]  # fmt: skip
    assert found.lines[0].name == "%0 = centroids"
    assert found.cache_share == 64 / (2 * 16 * 64)
    assert found.dense == 1000 * 2 * 16 * 64 * 4
    assert found.attended == 16 * 2 * 16 * 64 * 4
    scores, query = 1000 * 4, 4 * 64 * 4
    assert found.fused == 2 * query + (query + 1000 * 64 * 4 + scores) + (scores + 13 * 4)
    assert found.unfused == found.fused + 2 * 4 * scores  # the product is written and read again


@pytest.mark.parametrize("name", [*FLOWS, str(DOCS / "my_flow.py")])
def test_every_flow_is_explained(name: str):
    program = trace(parse_flow(name), 16, 32, 4)
    found = explain(program, 2 * 32, 16 * 1000)
    assert len(found.lines) == len(program.cache) + len(program.indexer)
    for line, value in zip(found.lines, [*program.cache, *program.indexer], strict=True):
        shapes = [text for name, text in _options(line.inputs) if name == "shape_to"]
        assert [text[1:-1] for text in shapes] == (
            [line.shape[1:-1]] if value.made_by.name == "Reshape" else []
        )
    render(found)


def _options(inputs: tuple[str, ...]) -> list[tuple[str, str]]:
    return [(name, text) for name, given, text in (one.partition("=") for one in inputs) if given]


def test_the_page_names_every_operator_and_its_example_is_a_flow():
    page = (DOCS / "flows.md").read_text()
    table = page[page.index("## Operators") : page.index("There is no division")]
    named = set(
        re.findall(
            r"`(\w+)[`(]",
            "\n".join(line.split("|")[1] for line in table.splitlines() if "|" in line),
        )
    )
    assert named - {"x"} == set(ops.__all__) - {"TopK"}
    flow = parse_flow(f"{DOCS / 'my_flow.py'}:topk_blocks=5,fine=0.25")
    assert flow is not None
    assert trace(flow, 32, 64, 2).most == 8
