"""Adapters over HTTP: `"model"` names one, and text is that model's."""

import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from engines import BLOCK, words
from running import ADMIN, ALICE, BOB, RunningServer, running
from test_guard import scored

from kvgraft.server.tenancy import Tenant
from models import make_adapter

pytestmark = pytest.mark.slow

SEGMENTS = "/v1/kvgraft/pins"
EVERYTHING = {"policy": "spread", "recompute_share": 1.0}
TOLERANCE = 1e-3  # nats


@pytest.fixture(scope="module")
def folder(model: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Adapters `a` and `b` in folders of their names."""
    folder = tmp_path_factory.mktemp("lora")
    for seed, name in enumerate("ab", 1):
        make_adapter(folder / name, model, seed=seed)
    return folder


@pytest.fixture(scope="module")
def serving(model: Path, folder: Path) -> Iterator[RunningServer]:
    arguments = [
        "-m",
        "kvgraft",
        "serve",
        str(model),
        "--served-model-name",
        "base",
        "--api-key",
        ALICE,
        BOB,
    ]
    arguments += [
        "--dtype",
        "float32",
        "--max-model-len",
        "2048",
        "--num-gpu-blocks-override",
        "200",
    ]
    arguments += ["--enable-lora", "--max-loras", "4", "--max-lora-rank", "8"]
    arguments += ["--lora-modules", *(f"{name}={folder / name}" for name in "ab")]
    arguments += [
        "--kvgraft-costs",
        "tokens",
        "--kvgraft-guard",
        "1.0",
        "--kvgraft-guard-tokens",
        "1000000",
    ]
    environment = {
        **os.environ,
        "KVGRAFT_ADMIN_KEY": ADMIN,
        "VLLM_ALLOW_RUNTIME_LORA_UPDATING": "1",
    }
    with running(arguments, folder / "log", environment) as started:
        yield started


def ask(
    server: RunningServer, model: str, prompt: list[int], key: str = ALICE, **options: Any
) -> tuple[str, Any]:
    """The answer, and the report."""
    answer = server.openai(key).completions.create(
        model=model, prompt=prompt, max_tokens=8, temperature=0,
        extra_body={"ignore_eos": True, "kv_transfer_params": {"kvgraft": options}},
    )  # fmt: skip
    return answer.choices[0].text, (answer.model_extra or {})["kv_transfer_params"]["kvgraft"]


def elsewhere(document: list[int], seed: int = 0) -> list[int]:
    return [*words(40, 1000 + seed), *document, *words(20, 2000 + seed)]


def test_a_model_name_is_an_adapter_and_its_text_is_its_own(serving: RunningServer):
    document = words(300, 1)
    names = [model.id for model in serving.openai(ALICE).models.list().data]
    assert sorted(names) == ["a", "b", "base"]
    answers = {name: ask(serving, name, elsewhere(document), reuse="exact")[0] for name in names}
    assert len({*answers.values()}) == 3
    ask(serving, "a", document, namespace="own")
    for name in names:
        text, report = ask(serving, name, elsewhere(document), namespace="own", **EVERYTHING)
        assert (report["grafted_tokens"] > 0) == (name == "a")
        assert text == answers[name]
        assert (
            ask(serving, name, elsewhere(document, 1), BOB, namespace="own")[1]["grafted_tokens"]
            == 0
        )


def test_answers_are_scored_under_their_own_adapter(serving: RunningServer):
    document, here = words(300, 2), {"namespace": "scored"}
    for name in ("a", "b"):
        ask(serving, name, document, **here)
        _, report = ask(serving, name, elsewhere(document), **here, **EVERYTHING)
        assert (report["outcome"], report["guard"]) == ("grafted", "pending")
        found = scored(serving, ALICE)[0]["scored"]
        assert found["flips"] == 0
        assert found["answer_kl"] < TOLERANCE


def test_text_is_pinned_under_an_adapter(serving: RunningServer):
    text = " ".join(f"w{3 + number % 150}" for number in range(7, 7 + 5 * BLOCK))
    place = {"tenant": Tenant.of(ALICE).label, "namespace": "pinned"}
    with serving.http(ADMIN) as admin:
        pinned = admin.post(SEGMENTS, json={"name": "x", "text": text, "model": "a", **place})
        assert pinned.status_code == 200, pinned.text
        assert pinned.json()["model"] == "a"
        tokens = admin.post("/tokenize", json={"model": "base", "prompt": text}).json()["tokens"]
        for name in ("base", "a", "b"):
            _, report = ask(serving, name, elsewhere(tokens), namespace="pinned")
            assert (report["grafted_tokens"] > 0) == (name == "a")
            listed = admin.get(SEGMENTS, params={"model": name, **place}).json()
            assert [one["name"] for one in listed["pins"]] == (["x"] if name == "a" else [])
        assert admin.delete(f"{SEGMENTS}/x", params=place).status_code == 404
        assert admin.delete(f"{SEGMENTS}/x", params={"model": "a", **place}).status_code == 200
        missing = admin.post(SEGMENTS, json={"name": "x", "text": text, "model": "c", **place})
        assert (missing.status_code, "no model 'c'" in missing.text) == (404, True)


def test_an_adapter_that_is_loaded_again_knows_nothing_of_its_earlier_weights(
    serving: RunningServer, model: Path, folder: Path
):
    """As vLLM's API allows the admin; vLLM itself warns that its prefix cache does not notice."""
    make_adapter(folder / "c", model, seed=3)
    document, here = words(300, 3), {"namespace": "reload"}
    given = {"lora_name": "c", "lora_path": str(folder / "c")}
    with serving.http(ALICE) as alice, serving.http(ADMIN) as admin:
        assert alice.post("/v1/load_lora_adapter", json=given).status_code == 403
        assert admin.post("/v1/load_lora_adapter", json=given).status_code == 200
        ask(serving, "c", document, **here)
        before, report = ask(serving, "c", elsewhere(document), **here, **EVERYTHING)
        assert report["grafted_tokens"] > 0
        make_adapter(folder / "c", model, seed=4)
        assert (
            admin.post("/v1/load_lora_adapter", json={**given, "load_inplace": True}).status_code
            == 200
        )
        after, report = ask(serving, "c", elsewhere(document), **here, **EVERYTHING)
        assert (report["grafted_tokens"], report["prefix_tokens"]) == (0, 0)
        assert after != before
        assert (
            ask(serving, "c", elsewhere(document, 1), **here, **EVERYTHING)[1]["grafted_tokens"] > 0
        )
