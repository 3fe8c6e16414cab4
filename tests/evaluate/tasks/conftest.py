"""Fixtures of the suites over installed packages."""

from collections.abc import Iterator

import pytest

from kvgraft_lab.evaluate.tasks import code


@pytest.fixture
def few_packages(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Three packages, since parsing all of them takes a quarter of a minute."""
    few = {name: (name,) for name in ("fastapi", "fsspec", "rich")}
    monkeypatch.setattr(code, "PACKAGES", few)
    code.packages_of.cache_clear()
    yield
    code.packages_of.cache_clear()
