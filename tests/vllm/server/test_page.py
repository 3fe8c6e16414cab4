"""The page of a running server, in a real browser."""

from collections.abc import Iterator
from typing import Any

import httpx
import pytest
from running import ADMIN, ALICE, BOB, RunningServer
from test_pin_routes import LABELS, PATH
from test_server import complete, elsewhere

from chromium import Page

ROWS = (
    "[...document.querySelectorAll('#{0} tbody tr')].map(row => [...row.cells].map(cell => "
    "cell.textContent))"
)
MARKUP = "<img src=x onerror=document.title='owned'>"


@pytest.fixture(scope="module")
def document(server: RunningServer, texts: Any) -> Iterator[str]:
    """A text that Alice has pinned under a name that is markup, met again elsewhere, and that Bob
    reads."""
    text = texts.document()
    segment = {"tenant": LABELS[ALICE], "name": MARKUP, "text": text}
    with server.http(ADMIN) as admin:
        admin.post(PATH, json=segment).raise_for_status()
        complete(server, ALICE, elsewhere(text))
        complete(server, BOB, elsewhere(text))
        yield text
        admin.delete(f"{PATH}/{MARKUP}", params={"tenant": LABELS[ALICE]}).raise_for_status()


def rows(page: Page, table: str) -> list[list[str]]:
    return page.evaluate(ROWS.format(table))


def show(page: Page, server: RunningServer, key: str, **options: Any) -> None:
    page.open(f"{server.url}/kvgraft", key=key, **options)
    page.wait_until("document.querySelectorAll('#recent tbody tr').length > 0")


def test_a_browser_shows_the_password_that_it_was_given(page: Page, server: RunningServer):
    page.open(f"{server.url.replace('//', f'//anyone:{ALICE}@')}/kvgraft", key=None)
    page.wait_until(f"document.getElementById('view').textContent === 'tenant {LABELS[ALICE]}'")
    assert page.complaints == []


@pytest.mark.usefixtures("document")
def test_a_tenant_sees_its_requests_as_bars_and_its_segments(page: Page, server: RunningServer):
    show(page, server, ALICE)
    newest, expected = rows(page, "recent")[0], server.status(ALICE)["recent"][0]
    assert newest[1] == "/v1/completions"
    assert newest[3] == str(expected["prompt_tokens"])
    assert newest[4].endswith(" ms")
    assert newest[5] == "grafted"
    bars = (
        "[...document.querySelector('#recent tbody tr').querySelectorAll('{0} > span')].map(s => "
        "s.className)"
    )
    assert page.evaluate(bars.format(".bar:not(.thin)")) == [kind for *_, kind in expected["spans"]]
    assert page.evaluate(bars.format(".bar.thin")) == ["grafted", "recomputed", "fresh"]
    [segment] = rows(page, "pins")
    assert segment[0] == MARKUP
    assert segment[2] == f"{server.status(ALICE)['pins'][0]['num_tokens']}"
    assert page.evaluate("document.getElementById('view').textContent") == f"tenant {LABELS[ALICE]}"
    assert LABELS[BOB] not in page.evaluate("document.body.textContent")


@pytest.mark.usefixtures("document")
def test_bars_have_the_proportions_of_the_prompt(page: Page, server: RunningServer):
    show(page, server, ALICE)
    first = "document.querySelector('#recent tbody tr .bar:not(.thin)')"
    bar = page.evaluate(f"{first}.getBoundingClientRect().width")
    widths = page.evaluate(
        f"[...{first}.children].map(piece => piece.getBoundingClientRect().width)"
    )
    newest = server.status(ALICE)["recent"][0]
    assert bar > 50
    for width, (start, stop, _) in zip(widths, newest["spans"], strict=True):
        assert width / bar == pytest.approx((stop - start) / newest["prompt_tokens"], abs=0.01)


@pytest.mark.usefixtures("document")
def test_the_admin_sees_all_tenants_and_why_nothing_was_grafted(page: Page, server: RunningServer):
    show(page, server, ADMIN)
    assert {row[1] for row in rows(page, "recent")} >= set(LABELS.values())
    assert page.evaluate("document.getElementById('view').textContent") == "all tenants"
    misses = {
        row[0]: int(row[2].replace(",", "")) for row in rows(page, "misses") if row[1] == "miss"
    }
    assert misses == server.status(ADMIN)["totals"]["misses"]
    pool = server.status(ADMIN)["pool"]
    legend = page.evaluate("document.getElementById('pool-legend').textContent")
    assert f"pinned {pool['pinned']}" in legend
    assert page.evaluate("document.getElementById('now').textContent") == "0 running, 0 waiting"


@pytest.mark.usefixtures("document")
def test_the_page_follows_the_server(page: Page, server: RunningServer, texts: Any):
    show(page, server, BOB)
    before = int(page.evaluate("document.getElementById('requests').textContent"))
    complete(server, BOB, texts.document(64))
    page.wait_until(f"Number(document.getElementById('requests').textContent) === {before + 1}")


@pytest.mark.usefixtures("document")
@pytest.mark.parametrize(("dark", "width"), [(False, 1200), (True, 1200), (False, 420)])
def test_it_is_read_as_text_and_loads_nothing_from_elsewhere(
    page: Page, server: RunningServer, dark: bool, width: int
):
    show(page, server, ADMIN, dark=dark, width=width)
    page.wait_until("document.querySelectorAll('#pins tbody tr').length > 0")
    assert page.evaluate("document.title") == "KVGraft"
    assert page.evaluate("document.querySelectorAll('main img').length") == 0
    loaded = page.evaluate("performance.getEntriesByType('resource').map(entry => entry.name)")
    assert set(loaded) == {f"{server.url}/v1/kvgraft/status"}
    ground = page.evaluate("getComputedStyle(document.body).backgroundColor")
    assert ground == ("rgb(18, 22, 29)" if dark else "rgb(246, 247, 249)")
    assert page.evaluate(
        "document.documentElement.scrollWidth <= document.documentElement.clientWidth"
    )
    assert page.complaints == []


@pytest.mark.usefixtures("document")
@pytest.mark.parametrize("key", [ALICE, ADMIN])
def test_on_a_phone_everything_is_on_the_screen(page: Page, server: RunningServer, key: str):
    show(page, server, key, width=390)
    page.wait_until("document.querySelectorAll('#pins tbody tr').length > 0")
    outside = """[...document.querySelectorAll('main *')].filter(element => {
        const box = element.getBoundingClientRect();
        return box.width && (box.left < 0 || box.right > document.documentElement.clientWidth);
    }).map(element => `${element.tagName} ${element.className} ${element.textContent.slice(0, 40)}`)"""
    assert page.evaluate(outside) == []
    numbers = "[...document.querySelector('#{0} tbody tr').querySelectorAll('td.number')]"
    for table, count in (("recent", 2), ("pins", 4)):
        shown = page.evaluate(
            f"{numbers.format(table)}.map(cell => cell.getBoundingClientRect().width > 0)"
        )
        assert shown == [True] * count
    named = page.evaluate(
        f"{numbers.format('pins')}.map(cell => getComputedStyle(cell, '::before').content)"
    )
    assert [text.split('"')[1].strip() for text in named] == ["Tokens", "Blocks", "Shed", "Hits"]


def test_the_policy_of_the_page_lets_no_foreign_script_run(page: Page, server: RunningServer):
    show(page, server, ALICE)
    page.evaluate("""document.body.append(Object.assign(document.createElement("script"),
        { textContent: "document.title = 'owned'" }))""")
    assert page.evaluate("document.title") == "KVGraft"
    assert any("Content Security Policy" in complaint for complaint in page.complaints)


def test_a_page_that_gets_no_figures_says_so(page: Page, server: RunningServer):
    show(page, server, ALICE)
    page.command("Network.setExtraHTTPHeaders", headers={"Authorization": "Bearer unknown"})
    page.wait_until("document.getElementById('notice').textContent.includes('401')")


def test_the_page_is_not_kept_and_not_framed(server: RunningServer):
    answer = httpx.get(f"{server.url}/kvgraft", auth=("anyone", ALICE))
    assert answer.headers["Cache-Control"] == "no-store"
    assert "frame-ancestors 'none'" in answer.headers["Content-Security-Policy"]
    assert "unsafe-inline" not in answer.headers["Content-Security-Policy"]
