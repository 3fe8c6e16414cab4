"""What a request may say about reuse: every refusal names the field and what is allowed."""

import os
import re
from contextlib import suppress
from dataclasses import asdict, fields
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvgraft.core.plan import Plan
from kvgraft.methods import count_layers
from kvgraft.policies import Full, Naive, SparseX, parse_policy
from kvgraft.vllm.options import (
    CONTROL_TOKEN,
    KEY,
    Control,
    RequestOptions,
    ServedReport,
    namespace_label,
)
from kvgraft.vllm.request_fields import MAX_NAME, NAME, NAMESPACE

POLICY = SparseX(boundary_layers=3, recompute_share=0.2)
DEFAULT = RequestOptions(POLICY)
SHARES = st.floats(0, 1) | st.integers(0, 1)
COUNTS = st.integers(0, 1000)


@pytest.mark.parametrize(
    ("said", "policy"),
    [
        ({}, POLICY),
        ({"policy": "sparsex"}, POLICY),
        ({"policy": "naive"}, Naive()),
        ({"policy": "full"}, Full()),
        (
            {"policy": "sparsex:boundary_layers=1,recompute_share=0.5"},
            SparseX(boundary_layers=1, recompute_share=0.5),
        ),
        (
            {"policy": "sparsex:boundary_layers=1", "recompute_share": 0.5},
            SparseX(boundary_layers=1, recompute_share=0.5),
        ),
        ({"recompute_share": 0.7}, SparseX(boundary_layers=3, recompute_share=0.7)),
        (
            {"policy": "sparsex", "recompute_share": 0.7},
            SparseX(boundary_layers=3, recompute_share=0.7),
        ),
        ({"recompute_share": 1}, SparseX(boundary_layers=3, recompute_share=1)),
        (
            {"boundary_share": 0.5, "tail_tokens": 8},
            SparseX(boundary_share=0.5, recompute_share=0.2, tail_tokens=8),
        ),
    ],
)
def test_policy_options_change_the_named_policy_or_the_default(said: dict[str, Any], policy: Any):
    assert RequestOptions.parse(said, DEFAULT) == RequestOptions(policy)


@given(st.fixed_dictionaries({}, optional={"recompute_share": SHARES, "boundary_layers": COUNTS}))
def test_each_option_changes_itself_only(said: dict[str, Any]):
    parsed = RequestOptions.parse(said, DEFAULT).policy
    assert asdict(parsed) == asdict(POLICY) | said


@pytest.mark.parametrize(
    ("said", "policy"),
    [
        ({}, "auto:same_context=naive"),
        ({"recompute_share": 0.1}, "spread:recompute_share=0.1"),
        ({"policy": "auto", "hops": 0}, "spread:hops=0"),
        ({"new_context": "epic"}, "auto:same_context=naive,new_context=epic"),
    ],
)
def test_an_option_that_auto_has_not_belongs_to_its_policy_for_a_new_context(
    said: dict[str, Any], policy: str
):
    default = RequestOptions(parse_policy("auto:same_context=naive"))
    assert RequestOptions.parse(said, default).policy == parse_policy(policy)


@pytest.mark.parametrize(
    ("said", "reuse"), [({}, True), ({"reuse": "auto"}, True), ({"reuse": "off"}, False)]
)
def test_reuse_is_on_unless_it_is_off(said: dict[str, Any], reuse: bool):
    assert RequestOptions.parse(said, DEFAULT).reuse is reuse


@pytest.mark.parametrize(
    ("said", "similar"), [({}, True), ({"match": "exact"}, False), ({"match": "similar"}, True)]
)
def test_near_duplicates_are_matched_unless_the_request_says_otherwise(
    said: dict[str, Any], similar: bool
):
    assert (
        RequestOptions.parse(said, RequestOptions(POLICY, match_similar=True)).match_similar
        is similar
    )


@pytest.mark.parametrize(
    ("said", "shared"),
    [
        ({}, None),
        ({"shared": None}, None),
        ({"shared": []}, ()),
        ({"shared": ["b", "a"]}, ("b", "a")),
    ],
)
def test_all_shared_text_is_wanted_unless_some_is_named(
    said: dict[str, Any], shared: tuple[str, ...] | None
):
    assert RequestOptions.parse(said, DEFAULT).shared == shared


def test_a_given_answer_is_taken_as_it_is():
    assert RequestOptions.parse({"forced_output": [5, 0]}, DEFAULT) == RequestOptions(
        POLICY, forced_output=(5, 0)
    )
    assert RequestOptions.parse({"forced_output": None}, DEFAULT).forced_output == ()


def test_the_namespace_is_taken_as_it_is():
    assert RequestOptions.parse({"namespace": "Team ä/7"}, DEFAULT).namespace == "Team ä/7"
    assert RequestOptions.parse({}, DEFAULT).namespace == ""


@pytest.mark.parametrize(
    ("said", "message"),
    [
        ({"reuse": "on"}, "reuse must be one of auto, exact, off, got 'on'"),
        ({"reuse": True}, "reuse must be one of auto, exact, off, got True"),
        ({"reuse": None}, "reuse must be one of auto, exact, off, got None"),
        ({"reuse": ["auto"]}, "reuse must be one of auto, exact, off"),
        ({"match": "close"}, "match must be one of exact, similar, got 'close'"),
        ({"match": ["similar"]}, "match must be one of exact, similar, got ['similar']"),
        (
            {"match": "similar"},
            "only identical text is known here, start the server with --kvgraft-match=similar",
        ),
        ({"policy": 3}, "policy must be a string, got 3"),
        ({"policy": "best"}, "unknown policy 'best': choose from auto, cacheblend, condense"),
        ({"policy": ""}, "unknown policy '': choose from auto, cacheblend, condense"),
        ({"policy": "sparsex:topk"}, "policy option 'topk' is not option=value"),
        ({"policy": "sparsex:k=1"}, "policy 'sparsex' has no option 'k': it has rows, reduction"),
        ({"policy": "naive:topk=1"}, "policy 'naive' has no option 'topk': it has none"),
        ({"recompute_share": 1.5}, "recompute_share must be a share from 0 to 1, got 1.5"),
        ({"recompute_share": -0.1}, "recompute_share must be a share from 0 to 1, got -0.1"),
        ({"recompute_share": float("nan")}, "recompute_share must be a share from 0 to 1, got nan"),
        ({"recompute_share": "0.1"}, "recompute_share must be a share from 0 to 1, got '0.1'"),
        ({"recompute_share": True}, "recompute_share must be a share from 0 to 1, got True"),
        ({"boundary_layers": -1}, "boundary_layers must be an integer of at least 0, got -1"),
        ({"boundary_share": 1.5}, "boundary_share must be a share from 0 to 1, got 1.5"),
        ({"boundary_share": None}, "boundary_share must be a share from 0 to 1, got None"),
        ({"overflow_blocks": 0.5}, "overflow_blocks must be an integer of at least 0, got 0.5"),
        ({"tail_tokens": 0}, "tail_tokens must be an integer of at least 1, got 0"),
        (
            {"policy": "naive", "topk": 0.1},
            "no option 'topk': it has none; a request itself has policy, reuse, quality, match, "
            "namespace",
        ),
        (
            {"boundary_layers": 1, "boundary_share": 0.5},
            "takes boundary_layers or boundary_share, not both",
        ),
        ({"top_k": 0.1}, "policy 'sparsex' has no option 'top_k': it has rows"),
        ({"control": {"op": "list"}}, "no option 'control': it has"),
        ({"name": "sparsex"}, "no option 'name': it has"),
        ({7: 1}, "no option 7: it has"),
        ({"forced_output": []}, "forced_output must be a list of token ids, got []"),
        ({"forced_output": "w3"}, "forced_output must be a list of token ids, got 'w3'"),
        ({"forced_output": [3, -1]}, "forced_output must be a list of token ids, got [3, -1]"),
        ({"forced_output": [True]}, "forced_output must be a list of token ids, got [True]"),
        ({"namespace": 5}, "namespace must be a printable string of at most 128 characters, got 5"),
        ({"namespace": "a\nb"}, "namespace must be a printable string"),
        ({"namespace": "x" * (MAX_NAME + 1)}, "namespace must be a printable string"),
    ],
    ids=str,
)
def test_what_is_not_allowed_is_refused_by_name(said: dict[str, Any], message: str):
    with pytest.raises(ValueError, match=re.escape(message)):
        RequestOptions.parse(said, DEFAULT)


@pytest.mark.parametrize("count", [10**6, 10**18, 10**30])
def test_a_count_of_any_size_is_refused_or_works(count: int):
    plan = Plan.for_prompt(8, 4)
    for name in ("overflow_blocks", "tail_tokens", "boundary_layers"):
        with suppress(ValueError):
            policy = RequestOptions.parse({name: count}, DEFAULT).policy
            assert isinstance(policy, SparseX)
            assert (
                plan.overflow(policy.overflow_blocks).shape
                == plan.tail(policy.tail_tokens).shape
                == (8,)
            )
            assert 0 <= count_layers(policy.boundary_layers, policy.boundary_share, 6) <= 6


JSON = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(),
    lambda inner: st.lists(inner) | st.dictionaries(st.text(), inner),
    max_leaves=5,
)
NAMES = st.sampled_from(
    ["policy", "reuse", "match", "namespace", "shared", *(f.name for f in fields(SparseX))]
)


@given(st.dictionaries(NAMES | st.text(), JSON))
def test_any_json_is_either_understood_or_refused(said: dict[str, Any]):
    try:
        parsed = RequestOptions.parse(said, DEFAULT)
    except ValueError:
        return
    assert said.keys() <= {"policy", "reuse", "match", "namespace", "shared"} | {
        f.name for f in fields(parsed.policy)
    }
    assert parsed.namespace == said.get("namespace", "")


@given(st.text(max_size=200))
def test_names_are_printable_and_bounded(text: str):
    allowed = text.isprintable() and 0 < len(text) <= MAX_NAME
    if allowed:
        NAME.check("segment", text)
    else:
        with pytest.raises(
            ValueError, match=f"^segment must be a printable string of 1 to {MAX_NAME} characters"
        ):
            NAME.check("segment", text)


def test_an_empty_name_needs_permission_and_a_refusal_does_not_repeat_everything():
    NAMESPACE.check("namespace", "")
    with pytest.raises(ValueError, match="segment") as raised:
        NAME.check("segment", "y" * 10_000)
    assert len(str(raised.value)) < 150


@pytest.fixture
def token(monkeypatch: pytest.MonkeyPatch) -> str:
    monkeypatch.setenv(CONTROL_TOKEN, "secret")
    return "secret"


@pytest.mark.parametrize(
    "control", [Control("pin", "manual"), Control("delete", "manual"), Control("list")]
)
def test_a_control_operation_survives_its_way_into_the_engine(token: str, control: Control):
    assert Control.parse(control.as_params()[KEY]["control"]) == control


@pytest.mark.parametrize("wrong", ["", "Secret", "secre", "secret ", "sécret", None, 0, ["secret"]])
def test_a_wrong_token_is_refused(token: str, wrong: Any):
    with pytest.raises(ValueError, match="come from the API server only"):
        Control.parse({"op": "list", "name": "", "token": wrong})


def test_a_control_operation_without_a_token_is_refused(token: str):
    with pytest.raises(ValueError, match="come from the API server only"):
        Control.parse({"op": "list"})


@pytest.mark.parametrize("shown", ["", None, "None"])
def test_where_no_token_is_set_nothing_is_one(monkeypatch: pytest.MonkeyPatch, shown: Any):
    monkeypatch.setenv(CONTROL_TOKEN, "")
    with pytest.raises(ValueError, match="API server"):
        Control.parse({"op": "list", "token": shown})
    monkeypatch.delenv(CONTROL_TOKEN)
    with pytest.raises(ValueError, match="API server"):
        Control.parse({"op": "list", "token": shown})
    assert CONTROL_TOKEN not in os.environ


def test_of_a_salt_that_a_client_chose_a_digest_is_shown():
    assert namespace_label("") == ""
    shown = {
        namespace_label(salt) for salt in ("secret", "another", "a" * 64, "g" * 64 + ":x", "ab:x")
    }
    assert len(shown) == 5
    assert all(re.fullmatch("[0-9a-f]{8}", label) for label in shown)


@pytest.mark.parametrize(
    ("said", "message"),
    [
        (
            {"op": "thaw", "token": "secret"},
            "op must be one of pin, delete, list, refresh, read, score, got 'thaw'",
        ),
        (
            {"token": "secret"},
            "op must be one of pin, delete, list, refresh, read, score, got 'None'",
        ),
        ({"op": "pin", "token": "secret", "quota": 2}, "quota must be a share from 0 to 1, got 2"),
        (
            {"op": "list", "token": "secret", "namespace": "x"},
            "control must have adapter, name, op, owner, quota, token",
        ),
        ("list", "control must have adapter, name, op, owner, quota, token"),
        (None, "control must have adapter, name, op, owner, quota, token"),
    ],
    ids=str,
)
def test_what_is_no_control_operation_is_refused(token: str, said: Any, message: str):
    with pytest.raises(ValueError, match=re.escape(message)):
        Control.parse(said)


def test_a_report_travels_as_plain_json():
    report = ServedReport(
        policy="Naive()",
        prompt_tokens=9,
        grafted_tokens=4,
        fresh_tokens=5,
        spans=[[0, 4, "grafted"]],
    )
    sent = report.as_params()
    assert list(sent) == [KEY]
    assert ServedReport(**sent[KEY]) == report
    sent[KEY]["spans"].append("changed")
    assert report.spans == [[0, 4, "grafted"]]
