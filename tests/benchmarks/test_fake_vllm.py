"""vLLM's host on a device that is not there: it recovers what it recovers on the CPU, and what it asks is bounded."""

from typing import NamedTuple

import pytest
import torch

pytest.importorskip("vllm.config")

from fake_device import FakeDevice, FakeTensor, Kind, Operation
from fake_vllm import LoadedModel, Recoveries
from kvgraft.prefill.policies import parse_policy
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
    "full": Most(81, 17, 2, 9),
    "naive": Most(90, 17, 2, 9),
    "epic": Most(90, 17, 2, 9),
    "cacheblend": Most(123, 17, 5, 14),
    "sparsex": Most(113, 17, 4, 12),
    "transitive": Most(218, 17, 6, 30),
    "spread": Most(400, 63, 6, 46),
}


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
    assert per_layer(few, many, Kind.WAIT, LAYERS) == 0


def test_a_layer_refuses_what_is_on_the_cpu(models: list[LoadedModel]):
    with torch.inference_mode(), FakeDevice():
        host = models[0].host("cuda")
        with pytest.raises(RuntimeError, match="on the CPU"):
            host.embed(torch.arange(4))
        states = host.embed(torch.arange(4, device="cuda"))
        with pytest.raises(RuntimeError, match="on the CPU"):
            host.project(0, torch.arange(4, device="cuda")[None], torch.arange(4), states, None)
