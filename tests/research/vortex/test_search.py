"""A search for flows: every combination of motifs is a flow, nothing is tried twice, an interrupted
search goes on."""

import json
from itertools import product
from pathlib import Path

import msgspec
import pytest

from every_flow import CHANNELS
from kvgraft import Engine
from kvgraft.decode.flow import trace
from kvgraft.flows import parse_flow
from kvgraft_lab.evaluate.flows import FlowStage
from kvgraft_lab.testbed import MODEL_DIR
from research.vortex import diversity
from research.vortex import search as searching

RESULTS = Path(__file__).parents[3] / "docs" / "results" / "flows"
MASKED = f"{CHANNELS}:channel_quest"
STAGES = (FlowStage("only", {"ruler": ("needles",)}, 1),)


def test_every_combination_of_motifs_is_a_flow(tmp_path: Path):
    names = ("base", "heads", "gate", "neighbours", "time")
    rest = {"top": "approxTopK", "k": "5", "layers_skip": "0+1"}
    for number, chosen in enumerate(product(*(searching.CHOICES[name] for name in names))):
        genes = dict(zip(names, chosen, strict=True)) | rest
        path = tmp_path / f"c{number}.py"
        path.write_text(searching.write(genes, "c"))
        flow = parse_flow(f"{path}:topk_blocks={genes['k']},layers_skip={genes['layers_skip']}")
        assert flow is not None
        program = trace(flow, 16, 32, 2)
        assert (program.most, program.is_stateful) == (8, genes["time"] != "none")


@pytest.mark.soak
def test_an_interrupted_search_goes_on_as_if_it_had_not_been(tmp_path: Path):
    engine = Engine(MODEL_DIR, dtype="float32")
    whole, halves = tmp_path / "whole", tmp_path / "halves"

    def run(out: Path, candidates: int) -> list[str]:
        found = searching.search(
            engine, out, candidates=candidates, seed=4, length=512, stages=STAGES
        )
        return [f"{Path(one.flow).name} {one.score}" for one in found]

    assert len(run(halves, 14)) == 15
    answers = (halves / "flows.jsonl").read_text()
    assert run(halves, 20) == run(whole, 20)
    assert (halves / "flows.jsonl").read_text().startswith(answers), (
        "what was known was not asked again"
    )
    files = [
        sorted(path.read_text() for path in (out / "candidates").glob("*.py"))
        for out in (whole, halves)
    ]
    assert files[0] == files[1]
    assert len(set(files[0])) == 20
    told = (whole / "candidates.json").read_text()
    assert '"parents": []' in told
    assert told.count('"parents": []') < 20, "the later ones are children"


def test_distance_is_of_caches_operators_and_calls():
    quest, again = (trace(parse_flow("quest:topk_blocks=29"), 16, 64, 4) for _ in range(2))  # type: ignore[arg-type]
    assert searching.distance(quest, again) == 0.0
    near, far = (trace(parse_flow(name), 16, 64, 4) for name in (MASKED, "h2o"))  # type: ignore[arg-type]
    assert searching.distance(quest, near) == 0.0, "which masks nothing unless it is told to"
    assert searching.distance(quest, far) > 0.8
    assert searching.diversity(["quest", MASKED, "h2o"]) == pytest.approx(
        2 / 3 * searching.distance(quest, far)
    )
    assert searching.diversity(["quest"]) == 0.0
    with pytest.raises(ValueError, match="candidates and time must be positive, got 0"):
        searching.search(None, Path(), candidates=0)  # type: ignore[arg-type]


def test_the_diversity_of_what_models_proposed_is_written(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
):
    diversity.main(None, tmp_path, as_json=True)
    told = json.loads(capsys.readouterr().out)
    assert {name: own["pairs"] for name, own in told.items()} == {
        "opus": 190,
        "sonnet": 190,
        "gpt": 190,
    }
    assert told == json.loads((tmp_path / "diversity.json").read_text())
    written = json.loads((RESULTS / "diversity.json").read_text())
    assert written.pop("search")["pairs"] == 435, "of the thirty candidates of search.json"
    assert told == written, "run research.vortex.diversity again"
    assert (tmp_path / "diversity.png").stat().st_size > 1000
    with pytest.raises(ValueError, match="distances are of pairs, got 1 flows"):
        diversity.distances(["quest", "dense"])


def test_what_a_search_has_found_is_written_beside_it(tmp_path: Path):
    genes = {name: choices[0] for name, choices in searching.CHOICES.items()}
    tried = []
    for number, k in enumerate(("5", "9", "13")):
        path = tmp_path / f"c{number}.py"
        path.write_text(
            searching.write(genes | {"heads": list(searching.HEADS)[number]}, f"c{number}")
        )
        tried.append(searching.Candidate(number, genes, (), f"{path}:topk_blocks={k}"))
    (tmp_path / "candidates.json").write_bytes(msgspec.json.encode(tried))
    (tmp_path / "found.json").write_text("[]\n")
    diversity.main(tmp_path, tmp_path / "out", as_json=True)
    assert json.loads((tmp_path / "out" / "diversity.json").read_text())["search"]["pairs"] == 3
    assert (tmp_path / "out" / "search.json").read_text() == "[]\n"
