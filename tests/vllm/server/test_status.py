"""What `/v1/kvgraft/status` shows to whom, with no engine behind it."""

from types import SimpleNamespace
from typing import Any

import pytest
from running import ADMIN, ALICE, BOB
from starlette.testclient import TestClient
from test_access import application

from kvgraft.server import status
from kvgraft.server.keys import ADMIN_KEY, API_KEY

FIGURES = {
    "running": 1,
    "waiting": 2,
    "pool": {"used": 3, "free": 5, "pinned": 2},
    "index_entries": 7,
    "idle_refresh_tokens": 11,
    "fallbacks": {"pool_pressure": 1},
}


def shown(monkeypatch: pytest.MonkeyPatch, api_keys: list[str], key: str | None) -> dict[str, Any]:
    """What a server with these API keys and an admin shows of its engine to whoever has this
    key."""
    monkeypatch.delenv(API_KEY, raising=False)
    monkeypatch.setenv(ADMIN_KEY, ADMIN)
    monkeypatch.setattr(status, "engine_figures", lambda: FIGURES)
    app = application(monkeypatch, *(["--api-key", *api_keys] if api_keys else []))
    app.state.openai_serving_models = SimpleNamespace(model_name=lambda: "bundled")
    answer = TestClient(app).get(
        "/v1/kvgraft/status", headers={"Authorization": f"Bearer {key}"} if key else {}
    )
    assert answer.status_code == 200
    return {name: answer.json()[name] for name in FIGURES}


def test_one_of_several_tenants_is_shown_nothing_of_the_others(monkeypatch: pytest.MonkeyPatch):
    nothing = {
        "running": None,
        "waiting": None,
        "pool": None,
        "index_entries": None,
        "idle_refresh_tokens": None,
        "fallbacks": {},
    }
    assert shown(monkeypatch, [ALICE, BOB], ALICE) == nothing


@pytest.mark.parametrize(
    ("api_keys", "key"), [([ALICE, BOB], ADMIN), ([ALICE], ALICE), ([], None), ([], ADMIN)]
)
def test_the_admin_and_the_only_tenant_see_all(
    monkeypatch: pytest.MonkeyPatch, api_keys: list[str], key: str | None
):
    assert shown(monkeypatch, api_keys, key) == FIGURES
