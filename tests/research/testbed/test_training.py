"""The recipe of the bundled model; the model itself is tested where it answers."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file
from transformers import (
    AutoModelForCausalLM,
    AutoTokenizer,
    DeepseekV2ForCausalLM,
    LlamaForCausalLM,
)

from kvgraft import Engine, Request, SamplingParams
from kvgraft_lab.testbed import MODEL_DIR, tasks, vocabulary
from research.redknot import by_head
from research.testbed import curriculum, mimetic, trainer
from research.testbed.batches import IDS, make_batch
from research.testbed.curriculum import STAGES, Stage
from research.testbed.export import export, make_tokenizer
from research.testbed.trainer import Job, make_config, train
from research.vortex import latent_model

TINY = Stage(3, 128, 1e-3, curriculum.FIRST, max_hops=1, max_position=300)


def words(ids: torch.Tensor) -> list[str]:
    return [vocabulary.VOCABULARY[number] for number in ids.tolist()]


@pytest.mark.parametrize("stage", STAGES, ids=lambda stage: f"{stage.length}-{len(stage.tasks)}")
def test_labels_are_the_words_that_follow(stage: Stage):
    batch = make_batch(stage, 4096, (1, 2, 3))
    flat = batch.token_ids.flatten()
    assert torch.equal(flat[batch.answers + 1], batch.answer_labels)
    ended = torch.tensor([not task for task in batch.answer_tasks])
    assert torch.equal(batch.answer_labels == IDS[vocabulary.END], ended)
    assert all(
        int(label) in allowed
        for label, allowed in zip(batch.answer_labels, batch.allowed, strict=True)
    )
    assert batch.positions.max() < make_config().max_position_embeddings
    assert (batch.positions.diff() > 0)[batch.token_ids[:, 1:] > 0].all()


def test_resolved_words_are_labelled_with_what_they_mean():
    batch = make_batch(STAGES[2], 8192, (0, 0, 0))
    meanings = {"variable": set(), "theirs": set(), "colour": set()}  # type: ignore[var-annotated]
    for word, label in zip(
        words(batch.token_ids.flatten()[batch.resolved]), words(batch.resolved_labels), strict=True
    ):
        if word in vocabulary.VARIABLES:
            meanings["variable"].add(label in vocabulary.NUMBERS)
        elif word in vocabulary.COLOURS:
            meanings["colour"].add(label in vocabulary.NUMBERS)
        elif word == "theirs":
            meanings["theirs"].add(label in vocabulary.NAMES)
        else:  # a mentor means a home; a question's end means the mentor it has to go through
            assert label in (*vocabulary.CITIES, *vocabulary.NAMES)
    assert meanings == {"variable": {True}, "theirs": {True}, "colour": {True}}


def test_all_tasks_are_read_in_both_formats_and_batches_are_repeatable():
    batches = [make_batch(STAGES[3], 4096, (0, step, 0)) for step in range(12)]
    assert {task for batch in batches for task in batch.answer_tasks} == {"", *tasks.TASKS}
    text = " ".join(words(torch.cat([batch.token_ids.flatten() for batch in batches])))
    assert "? answer :" in text
    assert "? <assistant> :" in text
    assert torch.equal(batches[3].token_ids, make_batch(STAGES[3], 4096, (0, 3, 0)).token_ids)
    assert not torch.equal(batches[3].token_ids, make_batch(STAGES[3], 4096, (0, 3, 1)).token_ids)


def test_the_starting_weights_look_back_and_match_keys():
    model = LlamaForCausalLM(make_config())
    model.set_attn_implementation("eager")
    mimetic.initialise(model, seed=0)
    facts = [
        f"the code of {thing} is {number} ."
        for thing, number in zip(vocabulary.THINGS, range(10, 18), strict=False)
    ]
    text = [*" ".join(facts).split(), *tasks.ask(f"code of {vocabulary.THINGS[3]}").split()]
    with torch.inference_mode():
        found = model(
            torch.tensor([[IDS[word] for word in text]]), output_attentions=True
        ).attentions
    for head, offset in enumerate(offset for offsets in mimetic.OFFSETS for offset in offsets):
        assert torch.diagonal(found[0][0, head], -offset).mean() > 0.8
    value = text.index("13")
    assert found[1][0, :, -1, value].max() > 5 / len(text)


@pytest.fixture
def short(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(curriculum, "STAGES", (TINY, TINY))
    monkeypatch.setattr(trainer, "NUM_TOKENS", 256)
    monkeypatch.setattr(trainer, "SAVE_EVERY", 2)
    monkeypatch.setattr(trainer, "LOG_EVERY", 2)


@pytest.mark.soak
def test_an_interrupted_run_ends_in_the_same_weights(short: None, tmp_path: Path):
    whole, halves = (Job(tmp_path / name, num_processes=1) for name in ("whole", "halves"))
    for job in (whole, halves):
        job.directory.mkdir()
    train(whole)

    def stop(step: int, said: dict[str, float]) -> None:
        if step == 3:  # the last checkpoint is that of step 2
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        train(halves, on_step=stop)
    assert json.loads((halves.directory / "step.json").read_text()) == {
        "step": 2,
        "seed": 0,
        "processes": 1,
    }
    train(halves)
    files = [
        sorted(path.name for path in job.directory.glob("*.safetensors")) for job in (whole, halves)
    ]
    assert files[0] == files[1] == ["model-6.safetensors", "muon-0-6.safetensors"]
    for name in files[0]:
        one, other = (load_file(job.directory / name) for job in (whole, halves))
        assert one.keys() == other.keys()
        assert all(torch.equal(one[key], other[key]) for key in one)
    log = [json.loads(line) for line in (whole.directory / "log.jsonl").read_text().splitlines()]
    assert [line["step"] for line in log] == [2, 4, 6]
    assert {"loss", "lens", "needle", "variable"} <= log[0].keys()


@pytest.mark.soak
def test_the_command_trains_and_goes_on(tmp_path: Path):
    command = [sys.executable, "-m", "research.testbed", "--out", str(tmp_path)]
    for until in (1, 2):
        subprocess.run(
            [*command, "--until", str(until)], check=True, capture_output=True, timeout=300
        )
        assert json.loads((tmp_path / "step.json").read_text()) == {
            "step": until,
            "seed": 0,
            "processes": 2,
        }
    assert sorted(path.name for path in tmp_path.glob("*.safetensors")) == [
        "model-2.safetensors", "muon-0-2.safetensors", "muon-1-2.safetensors",
    ]  # fmt: skip
    wide = {**os.environ, "COLUMNS": "400"}
    refused = subprocess.run(
        [*command, "--seed", "1"], capture_output=True, text=True, timeout=300, env=wide
    )
    assert refused.returncode == 2
    assert "holds a run of" in refused.stderr


@pytest.mark.soak
def test_export_is_a_hugging_face_directory(short: None, tmp_path: Path):
    train(Job(tmp_path, num_processes=1))
    export(tmp_path / "model-6.safetensors", make_config(), tmp_path / "model")
    model = AutoModelForCausalLM.from_pretrained(tmp_path / "model")
    assert model.dtype == torch.bfloat16
    trained = load_file(tmp_path / "model-6.safetensors")["model.model.layers.3.mlp.up_proj.weight"]
    assert torch.equal(model.model.layers[3].mlp.up_proj.weight, trained.bfloat16())
    tokenizer = AutoTokenizer.from_pretrained(tmp_path / "model")
    assert tokenizer.get_vocab() == make_tokenizer(10).get_vocab() == IDS
    assert sum(path.stat().st_size for path in (tmp_path / "model").iterdir()) < 20e6


def test_chat_template():
    tokenizer = make_tokenizer(100)
    chat = [
        {"role": "system", "content": "note red means 51 ."},
        {"role": "user", "content": "question : code of lamp ?"},
        {"role": "assistant", "content": "42"},
        {"role": "user", "content": "question : code of zzz ?"},
    ]
    text = tokenizer.apply_chat_template(chat, tokenize=False, add_generation_prompt=True)
    assert text == (
        "<system> : note red means 51 . <user> : question : code of lamp ? <assistant> : 42 <eos> "
        "<user> : question : code of zzz ? <assistant> :"
    )
    assert tokenizer.convert_ids_to_tokens(tokenizer(text).input_ids).count("<unk>") == 1
    assert tokenizer.decode(tokenizer("code of lamp").input_ids) == "code of lamp"
    with pytest.raises(Exception, match="unknown role critic"):
        tokenizer.apply_chat_template([{"role": "critic", "content": "no"}], tokenize=False)


@pytest.mark.soak
def test_the_model_by_head_starts_from_the_bundled_one_and_keeps_a_window_in_three_of_four_steps(
    short: None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.setattr(curriculum, "BY_HEAD", (TINY, TINY))
    seen: list[int] = []
    make_mask = by_head.mask

    def count(layer: int, *shape: int) -> torch.Tensor:
        seen.append(layer)
        return make_mask(layer, *shape)

    monkeypatch.setattr(by_head, "mask", count)
    job = Job(tmp_path, num_processes=1, by_head=True)
    train(job)
    assert set(seen) == {0, 1}
    assert job.identity == {"seed": 0, "processes": 1, "by_head": 1}
    trained = load_file(tmp_path / "model-6.safetensors")["model.model.layers.3.mlp.up_proj.weight"]
    bundled = load_file(MODEL_DIR / "model.safetensors")[
        "model.layers.3.mlp.up_proj.weight"
    ].float()
    assert 0 < float((trained - bundled).norm() / bundled.norm()) < 0.2
    assert by_head.head_map("x").num_kept == 7


@pytest.mark.soak
def test_the_model_of_latent_attention_starts_near_the_bundled_one_and_learns(
    short: None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    """Channels that turn fast make one key for all heads, so a part of the answers is lost until it
    has learned."""
    monkeypatch.setattr(curriculum, "LATENT", (TINY, TINY))
    job = Job(tmp_path, num_processes=1, latent=True)
    models = {"bundled": LlamaForCausalLM.from_pretrained(MODEL_DIR, dtype=torch.float32)}
    models["latent"] = DeepseekV2ForCausalLM(job.config)
    latent_model.initialise(models["latent"])
    batch, right = make_batch(STAGES[3], 2048, (9, 9, 9)), {}
    # not the words that end answers
    asked = torch.tensor([bool(task) for task in batch.answer_tasks])
    # or gaps of positions would be taken for ends of texts
    everything = torch.ones_like(batch.token_ids)
    with torch.no_grad():
        for name, model in models.items():
            logits = model(
                batch.token_ids, everything, batch.positions, use_cache=False
            ).logits.flatten(0, 1)
            found = logits[batch.answers].argmax(-1).tolist()
            is_right = torch.tensor(
                [token in allowed for token, allowed in zip(found, batch.allowed, strict=True)]
            )
            right[name] = float(is_right[asked].float().mean())
    assert right["bundled"] > 0.95
    assert 0.4 < right["latent"] < right["bundled"]
    train(job)
    assert job.identity == {"seed": 0, "processes": 1, "latent": 1}
    export(tmp_path / "model-6.safetensors", job.config, tmp_path / "model")
    engine = Engine(tmp_path / "model", dtype="float32", num_pages=20)
    assert engine.config.latent is not None
    assert (
        len(
            engine.generate(
                [Request("question : code of lamp ? answer :", None, SamplingParams(max_tokens=2))]
            )
        )
        == 1
    )


def test_local_heads_see_sinks_and_a_window():
    first, later = (by_head.mask(layer, 100, 2, 3).unflatten(0, (3, 4)) for layer in (0, 1))
    assert first.shape == (3, 4, 200, 100)
    seen = later[0] == 0  # [Hkv, group * length, length]
    assert torch.equal(seen[:, :100], seen[:, 100:])
    causal = torch.ones(100, 100).tril() > 0
    assert torch.equal(seen[0, :100], causal)
    assert seen[1, 90].nonzero()[:, 0].tolist() == [*range(4), *range(27, 91)]
    assert torch.equal((first[0, 0] == 0)[:100], seen[1, :100])
