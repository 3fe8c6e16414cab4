"""Flows along dense attention's own answers."""

from pathlib import Path

import pytest

from gguf_files import make_gguf
from kvgraft import Engine
from kvgraft.models.convert import convert
from research.vortex.real_text import MASKS, default_flows, main, measure


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("real_text")
    make_gguf(folder / "model.gguf", hidden_size=256)  # heads of 64 channels
    convert(folder / "model.gguf", folder / "made")
    return folder / "made"


def test_dense_decoding_is_at_no_distance_and_sparser_is_farther(model: Path):
    engine = Engine(model, dtype="float32", continuation=False)
    rows = list(
        measure(engine, ["dense", "quest:topk_blocks=100", "streaming:topk_blocks=1"], 640, 1, 0)
    )
    kl = {row.flow.partition(":")[0]: row.distances["answer_kl"] for row in rows}
    assert kl["dense"] < 1e-6
    assert kl["dense"] < kl["quest"] + 1e-6 < kl["streaming"] + 1e-6
    assert kl["streaming"] > 1e-4


def test_all_flows_are_measured_once_and_printed(
    model: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
):
    flows = default_flows(4)
    assert len(flows) == 7 + 2 * len(MASKS)
    chosen = ";".join(flows[:2] + flows[-1:])
    for _ in range(2):
        main(model, "640", 1, 4, chosen, 0, tmp_path)
        printed = capsys.readouterr().out
    assert (tmp_path / "640" / "rows.jsonl").read_text().count("\n") == 3
    assert "channel_quest" in printed
