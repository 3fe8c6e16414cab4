"""LoRA: what was read under an adapter is that adapter's, and what is recovered is recovered under
it."""

from collections.abc import Iterator
from dataclasses import replace
from itertools import chain
from pathlib import Path
from typing import Any

import pytest
from engines import BLOCK, EVERY_HEAD, EVERYTHING, NAIVE, OFF, Ask, words
from processes import HostProcess

from models import make_adapter

pytestmark = pytest.mark.slow

LORA = {"enable_lora": True, "max_lora_rank": 8}
ROOM = (
    # for adapters, more than there are: on a CPU vLLM computes requests without one by the last
    # slot, if others run
    8
)
DOCUMENT, OTHER, LONG = words(300, 1), words(200, 2), words(900, 3)


def prompt(seed: int, *documents: list[int]) -> list[int]:
    """Documents behind an opening of its own, and a question."""
    return [*words(40, 100 + seed), *chain(*documents), *words(30, 200 + seed)]


@pytest.fixture(scope="module")
def adapters(model: Path, tmp_path_factory: pytest.TempPathFactory) -> list[dict[str, Any]]:
    """Two adapters, as fields of vLLM's `LoRARequest`."""
    directory = tmp_path_factory.mktemp("adapters")
    return [
        {
            "lora_name": name,
            "lora_int_id": number,
            "lora_path": str(make_adapter(directory / name, model, seed=number)),
        }
        for number, name in enumerate("ab", 1)
    ]


@pytest.fixture(scope="module")
def truth(model: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[HostProcess]:
    """Plain vLLM with the same adapters."""
    log = tmp_path_factory.mktemp("truth") / "log"
    process = HostProcess(model, log, with_kvgraft=False, max_loras=ROOM, **LORA)
    yield process
    process.close()


@pytest.fixture(scope="module")
def roomy(model: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[HostProcess]:
    """Ours, with room for all adapters."""
    process = HostProcess(
        model, tmp_path_factory.mktemp("roomy") / "log", with_kvgraft=True, max_loras=ROOM, **LORA
    )
    yield process
    process.close()


@pytest.fixture(scope="module")
def cramped(model: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[HostProcess]:
    """Ours, with room for one adapter, which it forgets for another; every recovery spans several
    steps."""
    small = {"max_num_batched_tokens": 64, "max_cpu_loras": 1, "max_loras": 1}
    process = HostProcess(
        model, tmp_path_factory.mktemp("cramped") / "log", with_kvgraft=True, **small, **LORA
    )
    yield process
    process.close()


def read(process: HostProcess, text: list[int], adapter: dict[str, Any] | None, salt: str) -> None:
    process.ask(Ask(text, OFF, salt, max_tokens=1, adapter=adapter))


def plain(ask: Ask) -> Ask:
    """What plain vLLM is asked for the true answer."""
    return replace(ask, options=None, salt=None)


def test_adapters_change_every_answer(truth: HostProcess, adapters: list[dict[str, Any]]):
    answers = truth.ask(
        *[Ask(prompt(1, DOCUMENT), adapter=adapter) for adapter in (None, *adapters)]
    )
    assert len({tuple(answer.tokens) for answer in answers}) == 3


def test_recomputing_everything_gives_the_adapters_own_answer(
    truth: HostProcess, roomy: HostProcess, adapters: list[dict[str, Any]]
):
    for number, adapter in enumerate((None, *adapters)):
        read(roomy, DOCUMENT, adapter, "exact")
        ask = Ask(prompt(number, DOCUMENT), EVERYTHING, "exact", adapter=adapter)
        [answer], [expected] = roomy.ask(ask), truth.ask(plain(ask))
        assert answer.grafted >= len(DOCUMENT) - 2 * BLOCK
        assert answer.report["recomputed_tokens"] == answer.grafted
        assert answer.tokens == expected.tokens


@pytest.mark.parametrize("room", ["roomy", "cramped"])
def test_heads_are_recomputed_under_the_adapter_in_all_three_steps(
    truth: HostProcess, adapters: list[dict[str, Any]], room: str, request: pytest.FixtureRequest
):
    """`redknot`: projections, what follows the attention, and FFNs; beside others, in several steps
    of vLLM."""
    process: HostProcess = request.getfixturevalue(room)
    users = [None, *adapters] if room == "roomy" else adapters
    for adapter in users:
        read(process, DOCUMENT, adapter, "heads")
    asks = [
        Ask(prompt(number, DOCUMENT), EVERY_HEAD, "heads", adapter=adapter)
        for number, adapter in enumerate(users * 2)
    ]
    for answer, expected in zip(process.ask(*asks), truth.ask(*map(plain, asks)), strict=True):
        assert answer.grafted == answer.report["recomputed_tokens"] >= len(DOCUMENT) - 2 * BLOCK
        assert answer.tokens == expected.tokens


def test_heads_reuse_what_was_read_under_the_adapter(
    roomy: HostProcess, adapters: list[dict[str, Any]]
):
    for adapter in adapters:
        read(roomy, DOCUMENT, adapter, "reused heads")
    by_head = {"policy": "redknot:repair=off,recent_tokens=8,min_ffn_tokens=4"}
    asks = [
        Ask(prompt(1, DOCUMENT), by_head, "reused heads", adapter=adapter) for adapter in adapters
    ]
    one_by_one = [roomy.ask(ask)[0] for ask in asks]
    assert all(answer.grafted for answer in one_by_one)
    assert one_by_one[0].tokens != one_by_one[1].tokens
    assert [answer.tokens for answer in roomy.ask(*asks)] == [
        answer.tokens for answer in one_by_one
    ]


def test_what_is_grafted_is_what_was_read_under_the_adapter(
    truth: HostProcess, roomy: HostProcess, adapters: list[dict[str, Any]]
):
    read(roomy, DOCUMENT, adapters[0], "source")
    ask = Ask(prompt(1, DOCUMENT), NAIVE, "source", adapter=adapters[0])
    [whole] = roomy.ask(ask)
    assert whole.grafted > 0
    assert whole.report["recomputed_tokens"] == 0
    roomy.counted("poison_known")
    [poisoned] = roomy.ask(replace(ask, prompt=prompt(2, DOCUMENT)))
    assert poisoned.grafted > 0
    assert poisoned.tokens != truth.ask(plain(replace(ask, prompt=prompt(2, DOCUMENT))))[0].tokens


def test_text_is_known_under_its_own_adapter_only(
    roomy: HostProcess, adapters: list[dict[str, Any]]
):
    readers = [None, adapters[0], adapters[1]]
    for number, reader in enumerate(readers):
        salt = f"known {number}"
        read(roomy, DOCUMENT, reader, salt)
        for seed, asker in enumerate(readers):
            [answer] = roomy.ask(Ask(prompt(seed, DOCUMENT), NAIVE, salt, adapter=asker))
            assert (answer.grafted > 0) == (asker is reader)
            [again] = roomy.ask(Ask([*DOCUMENT, *words(20, seed)], OFF, salt, adapter=asker))
            assert (again.cached > 0) == (asker is reader), "vLLM's own exact hits"


def test_a_conversation_goes_on_under_its_own_adapter_only(
    roomy: HostProcess, adapters: list[dict[str, Any]]
):
    turn = prompt(1, DOCUMENT)
    for adapter in adapters:
        read(roomy, DOCUMENT, adapter, "conversation")
    [first] = roomy.ask(Ask(turn, NAIVE, "conversation", adapter=adapters[0]))
    assert first.grafted > 0
    following = Ask(
        [*turn, *first.tokens, *words(40, 9)], NAIVE, "conversation", adapter=adapters[1]
    )
    assert roomy.ask(following)[0].report["continued_tokens"] == 0
    assert roomy.ask(replace(following, adapter=None))[0].report["continued_tokens"] == 0
    assert roomy.ask(replace(following, adapter=adapters[0]))[0].report["continued_tokens"] > 0


def mixed(adapters: list[dict[str, Any]], salt: str) -> list[Ask]:
    """Requests that arrive together, of two adapters and of the model itself, of two policies and
    without reuse."""
    a, b = adapters
    users = [a, None, b, b, None, a, a]
    options = [
        EVERYTHING,
        EVERYTHING,
        EVERYTHING,
        {"policy": "spread", "recompute_share": 1.0},
        OFF,
        OFF,
        EVERYTHING,
    ]
    pairs = enumerate(zip(users, options, strict=True))
    return [
        Ask(prompt(at, DOCUMENT, OTHER), chosen, salt, adapter=user) for at, (user, chosen) in pairs
    ]


@pytest.mark.parametrize("room", ["roomy", "cramped"])
def test_requests_of_several_adapters_are_served_together(
    truth: HostProcess, adapters: list[dict[str, Any]], room: str, request: pytest.FixtureRequest
):
    """With room for one, adapters push each other out while a recovery is paused: see `ROOM` for
    the others."""
    process: HostProcess = request.getfixturevalue(room)
    for adapter in (None, *adapters):
        read(process, DOCUMENT, adapter, "mixed")
        read(process, OTHER, adapter, "mixed")
    asks = [ask for ask in mixed(adapters, "mixed") if ask.adapter or room == "roomy"]
    for ask, answer, expected in zip(
        asks, process.ask(*asks), truth.ask(*map(plain, asks)), strict=True
    ):
        assert (answer.grafted > 0) == (ask.options is not OFF)
        assert answer.tokens == expected.tokens


def test_answers_go_on_under_their_own_adapters_while_others_are_recovered(
    truth: HostProcess, cramped: HostProcess, adapters: list[dict[str, Any]]
):
    """Steps that decode under one adapter, and in each of them a part of a long recovery under
    another."""
    for adapter in adapters:
        read(cramped, LONG, adapter, "paused")
    asks = [
        Ask(words(20, 5), OFF, "paused", max_tokens=40, adapter=adapters[0]),
        Ask(prompt(1, LONG), EVERYTHING, "paused", adapter=adapters[0]),
        Ask(prompt(2, LONG), EVERYTHING, "paused", adapter=adapters[1]),
        Ask(prompt(3, LONG), EVERYTHING, "paused", adapter=adapters[1]),
    ]
    answers = cramped.ask(*asks)
    assert [answer.grafted > 0 for answer in answers] == [False, True, True, True]
    assert [answer.tokens for answer in answers] == [
        answer.tokens for answer in truth.ask(*map(plain, asks))
    ]


def test_documents_are_kept_by_adapter(roomy: HostProcess, adapters: list[dict[str, Any]]):
    """`condense` reads documents on their own, into host memory."""
    kept = {"policy": "condense"}
    for adapter in adapters:
        read(roomy, DOCUMENT, adapter, "kept")
    asks = [Ask(prompt(1, DOCUMENT), kept, "kept", adapter=adapter) for adapter in adapters]
    one_by_one = [roomy.ask(ask)[0] for ask in asks]
    assert all(answer.report["kept_tokens"] for answer in one_by_one)
    assert [answer.tokens for answer in roomy.ask(*asks)] == [
        answer.tokens for answer in one_by_one
    ]
    assert one_by_one[0].tokens != one_by_one[1].tokens


def test_other_weights_under_the_same_name_know_nothing(
    model: Path,
    truth: HostProcess,
    roomy: HostProcess,
    adapters: list[dict[str, Any]],
    tmp_path: Path,
):
    """Loaded in place, from the same path: vLLM's own prefix cache would go on with what the old
    weights computed."""
    path = make_adapter(tmp_path / "same", model, seed=11)
    adapter = {"lora_name": "same", "lora_int_id": 9, "lora_path": str(path)}
    read(roomy, DOCUMENT, adapter, "reload")
    read(roomy, OTHER, adapter, "reload")
    ask = Ask(prompt(1, DOCUMENT), EVERYTHING, "reload", adapter=adapter)
    assert roomy.ask(ask)[0].grafted > 0

    make_adapter(path, model, seed=12)
    [before] = roomy.ask(replace(ask, prompt=prompt(2, DOCUMENT)))
    assert before.grafted > 0, "the files have changed, but nobody has loaded them"

    anew, other = (
        adapter | {"load_inplace": True},
        {**adapter, "lora_path": str(tmp_path / "other")},
    )
    make_adapter(tmp_path / "other", model, seed=12)
    for again in (replace(ask, options=OFF), replace(ask, prompt=prompt(3, OTHER), options=NAIVE)):
        [answer], [expected] = (
            roomy.ask(replace(again, adapter=anew)),
            truth.ask(Ask(again.prompt, adapter=other)),
        )
        assert answer.cached == 0
        assert answer.tokens == expected.tokens
    again = Ask(prompt(4, OTHER), EVERYTHING, "reload", adapter=anew)
    [answer], [expected] = roomy.ask(again), truth.ask(Ask(again.prompt, adapter=other))
    assert answer.grafted > 0
    assert answer.tokens == expected.tokens

    make_adapter(path, model, seed=11)
    [answer] = roomy.ask(replace(ask, prompt=prompt(5, DOCUMENT), adapter=anew))
    assert answer.grafted > 0, "the first weights are back, and so is what they know"


def test_an_adapter_whose_files_are_gone_is_served_without_reuse(
    model: Path, roomy: HostProcess, tmp_path: Path
):
    path = make_adapter(tmp_path / "gone", model, seed=21)
    adapter = {"lora_name": "gone", "lora_int_id": 10, "lora_path": str(path)}
    read(roomy, DOCUMENT, adapter, "gone")
    for file in path.iterdir():
        file.unlink()
    [answer] = roomy.ask(Ask(prompt(1, DOCUMENT), NAIVE, "gone", adapter=adapter))
    assert answer.grafted > 0, "they are loaded, and what they were is known"
