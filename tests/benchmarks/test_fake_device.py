"""A device that is not there: it computes what the CPU computes, refuses what CUDA refuses, and
counts."""

from pathlib import Path

import pytest
import torch

from fake_device import CUDA, FakeDevice, FakeTensor, Kind, Operation
from kvgraft import Engine, Request, SamplingParams
from kvgraft.kernels.triton import attention
from kvgraft_lab.testbed import MODEL_DIR
from launches import (
    DECODED,
    MAX_LENGTH,
    ONE_TOKEN,
    POLICIES,
    SHAPE,
    count_of,
    counted,
    counted_steps,
    moved,
    per_layer,
    prompts,
)
from ttft import make_model

LAYERS, TOKENS = 8, 512
PAGES, ROOM = 400, 8192
# what a recovery of one prompt asks of a device at most: launches, waits inside, uploads that wait
BARS = {
    "full": (107, 0, 0),
    "naive": (115, 0, 0),
    "epic": (115, 0, 0),
    "spread": (260, 0, 0),
    "transitive": (188, 3, 0),
    "sparsex": (128, 1, 0),
    "cacheblend": (135, 2, 0),
    "prophet": (278, 0, 0),
}
# KB a grafted token and layer; here tables of RoPE weigh more than in a model
# (with tokens that are recomputed, which the kernel of `spread` leaves out)
MOVED = {"naive": 8.8, "spread": 14.8}
# launches
A_LAYER = {"full": 12, "naive": 12, "epic": 12, "sparsex": 12, "cacheblend": 12, "spread": 15.5}
FEW_LAYERS = 2
# what a decode step asks of a device at most: launches a layer, launches beside them, waits,
# uploads that wait
STEP_BARS = {
    "dense": (12, 11, 1, 0),
    "block_topk": (16, 11, 1, 0),
    "quest": (16, 11, 1, 0),
    "double_sparse": (15, 11, 1, 0),
    "nsa_block_topk": (16, 11, 1, 0),
    "h2o": (16, 11, 1, 0),
    "streaming": (13, 39, 1, 0),
}


@pytest.fixture(scope="module")
def models(tmp_path_factory: pytest.TempPathFactory) -> list[Path]:
    """Of 8 and of 16 layers."""
    folder = tmp_path_factory.mktemp("models")
    for layers in (LAYERS, 2 * LAYERS):
        make_model(folder / str(layers), layers, MAX_LENGTH, SHAPE, dtype="bfloat16")
    return [folder / str(layers) for layers in (LAYERS, 2 * LAYERS)]


@pytest.fixture(scope="module")
def operations(models: list[Path]) -> list[dict[str, list[Operation]]]:
    return [counted(model, tuple(BARS), TOKENS) for model in models]


def answers(model: Path, device: str) -> dict[str, tuple[torch.Tensor, int]]:
    """(logits of the first token, recomputed tokens) by policy."""
    engine = Engine(
        model, dtype="bfloat16", device=device, num_pages=PAGES, max_prefill_tokens=ROOM
    )
    read, [asked] = prompts(TOKENS, 1)
    engine.generate([Request(read, "full", ONE_TOKEN)])
    found = {}
    for policy in POLICIES:
        [result] = engine.generate(
            [Request(asked, policy, ONE_TOKEN, remember=False, return_logits=True)]
        )
        assert result.error is None
        assert result.logits is not None
        logits = result.logits.held if isinstance(result.logits, FakeTensor) else result.logits
        found[policy] = logits.clone(), result.report.recomputed_tokens
    return found


def test_every_policy_computes_on_it_what_it_computes_on_the_cpu(models: list[Path]):
    """Bit by bit, or in other batches of rows where the device chooses tokens."""
    expected = answers(models[0], "cpu")
    with torch.inference_mode(), FakeDevice():
        found = answers(models[0], "cuda")
    for policy in POLICIES:
        if policy in ("spread", "prophet"):
            torch.testing.assert_close(found[policy][0], expected[policy][0], atol=0.01, rtol=0)
        else:
            assert torch.equal(found[policy][0], expected[policy][0]), policy
        assert found[policy][1] == expected[policy][1], policy
    assert expected["spread"][1] > 0


@pytest.mark.parametrize("policy", BARS)
def test_what_a_recovery_asks_of_a_device_does_not_grow(
    operations: list[dict[str, list[Operation]]], policy: str
):
    few, many = (found[policy] for found in operations)
    launches, waits, uploads = BARS[policy]
    assert count_of(few, Kind.LAUNCH) <= launches
    assert count_of(few, Kind.WAIT, inside="recover") <= waits
    assert count_of(few, Kind.WAITING_UPLOAD) <= uploads
    if policy in A_LAYER:
        assert per_layer(few, many, Kind.LAUNCH, LAYERS) <= A_LAYER[policy]
    assert per_layer(few, many, Kind.WAITING_UPLOAD, LAYERS) == 0
    if policy in MOVED:
        assert moved(few, False, LAYERS, TOKENS, 1) <= MOVED[policy]
    kernels = {one.name for one in few if one.kind is Kind.LAUNCH}
    assert "_segpaged" in kernels
    assert ("_align_copy" in kernels) == (policy != "full")


def test_long_runs_take_at_most_three_launches_more_a_layer(
    models: list[Path], monkeypatch: pytest.MonkeyPatch
):
    """The copy of what they see, flash attention, and the kernel for all other rows; nothing
    waits."""
    monkeypatch.setattr(attention, "RUN", 8)
    monkeypatch.setattr(attention, "programs_of", lambda device: 0)
    policies = ("full", "naive", "spread")
    few, many = (counted(model, policies, TOKENS) for model in models)
    for policy in policies:
        kernels = {one.name for one in few[policy] if one.kind is Kind.LAUNCH}
        assert {"_flash_attention_forward", "_move_rows"} <= kernels
        assert ("_segpaged" in kernels) == (policy != "full")  # which has no other rows
        assert per_layer(few[policy], many[policy], Kind.LAUNCH, LAYERS) <= A_LAYER[policy] + 3
        assert count_of(few[policy], Kind.WAIT, inside="recover") <= BARS[policy][1]
        assert count_of(few[policy], Kind.WAITING_UPLOAD) <= BARS[policy][2]


def test_prompts_of_one_pass_hardly_ask_for_more_than_one(models: list[Path]):
    one, four = (counted(models[0], ("spread",), TOKENS, count)["spread"] for count in (1, 4))
    assert count_of(four, Kind.LAUNCH) <= 1.1 * count_of(one, Kind.LAUNCH)
    assert count_of(four, Kind.WAIT) == count_of(one, Kind.WAIT)
    assert count_of(four, Kind.WAITING_UPLOAD) == 0


@pytest.mark.parametrize("policy", BARS)
def test_the_logits_are_launched_before_the_times_of_a_recovery_are_read(
    operations: list[dict[str, list[Operation]]], policy: str
):
    """Else the device would have nothing to do while the host waits for them."""
    few = operations[0][policy]
    [waited] = [
        number for number, one in enumerate(few) if one.name == "event" and one.kind is Kind.WAIT
    ]
    launched = [
        number
        for number, one in enumerate(few)
        if one.kind is Kind.LAUNCH and "logits" in one.functions
    ]
    assert launched
    assert max(launched) < waited


@pytest.fixture(scope="module")
def shallow(tmp_path_factory: pytest.TempPathFactory) -> list[Path]:
    """Models of 2 and of 4 layers."""
    folder = tmp_path_factory.mktemp("shallow")
    for layers in (FEW_LAYERS, 2 * FEW_LAYERS):
        make_model(folder / str(layers), layers, MAX_LENGTH, SHAPE, dtype="bfloat16")
    return [folder / str(layers) for layers in (FEW_LAYERS, 2 * FEW_LAYERS)]


@pytest.mark.parametrize("flow", DECODED)
def test_what_a_decode_step_asks_of_a_device_does_not_grow(shallow: list[Path], flow: str):
    few, many = (counted_steps(model, [flow], 256, 2)[flow] for model in shallow)
    a_layer, beside, waits, uploads = STEP_BARS[flow.partition(":")[0]]
    launches = per_layer(few, many, Kind.LAUNCH, FEW_LAYERS)
    assert launches <= a_layer
    assert count_of(few, Kind.LAUNCH) - FEW_LAYERS * launches <= beside
    assert count_of(few, Kind.WAIT) <= waits
    assert count_of(few, Kind.WAITING_UPLOAD) <= uploads


@pytest.mark.parametrize("flow", DECODED)
def test_a_flow_decodes_on_it_as_on_the_cpu(shallow: list[Path], flow: str):
    read, _ = prompts(300, 1)
    found = []
    for device in ("cpu", "cuda"):
        with torch.inference_mode(), FakeDevice():
            engine = Engine(
                shallow[0], dtype="float32", device=device, num_pages=PAGES, enforce_eager=True
            )
            sampling = SamplingParams(6, ignore_eos=True)
            requests = [Request(read[:count], "full", sampling, flow=flow) for count in (290, 200)]
            found.append([result.token_ids for result in engine.generate(requests)])
    assert found[0] == found[1]


def test_it_counts_what_makes_a_host_wait():
    kinds = {
        "item": lambda tensor: tensor.sum().item(),
        "cpu": lambda tensor: tensor.cpu(),
        "list": lambda tensor: tensor.tolist(),
        "nonzero": lambda tensor: tensor.nonzero(),
        "mask": lambda tensor: tensor[tensor > 0],
    }
    with torch.inference_mode(), FakeDevice() as device:
        tensor = torch.ones(8, device="cuda")
        for name, act in kinds.items():
            with device.counting() as operations:
                act(tensor)
            assert count_of(operations, Kind.WAIT) == 1, name
        with device.counting() as operations:
            torch.ones(8).to("cuda")
            torch.tensor([1, 2], device="cuda")
            torch.ones(8).to("cuda", non_blocking=True)
            torch.ones(8).pin_memory().to("cuda", non_blocking=True)
        assert count_of(operations, Kind.WAITING_UPLOAD) == 3
        assert count_of(operations, Kind.UPLOAD) == 1
        with device.counting() as operations:
            summed = (tensor + 1).view(2, 4)[0]
        assert [one.kind for one in operations] == [Kind.LAUNCH, Kind.VIEW, Kind.VIEW]
        assert operations[0].nbytes == tensor.held.nbytes
    assert summed.device == CUDA
    assert torch.equal(summed.held, torch.full((4,), 2.0))


def test_it_refuses_what_cuda_refuses():
    with FakeDevice():
        tensor = torch.ones(8, device="cuda")
        with pytest.raises(RuntimeError, match="on the CPU"):
            tensor + torch.ones(8)
        with pytest.raises(TypeError, match="numpy"):
            tensor.numpy()
        with pytest.raises(RuntimeError, match="indexed"):
            torch.ones(8)[tensor.long()]
        assert (tensor + torch.tensor(1.0)).held.tolist() == [2.0] * 8  # a number may be on the CPU


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a device")
def test_nothing_is_left_of_it():
    made = torch.tensor
    with FakeDevice():
        assert torch.tensor is not made
    assert torch.tensor is made
    with pytest.raises(ValueError, match="cuda"):
        Engine(MODEL_DIR, device="cuda")
