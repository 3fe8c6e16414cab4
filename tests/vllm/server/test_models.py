"""A model behind the API by its name."""

import os
from pathlib import Path

import pytest
from running import running

from gguf_files import make_gguf
from kvgraft.core.prompt import render_chat
from kvgraft.engine.text import load_tokenizer
from kvgraft.models import get_model

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
    assert names == ["mine", str(directory)]
    assert answer.model == "mine"
    tokenizer = load_tokenizer(directory)
    assert answer.usage is not None
    assert answer.usage.prompt_tokens == len(tokenizer.encode(render_chat(tokenizer, [MESSAGE])))
