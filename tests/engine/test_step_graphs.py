"""Decode steps as CUDA graphs: on a device if there is one, else on the fake one, whose graphs
compute what was captured with what the same tensors hold then."""

from collections.abc import Iterator
from contextlib import nullcontext
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

import fake_device
from fake_device import FakeDevice, Kind
from fake_graphs import FakeGraph
from kvgraft import Engine, Request, SamplingParams
from kvgraft.engine import step_graphs
from kvgraft.engine.sequence_state import SequenceState
from kvgraft.engine.step_graphs import StepGraphs
from kvgraft.flows import DENSE, FLOWS
from kvgraft.kernels.watched import watching
from models import make_head_map, make_model

BLOCK, PAGES = 4, 120
PROMPTS = (41, 58, 47)  # tokens; three sequences are padded to four
CLOSE = {"atol": 1e-4, "rtol": 1e-4}  # of logits of order 5, summed in another order
H2O, STREAMING = "h2o:topk_blocks=2", "streaming:topk_blocks=2,layers_skip=none"
ASKED = (Kind.LAUNCH, Kind.UPLOAD, Kind.WAITING_UPLOAD, Kind.WAIT)
needs_fake = pytest.mark.skipif(
    torch.cuda.is_available(), reason="looks into graphs of the fake device"
)


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_model(tmp_path_factory.mktemp("model"), "llama", num_hidden_layers=2)


@pytest.fixture
def device(monkeypatch: pytest.MonkeyPatch) -> Iterator[FakeDevice | None]:
    """The fake device, with few processors, since its kernels are interpreted; None if there is a
    real one."""
    monkeypatch.setattr(fake_device, "PROCESSORS", 1)
    if torch.cuda.is_available():
        with torch.inference_mode():
            yield None
        return
    with torch.inference_mode(), FakeDevice(interprets=True) as fake:
        yield fake


class Sides:
    """Sequences that decode on a device and, the truth, on the CPU, over the same random keys and
    values."""

    def __init__(
        self, model: Path, flow: str = DENSE, prompts: tuple[int, ...] = PROMPTS, **options: Any
    ) -> None:
        self.device, self.cpu = self.engines = [
            Engine(
                model, dtype="float32", device=name, num_pages=PAGES, block_size=BLOCK, **options
            )
            for name in ("cuda", "cpu")
        ]
        self.noise = [
            torch.randn(pool.shape, generator=torch.manual_seed(0))
            for pool in self.cpu.memory.cache.pools
        ]
        for engine in self.engines:
            for pool, noise in zip(engine.memory.cache.pools, self.noise, strict=True):
                pool.copy_(noise)
        self.running: list[list[SequenceState]] = []  # pairs of the same
        for prompt in prompts:
            self.join(prompt, flow)

    @property
    def steps(self) -> StepGraphs:
        return self.device.scheduler.steps

    def join(self, prompt: int, flow: str = DENSE) -> None:
        """One sequence more."""
        text = np.random.default_rng(prompt).integers(3, 190, prompt).tolist()
        sampling = SamplingParams(40, ignore_eos=True)
        asked = Request(
            text, "full", sampling, namespace=str(prompt), flow=flow, return_logits=True
        )
        self.running.append([engine.occupy([asked])[0] for engine in self.engines])
        for sequence in self.running[-1]:
            sequence.tokens.append(text[0])

    def leave(self, number: int) -> None:
        """One sequence less."""
        for engine, sequence in zip(self.engines, self.running.pop(number), strict=True):
            engine.scheduler.abort([sequence])

    def step(self) -> tuple[Tensor, Tensor]:
        """One step on both sides; logits [b, V] of the device and of the CPU."""
        for engine in self.engines:
            engine.scheduler.step()
        found, expected = (
            torch.stack([sequence.logits[-1] for sequence in own])
            for own in zip(*self.running, strict=True)
        )
        return found, expected

    def check(self) -> None:
        """One step that is the same on both sides."""
        found, expected = self.step()
        torch.testing.assert_close(found, expected, **CLOSE)

    def pools_agree(self) -> bool:
        """Whether what has been written is the same on both sides, and nothing else has been
        touched."""
        agree = True
        for found, expected, noise in zip(
            *(engine.memory.cache.pools for engine in self.engines), self.noise, strict=True
        ):
            untouched = (expected == noise).all(-1)
            agree &= torch.allclose(found.cpu(), expected, **CLOSE)
            agree &= torch.equal(found.cpu()[untouched], noise[untouched])
        return agree

    def flows_agree(self) -> bool:
        """Whether flows hold the same of all pages of the last layer that are full."""
        held = [
            sequence.pages.pages[0, : sequence.num_computed // BLOCK]
            for _, sequence in self.running
        ]
        heads = np.array(self.cpu.memory.cache.layout.layers[-1].streams)
        rows = np.add.outer(PAGES * heads, np.concatenate(held)).ravel()
        indexers = zip(
            *(engine.scheduler.flows._indexers.values() for engine in self.engines), strict=True
        )
        return all(
            torch.allclose(one.caches[name].cpu()[rows], cache[rows], **CLOSE)
            for one, other in indexers
            for name, cache in other.caches.items()
        )


@pytest.mark.parametrize(
    "flow",
    [
        DENSE,
        H2O,
        STREAMING,
        *(pytest.param(f"{flow}:topk_blocks=3", marks=pytest.mark.slow) for flow in FLOWS),
    ],
)
@pytest.mark.usefixtures("device")
def test_replayed_steps_are_those_of_the_cpu(model: Path, flow: str):
    """Which pads nothing. Sequences come and go, and fill pages, between steps of one graph."""
    sides = Sides(model, flow)
    begins = {} if flow == DENSE else {"new_pages": 2}  # when a sequence begins to follow the flow
    for _ in range(4 if begins else 3):
        sides.check()
    assert sides.flows_agree()
    sides.leave(0)
    sides.join(71, flow)
    for _ in range(3 if begins else 2):
        sides.check()
    assert sides.pools_agree()
    assert sides.steps.counts == {"warmed_up": 1, "captured": 1, "replayed": 3} | begins


@needs_fake
@pytest.mark.parametrize("flow", [DENSE, H2O, STREAMING])
def test_a_step_of_a_shape_is_captured_the_same_whatever_it_computes(
    model: Path, device: FakeDevice, flow: str
):
    """All launches, with all numbers and places among their arguments; and the host computes
    nothing between them."""
    sides = Sides(model, flow)
    for _ in range(2 if flow == DENSE else 3):
        sides.step()
    [step] = sides.steps._steps.values()
    first, step._graph = step._graph, None  # so that the next is captured, too
    sides.running.append(sides.running.pop(0))
    for engine in sides.engines:
        engine.scheduler.running.append(engine.scheduler.running.pop(0))
    with device.counting() as operations:
        sides.step()
    second = step._graph
    assert isinstance(first, FakeGraph)
    assert isinstance(second, FakeGraph)
    assert len(first.signature) > 20
    assert first.signature == second.signature
    assert not [one for one in operations if one.kind is Kind.HOST and "_hidden" in one.functions]

    with device.counting() as operations:
        sides.step()
    asked = [
        (one.kind, one.name)
        for one in operations
        if "decode" in one.functions and one.kind in ASKED
    ]
    assert asked == [
        (Kind.UPLOAD, "copy to cuda"), (Kind.LAUNCH, "graph"), (Kind.LAUNCH, "rms_norm"),
        (Kind.LAUNCH, "linear"),
    ]  # fmt: skip


PARTS = {  # of what a step of four rows and LEAST_BLOCKS blocks is given, one behind the other
    "tokens": slice(0, 4),
    "positions": slice(4, 8),
    "places": slice(8, 12),
    "slots": slice(12, 16),
    "pages": slice(16, 16 + 4 * step_graphs.LEAST_BLOCKS),
    "full": slice(-5, None),
}


@pytest.mark.usefixtures("device")
@pytest.mark.parametrize("stale", ["nothing", *PARTS])
def test_no_part_of_the_input_could_be_stale(
    model: Path, monkeypatch: pytest.MonkeyPatch, stale: str
):
    """With one that is, a replay gives other logits, or leaves other keys, values or caches of the
    flow."""
    sides = Sides(model, H2O if stale == "full" else DENSE, (43, 43, 43))
    for _ in range(2):
        sides.step()
    if stale == "full":  # pages are full from the fifth step on
        sides.step()
        sides.step()
    else:
        sides.leave(0)
        sides.join(58)
    run, changed = step_graphs._FixedStep.run, []

    def run_with_old(step: Any, numbers: Tensor, *others: Any) -> Any:
        if stale != "nothing":
            old = step._room.cpu()[PARTS[stale]]
            changed.append(not torch.equal(old, numbers[PARTS[stale]]))
            numbers[PARTS[stale]] = old
        return run(step, numbers, *others)

    monkeypatch.setattr(step_graphs._FixedStep, "run", run_with_old)
    found, expected = sides.step()
    assert all(changed)
    assert sides.steps.counts["replayed"] >= 1
    agrees = (
        torch.allclose(found, expected, **CLOSE) and sides.pools_agree() and sides.flows_agree()
    )
    assert agrees == (stale == "nothing")


@pytest.mark.usefixtures("device")
def test_local_heads_are_captured_too(model: Path):
    sides = Sides(model, head_map=make_head_map(model, window=10), head_paging=True)
    for _ in range(5):
        sides.check()
    assert sides.steps.counts == {"warmed_up": 1, "captured": 1, "replayed": 3}


@pytest.mark.usefixtures("device")
def test_a_flow_beside_local_heads_is_captured_too(model: Path):
    sides = Sides(model, H2O, head_map=make_head_map(model, window=10), head_paging=True)
    for _ in range(5):
        sides.check()
    assert sides.steps.counts["replayed"] >= 2


@pytest.mark.slow
@pytest.mark.usefixtures("device")
@pytest.mark.parametrize(
    ("family", "flow"), [("deepseek_v3", H2O), ("qwen3", DENSE), ("mistral", DENSE)]
)
def test_families_are_captured(model_dirs: dict[str, Path], family: str, flow: str):
    sides = Sides(model_dirs[family], flow)
    for _ in range(5):
        sides.check()
    assert sides.steps.counts["replayed"] >= 2


@pytest.mark.usefixtures("device")
def test_what_cannot_be_captured_runs_without_and_is_counted(
    model: Path, model_dirs: dict[str, Path], monkeypatch: pytest.MonkeyPatch
):
    def reason(*arguments: Any, **options: Any) -> str:
        sides = Sides(*arguments, **options)
        sides.step()
        sides.check()
        [reason] = sides.steps.counts.keys() - {"new_pages"}
        assert sides.cpu.scheduler.steps.counts == {
            "enforce_eager" if options.get("enforce_eager") else "no_cuda": 2
        }
        return reason

    short = (9,)  # which no flow reaches
    assert reason(model, prompts=short, enforce_eager=True) == "enforce_eager"
    assert reason(model, prompts=short, residual_layers=[1]) == "residual_layers"
    experts = Engine(model_dirs["qwen3_moe"], dtype="float32", device="cuda", num_pages=8)
    assert step_graphs._never(experts.decoder, experts.memory.cache) == "experts"
    assert reason(model, STREAMING, prompts=(9, 41)) == "mixed_flows"
    assert (
        reason(
            model, "research/vortex/proposed/gpt.py:gpt_positional_smoothing:topk_blocks=2", (41,)
        )
        == "unfused_flow"
    )
    monkeypatch.setattr(step_graphs, "MOST_ROWS", 1)
    assert reason(model, prompts=(9, 10)) == "too_many_rows"
    asked: list[str] = []
    with watching(lambda stage: asked.append(stage) or nullcontext()):
        assert reason(model, prompts=short) == "watched"
    assert "attention" in asked


@needs_fake
def test_a_step_that_cuda_refuses_to_capture_runs_without(
    model: Path,
    device: FakeDevice,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
):
    sides = Sides(model)
    sides.check()
    real = step_graphs.last_hidden

    def waits(*arguments: Any) -> Tensor:
        hidden = real(*arguments)
        hidden.sum().item()
        return hidden

    with monkeypatch.context() as patched:
        patched.setattr(step_graphs, "last_hidden", waits)
        sides.check()
    sides.check()
    assert sides.steps.counts == {"warmed_up": 1, "not_captured": 2}
    refusal = "_local_scalar_dense: operation not permitted when stream is capturing"
    assert caplog.messages == [f"a decode step runs without a CUDA graph: {refusal}"]
    assert sides.pools_agree()


@pytest.mark.usefixtures("device")
def test_graphs_are_few_and_those_not_needed_go_first(model: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(step_graphs, "MOST_GRAPHS", 2)
    sides = Sides(model, prompts=(9,))
    steps = sides.steps

    def rows() -> list[int]:
        return [shape.rows for shape in steps._steps]

    sides.check()
    for prompt in (10, 11):
        sides.join(prompt)
        sides.check()
    assert rows() == [2, 4]
    sides.leave(0)
    sides.check()
    assert rows() == [4, 2]
    assert steps.counts == {"warmed_up": 3, "captured": 1}


@pytest.mark.usefixtures("device")
def test_a_sequence_that_grows_out_of_a_graph_gets_another(
    model: Path, monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.setattr(step_graphs, "LEAST_BLOCKS", 4)
    sides = Sides(model, prompts=(4 * BLOCK - 2,))
    for _ in range(4):
        sides.check()
    assert [shape.blocks for shape in sides.steps._steps] == [4, 8]
    assert sides.steps.counts == {"warmed_up": 2, "captured": 2}


@pytest.mark.usefixtures("device")
def test_graphs_go_with_what_they_read(model: Path):
    sides = Sides(model, STREAMING, (41,))
    for _ in range(3):
        sides.step()
    [shape] = sides.steps._steps
    assert shape.indexer is not None
    assert shape.indexer() is not None
    sides.leave(0)
    sides.join(41, H2O)  # whose caches take the place of the other's
    for _ in range(3):
        sides.check()
    [left] = sides.steps._steps
    assert shape.indexer() is None
    assert left != shape

    decoder = sides.device.decoder
    decoder.weights = replace(decoder.weights)
    sides.check()
    assert sides.steps.counts == {"new_pages": 2, "warmed_up": 3, "captured": 2}


def test_the_option_is_checked(model: Path):
    with pytest.raises(ValueError, match="enforce_eager must be true or false, got 'yes'"):
        Engine(model, enforce_eager="yes")  # type: ignore[arg-type]
