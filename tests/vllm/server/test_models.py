"""Models behind the API by their names."""

import asyncio
import os
from pathlib import Path
from types import SimpleNamespace

import pytest
from running import ALICE, RunningServer, running
from vllm.entrypoints.openai.models.protocol import BaseModelPath
from vllm.entrypoints.openai.models.serving import OpenAIServingModels
from vllm.lora.request import LoRARequest

from gguf_files import make_gguf
from kvgraft.core.prompt import render_chat
from kvgraft.engine.text import load_tokenizer
from kvgraft.models import get_model
from kvgraft.vllm.patches.model_list import hide_paths

FLAGS = ["--dtype", "float32", "--num-gpu-blocks-override", "64", "--kvgraft-costs", "tokens"]
MESSAGE = {"role": "user", "content": "where is the hen? " * 20}


@pytest.mark.soak
def test_a_model_is_asked_by_its_name_and_through_its_own_chat_template(
    cache: Path, tmp_path: Path
):
    make_gguf(tmp_path / "mine.gguf", hidden_size=128, max_position_embeddings=1024)
    directory = get_model(tmp_path / "mine.gguf").directory
    with running(
        ["-m", "kvgraft", "serve", "mine", *FLAGS], tmp_path / "log", dict(os.environ)
    ) as server:
        client = server.openai("any")
        names = [model.id for model in client.models.list()]
        answer = client.chat.completions.create(
            model="mine", messages=[MESSAGE], max_tokens=3, temperature=0
        )  # type: ignore[list-item]
    assert names == ["mine"]
    assert answer.model == "mine"
    tokenizer = load_tokenizer(directory)
    assert answer.usage is not None
    assert answer.usage.prompt_tokens == len(tokenizer.encode(render_chat(tokenizer, [MESSAGE])))


def test_the_list_of_models_has_no_path_of_the_host(tmp_path: Path):
    config = SimpleNamespace(max_model_len=8)
    engine = SimpleNamespace(model_config=config, renderer=None, input_processor=None)
    paths = [BaseModelPath("qwen", str(tmp_path)), BaseModelPath("hub", "Qwen/Qwen3-8B")]
    models = OpenAIServingModels(engine, paths)  # type: ignore[arg-type]
    models.lora_requests["terse"] = LoRARequest("terse", 1, str(tmp_path / "removed"))
    hide_paths(models)
    listed = asyncio.run(models.show_available_models())
    assert {card.id: card.root for card in listed.data} == {
        "qwen": "qwen", "hub": "Qwen/Qwen3-8B", "terse": "terse",
    }  # fmt: skip


def test_the_bundled_model_is_served_under_its_name_alone(server: RunningServer):
    listed = server.openai(ALICE).models.list().data
    assert [(model.id, (model.model_extra or {})["root"]) for model in listed] == [
        ("bundled", "bundled")
    ]
    with server.http(ALICE) as client:
        refused = client.post("/v1/completions", json={"model": "none", "prompt": "x"})
    assert refused.status_code == 404
    assert "/" not in refused.json()["error"]["message"]
