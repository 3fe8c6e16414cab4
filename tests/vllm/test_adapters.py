"""What tells the weights of adapters apart, beside the scheduler: no engine."""

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from test_pool import BLOCK, hasher, make_pool
from vllm.lora.request import LoRARequest
from vllm.sampling_params import SamplingParams
from vllm.v1.request import Request

from kvgraft.core.keys import scope_digest
from kvgraft.core.provenance import BlockProvenance
from kvgraft.policies import parse_policy
from kvgraft.vllm.compat.adapters import Adapter, adapter_digest
from kvgraft.vllm.connector.eligibility import RequestAdapters
from kvgraft.vllm.connector.request_state import RequestState
from kvgraft.vllm.options import RequestOptions

TOKENS = list(range(3 * BLOCK + 1))


@pytest.fixture(autouse=True)
def _hashes() -> None:
    make_pool(1)


@pytest.fixture
def path(tmp_path: Path) -> Path:
    (tmp_path / "adapter_config.json").write_text("{}")
    (tmp_path / "adapter_model.safetensors").write_bytes(b"first")
    return tmp_path


@pytest.fixture
def adapters() -> RequestAdapters:
    lora = SimpleNamespace(lora_dtype="float32", target_modules=None)
    return RequestAdapters(SimpleNamespace(lora_config=lora))  # type: ignore[arg-type]


def write(path: Path, weights: bytes) -> None:
    (path / "adapter_model.safetensors").write_bytes(weights)


def request(
    path: Path | str, name: str = "a", number: int = 1, *, anew: bool = False, tokens: Any = TOKENS
) -> Request:
    lora = LoRARequest(name, number, str(path), load_inplace=anew)
    return Request(
        "r",
        tokens,
        SamplingParams(max_tokens=BLOCK),
        None,
        lora_request=lora,
        block_hasher=hasher(),
    )


def arrive(adapters: RequestAdapters, *given: Any, **more: Any) -> tuple[Adapter, list[Any]]:
    """The adapter of a request, and the hashes of its blocks."""
    arrived = request(*given, **more)
    found = adapters.of(arrived)
    assert found is not None
    return found, list(arrived.block_hashes)


def test_weights_are_told_apart_by_content(path: Path, tmp_path: Path):
    lora = LoRARequest("a", 1, str(path))
    first = adapter_digest(lora)
    write(path, b"other")
    assert adapter_digest(lora) not in (None, first)
    write(path, b"first")
    assert adapter_digest(lora) == adapter_digest(LoRARequest("b", 2, str(path))) == first
    (path / "adapter_config.json").write_text('{"r": 8}')
    assert adapter_digest(lora) != first


@pytest.mark.parametrize("where", ["/not/here", "no-such/repository", "no such repository"])
def test_what_is_not_on_this_machine_has_no_digest(where: str):
    assert adapter_digest(LoRARequest("a", 1, where)) is None


def test_vllms_own_hashes_stand_while_weights_stay(path: Path, adapters: RequestAdapters):
    plain = list(request(path).block_hashes)
    assert len(plain) == 3
    assert arrive(adapters, path)[1] == arrive(adapters, path)[1] == plain


def test_other_weights_from_the_same_path_have_other_hashes(path: Path, adapters: RequestAdapters):
    first, plain = arrive(adapters, path)
    write(path, b"other")
    second, hashes = arrive(adapters, path, anew=True)
    assert second.digest != first.digest
    assert not {*plain} & {*hashes}
    assert arrive(adapters, path, anew=True) == (second, hashes)
    write(path, b"first")
    assert arrive(adapters, path, anew=True) == (first, plain)


def test_a_block_that_fills_up_later_has_another_hash_too(path: Path, adapters: RequestAdapters):
    arrive(adapters, path)
    write(path, b"other")
    short, plain = request(path, anew=True, tokens=TOKENS[:1]), request(path, tokens=TOKENS[:1])
    adapters.of(short)
    for one in (short, plain):
        one.append_output_token_ids(list(range(BLOCK - 1)))
    assert len(short.block_hashes) == len(plain.block_hashes) == 1
    assert short.block_hashes != plain.block_hashes
    assert short.cache_salt is None


def test_what_workers_have_loaded_counts_and_not_what_the_files_are(
    path: Path, adapters: RequestAdapters
):
    first, plain = arrive(adapters, path)
    adapters.learn({1: first.digest}, [])
    write(path, b"other")
    assert arrive(adapters, path) == (first, plain)
    assert arrive(adapters, path, "a", 2)[0].digest != first.digest, (
        "this one has not been loaded yet"
    )


def test_a_request_whose_adapter_got_other_weights_leaves_nothing(
    path: Path, adapters: RequestAdapters
):
    options = RequestOptions(parse_policy("naive"))
    states = []
    for name, number in (("a", 1), ("b", 2)):
        arrived = request(path, name, number)
        scope = scope_digest("model", name)
        states.append(
            RequestState(
                arrived, options, BlockProvenance(scope), adapters.of(arrived), recovery_key="naive"
            )
        )
    adapters.learn({1: "others"}, states)
    assert [state.has_known_weights for state in states] == [False, True]
    assert [state.refusal for state in states] == ["lora", None]
    assert [state.recovery_key for state in states] == [None, "naive"]
    assert arrive(adapters, path)[0].digest == "others"


def test_unknown_weights_share_nothing(adapters: RequestAdapters):
    (first, one), (second, other) = (arrive(adapters, "/not/here") for _ in range(2))
    assert first.digest == second.digest == ""
    assert not {*one} & {*other}


def test_the_model_itself_is_no_adapter(adapters: RequestAdapters):
    assert adapters.of(Request("r", TOKENS, SamplingParams(), None)) is None
    assert adapters.scoped("model", None) == "model"
