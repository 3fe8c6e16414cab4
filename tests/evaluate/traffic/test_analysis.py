"""What is found of traffic whose repetitions are known."""

from collections.abc import Sequence
from dataclasses import asdict
from itertools import pairwise
from pathlib import Path

import numpy as np
import pytest

from kvgraft import Engine, Request, SamplingParams
from kvgraft.core.cost_model import WORK
from kvgraft.core.costs import Costs
from kvgraft.core.segmentation import Similarity
from kvgraft_lab.traffic.analysis import CHUNKS, KVGRAFT, PREFIX_CACHING, Analysed, analyse
from kvgraft_lab.traffic.chunks import FixedChunks
from kvgraft_lab.traffic.origins import Origin, Stretches, TokenCounts
from kvgraft_lab.traffic.replay import Replay, ReplaySettings
from kvgraft_lab.traffic.seconds import prefill_seconds
from kvgraft_lab.traffic.tables import by_depth, depth_limit
from kvgraft_lab.traffic.trace import RequestTrace, TracedRequest

RNG = np.random.default_rng(0)
DOCUMENTS = [RNG.integers(3, 40000, 608).astype(np.int32) for _ in range(4)]


def text(count: int) -> np.ndarray:
    return RNG.integers(3, 40000, count).astype(np.int32)


def trace(*prompts: Sequence[np.ndarray], sessions: Sequence[str] = ()) -> RequestTrace:
    """Prompts of several messages; all of one session unless told otherwise."""
    requests = []
    for number, pieces in enumerate(prompts):
        session = sessions[number] if sessions else "one"
        starts = np.cumsum([0, *map(len, pieces[:-1])])
        turn = 1 + sum(request.session == session for request in requests)
        requests.append(TracedRequest(session, None, np.concatenate(pieces), starts, turn=turn))
    return RequestTrace(tuple(requests), 1, False, (), (), 0)


def sides(analysed: Analysed) -> dict[str, TokenCounts]:
    return analysed.analysis.largest.sides


def stretches(analysed: Analysed, request: int) -> list[tuple[int, int]]:
    """(origin, tokens) of a prompt under KVGraft."""
    found = analysed.answers[request][-1]
    return list(zip(found.origins.tolist(), found.lengths.tolist(), strict=True))


def test_a_session_that_is_only_appended_to_is_all_prefix():
    pieces = [text(100) for _ in range(6)]
    analysed = analyse(trace(*(pieces[:count] for count in range(1, 7))), ReplaySettings())
    plain, ours = sides(analysed)[PREFIX_CACHING], sides(analysed)[KVGRAFT]
    assert plain == ours == sides(analysed)[CHUNKS]
    assert plain.prefix == sum(100 * count // 16 * 16 for count in range(1, 6))
    assert plain.prompt == sum(100 * count for count in range(1, 7))
    assert [group.name for group in analysed.analysis.turns] == ["1", "2", "3", "4", "5", "6"]


def test_documents_in_another_order_are_grafted_and_continued():
    a, b, c, d = DOCUMENTS
    first, second = [text(50), a, b, c, d], [text(50), c, a, text(10)]
    analysed = analyse(trace(first, second, [*second, text(80)]), ReplaySettings())
    assert stretches(analysed, 0) == [(Origin.NEW, 2482)]
    assert stretches(analysed, 1) == [(Origin.NEW, 50), (Origin.GRAFTED, 1216), (Origin.NEW, 10)]
    assert stretches(analysed, 2) == [
        (Origin.PREFIX, 48),
        (Origin.CONTINUED, 1216),
        (Origin.NEW, 92),
    ]
    plain, chunks = (sides(analysed)[side] for side in (PREFIX_CACHING, CHUNKS))
    assert (plain.prefix, sum(plain.grafted)) == (1264, 0)
    assert sum(chunks.grafted) == 2 * 2 * 256, (
        "two whole chunks of each document, where it was not a prefix"
    )


def test_the_depth_of_grafts_is_told():
    a, b, c, d = DOCUMENTS
    # if deep ones may be, b is read behind a graft of a, and c behind one of b
    prompts = ([text(16), a], [text(16), a, b], [text(16), b, c], [text(16), c, d])
    counts = [
        sides(analyse(trace(*prompts), ReplaySettings(max_depth=depth)))[KVGRAFT].grafted
        for depth in range(3)
    ]
    assert counts == [(1216,), (608, 608), (608, 608, 608)]


def test_grafts_of_any_depth_are_found_by_default_and_shown_in_few_groups():
    texts = [text(608) for _ in range(9)]
    prompts = [[text(16), texts[0]], *([text(16), one, other] for one, other in pairwise(texts))]
    analysed = analyse(trace(*prompts), ReplaySettings()).analysis
    counts = analysed.largest.sides[KVGRAFT]
    assert len(counts.grafted) == 8, "the last one rests on seven others"
    assert by_depth(counts).startswith("0: ")
    assert [shown.split(":")[0] for shown in by_depth(counts).split(", ")] == [
        "0",
        "1",
        "2",
        "3",
        "4",
        "5+",
    ]
    assert (depth_limit(analysed.max_depth), depth_limit(4)) == ("any depth", "depth up to 4")


def test_near_duplicates_are_told_from_identical_text():
    edited = DOCUMENTS[0].copy()
    edited[5::12] = 40001  # eleven tokens in a row at most: less than a block
    prompts = ([text(16), DOCUMENTS[0]], [text(16), edited])
    exact = sides(analyse(trace(*prompts), ReplaySettings()))[KVGRAFT]
    similar = sides(
        analyse(trace(*prompts), ReplaySettings(similarity=Similarity(tau=0.05, shingle_tokens=4)))
    )[KVGRAFT]
    assert exact.known == 0
    assert similar.similar == similar.known > 300
    moved = trace(prompts[0], [text(30), DOCUMENTS[0]])
    found = sides(analyse(moved, ReplaySettings(similarity=Similarity())))[KVGRAFT]
    assert (sum(found.grafted), found.similar) == (607, 0), "the last token is computed in any case"


def test_a_smaller_pool_finds_less():
    documents = [[text(32), DOCUMENTS[number % 4], text(16)] for number in range(12)]
    pools = analyse(trace(*documents), ReplaySettings(), [None, 2000, 800]).analysis.pools
    assert [pool.tokens for pool in pools] == [800, 2000, None]
    for side in (CHUNKS, KVGRAFT):
        known = [pool.sides[side].known for pool in pools]
        assert known == sorted(known)
        assert known[0] == 0 < known[-1]
    assert pools[0].sides[KVGRAFT].known < pools[-1].sides[KVGRAFT].known


def test_a_pool_that_no_request_fits_into_is_refused():
    with pytest.raises(
        ValueError, match="a pool of 600 tokens: the longest request of this trace needs 624"
    ):
        analyse(trace([DOCUMENTS[0], text(1)]), ReplaySettings(), [600])


def test_what_is_given_up_in_a_small_pool_is_counted():
    prompts = ([text(16), *DOCUMENTS[:3]], [text(16), *DOCUMENTS[2::-1]])
    tight, ample = analyse(trace(*prompts), ReplaySettings(), [1840, None]).analysis.pools
    assert (tight.given_up, tight.sides[KVGRAFT].known) == (1, 0)
    assert (ample.given_up, ample.sides[KVGRAFT].known) == (0, 1823)


def test_sessions_share_a_cache_unless_told_otherwise():
    prompts = ([text(16), DOCUMENTS[0], text(8)], [text(16), DOCUMENTS[0], text(8)])
    traced = trace(*prompts, sessions=("a", "b"))
    together, alone = (
        analyse(traced, ReplaySettings(), per_session=alone) for alone in (False, True)
    )
    assert sides(together)[KVGRAFT].grafted == (608,)
    assert sides(alone)[KVGRAFT].known == 0
    assert [group.name for group in alone.analysis.sessions] == ["a", "b"]
    assert alone.analysis.order == "each session on its own"


def test_the_same_trace_gives_the_same_analysis():
    prompts = [
        [text(16), *(DOCUMENTS[i] for i in RNG.permutation(4)[:2]), text(40)] for _ in range(8)
    ]
    runs = [analyse(trace(*prompts), ReplaySettings(max_depth=1), [1400, None]) for _ in range(2)]
    assert asdict(runs[0].analysis) == asdict(runs[1].analysis)
    assert [stretches(runs[0], i) for i in range(8)] == [stretches(runs[1], i) for i in range(8)]


def test_later_turns_share_rows():
    pieces = [text(16) for _ in range(20)]
    analysed = analyse(trace(*(pieces[:count] for count in range(1, 21))), ReplaySettings())
    assert [group.name for group in analysed.analysis.turns][7:] == ["8", "9 to 16", "17 to 20"]
    assert sum(group.sides[KVGRAFT].requests for group in analysed.analysis.turns) == 20


def test_an_engine_reports_what_the_replay_says(model_dirs: dict[str, Path]):
    engine = Engine(model_dirs["llama"], max_depth=1, num_pages=60, costs="tokens")
    replay = Replay(ReplaySettings(max_depth=1), 60, grafts=True)
    documents = [RNG.integers(3, 190, 90) for _ in range(4)]
    asked: list[np.ndarray] = []
    for number in range(10):
        chosen = [documents[i] for i in RNG.permutation(4)[:3]]
        prompt = np.concatenate([RNG.integers(3, 190, 7 * number), *chosen]).astype(np.int32)
        if number % 3 == 2:
            prompt = np.concatenate([asked[-1], prompt[:80]])
        [result] = engine.generate(
            [Request(prompt.tolist(), sampling=SamplingParams(max_tokens=4, ignore_eos=True))]
        )
        counts = TokenCounts.of(
            [Stretches.of(replay.ask(prompt, np.array(result.token_ids, np.int32)))]
        )
        report = result.report
        found = (
            report.prefix_tokens,
            report.continued_tokens,
            report.grafted_tokens,
            report.fresh_tokens,
        )
        assert (counts.prefix, counts.continued, sum(counts.grafted), counts.new) == found, (
            f"request {number}"
        )
        asked.append(prompt)


@pytest.mark.parametrize("seed", range(5))
def test_seconds_are_those_of_computing_token_by_token(seed: int):
    rng = np.random.default_rng(seed)
    costs = Costs(pass_s=0.5, token_s=1e-3, pair_s=1e-5, copy_s=1e-4)
    origins = np.repeat(rng.integers(0, 8, 40), rng.integers(1, 50, 40)).astype(np.int16)
    origins[-1] = Origin.NEW
    seconds, grafts = costs.pass_s, False
    for position, origin in enumerate(origins.tolist()):
        computed = costs.token_s + costs.pair_s * (position + 1)
        if origin == Origin.NEW:
            seconds += computed
        elif origin >= Origin.SIMILAR:
            seconds, grafts = seconds + costs.copy_s + WORK * computed, True
    assert prefill_seconds(Stretches.of(origins), costs) == pytest.approx(
        seconds + grafts * costs.pass_s
    )


def test_seconds_are_told_of_pools_sessions_and_turns_if_there_are_costs():
    costs = Costs(pass_s=0.01, token_s=1e-3, pair_s=1e-7, copy_s=1e-6)
    a, b, c, d = DOCUMENTS
    traced = trace(
        [text(16), a, b], [text(16), b, a], [text(16), c, d], sessions=("one", "one", "two")
    )
    analysis = analyse(traced, ReplaySettings(costs=costs), [None, 4000]).analysis
    total = analysis.largest.seconds
    assert total is not None
    assert total.full == pytest.approx(sum(0.01 + 1.232 + 1e-7 * 1232 * 1233 / 2 for _ in range(3)))
    assert (
        total.full >= total.sides[PREFIX_CACHING] > total.sides[CHUNKS] > total.sides[KVGRAFT] > 0
    )
    assert total.saved(KVGRAFT) == total.full - total.sides[KVGRAFT]
    for groups in (analysis.turns, analysis.sessions):
        parts = [group.seconds for group in groups]
        assert sum(part.full for part in parts if part) == pytest.approx(total.full)
        assert sum(part.sides[KVGRAFT] for part in parts if part) == pytest.approx(
            total.sides[KVGRAFT]
        )
    assert all(pool.seconds for pool in analysis.pools)
    unpriced = analyse(traced, ReplaySettings()).analysis
    assert unpriced.costs is None
    assert [group.seconds for group in (*unpriced.pools, *unpriced.sessions, *unpriced.turns)] == [
        None
    ] * 5


def test_chunks_begin_where_messages_do_and_the_least_recently_used_go():
    document, fresh = DOCUMENTS[0], np.full(624, Origin.NEW, np.int16)
    chunks = FixedChunks(capacity=2 * 256)
    prompt, at = np.concatenate([text(16), document]), np.array([0, 16])
    assert set(chunks.ask(prompt, at, fresh).tolist()) == {Origin.NEW}
    found = chunks.ask(prompt, at, fresh)
    assert np.flatnonzero(found == Origin.GRAFTED).tolist() == list(range(16, 528))
    assert set(chunks.ask(prompt, np.array([0, 17]), fresh).tolist()) == {Origin.NEW}, (
        "cut in another place"
    )
    assert set(chunks.ask(prompt, at, fresh).tolist()) == {Origin.NEW}, (
        "two others took their place"
    )
