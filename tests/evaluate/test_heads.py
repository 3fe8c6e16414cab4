import json
import os
import re
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch

from kvgraft import Engine, Request, SamplingParams
from kvgraft.cli import app, run
from kvgraft.engine.decoder import Decoder
from kvgraft.kv.heads import HeadClass, HeadMap
from kvgraft_lab.evaluate import heads
from kvgraft_lab.evaluate.heads import TextSample
from kvgraft_lab.testbed import MODEL_DIR
from research import redknot

L, G, R = HeadClass.LOCAL, HeadClass.GLOBAL, HeadClass.RETRIEVAL


def blind(decoder: Decoder, layer: int, head: int) -> None:
    """Make a KV head of a tiny llama attend to everything alike: its queries become zero."""
    config = decoder.config
    size = config.num_heads // config.num_kv_heads * config.head_dim
    decoder.weights.layers[layer].qkv[head * size : (head + 1) * size] = 0.0


def test_far_mass_and_shift_are_those_of_uniform_attention(model_dirs: dict[str, Path]):
    """A head that attends to all alike: its far mass and its shift follow from counting."""
    decoder = Decoder.from_pretrained(model_dirs["llama"], torch.float32)
    blind(decoder, 0, 1)
    generator = np.random.default_rng(0)
    one, other, body = (generator.integers(3, 190, count).tolist() for count in (30, 30, 50))
    shift, far = heads.measure(decoder, TextSample((one, other), body), sinks=2, window=10)
    at = np.arange(30, 80)
    assert far[0, 1] == pytest.approx(np.mean((at - 10 + 1 - 2) / (at + 1)), rel=1e-5)
    assert far[0, 0] != pytest.approx(far[0, 1], rel=0.01)
    same = heads.measure(decoder, TextSample((one, one), body), sinks=2, window=10)
    assert np.allclose(same[1], heads.measure(decoder, TextSample((one, one), body), 2, 10)[1])
    assert same[0].max() < 1e-5 < shift.min()
    assert heads.measure(decoder, TextSample((one, other), body), 2, 80)[1].max() == 0


def test_classes_follow_from_far_mass_then_from_shift():
    far = np.array([[0.9, 0.1], [0.8, 0.7], [0.2, 0.3]])
    shift = np.array([[0.1, 0.5], [0.9, 0.2], [0.4, 0.24]])
    assert heads.classify(shift, far, 0.5, None) == ((R, L), (G, R), (L, L))
    assert heads.classify(shift, far, 0.01, None) == ((R, L), (L, L), (L, L))
    assert heads.classify(shift, far, 1.0, None) == ((R, G), (G, R), (G, R))
    assert heads.classify(shift, far, None, 0.25) == ((R, L), (G, R), (L, R))


@pytest.mark.slow
def test_effect_is_that_of_a_map_with_one_local_head(engine: Engine):
    [sample, _] = heads.testbed_samples(engine, seed=3, count=2, length=512)
    effect = heads.measure_effect(engine.decoder, sample, sinks=4, window=32)
    assert effect.shape == (8, 4)
    prompts = [[*prefix, *sample.body] for prefix in sample.prefixes]

    def first(**options: object) -> torch.Tensor:
        """Log probabilities [2, V] of the token behind either prompt."""
        host = Engine(MODEL_DIR, dtype="float32", kv_gib=0.02, policy="full", **options)  # type: ignore[arg-type]
        one = SamplingParams(max_tokens=1)
        answers = host.generate(
            [Request(prompt, None, one, return_logits=True) for prompt in prompts]
        )
        return torch.stack([answer.first_logits for answer in answers]).log_softmax(-1)

    whole = first()
    for layer, head in ((0, 1), (3, 2), (7, 0)):
        classes = [[G] * 4 for _ in range(8)]
        classes[layer][head] = L
        one_local = HeadMap(engine.config.identity, 4, 32, tuple(map(tuple, classes)))
        changed = first(head_map=one_local, head_paging=True)
        apart = (whole.exp() * (whole - changed)).sum(-1).mean()
        assert effect[layer, head] == pytest.approx(float(apart), rel=1e-3, abs=1e-5)


@pytest.mark.soak
def test_the_heads_that_a_model_by_head_needs_are_among_those_it_was_trained_to_need():
    host = Engine(redknot.MODEL_DIR, dtype="float32", kv_gib=0.01)
    made = HeadMap.load(redknot.MODEL_DIR / "heads.json")
    samples = heads.testbed_samples(host, seed=0, count=6, length=512)
    found = heads.profile(
        host, samples, sinks=made.sinks, window=made.window, threshold=0.1
    ).head_map
    assert 2 <= found.num_kept <= made.num_kept
    for layer in range(8):
        pairs = zip(found.heads(layer, L), made.heads(layer, L), strict=True)
        assert all(is_local or not was_local for is_local, was_local in pairs)


@pytest.fixture(scope="module")
def engine() -> Engine:
    return Engine(MODEL_DIR, dtype="float32", kv_gib=0.01)


def test_maps_of_disjoint_prompts_agree(engine: Engine):
    """The bundled model: the first layer looks around, all others look far."""
    samples = heads.testbed_samples(engine, seed=0, count=8, length=512)
    assert len(samples) == 8
    found = heads.profile(engine, samples, sinks=4, window=64, threshold=0.5, by="far-mass")
    assert found.agreement >= 0.75
    assert found.kept_agreement == 1.0
    assert set(found.head_map.classes[0]) == {L}
    assert L not in {name for layer in found.head_map.classes[1:] for name in layer}


BYTES: Any = SimpleNamespace(encode=lambda text: list(text.encode()))


def text_of(tokens: list[int]) -> str:
    return bytes(tokens).decode()


def test_samples_of_models_that_read_english_hold_both_suites_in_both_halves():
    samples = heads.english_samples(BYTES, seed=0, count=12, length=512)
    texts = [text_of(sample.body) for sample in samples]
    assert len(texts) == 12
    assert all(text.startswith("Answer the question from the following text.") for text in texts)
    documented = ["Question: What does the text say about " in text for text in texts]
    for half in (documented[::2], documented[1::2]):
        assert set(half) == {True, False}
    begun = [text.rpartition("\nAnswer: ")[2] for text in texts]
    assert all(begun)
    assert len(set(begun)) > 6


def test_samples_of_own_texts_end_with_words_of_passages_that_no_other_sample_has():
    text = " ".join(f"Room {number} has {number * 7} chairs." for number in range(600))
    samples = heads.own_samples(BYTES, {"rooms": text}, seed=0, count=4, length=1024)
    assert len(samples) == 4
    rooms = []
    for sample in samples:
        passages, _, begun = text_of(sample.body).rpartition("\nAnswer: ")
        assert begun in passages
        assert 600 < len(sample.body) < 900
        rooms.append(set(re.findall(r"Room (\d+) has", passages)))
        for prefix in sample.prefixes:
            assert len(prefix) == 256
            assert not rooms[-1] & set(re.findall(r"Room (\d+) has", text_of(prefix)))
    assert not set.intersection(*rooms)


@pytest.mark.parametrize(
    ("model", "draws"),
    [
        (MODEL_DIR, "testbed_samples"),
        (Path(os.path.relpath(MODEL_DIR)), "testbed_samples"),
        (redknot.MODEL_DIR, "testbed_samples"),
        (Path("llama"), "english_samples"),
    ],
    ids=["bundled", "bundled, relative", "trained from it", "another"],
)
def test_the_command_asks_each_model_in_its_language(
    model: Path,
    draws: str,
    model_dirs: dict[str, Path],
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    tmp_path: Path,
):
    def draw(*_: object, **__: object) -> None:
        raise ValueError(f"asked by {draws}")

    monkeypatch.setattr(heads, draws, draw)
    model = model_dirs.get(str(model), model)
    assert run(app, ["profile-heads", str(model), "--out", str(tmp_path / "heads.json")]) == 2
    assert f"asked by {draws}" in capsys.readouterr().err


@pytest.mark.slow
def test_a_profile_needs_text_and_sane_numbers(engine: Engine):
    text = " ".join(f"the door of room {number} closed ." for number in range(600))
    samples = heads.own_samples(engine, {"doors": text}, seed=0, count=3, length=512)
    assert len(samples) == 3
    assert all(len(prefix) == 128 for sample in samples for prefix in sample.prefixes)
    for given, message in (
        ({"share": 0.0}, r"share must be in \(0, 1\], got 0.0"),
        ({"threshold": 1.5}, r"threshold must be in \(0, 1\], got 1.5"),
        ({}, "give either a share or a threshold"),
        ({"share": 0.5, "by": "luck"}, "unknown criterion 'luck': choose from effect, far-mass"),
        ({"share": 0.5, "window": 0}, "window at least 1, got 4 and 0"),
        ({"threshold": 1.0}, "at least one must see everything"),
    ):
        with pytest.raises(ValueError, match=message):
            heads.profile(engine, samples, **{"sinks": 4, "window": 64} | given)  # type: ignore[arg-type]
    with pytest.raises(ValueError, match="sinks and window see all of a sample of "):
        heads.profile(engine, samples, sinks=4, window=4096, share=0.5)
    with pytest.raises(ValueError, match=r"the texts have 9 characters, and .* give more text"):
        heads.own_samples(engine, {"short": "too short"}, seed=0, count=3, length=512)
    with pytest.raises(ValueError, match="length must be at least 512 tokens, got 511"):
        heads.english_samples(engine, seed=0, count=2, length=511)
    with pytest.raises(ValueError, match="samples must be at least 2"):
        heads.testbed_samples(engine, seed=0, count=1, length=512)


@pytest.mark.soak
def test_the_command_writes_a_map_a_picture_and_json(
    capsys: pytest.CaptureFixture[str], tmp_path: Path
):
    out, plot = tmp_path / "heads.json", tmp_path / "heads.png"
    arguments = [
        "profile-heads",
        str(MODEL_DIR),
        "--samples",
        "4",
        "--length",
        "512",
        "--window",
        "64",
    ]
    assert run(app, [*arguments, "--out", str(out), "--plot", str(plot), "--json"]) == 0
    said = json.loads(capsys.readouterr().out)
    assert said["samples"] == 4
    assert HeadMap.load(out).num_kept == round(0.15 * 32)
    assert plot.read_bytes().startswith(b"\x89PNG")
    assert run(app, [*arguments, "--out", str(out), "--by", "far-mass", "--threshold", "0.5"]) == 0
    assert "28 of 32 heads keep everything" in capsys.readouterr().out
    question = "the code of lamp is 42 . question : code of lamp ? answer :"
    assert (
        run(
            app,
            ["generate", question, "--head-map", str(out), "--head-paging", "--max-tokens", "1"],
        )
        == 0
    )
    assert capsys.readouterr().out.startswith("42")
    assert run(app, ["generate", question, "--head-map", str(tmp_path / "none.json")]) == 2
    assert "no such file: " in capsys.readouterr().err
    assert run(app, ["profile-heads", str(tmp_path)]) == 2
    assert run(app, [*arguments, "--text", str(tmp_path / "no.txt")]) == 2
