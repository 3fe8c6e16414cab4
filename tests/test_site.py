"""The documentation site in a real browser: what a page says can be read without scrolling
sideways."""

import subprocess
import sys
from pathlib import Path

import pytest

from chromium import Page

pytestmark = pytest.mark.slow
ROOT = Path(__file__).parent.parent
# number of elements that are wider than the place in which they stand
TOO_WIDE = "[...document.querySelectorAll('{0}')].filter(e => e.scrollWidth > {1}).length"
CODE = TOO_WIDE.format("article pre > code", "e.clientWidth")
TABLES = TOO_WIDE.format("article table", "e.parentElement.clientWidth")


@pytest.fixture(scope="module")
def site(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The site, as `make docs` builds it."""
    folder = tmp_path_factory.mktemp("site")
    command = [sys.executable, "-m", "mkdocs", "build", "--strict", "--quiet", "-d", str(folder)]
    subprocess.run(command, cwd=ROOT, check=True, capture_output=True)
    return folder


@pytest.mark.parametrize("width", [390, 1366])
@pytest.mark.parametrize("name", ["quickstart", "serving", "fleet", "runbook"])
def test_code_and_tables_of_options_fit_the_screen(page: Page, site: Path, name: str, width: int):
    page.open((site / f"{name}.html").as_uri(), key=None, width=width)
    page.wait_until("document.querySelector('article table').parentElement !== null")
    assert page.evaluate(CODE) == 0
    assert page.evaluate(TABLES) == 0


def test_the_site_has_no_files_of_python(site: Path):
    assert list(site.rglob("__pycache__")) == []
