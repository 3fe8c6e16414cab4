"""What a choice of tokens can reach at best."""

from dataclasses import replace
from pathlib import Path

import pytest
import torch

from kvgraft import Engine, Request, SamplingParams
from kvgraft_lab.evaluate.prompts import as_parts
from kvgraft_lab.evaluate.scoring import native_distances, send
from kvgraft_lab.evaluate.tasks import Shape, find_suites
from kvgraft_lab.testbed import MODEL_DIR
from research.oracle import Attribution, Told, main, measure

[SUITE] = find_suites("multihop")


@pytest.fixture(scope="module")
def engine() -> Engine:
    return Engine(MODEL_DIR, dtype="float32", continuation=False)


@pytest.mark.parametrize("pattern", ["alone", "reordered", "between"])
def test_what_cached_kv_costs_is_attributed_to_tokens_and_layers(engine: Engine, pattern: str):
    engine.clear_cache()
    [item, *_] = SUITE.items(5, 1, Shape(512, 4, (pattern,)))
    for read in item.phase_1:
        send(engine, Request(as_parts(read), "full", SamplingParams(max_tokens=1, ignore_eos=True)))
    ask = item.phase_2[0]
    reused = {segment for segments in item.phase_1 for segment in segments}
    sampling = SamplingParams(max_tokens=6, ignore_eos=True)
    asked = Request(
        as_parts(ask.segments, reused), "full", sampling, remember=False, return_logits=True
    )
    truth = send(engine, asked)
    naive = replace(asked, policy="naive")
    distance = native_distances(engine, naive, send(engine, naive), truth)["answer_kl"]

    prompt = engine.token_ids(asked)
    nothing, everything = Told(torch.zeros(len(prompt), dtype=torch.bool)), Told()
    for told in (nothing, everything):
        send(engine, replace(asked, policy=told))
    assert truth.logits is not None
    attribution = Attribution(engine.decoder, everything, [*prompt, *truth.token_ids], truth.logits)
    costs = attribution.costs(nothing)
    assert costs.shape == (int(attribution.grafted.sum()), engine.config.num_layers)
    none = torch.zeros_like(costs, dtype=torch.bool)
    assert attribution.kl(nothing, none) == pytest.approx(distance, rel=1e-3, abs=1e-5)
    assert attribution.kl(nothing, ~none) < 1e-6
    assert distance > 0.01
    # four steps on a line that is not straight
    assert float(costs.sum()) == pytest.approx(distance, rel=0.5)

    whole = replace(asked, policy=Told())
    assert native_distances(engine, whole, send(engine, whole), truth)["answer_kl"] < 1e-6


def test_an_oracle_of_more_tokens_costs_more_and_is_nearer(engine: Engine):
    [item, *_] = SUITE.items(5, 1, Shape(512, 4, ("alone",)))
    rows = {
        name: (flops, kl)
        for name, flops, kl in measure(engine, item, ["naive"], [0.04, 0.08, 0.16])
    }
    by_token = [rows[name] for name in rows if name.startswith("oracle by token,")]
    assert [flops for flops, _ in by_token] == sorted(flops for flops, _ in by_token)
    assert by_token[-1][1] < rows["naive"][1] / 2
    assert rows["oracle by token and layer, 16%"][1] < rows["oracle by token and layer, 4%"][1]


def test_prompts_are_measured_once_and_printed(tmp_path: Path, capsys: pytest.CaptureFixture[str]):
    for _ in range(2):
        main(
            MODEL_DIR, "multihop", "alone", "naive", "0.04,0.08,0.16", 1, 512, 4, "all", 5, tmp_path
        )
        printed = capsys.readouterr().out
    assert (tmp_path / "rows.jsonl").read_text().count("\n") == 7 * len(
        SUITE.items(5, 1, Shape(512, 4, ("alone",)))
    )
    assert "oracle by" in printed
