"""The page of a trace, in a real browser without a network; its picture and its tables."""

import colorsys
import io
import re
from pathlib import Path

import numpy as np
import pytest
from rich.console import Console

from chromium import Page
from kvgraft import server
from kvgraft.core.costs import Costs
from kvgraft_lab import traffic
from kvgraft_lab.traffic.analysis import KVGRAFT, SIDES, Analysed, analyse
from kvgraft_lab.traffic.origins import Origin
from kvgraft_lab.traffic.page import render_page
from kvgraft_lab.traffic.picture import draw
from kvgraft_lab.traffic.replay import ReplaySettings
from kvgraft_lab.traffic.tables import render
from kvgraft_lab.traffic.trace import RequestTrace, TracedRequest

COSTS = Costs(pass_s=0.1, token_s=1e-2, pair_s=1e-6, copy_s=1e-4)
EVIL = "</script><img src=x onerror=document.title='owned'>[red]"


@pytest.fixture(scope="module")
def analysed() -> Analysed:
    """Of the trace, as it is analysed without costs."""
    return analyse(made_trace(), ReplaySettings(), [1500, None], tokenizer="words")


def made_trace() -> RequestTrace:
    """Two sessions with the same documents, one of them with a name that nobody should believe."""
    rng = np.random.default_rng(0)
    a, b = (rng.integers(3, 4000, 320).astype(np.int32) for _ in range(2))
    prompts = (("one", 1, (a, b)), (EVIL, 1, (b, a)), ("one", 2, (a, b, a)))
    requests = []
    for session, turn, texts in prompts:
        tokens = np.concatenate([rng.integers(3, 4000, 16).astype(np.int32), *texts])
        requests.append(TracedRequest(session, None, tokens, np.zeros(1, int), turn=turn))
    return RequestTrace(tuple(requests), 2, False, ("a.jsonl, line 3: is not JSON",), (), 0)


@pytest.fixture
def opened(page: Page, analysed: Analysed, tmp_path: Path, request: pytest.FixtureRequest) -> Page:
    path = tmp_path / "page.html"
    path.write_text(render_page(analysed), encoding="utf-8")
    page.command(
        "Network.emulateNetworkConditions",
        offline=True,
        latency=0,
        downloadThroughput=0,
        uploadThroughput=0,
    )
    page.open(path.as_uri(), key=None, dark=getattr(request, "param", False))
    page.wait_until("document.querySelectorAll('canvas').length > 0")
    return page


def hues(template: Path, kind: str) -> list[float]:
    """Hues of a kind of tokens on a page, light and dark."""
    found = re.findall(rf"--{kind}: #(\w\w)(\w\w)(\w\w)", template.read_text())
    return [colorsys.rgb_to_hls(*(int(part, 16) / 255 for part in one))[0] for one in found]


@pytest.mark.parametrize("kind", ["prefix", "continued", "grafted"])
def test_a_kind_has_the_hue_that_it_has_on_the_page_of_a_server(kind: str):
    ours, theirs = (
        hues(path, kind)
        for path in (
            Path(traffic.__file__).with_name("traffic.html.j2"),
            Path(server.__file__).with_name("page.html"),
        )
    )
    assert len(ours) == len(theirs) == 2
    assert ours == pytest.approx(theirs, abs=0.1)


@pytest.mark.parametrize("opened", [False, True], indirect=True)
def test_the_page_shows_every_session_and_side(opened: Page):
    assert opened.evaluate(
        "[...document.querySelectorAll('#sides tr')].map(row => row.cells[0].textContent)"
    ) == [*SIDES]
    assert opened.evaluate("document.querySelectorAll('#turns tr').length") == 2
    assert opened.evaluate("document.querySelectorAll('#pools tr').length") == 2
    assert opened.evaluate(
        "[...document.querySelectorAll('h3')].map(name => name.textContent)"
    ) == ["one", EVIL]
    pixels = "canvas.getContext('2d').getImageData(0, 4, canvas.width, 1).data"
    drawn = f"[...document.querySelectorAll('canvas')].map(canvas => new Set({pixels}).size > 2)"
    assert opened.evaluate(drawn) == [True, True]
    assert opened.evaluate("document.getElementById('seconds-part').hidden")
    assert opened.complaints == []


def test_seconds_are_shown_of_all_prompts_and_by_session(page: Page, tmp_path: Path):
    analysed = analyse(made_trace(), ReplaySettings(costs=COSTS), [None], tokenizer="words")
    path = tmp_path / "page.html"
    path.write_text(render_page(analysed), encoding="utf-8")
    page.open(path.as_uri(), key=None)
    page.wait_until("document.querySelectorAll('canvas').length > 0")
    assert page.evaluate("document.getElementById('seconds-part').hidden") is False
    cells = page.evaluate(
        "[...document.querySelectorAll('#seconds tr')].map(r => [...r.cells].map(c => "
        "c.textContent))"
    )
    assert [row[0] for row in cells] == ["all prompts", "one", EVIL]
    total = analysed.analysis.largest.seconds
    assert total is not None
    numbers = [float(text) for text in cells[0][1:]]
    assert numbers == pytest.approx(
        [total.full, *total.sides.values(), total.saved(KVGRAFT)], rel=0.01
    )
    assert numbers[-1] > 0
    console = Console(width=80, file=io.StringIO(), record=True)
    console.print(render(analysed.analysis))
    text = console.export_text()
    assert "saved by" in text
    assert "…" not in text, "nothing is cut off"


def test_what_is_pointed_at_is_told(opened: Page, analysed: Analysed):
    point = """(y) => { const c = document.querySelectorAll('canvas')[1], box = c.getBoundingClientRect();
        c.dispatchEvent(new MouseEvent('mousemove', { clientX: box.left + box.width * 0.3, clientY: box.top + y }));
        return document.getElementById('hover').textContent; }"""
    assert analysed.answers[1][-1].origins.tolist() == [Origin.NEW, Origin.GRAFTED, Origin.NEW]
    told = opened.evaluate(f"({point})(3)")
    assert told.startswith("Request 1 of 1, 656 tokens: tokens 16 to 654 are grafted at depth 0.")
    opened.evaluate("document.querySelectorAll('#sides tr')[0].click()")
    assert "tokens 0 to 655 are new" in opened.evaluate(f"({point})(3)"), (
        "prefix caching alone finds nothing of it"
    )


def test_the_page_fits_a_phone(opened: Page):
    opened.command(
        "Emulation.setDeviceMetricsOverride",
        width=400,
        height=800,
        deviceScaleFactor=1,
        mobile=False,
    )
    assert opened.evaluate("document.documentElement.scrollWidth <= innerWidth")


def test_names_are_never_markup(opened: Page):
    assert opened.evaluate("document.title") == "KVGraft: recorded traffic"
    assert opened.evaluate("document.querySelectorAll('img').length") == 0


def test_the_page_needs_nothing_from_elsewhere(analysed: Analysed):
    assert "http" not in render_page(analysed)


def test_the_tables_fit_a_terminal_and_say_what_was_skipped(analysed: Analysed):
    console = Console(width=80, file=io.StringIO(), record=True)
    console.print(render(analysed.analysis))
    text = console.export_text()
    for name in (
        *SIDES,
        "unlimited",
        "1,500",
        "lines skipped: 1; the first: a.jsonl, line 3",
        "words",
    ):
        assert name in text
    assert "…" not in text, "nothing is cut off"
    assert EVIL[:9] in text, "a name is no markup of the terminal's"


def test_the_picture_is_written(analysed: Analysed, tmp_path: Path):
    draw(analysed.analysis, tmp_path / "a.png")
    assert (tmp_path / "a.png").read_bytes().startswith(b"\x89PNG")
