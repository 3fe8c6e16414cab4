"""Tiers below the page pool: what was computed once comes back, exact where it was exact, and only
to its owner."""

from pathlib import Path

import numpy as np
import pytest
import torch

from kvgraft import Engine, Request, Result, SamplingParams
from kvgraft.policies import Naive, Similar, SparseX
from kvgraft.store import StoreOptions
from models import VOCAB_SIZE

TOLERANCE = 1e-4
KNOWN = np.random.default_rng(1).integers(3, VOCAB_SIZE, 200).tolist()
MOVED = [5, 6, 7, 8, 9, *KNOWN, 11, 12]
EVERYTHING = SparseX(recompute_share=1.0)


@pytest.fixture(scope="module")
def model(model_dirs: dict[str, Path]) -> Path:
    return model_dirs["qwen3"]


def start(model: Path, store: StoreOptions, **settings: object) -> Engine:
    return Engine(
        model, dtype="float32", num_pages=40, store=store, poison_dropped_pages=True, **settings
    )  # type: ignore[arg-type]


def ask(engine: Engine, prompt: list[int], policy: object = "full", **fields: object) -> Result:
    sampling = SamplingParams(max_tokens=1, ignore_eos=True)
    return engine.generate([Request(prompt, policy, sampling, return_logits=True, **fields)])[0]  # type: ignore[arg-type]


def flood(engine: Engine) -> None:
    """Push everything out of the pool."""
    for seed in range(10, 14):
        ask(
            engine,
            np.random.default_rng(seed).integers(3, VOCAB_SIZE, 400).tolist(),
            remember=False,
        )
    engine.clear_cache()


def same(again: Result, at_once: Result, first: Result, engine: Engine) -> None:
    """The last bit is that of a prefix that had never left the pool, and of full prefill but on
    CUDA, whose matrix products add up in another order where there are more rows."""
    assert torch.equal(again.first_logits, at_once.first_logits)  # type: ignore[arg-type]
    atol = 0.0 if engine.decoder.device.type == "cpu" else TOLERANCE
    torch.testing.assert_close(again.first_logits, first.first_logits, atol=atol, rtol=0.0)


def on_disk(path: Path) -> StoreOptions:
    return StoreOptions(path / "store", ram_gib=0, disk_gib=1)


@pytest.mark.parametrize("disk", [False, True])
def test_what_left_the_pool_comes_back_bit_for_bit(model: Path, tmp_path: Path, disk: bool):
    with start(model, on_disk(tmp_path) if disk else StoreOptions()) as engine:
        first, at_once = ask(engine, KNOWN), ask(engine, KNOWN, remember=False)
        assert at_once.report.prefix_tokens == 192
        assert engine.store is not None
        engine.store.flush()
        flood(engine)
        again = ask(engine, KNOWN)
        assert again.report.prefix_tokens == 192
        assert again.report.counts["restored_blocks"] == 12
        assert engine.store.counts["disk_hits" if disk else "ram_hits"] == 12
        same(again, at_once, first, engine)
        engine.check()


@pytest.mark.parametrize("disk", [False, True])
def test_what_left_the_pool_is_grafted(model: Path, tmp_path: Path, disk: bool):
    with start(model, on_disk(tmp_path) if disk else StoreOptions()) as engine:
        ask(engine, KNOWN)
        at_once = ask(engine, MOVED, Naive(), remember=False)
        assert engine.store is not None
        engine.store.flush()
        flood(engine)
        result = ask(engine, MOVED, Naive(), remember=False)
        assert result.report.grafted_tokens == at_once.report.grafted_tokens >= 192
        assert torch.equal(result.first_logits, at_once.first_logits)  # type: ignore[arg-type]
        flood(engine)
        exact = ask(engine, MOVED, EVERYTHING, remember=False)
        expected = ask(engine, MOVED, namespace="nobody else", remember=False)
        assert float((exact.first_logits - expected.first_logits).abs().max()) < TOLERANCE  # type: ignore[operator]
        engine.check()


def test_another_process_goes_on_with_what_the_first_one_read(model: Path, tmp_path: Path):
    with start(model, on_disk(tmp_path)) as engine:
        first, at_once = ask(engine, KNOWN), ask(engine, KNOWN, remember=False)
    with start(model, on_disk(tmp_path)) as engine:
        again, moved = (
            ask(engine, KNOWN, remember=False),
            ask(engine, MOVED, Naive(), remember=False),
        )
        assert again.report.prefix_tokens == 192
        assert moved.report.grafted_tokens >= 192
        same(again, at_once, first, engine)
    with Engine(model, dtype="bfloat16", num_pages=40, store=on_disk(tmp_path)) as other:
        assert ask(other, KNOWN).report.prefix_tokens == 0


@pytest.mark.parametrize("disk", [False, True])
def test_namespaces(model: Path, tmp_path: Path, disk: bool):
    options = on_disk(tmp_path) if disk else StoreOptions()
    with start(model, options, match="similar:tau=0.3,window_tokens=64") as engine:
        ask(engine, KNOWN, namespace="a")
        assert engine.store is not None
        engine.store.flush()
        flood(engine)
        edited = [3 + place % 7 if place % 20 == 19 else token for place, token in enumerate(KNOWN)]
        for prompt in (KNOWN, MOVED, edited):
            report = ask(engine, prompt, Naive(), namespace="b", remember=False).report
            assert (report.prefix_tokens, report.grafted_tokens) == (0, 0)
            assert not engine.store.counts["ram_hits"] + engine.store.counts["disk_hits"]
        for prompt in (KNOWN, MOVED, edited):
            flood(engine)
            report = ask(engine, prompt, Naive(), namespace="a", remember=False).report
            assert report.prefix_tokens + report.grafted_tokens > 100
            assert report.counts["restored_blocks"]


def test_near_duplicates_and_residual_streams_come_back(model: Path, tmp_path: Path):
    settings = {"match": "similar:tau=0.3,window_tokens=64", "residual_layers": (2,)}
    edited = [3 + place % 7 if place % 20 == 19 else token for place, token in enumerate(KNOWN)]
    policy = Similar(reused_layers=2, halo_tokens=2, probe_tokens=0)
    with start(model, on_disk(tmp_path), **settings) as engine:
        ask(engine, KNOWN)
        at_once = ask(engine, edited, policy, remember=False)
    with start(model, on_disk(tmp_path), **settings) as engine:
        result = ask(engine, edited, policy, remember=False)
        assert result.report.grafted_tokens == at_once.report.grafted_tokens > 130
        assert torch.equal(result.first_logits, at_once.first_logits)  # type: ignore[arg-type]
    with start(
        model, on_disk(tmp_path), match="exact", residual_layers=(1,)
    ) as engine:  # what is stored lacks what it keeps
        assert ask(engine, KNOWN, remember=False).report.prefix_tokens == 0


def test_int8_is_grafted_but_is_no_prefix(model: Path):
    with start(model, StoreOptions(int8=True)) as engine:
        ask(engine, KNOWN)
        at_once = ask(engine, MOVED, Naive(), remember=False)
        flood(engine)
        again = ask(engine, KNOWN, Naive(), remember=False)
        assert (again.report.prefix_tokens, again.report.grafted_tokens) == (0, 192)
        flood(engine)
        moved = ask(engine, MOVED, Naive(), remember=False)
        assert moved.report.grafted_tokens >= 192
        difference = float((moved.first_logits - at_once.first_logits).abs().max())  # type: ignore[operator]
        assert 0 < difference < 0.5


def test_grafted_blocks_are_never_stored(model: Path):
    with start(model, StoreOptions()) as engine:
        ask(engine, KNOWN)
        assert engine.store is not None
        held = len(engine.store)
        ask(engine, MOVED, Naive())
        assert len(engine.store) == held


def test_a_pool_without_room_takes_nothing_back(model: Path):
    """What a prompt needs itself comes first."""
    with Engine(
        model, dtype="float32", num_pages=16, store=StoreOptions(), poison_dropped_pages=True
    ) as engine:
        ask(engine, KNOWN)
        ask(engine, np.random.default_rng(9).integers(3, VOCAB_SIZE, 240).tolist(), remember=False)
        engine.clear_cache()
        result = ask(engine, MOVED, EVERYTHING, remember=False)
        expected = ask(engine, MOVED, namespace="nobody else", remember=False)
        assert float((result.first_logits - expected.first_logits).abs().max()) < TOLERANCE  # type: ignore[operator]
        engine.check()


def test_a_damaged_store_is_a_miss(model: Path, tmp_path: Path):
    with start(model, on_disk(tmp_path)) as engine:
        first = ask(engine, KNOWN)
    for number, path in enumerate(sorted((tmp_path / "store").rglob("*.safetensors"))):
        data = bytearray(path.read_bytes())
        data[len(data) // 2 + number] ^= 16
        path.write_bytes(data)
    with start(model, on_disk(tmp_path)) as engine:
        again = ask(engine, KNOWN)
        assert engine.store is not None
        assert engine.store.counts["damaged"] > 0
        assert again.report.prefix_tokens == 0
        assert torch.equal(again.first_logits, first.first_logits)  # type: ignore[arg-type]


@pytest.mark.parametrize("seed", range(5))
def test_chunks_that_vanish_after_they_were_listed_are_computed_and_counted(
    model: Path, tmp_path: Path, seed: int
):
    with start(model, on_disk(tmp_path)) as engine:
        for text in range(4):
            ask(engine, np.random.default_rng((text, 9)).integers(3, VOCAB_SIZE, 300).tolist())
    rng = np.random.default_rng(seed)
    with start(model, on_disk(tmp_path)) as engine:
        paths = sorted((tmp_path / "store").rglob("*.safetensors"))
        gone = [path for path in paths if rng.random() < 0.4]
        for path in gone:
            path.unlink()
        assert engine.store is not None
        for text in range(4):
            prompt = [
                7,
                8,
                9,
                *np.random.default_rng((text, 9)).integers(3, VOCAB_SIZE, 300).tolist(),
            ]
            result = ask(engine, prompt, EVERYTHING, remember=False)
            expected = ask(engine, prompt, namespace="nobody else", remember=False)
            assert float((result.first_logits - expected.first_logits).abs().max()) < TOLERANCE  # type: ignore[operator]
        assert engine.store.counts["missing"] == len(gone)
        assert len(engine.store) == len(paths) - len(gone)
        engine.check()


def test_what_does_not_go_together_is_refused(model: Path):
    with pytest.raises(ValueError, match="quota"):
        StoreOptions(quota=2)
    with pytest.raises(ValueError, match="ram_gib"):
        StoreOptions(ram_gib=-1)
    with pytest.raises(ValueError, match="int8"):
        StoreOptions(int8="yes")  # type: ignore[arg-type]
