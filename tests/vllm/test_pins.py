"""Pinned text survives what others do, belongs to one namespace, and leaves room for the rest."""

from typing import Any

import pytest
from engines import BLOCK, EVERYTHING, MAX_LENGTH, NAIVE, NUM_BLOCKS, OFF, Ask, words
from hosts import Host
from processes import HostProcess
from prometheus_client import Counter

from kvgraft.vllm.options import CONTROL_TOKEN, Control
from kvgraft.vllm.stats import METRICS

DOCUMENT = words(300, 1)
PROMPT = words(10, 2) + DOCUMENT


@pytest.fixture(autouse=True)
def _token(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(CONTROL_TOKEN, "a token of the test's own")


def control(
    host: Host, op: str, name: str = "", text: list[int] | None = None, salt: str | None = "a"
) -> Any:
    """What the API server sends, and what the engine tells it."""
    options = Control(op, name).as_params()["kvgraft"]
    [answer] = host.ask(Ask(text or [5], options, salt, max_tokens=1), limit=200)
    return answer.report


def names(host: Host, salt: str | None = "a") -> list[str]:
    return [segment["name"] for segment in control(host, "list", salt=salt)["pins"]]


def flood(host: Host, salt: str = "others") -> None:
    """As much text as the pool holds, twice over."""
    for seed in range(100, 104):
        host.ask(Ask(words(48 * BLOCK, seed), OFF, salt, max_tokens=1))


@pytest.mark.parametrize("pinned", [True, False])
def test_pinned_text_survives_a_flood(host: Host, plain: HostProcess, pinned: bool):
    if pinned:
        assert control(host, "pin", "manual", DOCUMENT)["num_pins"] == 1
        assert host.known.pool.num_used == 9
    else:
        host.read(DOCUMENT, salt="a")
    flood(host)
    [answer] = host.ask(Ask(PROMPT, EVERYTHING, "a"))
    assert answer.grafted == (288 if pinned else 0)
    assert [answer.tokens] == plain.tokens(PROMPT)


def test_the_life_of_a_segment(host: Host):
    assert control(host, "list") == {"pins": []}
    entry = {"name": "manual", "num_tokens": 288, "num_blocks": 9, "num_shed": 0, "hits": 0}
    assert control(host, "pin", "manual", DOCUMENT) == {"pin": entry, "num_pins": 1}
    host.ask(Ask(PROMPT, NAIVE, "a"), Ask(words(3, 3) + DOCUMENT, NAIVE, "a"))
    assert control(host, "list") == {"pins": [entry | {"hits": 2}]}
    notes = {"name": "notes", "num_tokens": 96, "num_blocks": 3, "num_shed": 0, "hits": 0}
    assert control(host, "pin", "notes", words(100, 4)) == {"pin": notes, "num_pins": 2}
    assert names(host) == ["manual", "notes"]
    assert host.known.pool.num_used == 9 + 3
    assert control(host, "delete", "manual") == {"pin": entry | {"hits": 2}, "num_pins": 1}
    assert names(host) == ["notes"]
    assert host.known.pool.num_used == 3
    assert control(host, "pin", "notes", words(200, 5))["num_pins"] == 1  # replaces the old one
    assert host.known.pool.num_used == 6
    # unpinned, not forgotten
    assert host.ask(Ask(words(4, 6) + PROMPT, NAIVE, "a"))[0].grafted == 288
    assert control(host, "delete", "notes")["num_pins"] == 0
    assert control(host, "list") == {"pins": []}
    assert host.known.pool.num_used == 0


def test_a_segment_does_not_inherit_the_hits_of_what_its_blocks_held_before(host: Host):
    for seed in range(1, 4):
        host.read(words(30 * BLOCK, seed), salt="a")
        host.ask(Ask(words(5, 9) + words(30 * BLOCK, seed), NAIVE, "a", max_tokens=1))
    assert (host.known.pool.hit_counts > 0).sum() > 60
    flood(host)
    assert control(host, "pin", "manual", words(30 * BLOCK, 4))["pin"]["hits"] == 0


def test_a_segment_is_its_namespace_s_own(host: Host):
    control(host, "pin", "manual", DOCUMENT, salt="a")
    assert control(host, "list", salt="b") == {"pins": []}
    assert control(host, "delete", "manual", salt="b")["status"] == 404
    assert control(host, "pin", "manual", words(64, 3), salt="b")["num_pins"] == 1
    assert host.ask(Ask(PROMPT, NAIVE, "b"))[0].cached == 0
    assert control(host, "delete", "manual", salt="b")["num_pins"] == 0
    assert names(host, "a") == ["manual"]


def test_operations_are_no_traffic(host: Host):
    host.stats.reset()
    control(host, "pin", "manual", DOCUMENT)
    control(host, "list")
    host.settle()
    assert (host.count("pool_blocks", "pinned"), host.count("pinned_documents")) == (9, 1)
    control(host, "delete", "manual")
    host.settle()
    assert (host.count("pool_blocks", "pinned"), host.count("pinned_documents")) == (0, 0)
    counted = {
        name.removeprefix("kvgraft:") for name, metric in METRICS.items() if metric.kind is Counter
    }
    assert {name: host.stats.data.get(f"kvgraft:{name}") for name in counted} == dict.fromkeys(
        counted
    )


def test_an_owner_takes_its_share_whatever_the_namespace(host: Host):
    """31 blocks of the pool may be pinned beside the longest request; half of them is 15."""

    def pin(name: str, salt: str, owner: str, seed: int) -> Any:
        options = Control("pin", name, owner, 0.5).as_params()["kvgraft"]
        [answer] = host.ask(Ask(words(7 * BLOCK, seed), options, salt, max_tokens=1), limit=200)
        return answer.report

    assert pin("one", "a", "ours", 1)["num_pins"] == 1
    assert pin("one", "b", "ours", 2)["num_pins"] == 1
    for salt in "abc":
        assert "its owner has 14 of at most 15" in pin("two", salt, "ours", 3)["error"]
    assert pin("one", "d", "theirs", 4)["num_pins"] == 1


def test_two_names_of_one_text_hold_it_twice(host: Host):
    for name in ("one", "two"):
        control(host, "pin", name, DOCUMENT)
    assert host.known.pool.num_used == 9
    control(host, "delete", "one")
    flood(host)
    assert host.ask(Ask(PROMPT, NAIVE, "a"))[0].grafted == 288


def test_what_cannot_be_pinned(host: Host):
    assert control(host, "pin", "short", words(BLOCK - 1, 1))["status"] == 400
    # half of the pool is 47 blocks
    assert control(host, "pin", "large", words(48 * BLOCK, 1))["status"] == 409
    assert control(host, "delete", "nothing")["status"] == 404
    assert control(host, "list") == {"pins": []}
    assert host.known.pool.num_used == 0


def test_a_pinned_text_is_computed_exactly(host: Host, plain: HostProcess):
    """Although its parts are known elsewhere, and could be grafted."""
    host.read(DOCUMENT, salt="a")
    control(host, "pin", "manual", PROMPT)
    prompt = PROMPT + words(20, 3)
    [answer] = host.ask(Ask(prompt, OFF, "a"))
    assert answer.cached == 9 * BLOCK
    assert [answer.tokens] == plain.tokens(prompt)


def test_a_text_that_is_well_known_can_be_pinned(host: Host):
    """It must be found when those who had it before are gone."""
    for seed in range(10, 16):
        host.read(words(2 * BLOCK, seed) + DOCUMENT, salt="a")
    control(host, "pin", "manual", DOCUMENT)
    flood(host)
    assert host.ask(Ask(PROMPT, NAIVE, "a"))[0].grafted == 288


@pytest.mark.parametrize(
    "forged",
    [
        {"op": "pin", "name": "x", "token": "wrong"},
        {"op": "pin", "name": "x", "token": ""},
        {"op": "pin", "name": "x"},
        {"op": "pin", "name": "x", "token": None},
        {"op": "pin", "name": "x", "token": ["a token of the test's own"]},
        {"op": "thaw", "name": "x", "token": "a token of the test's own"},
        {"op": "pin", "name": "x", "token": "a token of the test's own", "more": 1},
        "pin",
        None,
    ],
    ids=str,
)
def test_a_forged_operation_is_an_ordinary_request_without_reuse(
    host: Host, plain: HostProcess, forged: Any
):
    host.read(DOCUMENT, salt="a")
    [answer] = host.ask(Ask(PROMPT, {"control": forged}, "a"))
    assert [answer.tokens] == plain.tokens(PROMPT)
    assert (answer.cached, answer.report["reason"]) == (0, "invalid_params")
    assert host.known.pins.list() == []


def test_without_a_token_in_the_environment_nobody_may_pin(
    host: Host, monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.delenv(CONTROL_TOKEN)
    for token in ("", "None"):
        [answer] = host.ask(
            Ask(DOCUMENT, {"control": {"op": "pin", "name": "x", "token": token}}, "a")
        )
        assert answer.report["reason"] == "invalid_params"
    assert host.known.pins.list() == []


def test_an_aborted_pin_pins_nothing(host: Host):
    for num_steps in range(3):
        name = host.add(
            Ask(
                words(700, num_steps), Control("pin", "x").as_params()["kvgraft"], "a", max_tokens=1
            )
        )
        for _ in range(num_steps):
            host.step()
        host.abort(name)
        host.settle()
    assert host.known.pins.list() == []


def test_a_namespace_sheds_its_own_text_under_pressure(host: Host, plain: HostProcess):
    """Above the watermark, 85 of 95 blocks, and only as much as is needed; the least used first."""
    control(host, "pin", "used", words(10 * BLOCK, 1))
    control(host, "pin", "unused", words(20 * BLOCK, 2))
    host.ask(Ask(words(5, 3) + words(10 * BLOCK, 1), NAIVE, "a"))
    long_prompt = words(60 * BLOCK - 10, 4)
    [answer] = host.ask(Ask(long_prompt, OFF, "a"))
    assert [answer.tokens] == plain.tokens(long_prompt)
    shed = {segment["name"]: segment["num_shed"] for segment in control(host, "list")["pins"]}
    assert shed == {"used": 0, "unused": 5}


def shed(host: Host) -> dict[str, int]:
    return {segment["name"]: segment["num_shed"] for segment in control(host, "list")["pins"]}


def test_exact_prefixes_count_as_use(host: Host):
    """A system prompt is hit more often than grafted from."""
    system, once = words(15 * BLOCK, 1), words(15 * BLOCK, 2)
    control(host, "pin", "system", system)
    control(host, "pin", "once", once)
    for seed in range(4):
        assert host.ask(Ask(system + words(20, seed), NAIVE, "a"))[0].report[
            "prefix_tokens"
        ] == len(system)
    assert host.ask(Ask(words(5, 3) + once, NAIVE, "a"))[0].grafted == len(once) - 1
    hits = {segment["name"]: segment["hits"] for segment in control(host, "list")["pins"]}
    assert hits == {"system": 4, "once": 1}
    host.ask(Ask(words(60 * BLOCK - 10, 4), OFF, "a"))
    assert shed(host) == {"system": 0, "once": 5}


def test_documents_of_which_a_part_is_kept_count_as_used(host: Host):
    text = words(15 * BLOCK, 1)
    control(host, "pin", "document", text)
    for seed in range(2):
        [answer] = host.ask(
            Ask(words(9, seed) + text + words(20, 10 + seed), {"policy": "condense"}, "a")
        )
        assert answer.report["kept_tokens"] < len(text)
    assert control(host, "list")["pins"][0]["hits"] == 2


@pytest.mark.parametrize("pinned_first", ["used", "other"])
@pytest.mark.parametrize("where", ["grafted", "prefix"])
def test_a_request_never_sheds_what_it_is_about_to_use(host: Host, pinned_first: str, where: str):
    """Its first use is its first hit, and yet other text of its namespace goes first."""
    texts = {"used": words(10 * BLOCK, 1), "other": words(20 * BLOCK, 2)}
    for name in sorted(texts, key=lambda name: name != pinned_first):
        control(host, "pin", name, texts[name])
    rest = words(50 * BLOCK - 20, 3)
    if where == "prefix":  # of which fewer blocks are new: others make up for it
        beside = host.add(Ask(words(9 * BLOCK + 1, 4), OFF, "b", max_tokens=60))
        host.step_until(lambda: beside in host.outputs)
    prompt = texts["used"] + rest if where == "prefix" else words(10, 5) + texts["used"] + rest
    [answer] = host.ask(Ask(prompt, NAIVE, "a", max_tokens=1))
    assert answer.report[f"{where}_tokens"] == 10 * BLOCK
    assert shed(host) == {"used": 0, "other": 5}


def test_a_namespace_never_sheds_another_s_text(host: Host, plain: HostProcess):
    control(host, "pin", "manual", words(30 * BLOCK, 1))
    long_prompt = words(60 * BLOCK - 10, 4)
    for seed in range(3):
        [answer] = host.ask(Ask(long_prompt[seed:], OFF, "b"))
        assert [answer.tokens] == plain.tokens(long_prompt[seed:])
    [segment] = control(host, "list")["pins"]
    assert (segment["num_blocks"], segment["num_shed"]) == (30, 0)


def test_pinned_text_leaves_room_for_everyone_s_longest_request(host: Host):
    """Whether or not the engine takes the text: who has nothing to shed must not wait for ever."""
    control(host, "pin", "manual", words(47 * BLOCK, 1))
    prompt = words(MAX_LENGTH - 1, 2)
    [answer] = host.ask(Ask(prompt, OFF, "b", max_tokens=1), limit=200)
    assert answer.report["fresh_tokens"] == len(prompt)


def test_a_grafted_request_of_the_longest_kind_beside_pinned_text(host: Host, plain: HostProcess):
    """Its sources are pinned, so they cannot be what is given up."""
    manual = words(30 * BLOCK, 1)
    control(host, "pin", "manual", manual)
    prompt = words(10, 2) + manual + words(MAX_LENGTH - 11 - len(manual), 3)
    [answer] = host.ask(Ask(prompt, EVERYTHING, "a", max_tokens=1), limit=200)
    assert [answer.tokens] == plain.tokens(prompt, max_tokens=1)


def test_a_reset_that_is_refused_keeps_pinned_text(host: Host):
    control(host, "pin", "manual", DOCUMENT)
    name = host.add(Ask(words(70, 9), OFF, max_tokens=60))
    host.step_until(lambda: name in host.outputs)
    assert not host.llm.reset_prefix_cache()
    assert names(host) == ["manual"]
    host.finish(name)


def test_a_reset_drops_pinned_text(host: Host, plain: HostProcess):
    """vLLM refuses to reset while blocks are held; and what is computed afterwards may be of other
    weights."""
    control(host, "pin", "manual", DOCUMENT)
    assert host.llm.reset_prefix_cache()
    assert host.known.pool.num_used == 0
    assert control(host, "list") == {"pins": []}
    host.poison(range(1, NUM_BLOCKS + 1))
    [answer] = host.ask(Ask(PROMPT, EVERYTHING, "a"))
    assert (answer.cached, answer.report["reason"]) == (0, "no_known_text")
    assert [answer.tokens] == plain.tokens(PROMPT)
    assert control(host, "pin", "manual", DOCUMENT)["pin"]["name"] == "manual"


def test_gauges_show_the_pool(host: Host):
    control(host, "pin", "manual", DOCUMENT)
    host.ask(Ask(words(10, 3), OFF))
    found = {state: host.count("pool_blocks", state) for state in ("used", "free", "pinned")}
    assert found["pinned"] == 9
    assert found["used"] + found["free"] == NUM_BLOCKS
    assert host.count("pinned_documents") == 1
    assert host.count("index_entries") == len(host.known.index)
