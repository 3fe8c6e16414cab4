"""vLLM's host on a device that is not there: it recovers what it recovers on the CPU, and what it asks is bounded."""

from typing import NamedTuple

import pytest
import torch

pytest.importorskip("vllm.config")

from fake_device import FakeDevice, FakeTensor, Kind, Operation
from fake_vllm import LoadedModel, Recoveries
from kvgraft.prefill.policies import parse_policy
from kvgraft.vllm.compat.model import ModelHost
from kvgraft.vllm.compat.pools import PoolLayout
from kvgraft.vllm.prefill import VllmPrefill
from launches import MAX_LENGTH, VLLM_POLICIES, VLLM_SHAPE, count_of, documents, per_layer, prompts
from ttft import make_model

LAYERS, TOKENS = 4, 512


class Most(NamedTuple):
    """What one recovery of 4 layers may ask of a device: a bound for each column of the table."""

    launches: int
    a_layer: float  # launches that one more layer adds; a stock layer is 12
    waits: int
    waiting_uploads: int


MOST = {
    "full": Most(62, 13, 2, 1),
    "naive": Most(71, 13, 2, 1),
    "epic": Most(71, 13, 2, 1),
    "cacheblend": Most(100, 13, 4, 1),
    "sparsex": Most(88, 13.5, 3, 2),
    "transitive": Most(167, 13, 5, 4),
    "spread": Most(195, 16, 5, 4),
}
ROUNDING = 0.03  # relative, of KV in bfloat16 behind some layers


class Recovered(NamedTuple):
    """By layer what the cache has of the prompt [T, Hkv, 2 d]; the last token's state [1, 2, D]; what it counted."""

    cached: list[torch.Tensor]
    last: torch.Tensor
    recomputed: int
    operations: list[Operation]


def recovered(loaded: LoadedModel, device: str) -> dict[str, Recovered]:
    """Recover one prompt under every policy."""
    read, [asked] = prompts(TOKENS, 1)
    recover = Recoveries(loaded.host(device), read, documents(TOKENS), asked)
    found, last = {}, []
    last_hidden = VllmPrefill.last_hidden
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(VllmPrefill, "last_hidden", lambda *given: (last.append(last_hidden(*given)), last[-1])[1])
        for policy in VLLM_POLICIES:
            recover(parse_policy(policy))
            recover.forget()
            operations: list[Operation] = []
            if device == "cuda":
                with FakeDevice.current.counting() as operations:
                    result = recover(parse_policy(policy))
            else:
                result = recover(parse_policy(policy))
            state = last[-1].held if isinstance(last[-1], FakeTensor) else last[-1]
            found[policy] = Recovered(recover.cached(), state, result.recomputed_tokens, operations)
    return found


@pytest.fixture(scope="module")
def models(tmp_path_factory: pytest.TempPathFactory) -> list[LoadedModel]:
    """Of 4 and of 8 layers."""
    folder = tmp_path_factory.mktemp("models")
    for layers in (LAYERS, 2 * LAYERS):
        make_model(folder / str(layers), layers, MAX_LENGTH, VLLM_SHAPE, dtype="bfloat16")
    return [LoadedModel.of(folder / str(layers)) for layers in (LAYERS, 2 * LAYERS)]


@pytest.fixture(scope="module")
def on_device(models: list[LoadedModel]) -> list[dict[str, Recovered]]:
    with torch.inference_mode(), FakeDevice():
        return [recovered(model, "cuda") for model in models]


def test_every_policy_recovers_on_it_what_it_recovers_on_the_cpu(
    models: list[LoadedModel], on_device: list[dict[str, Recovered]]
):
    for policy, expected in recovered(models[0], "cpu").items():
        found = on_device[0][policy]
        for layer, (mine, theirs) in enumerate(zip(found.cached, expected.cached, strict=True)):
            assert torch.equal(mine, theirs), f"{policy}, layer {layer}"
        assert torch.equal(found.last, expected.last), policy
        assert found.recomputed == expected.recomputed, policy
        assert (found.recomputed > 0) == (policy not in ("full", "naive"))


@pytest.mark.parametrize("policy", VLLM_POLICIES)
def test_what_a_recovery_asks_of_a_device_does_not_grow(on_device: list[dict[str, Recovered]], policy: str):
    few, many = (found[policy].operations for found in on_device)
    most = MOST[policy]
    assert count_of(few, Kind.LAUNCH) <= most.launches
    assert per_layer(few, many, Kind.LAUNCH, LAYERS) <= most.a_layer
    assert count_of(few, Kind.WAIT) <= most.waits
    assert count_of(few, Kind.WAITING_UPLOAD) <= most.waiting_uploads
    assert per_layer(few, many, Kind.WAIT, LAYERS) == per_layer(few, many, Kind.WAITING_UPLOAD, LAYERS) == 0


def spread_on_cpu(loaded: LoadedModel, max_rows: int | None = None) -> list[torch.Tensor]:
    """By layer what the cache then has of the prompt."""
    read, [asked] = prompts(TOKENS, 1)
    host = loaded.host("cpu")
    recover = Recoveries(host, read, documents(TOKENS), asked)
    host.max_rows = max_rows or host.max_rows
    recover(parse_policy("spread"))
    return recover.cached()


def test_kernels_spread_what_the_chain_of_operations_spreads(
    models: list[LoadedModel], monkeypatch: pytest.MonkeyPatch
):
    found = spread_on_cpu(models[0])
    monkeypatch.setattr(ModelHost, "pool_layout", lambda host, index: None)
    expected = spread_on_cpu(models[0])
    for mine, theirs in zip(found, expected, strict=True):
        assert (mine - theirs).norm() < ROUNDING * theirs.norm()
    assert not torch.equal(found[1], expected[1]), "both are the same code"


def test_rows_may_be_computed_in_chunks(models: list[LoadedModel]):
    found, expected = spread_on_cpu(models[0], max_rows=24), spread_on_cpu(models[0])
    for mine, theirs in zip(found, expected, strict=True):
        assert (mine - theirs).norm() < ROUNDING * theirs.norm()


@pytest.mark.parametrize("by_head", [True, False])
def test_a_cache_is_a_pool_of_rows(by_head: bool):
    """Whether the tokens of a head follow each other in a block, or the heads of a token."""
    blocks, heads, size, dim = 5, 3, 4, 8
    shape = (blocks, heads, size, 2 * dim) if by_head else (blocks, size, heads, 2 * dim)
    whole = torch.randn(shape)
    cache = whole if by_head else whole.transpose(1, 2)
    layout = PoolLayout.of(cache)
    assert layout is not None
    slots = torch.tensor([0, 7, 19, -1])
    rows, (keys, values) = layout.rows(slots), layout.pools(cache)
    expected = cache.transpose(1, 2)[slots // size, slots % size]  # [n, Hkv, 2 d]
    assert rows[:, 3].tolist() == [-1] * heads
    assert torch.equal(torch.cat((keys[0][rows], values[0][rows]), -1)[:, :3], expected[:3].transpose(0, 1))


def test_a_layer_refuses_what_is_on_the_cpu(models: list[LoadedModel]):
    with torch.inference_mode(), FakeDevice():
        host = models[0].host("cuda")
        with pytest.raises(RuntimeError, match="on the CPU"):
            host.embed(torch.arange(4))
        states = host.embed(torch.arange(4, device="cuda"))
        with pytest.raises(RuntimeError, match="on the CPU"):
            host.project(0, torch.arange(4, device="cuda")[None], torch.arange(4), states, None)
