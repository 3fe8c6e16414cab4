"""The head map of `benchmarks/head_paging.py`, and its figures."""

from pathlib import Path

import pytest

from head_paging import _figure, make_map
from kvgraft.kv.heads import HeadClass
from models import make_model


@pytest.mark.parametrize(("share", "whole"), [(0.01, 1), (0.25, 1), (0.5, 2), (1.0, 4)])
def test_a_share_of_the_heads_of_each_layer_sees_everything(
    tmp_path: Path, share: float, whole: int
):
    model = make_model(tmp_path, "qwen3", num_hidden_layers=3, num_key_value_heads=4)
    head_map = make_map(model, share)
    kept = [head_map.heads(layer, HeadClass.GLOBAL) for layer in range(3)]
    assert [sum(row) for row in kept] == [whole] * 3
    assert (len(set(kept)) == 3) == (whole < 4)


def test_a_figure_is_the_median_of_ratios_in_turn():
    figure = _figure("first token", 8192, [(2.0, 1.0), (3.0, 1.0), (4.0, 8.0)])
    assert (figure.plain_ms, figure.ours_ms, figure.gain) == (3000.0, 1000.0, 2.0)
    assert 0.5 <= figure.low <= 2.0 <= figure.high <= 3.0
