"""Latent attention (MLA): what a paged cache of latents holds, and flows that choose blocks by
them.

That logits, policies and documents are right is tested with those of the other families.
"""

from pathlib import Path

import numpy as np
import pytest
import torch
from safetensors import safe_open

from every_flow import CHANNELS, NAMED
from kvgraft import Engine, Request, SamplingParams
from kvgraft.decode import indexer
from models import VOCAB_SIZE

LENGTHS = (40, 150, 400, 90)
ROPE = "groups=8,masked=3+7"  # of 32 channels, 24 of the latent and 8 that turn, in halves


def request(count: int, flow: str = "dense") -> Request:
    tokens = np.random.default_rng(count).integers(3, VOCAB_SIZE, count).tolist()
    return Request(tokens, "full", SamplingParams(24, ignore_eos=True), flow=flow)


@pytest.fixture(scope="module", params=["deepseek_v2", "deepseek_v3"])
def engine(request: pytest.FixtureRequest, model_dirs: dict[str, Path]) -> Engine:
    return Engine(
        model_dirs[request.param], dtype="float32", block_size=8, poison_dropped_pages=True
    )


def test_a_token_is_kept_once(engine: Engine):
    # layers, tokens, rank and rope, float32
    assert engine.memory.cache.page_bytes == 3 * 8 * (24 + 8) * 4
    assert engine.memory.cache.values is engine.memory.cache.keys
    used = engine.generate([request(40)])[0].report.kv_bytes
    assert used == 8 * engine.memory.cache.page_bytes  # 63 tokens


# which leaves out what it may
@pytest.mark.parametrize("flow", sorted(NAMED.keys() - {"sonnet_above_mean_gate"}))
def test_with_all_blocks_a_flow_is_dense_attention(
    engine: Engine, flow: str, monkeypatch: pytest.MonkeyPatch
):
    # else nothing would be sparse
    monkeypatch.setattr("kvgraft.decode.flow.Program.reaches", lambda *_: True)
    engine.clear_cache()
    dense = engine.generate([request(count) for count in LENGTHS])
    sparse = engine.generate(
        [request(count, f"{NAMED[flow]}:topk_blocks=60,layers_skip=none") for count in LENGTHS]
    )
    assert [result.token_ids for result in sparse] == [result.token_ids for result in dense]


@pytest.mark.parametrize(
    ("flow", "aware"),
    [("block_topk:topk_blocks=2", True), (f"{CHANNELS}:channel_topk:topk_blocks=2,{ROPE}", False)],
)
def test_flows_see_the_fused_latent_or_its_content_alone(
    engine: Engine, flow: str, aware: bool, monkeypatch: pytest.MonkeyPatch
):
    seen = []
    attention = indexer.block_sparse_attention

    def spy(query, keys, values, tables, lengths, *rest):  # type: ignore[no-untyped-def]
        [sequence] = engine.scheduler.running
        seen.append(
            (query, keys, tables, torch.from_numpy(sequence.pages.pages[0]).to(keys.device))
        )
        return attention(query, keys, values, tables, lengths, *rest)

    monkeypatch.setattr(indexer, "block_sparse_attention", spy)
    engine.clear_cache()
    prompt = Request(
        request(201, flow).prompt, "full", SamplingParams(2, ignore_eos=True), flow=flow
    )
    engine.generate([prompt])
    [(query, keys, tables, pages), _] = seen  # layers, of which the first is dense
    masked = torch.tensor(
        [*range(32)] if aware else [*range(12), *range(16, 28)], device=query.device
    )
    routed = query.index_fill(2, masked, 0.0)  # what is masked, to be taken away
    score = (keys[pages[:25]].mean(1) @ (query if aware else query - routed)[0].T).amax(1)
    best = score[1:24].topk(2).indices.sort().values + 1
    assert tables[0].tolist() == [pages[0], *pages[best].tolist(), *pages[24:26].tolist()]


def test_a_payload_holds_latents_once(engine: Engine, model_dirs: dict[str, Path], tmp_path: Path):
    engine.clear_cache()
    path = tmp_path / "payload"
    engine.prefill(request(100), path)
    with safe_open(path, framework="pt") as file:
        assert list(file.keys()) == ["keys.0"]
    assert engine.resume(path).token_ids == engine.generate([request(100)])[0].token_ids
