"""The page of one prompt, in a real browser without a network."""

import json
from pathlib import Path

import pytest

from chromium import Page
from kvgraft import Engine
from kvgraft_lab.evaluate.compare import Case, run_compare
from kvgraft_lab.evaluate.inspect import Inspection, inspect, render_page
from kvgraft_lab.testbed import MODEL_DIR

DOCUMENT = (
    "the code of lamp is 42 . the old river slept . the paint of bell is grey . the wide road "
    "waited . " * 4
)
CASE = Case(
    prompt=f"note grey means 51 . {DOCUMENT} question : note of bell ? answer :",
    read=(DOCUMENT,),
    policies=("naive", "sparsex:boundary_layers=2", "transitive"),
    max_tokens=2,
    repeats=1,
)


@pytest.fixture(scope="module")
def inspection() -> Inspection:
    return inspect(Engine(MODEL_DIR, dtype="float32"), CASE)


@pytest.fixture(scope="module", autouse=True)
def _without_a_network(page: Page) -> None:
    page.command(
        "Network.emulateNetworkConditions",
        offline=True,
        latency=0,
        downloadThroughput=0,
        uploadThroughput=0,
    )


def show(page: Page, inspection: Inspection, directory: Path, *, dark: bool = False) -> None:
    path = directory / "page.html"
    path.write_text(render_page(inspection), encoding="utf-8")
    page.open(path.as_uri(), key=None, dark=dark)
    page.wait_until("document.querySelectorAll('#tokens span').length > 0")


def test_every_token_has_a_kind_under_every_policy(inspection: Inspection):
    assert [view["policy"] for view in inspection.policies] == ["full", *CASE.policies]
    full, naive, sparsex, transitive = inspection.policies
    assert set(full["kinds"]) == {"f"}
    assert set(naive["kinds"]) == {"f", "g"}
    assert set(sparsex["kinds"]) == set(transitive["kinds"]) == {"f", "g", "r"}
    for view in inspection.policies:
        assert len(view["kinds"]) == len(inspection.tokens) == len(view["layers"])
        assert [layers == 8 for layers in view["layers"]] == [
            kind in "fr" for kind in view["kinds"]
        ]
        assert all(len(scores) == len(inspection.tokens) for scores in view["scores"].values())
    assert " ".join(inspection.tokens) == CASE.prompt.replace("  ", " ")


def test_the_page_and_the_comparison_say_the_same_of_a_policy(inspection: Inspection):
    compared = run_compare(Engine(MODEL_DIR, dtype="float32"), CASE)
    shown = [(view["policy"], view["kl"]) for view in inspection.policies]
    assert shown == [(one.policy, round(one.answer_kl, 4)) for one in compared]


@pytest.mark.parametrize("dark", [False, True])
def test_the_page_shows_what_was_inspected(
    page: Page, inspection: Inspection, tmp_path: Path, dark: bool
):
    show(page, inspection, tmp_path, dark=dark)
    table = page.evaluate(
        "[...document.querySelectorAll('#policies tr')].map(row => row.cells[0].textContent)"
    )
    assert table == ["full", *CASE.policies]
    for number, view in enumerate(inspection.policies):
        page.evaluate(f"document.querySelectorAll('#policies tr')[{number}].click()")
        kinds = page.evaluate(
            "[...document.querySelectorAll('#tokens span')].map(span => span.className).join('')"
        )
        assert kinds == view["kinds"]
    assert "transitive" in page.evaluate("document.querySelector('tr.chosen').textContent")
    assert page.evaluate("document.getElementById('heat').width") == len(inspection.tokens)
    assert page.complaints == []


def test_texts_are_never_markup(page: Page, inspection: Inspection, tmp_path: Path):
    evil = "</script><img src=x onerror=document.title='owned'>"
    tokens = (evil, *inspection.tokens[1:])
    policies = tuple({**view, "answer": evil} for view in inspection.policies)
    show(page, Inspection(evil, tokens, policies), tmp_path)
    assert page.evaluate("document.title") == "KVGraft: one prompt"
    assert page.evaluate("document.querySelectorAll('img').length") == 0
    assert evil in page.evaluate("document.querySelector('#tokens span').textContent")
    assert page.complaints == []


def test_the_page_needs_nothing_from_elsewhere(inspection: Inspection):
    text = render_page(inspection)
    assert "http" not in text.replace("http-equiv", "")
    assert json.dumps(inspection.tokens[0])[1:-1] in text
