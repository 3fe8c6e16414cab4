import json
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file

from gguf_files import BOS, CHAT_TEMPLATE, EOS, EOT, TOKENS, make_gguf
from kvgraft import Engine, Request, SamplingParams
from kvgraft.core.prompt import render_chat
from kvgraft.engine.config import SUPPORTED_ARCHITECTURES, load_config
from kvgraft.engine.text import load_tokenizer, opening_ids
from kvgraft.models.convert import ARCHITECTURES, convert


@pytest.fixture
def gguf(tmp_path: Path) -> Path:
    (tmp_path / "gguf").mkdir()
    return tmp_path / "gguf" / "model.gguf"


def test_everything_that_is_converted_can_be_loaded():
    assert set(ARCHITECTURES.values()) <= SUPPORTED_ARCHITECTURES.keys()


@pytest.mark.parametrize(
    ("architecture", "sizes"),
    [
        ("llama", {}),
        ("llama", {"tie_word_embeddings": False}),
        ("qwen2", {}),
        ("qwen3", {"head_dim": 128}),
    ],
    ids=["llama", "untied", "qwen2", "qwen3"],
)
def test_every_weight_arrives(gguf: Path, tmp_path: Path, architecture: str, sizes: dict[str, Any]):
    held = make_gguf(gguf, architecture, **sizes)
    convert(gguf, tmp_path / "made")
    found = load_file(tmp_path / "made" / "model.safetensors")
    assert found.keys() == held.keys()
    assert all(torch.equal(found[name], tensor) for name, tensor in held.items())
    config = load_config(tmp_path / "made")
    assert (config.architecture, config.dtype) == (ARCHITECTURES[architecture], torch.float32)
    assert (config.num_layers, config.max_position, config.rope.theta) == (2, 8192, 50000.0)
    assert config.eos_token_ids == (EOS,)
    with Engine(tmp_path / "made", num_pages=32) as engine:
        [answer] = engine.generate(
            [Request("the hen", sampling=SamplingParams(max_tokens=3, ignore_eos=True))]
        )
    assert len(answer.token_ids) == 3


def test_quantised_weights_become_the_numbers_that_they_stand_for(gguf: Path, tmp_path: Path):
    held = make_gguf(gguf, quantised=True)
    convert(gguf, tmp_path / "made")
    found = load_file(tmp_path / "made" / "model.safetensors")
    assert found.keys() == held.keys()
    for name, tensor in held.items():
        assert found[name].dtype == torch.float32
        assert torch.equal(found[name], tensor)
    assert "quantization_config" not in json.loads((tmp_path / "made" / "config.json").read_text())


def test_the_tokenizer_and_the_chat_template_are_those_of_the_file(gguf: Path, tmp_path: Path):
    make_gguf(gguf, metadata={"tokenizer.ggml.eot_token_id": EOT})
    convert(gguf, tmp_path / "made")
    tokenizer = load_tokenizer(tmp_path / "made")
    ids = tokenizer.encode("<|im_start|>the hen", add_special_tokens=False)
    assert [TOKENS[i] for i in ids] == ["<|im_start|>", "the", "Ġ", "he", "n"]
    assert tokenizer.decode(ids[1:]) == "the hen"
    assert tokenizer.chat_template == CHAT_TEMPLATE
    message = {"role": "user", "content": "hen"}
    assert (
        render_chat(tokenizer, [message])
        == "<|im_start|>user\nhen<|im_end|>\n<|im_start|>assistant\n"
    )
    assert opening_ids(tokenizer, "the") == []
    assert load_config(tmp_path / "made").eos_token_ids == (EOS, EOT), (
        "the end of a turn ends an answer, too"
    )


@pytest.mark.parametrize(("told", "opening"), [(True, [BOS]), (False, [])])
def test_a_text_begins_as_the_file_says(gguf: Path, tmp_path: Path, told: bool, opening: list[int]):
    make_gguf(gguf, metadata={"tokenizer.ggml.add_bos_token": told})
    convert(gguf, tmp_path / "made")
    tokenizer = load_tokenizer(tmp_path / "made")
    assert opening_ids(tokenizer, "the") == opening
    assert tokenizer.encode("the")[:-1] == opening


@pytest.mark.parametrize(
    ("made", "message"),
    [
        ({"says": "gemma2"}, "architecture 'gemma2' is not supported: llama, qwen2, qwen3 are"),
        ({"metadata": {"llama.expert_count": 8}}, "the model has 8 experts"),
        ({"metadata": {"llama.rope.scaling.type": "yarn"}}, "the model has RoPE scaling 'yarn'"),
        ({"metadata": {"llama.attention.sliding_window": 512}}, "a sliding window of 512 tokens"),
        ({"extra": ["rope_freqs.weight"]}, "21 tensors where LlamaForCausalLM has 20"),
        ({"without": ["blk.1.ffn_up.weight"]}, r"missing: model\.layers\.1\.mlp\.up_proj\.weight"),
    ],
    ids=["architecture", "experts", "scaling", "window", "extra", "missing"],
)
def test_what_would_be_lost_is_refused(
    gguf: Path, tmp_path: Path, made: dict[str, Any], message: str
):
    make_gguf(gguf, **made)
    with pytest.raises(ValueError, match=message):
        convert(gguf, tmp_path / "made")
    assert not (tmp_path / "made").exists()


@pytest.mark.parametrize(
    "content", [b"", b"GGUF", b"no model at all, and more than a few bytes of it" * 9]
)
def test_what_is_no_gguf_file_is_refused(gguf: Path, tmp_path: Path, content: bytes):
    gguf.write_bytes(content)
    with pytest.raises(ValueError, match="not a GGUF file that can be read"):
        convert(gguf, tmp_path / "made")


def test_a_file_that_ends_too_early_is_refused(gguf: Path, tmp_path: Path):
    make_gguf(gguf)
    gguf.write_bytes(gguf.read_bytes()[:-5000])
    with pytest.raises(ValueError, match="can"):
        convert(gguf, tmp_path / "made")
    assert not (tmp_path / "made").exists()
