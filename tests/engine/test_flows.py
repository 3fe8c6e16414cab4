"""Decode steps under flows: dense where nothing can be left out, exact with all blocks, right in
whatever company."""

from pathlib import Path

import numpy as np
import pytest
import torch

from every_flow import NAMED
from kvgraft import Engine, Request, RequestError, SamplingParams
from kvgraft.flows import FLOWS
from kvgraft.flows.block_topk import BlockTopK
from kvgraft.kernels import dispatch
from models import VOCAB_SIZE

LENGTHS = (40, 150, 400, 90)


def tokens(count: int, seed: int = 0) -> list[int]:
    return np.random.default_rng(seed).integers(3, VOCAB_SIZE, count).tolist()


def request(count: int, flow: str = "dense", seed: int = 0, **fields: object) -> Request:
    return Request(
        tokens(count, seed), "full", SamplingParams(24, ignore_eos=True), flow=flow, **fields
    )  # type: ignore[arg-type]


@pytest.fixture(scope="module")
def shared(model_dirs: dict[str, Path]) -> Engine:
    return Engine(model_dirs["llama"], dtype="float32", block_size=8, poison_dropped_pages=True)


@pytest.fixture
def engine(shared: Engine) -> Engine:
    shared.clear_cache()
    yield shared  # type: ignore[misc]
    shared.check()


# which leaves out what it may
@pytest.mark.parametrize("flow", sorted(NAMED.keys() - {"sonnet_above_mean_gate"}))
def test_with_all_blocks_a_flow_is_dense_attention(
    engine: Engine, flow: str, monkeypatch: pytest.MonkeyPatch
):
    # else nothing would be sparse
    monkeypatch.setattr("kvgraft.decode.flow.Program.reaches", lambda *_: True)
    dense = engine.generate([request(count, seed=count) for count in LENGTHS])
    sparse = engine.generate(
        [
            request(count, f"{NAMED[flow]}:topk_blocks=60,layers_skip=none", count)
            for count in LENGTHS
        ]
    )
    assert [result.token_ids for result in sparse] == [result.token_ids for result in dense]


@pytest.mark.parametrize("flow", NAMED)
def test_company_changes_nothing(engine: Engine, flow: str):
    requests = [
        request(
            count, f"{NAMED[flow]}:topk_blocks=3", count, forced_output=tokens(4), remember=False
        )
        for count in LENGTHS
    ]
    requests += [request(200), request(200, "quest:topk_blocks=5")]
    together = [result.token_ids for result in engine.generate(requests)]
    assert together == [engine.generate([one])[0].token_ids for one in requests]


@pytest.mark.parametrize(
    "flow", ["quest", "h2o", "nsa_block_topk", "sonnet_value_weighted_centroid"]
)
def test_generated_kernels_choose_the_same(
    engine: Engine, flow: str, monkeypatch: pytest.MonkeyPatch
):
    requests = [
        request(count, f"{NAMED[flow]}:topk_blocks=3", count, remember=False) for count in (150, 90)
    ]
    expected = [result.token_ids for result in engine.generate(requests)]
    calls = []
    run = dispatch.generated
    monkeypatch.setattr(dispatch, "generates", lambda *_: True)
    monkeypatch.setattr(dispatch, "generated", lambda *args: calls.append(run(*args)))
    assert [result.token_ids for result in engine.generate(requests)] == expected
    assert len(calls) >= 23  # steps after the first token, in the layer that is sparse


def test_less_is_attended_to(engine: Engine):
    dense, sparse = (
        engine.generate([request(400, flow)])[0] for flow in ("dense", "streaming:topk_blocks=1")
    )
    assert dense.token_ids != sparse.token_ids
    short = [
        engine.generate([request(30, flow)])[0].token_ids
        for flow in ("dense", "streaming:topk_blocks=4")
    ]
    assert short[0] == short[1]  # 54 tokens at the end: all blocks are attended to


def test_a_flow_sees_what_the_model_computes(engine: Engine, monkeypatch: pytest.MonkeyPatch):
    """The attention of a step is that of the tokens in the blocks that the keys in the pool make
    the best."""
    seen = []
    from kvgraft.decode import indexer

    def spy(query, keys, values, tables, lengths, *rest):  # type: ignore[no-untyped-def]
        [sequence] = engine.scheduler.running
        seen.append(
            (
                query,
                keys,
                tables,
                lengths,
                torch.from_numpy(sequence.pages.pages[0]).to(keys.device),
            )
        )
        return indexer_attention(query, keys, values, tables, lengths, *rest)

    indexer_attention = indexer.block_sparse_attention
    monkeypatch.setattr(indexer, "block_sparse_attention", spy)
    engine.generate(
        [
            Request(
                tokens(201),
                "full",
                SamplingParams(2, ignore_eos=True),
                flow="block_topk:topk_blocks=2",
            )
        ]
    )
    assert len(seen) == 2  # layers, of which the first is dense
    query, keys, tables, lengths, pages = seen[0]
    # first, two best, the last two: of 202 tokens the last holds two
    assert lengths.tolist() == [4 * 8 + 2, 4 * 8 + 2]
    num_pages = len(keys) // 2
    for head in range(2):
        blocks = pages[:26] + head * num_pages
        score = (keys[blocks[:25]].mean(1) @ query[head].T).amax(1)
        best = score[1:24].topk(2).indices.sort().values + 1
        assert tables[head].tolist() == [blocks[0], *blocks[best].tolist(), *blocks[24:].tolist()]


def test_a_flow_begins_at_from_tokens(engine: Engine):
    answer = {"forced_output": tokens(20, 1), "return_logits": True, "remember": False}
    dense, sparse, later = (
        engine.generate([request(400, flow, **answer)])[0].logits
        for flow in (
            "dense",
            "streaming:topk_blocks=1,from_tokens=400",
            "streaming:topk_blocks=1,from_tokens=411",
        )
    )
    is_dense = [bool((a == b).all()) for a, b in zip(dense, later, strict=True)]
    # The step that computes token 411 is the first sparse one.
    assert is_dense == [True] * 11 + [False] * (len(is_dense) - 11)
    assert not torch.equal(sparse[1], dense[1])  # type: ignore[index]


def test_a_given_answer_is_computed_under_the_flow(engine: Engine):
    sparse = "streaming:topk_blocks=1"
    dense, given = (
        engine.generate(
            [request(400, flow, forced_output=tokens(20, 1), return_logits=True, remember=False)]
        )[0]
        for flow in ("dense", sparse)
    )
    assert given.token_ids[:20] == dense.token_ids[:20] == tokens(20, 1)
    assert torch.equal(given.first_logits, dense.first_logits)  # type: ignore[arg-type]  # of the prompt
    assert float((given.logits[1:20] - dense.logits[1:20]).abs().max()) > 0.01  # type: ignore[index]


def test_what_follows_a_sparse_step_is_never_an_exact_hit(engine: Engine):
    for flow, found in ("streaming:topk_blocks=1", 200), ("dense", 216):
        engine.clear_cache()
        answer = engine.generate([request(200, flow)])[0].token_ids
        again = Request([*tokens(200), *answer], "full", SamplingParams(1))
        assert engine.generate([again])[0].report.prefix_tokens == found


def test_a_flow_with_state_shares_no_prefix_but_takes_grafts(engine: Engine):
    alone = [
        engine.generate([request(200, "h2o:topk_blocks=2", remember=False)])[0].token_ids
        for _ in range(2)
    ]
    assert alone[0] == alone[1]
    both = engine.generate([request(200, "h2o:topk_blocks=2"), request(200, "h2o:topk_blocks=2")])
    assert [result.token_ids for result in both] == alone
    late = engine.generate([request(200, "h2o:topk_blocks=2"), request(200, "quest:topk_blocks=2")])
    assert [result.report.prefix_tokens for result in late] == [0, 192]
    assert late[0].token_ids == alone[0]
    copied = engine.generate(
        [
            Request(
                tokens(200), "naive", SamplingParams(24, ignore_eos=True), flow="h2o:topk_blocks=2"
            )
        ]
    )[0]
    assert copied.report.grafted_tokens >= 192
    assert copied.token_ids == alone[0]


def test_a_full_pool_lets_sparse_requests_wait(model_dirs: dict[str, Path]):
    small = Engine(
        model_dirs["llama"], dtype="float32", block_size=8, num_pages=60, poison_dropped_pages=True
    )
    requests = [
        request(count, f"{flow}:topk_blocks=3", count)
        for count, flow in zip((200, 300, 250), FLOWS, strict=False)
    ]
    together = [result.token_ids for result in small.generate(requests)]
    small.clear_cache()
    assert together == [small.generate([one])[0].token_ids for one in requests]
    small.check()


@pytest.mark.parametrize(
    ("fields", "error"),
    [
        ({"flow": "quest3"}, "unknown flow 'quest3': choose from block_topk"),
        ({"flow": "quest:r=1"}, "flow 'quest' has no option 'r': it has topk_blocks, layers_skip"),
        ({"flow": "quest:topk_blocks=0"}, "topk_blocks must be an integer of at least 1, got 0"),
        (
            {"flow": "quest:layers_skip=x"},
            "layers_skip must be layers, such as 0 or 0[+]1, or none, got 'x'",
        ),
        ({"flow": "dense:topk_blocks=1"}, "flow 'dense' has no options"),
        ({"flow": "nothing.py"}, "there is no file of flows nothing.py"),
    ],
)
def test_bad_flows_are_refused(engine: Engine, fields: dict[str, object], error: str):
    with pytest.raises(RequestError, match=error):
        engine.generate([request(40, **fields)])  # type: ignore[arg-type]


def test_a_flow_of_a_file(engine: Engine, tmp_path: Path):
    path = tmp_path / "mine.py"
    path.write_text(
        "from kvgraft.decode import Flow, GeMM, Max, Mean, topK\n\n\n"
        "class Mine(Flow):\n    name = 'mine'\n\n"
        "    def create_cache(self, block_size, head_dim):\n        return {'centroids': "
        "(head_dim,)}\n\n"
        "    def forward_cache(self, c):\n        c['centroids'] = Mean(c['k'], dim=2)\n\n"
        "    def forward_indexer(self, q, c):\n"
        "        return topK(Max(GeMM(c['centroids'], q.T), dim=2), self.topk_blocks)\n"
    )
    theirs, ours = (
        engine.generate([request(300, f"{flow}:topk_blocks=4")])[0].token_ids
        for flow in (path, "block_topk")
    )
    assert theirs == ours
    path.write_text(
        path.read_text().replace("GeMM(c['centroids'], q.T)", "GeMM(c['centroid'], q.T)")
    )
    with pytest.raises(
        RequestError, match=r"mine.py:14: there is no cache 'centroid': choose from k, v, centroids"
    ):
        engine.generate([request(300, str(path))])
    path.write_text(
        path.read_text() + path.read_text().replace("Mine", "Other").replace("mine", "other")
    )
    with pytest.raises(
        RequestError, match=r"several flows: name one \(.*mine.py:mine\) of mine, other"
    ):
        engine.generate([request(300, str(path))])


def test_the_engine_has_a_flow_of_its_own(model_dirs: dict[str, Path]):
    mine = Engine(model_dirs["llama"], dtype="float32", block_size=8, flow=BlockTopK(topk_blocks=2))
    one, dense = request(300), request(300)
    one = Request(one.prompt, "full", one.sampling)
    named = Request(one.prompt, "full", one.sampling, flow="block_topk:topk_blocks=2")
    found = [result.token_ids for result in mine.generate([one, named, dense])]
    assert found[0] == found[1] != found[2]
