"""Every route of the application that vLLM builds, with the API server in place and no engine
behind it."""

from collections.abc import Iterator
from itertools import product

import pytest
from fastapi import FastAPI
from running import ADMIN, ALICE, BOB
from starlette.routing import Mount, WebSocketRoute
from starlette.testclient import TestClient
from starlette.websockets import WebSocket, WebSocketDisconnect
from vllm.entrypoints.launchers.app import build_app

from kvgraft.server.access import KEY_ROUTES, OPEN_ROUTES, Access, access
from kvgraft.server.arguments import parse
from kvgraft.server.keys import ADMIN_KEY, API_KEY
from kvgraft.server.serve import PLUGINS

DEV_MODE = "VLLM_SERVER_DEV_MODE"
RUNS_THE_MODEL = {  # of the routes for tenants; each is driven in test_server.py
    "/generative_scoring",
    "/invocations",
    "/v1/chat/completions",
    "/v1/chat/completions/batch",
    "/v1/completions",
    "/v1/messages",
    "/v1/responses",
}
NO_ONE, NOT_ENOUGH, NO_PATH, NO_ADMIN = 401, 403, 404, 503


def application(monkeypatch: pytest.MonkeyPatch, *arguments: str) -> FastAPI:
    """vLLM's application with every route that it has for a model that generates."""
    monkeypatch.setenv(PLUGINS, "kvgraft")
    monkeypatch.setenv(DEV_MODE, "1")
    return build_app(
        parse([*arguments, "--enable-scale-out", "--enable-tokenizer-info-endpoint"]),
        ("generate",),
        None,
    )


@pytest.fixture
def client(monkeypatch: pytest.MonkeyPatch) -> TestClient:
    """Of a server with two tenants and an admin."""
    monkeypatch.delenv(API_KEY, raising=False)
    monkeypatch.setenv(ADMIN_KEY, ADMIN)
    return TestClient(
        application(monkeypatch, "--api-key", ALICE, BOB), raise_server_exceptions=False
    )


def routes(app: FastAPI) -> Iterator[tuple[str, str]]:
    """(method, path) of everything that the application answers."""
    for route in app.routes:
        path = route.path.replace("{name:path}", "x").replace("{response_id}", "resp_x")
        assert "{" not in path, f"a parameter that this test does not fill: {path}"
        for method in getattr(route, "methods", None) or (
            {"GET", "POST"} if isinstance(route, Mount) else ()
        ):
            yield method, path
        assert not isinstance(route, WebSocketRoute), (
            "a new websocket: see test_websockets_need_a_key"
        )


def ask(client: TestClient, method: str, path: str, key: str | None) -> int:
    headers = {"Authorization": f"Bearer {key}"} if key else {}
    return client.request(method, path, headers=headers).status_code


def test_every_route_but_the_open_ones_needs_a_key(client: TestClient):
    asked = set(routes(client.app))
    assert {path for _, path in asked} >= {
        "/v1/completions",
        "/v1/kvgraft/pins",
        "/kvgraft",
        "/collective_rpc",
    }
    for (method, path), key in product(asked, (None, "unknown", ALICE[:-1])):
        expected = path in OPEN_ROUTES
        assert (ask(client, method, path, key) != NO_ONE) == expected, (
            f"{method} {path} with key {key}"
        )


def test_a_tenant_reaches_the_routes_for_tenants_and_no_others(client: TestClient):
    for method, path in routes(client.app):
        refused = ask(client, method, path, ALICE) in (NO_ONE, NOT_ENOUGH, NO_ADMIN)
        assert refused == (access(path) is Access.ADMIN), f"{method} {path}"
        assert ask(client, method, path, ADMIN) not in (NO_ONE, NOT_ENOUGH, NO_ADMIN), (
            f"{method} {path} as admin"
        )


def test_clients_that_count_tokens_themselves_need_no_admin(client: TestClient):
    assert ("GET", "/tokenizer_info") in set(routes(client.app))
    assert ask(client, "GET", "/tokenizer_info", ALICE) not in (
        NO_ONE,
        NOT_ENOUGH,
        NO_PATH,
        NO_ADMIN,
    )


def test_what_acts_on_all_tenants_is_for_the_admin(client: TestClient):
    paths = {path for _, path in routes(client.app)}
    for path in (
        "/reset_prefix_cache",
        "/collective_rpc",
        "/server_info",
        "/pause",
        "/inference/v1/generate",
    ):
        assert path in paths
        assert ask(client, "POST", path, ALICE) == NOT_ENOUGH
    for path in ("/v1/kvgraft/pins", "/v1/kvgraft/pins/x", "/v1/kvgraft/tenants"):
        assert ask(client, "GET", path, ALICE) == NOT_ENOUGH


@pytest.mark.parametrize(
    "path",
    [
        "/",
        "/no/such/route",
        "/v1/embeddings",
        "/v1/models/",
        "/v1/chat/completions/",
        "/health/",
        "/v1",
    ],
)
def test_what_is_no_route_is_a_404_for_whoever_has_a_key(client: TestClient, path: str):
    for method, key in product(("GET", "POST"), (ALICE, ADMIN)):
        assert ask(client, method, path, key) == NO_PATH, f"{method} {path}"
    assert ask(client, "GET", path, None) == NO_ONE
    answer = client.get(path, headers={"Authorization": f"Bearer {ALICE}"})
    assert answer.json()["error"]["type"] == "Not Found"


def test_what_is_no_route_is_a_404_without_an_admin_key_and_without_keys(
    monkeypatch: pytest.MonkeyPatch,
):
    monkeypatch.delenv(ADMIN_KEY, raising=False)
    for arguments, key in ((["--api-key", ALICE], ALICE), ([], None)):
        client = TestClient(application(monkeypatch, *arguments), raise_server_exceptions=False)
        assert ask(client, "POST", "/v1/embeddings", key) == NO_PATH
        assert ask(client, "GET", "/v1/models/", key) == NO_PATH


def test_a_route_that_nobody_thought_of_is_for_the_admin(client: TestClient):
    app = client.app
    app.add_api_route("/v1/brand/new", lambda: "here", methods=["POST"])
    assert ask(client, "POST", "/v1/brand/new", ALICE) == NOT_ENOUGH
    assert ask(client, "GET", "/v1/brand/new", ALICE) == NOT_ENOUGH, (
        "the path is known, whatever the method"
    )
    assert ask(client, "POST", "/v1/brand/new", ADMIN) == 200


def test_without_an_admin_key_nobody_is_admin_and_the_answer_says_so(
    monkeypatch: pytest.MonkeyPatch,
):
    monkeypatch.delenv(ADMIN_KEY, raising=False)
    for arguments, key in ((["--api-key", ALICE], ALICE), ([], None)):
        client = TestClient(application(monkeypatch, *arguments), raise_server_exceptions=False)
        headers = {"Authorization": f"Bearer {key}"} if key else {}
        answer = client.get("/v1/kvgraft/pins", headers=headers)
        assert answer.status_code == NO_ADMIN
        assert "KVGRAFT_ADMIN_KEY" in answer.json()["error"]["message"]
        assert ask(client, "POST", "/v1/completions", key) not in (NO_ONE, NOT_ENOUGH, NO_ADMIN)


def test_every_route_that_runs_the_model_is_known(client: TestClient):
    """A new route of vLLM appears here, and is to be driven in test_server.py before it is given to
    tenants."""
    quiet = {
        "/tokenize",
        "/detokenize",
        "/load",
        "/version",
        "/v1/models",
        "/v1/messages/count_tokens",
        "/kvgraft",
    }
    quiet |= {"/v1/kvgraft/status", "/docs", "/docs/oauth2-redirect", "/openapi.json", "/redoc"}
    quiet |= {"/tokenizer_info", "/v1/responses/resp_x", "/v1/responses/resp_x/cancel"}
    for _, path in routes(client.app):
        if access(path) is Access.KEY:
            assert path in RUNS_THE_MODEL | quiet, (
                f"{path} is open to tenants: is it driven in test_server.py?"
            )
    assert {path for _, path in routes(client.app)} >= RUNS_THE_MODEL


@pytest.mark.parametrize(
    "path",
    [
        "//health",
        "/health/",
        "/metrics/x",
        "/metricsx",
        "/HEALTH",
        "/v1/%2e%2e/health",
        "/x/health",
    ],
)
def test_what_only_resembles_an_open_route_is_not_open(client: TestClient, path: str):
    assert ask(client, "GET", path, None) == NO_ONE


@pytest.mark.parametrize("path", sorted(KEY_ROUTES))
def test_no_route_for_tenants_becomes_open_by_a_detour(path: str):
    assert access(path) is Access.KEY
    for detour in (f"{path}/", f"/{path}", f"{path}/x", path.upper(), f"/v1{path}", f"{path}?"):
        assert access(detour) is not Access.OPEN


def test_behind_a_proxy_the_rules_are_those_of_the_route(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setenv(ADMIN_KEY, ADMIN)
    app = application(monkeypatch, "--api-key", ALICE, "--root-path", "/proxy")
    client = TestClient(app, root_path="/proxy", raise_server_exceptions=False)
    assert ask(client, "GET", "/proxy/ping", None) != NO_ONE
    assert ask(client, "POST", "/proxy/v1/completions", None) == NO_ONE
    assert ask(client, "POST", "/proxy/v1/completions", ALICE) not in (NO_ONE, NOT_ENOUGH)
    assert ask(client, "POST", "/proxy/reset_prefix_cache", ALICE) == NOT_ENOUGH
    assert ask(client, "GET", "/proxyping", None) == NO_ONE


def test_websockets_need_a_key(client: TestClient):
    app = client.app

    @app.websocket("/v1/realtime")
    async def realtime(socket: WebSocket) -> None:
        await socket.accept()
        await socket.close()

    with pytest.raises(WebSocketDisconnect) as refused, client.websocket_connect("/v1/realtime"):
        pass
    assert refused.value.code == 1008
    with client.websocket_connect("/v1/realtime", headers={"Authorization": f"Bearer {ADMIN}"}):
        pass


@pytest.mark.parametrize("path", sorted(OPEN_ROUTES))
@pytest.mark.parametrize("key", [None, ALICE, ADMIN])
def test_what_is_open_is_no_websocket(client: TestClient, path: str, key: str | None):
    client = TestClient(client.app)  # raises what the application does not catch
    headers = {"Authorization": f"Bearer {key}"} if key else {}
    with (
        pytest.raises(WebSocketDisconnect) as refused,
        client.websocket_connect(path, headers=headers),
    ):
        pass
    assert (refused.value.code, refused.value.reason) == (
        1008,
        "nothing listens to a websocket here",
    )


def test_vllm_does_not_check_the_keys_a_second_time(client: TestClient):
    """Its own check knows neither the admin key nor a browser's password."""
    middleware = [entry.cls.__name__ for entry in client.app.user_middleware]
    assert "ServerMiddleware" in middleware
    assert "AuthenticationMiddleware" not in middleware


def test_refusals_are_errors_of_the_openai_api_and_name_the_scheme(client: TestClient):
    answer = client.post("/v1/completions")
    assert answer.json()["error"] == {
        "message": "no valid API key in the Authorization header",
        "type": "Unauthorized",
        "param": None,
        "code": NO_ONE,
    }
    assert answer.headers["WWW-Authenticate"] == "Bearer"
    assert client.get("/kvgraft").headers["WWW-Authenticate"].startswith("Basic ")


def test_a_password_opens_the_page_only(client: TestClient):
    assert client.get("/kvgraft", auth=("anyone", ALICE)).status_code == 200
    assert client.get("/kvgraft", auth=("anyone", "unknown")).status_code == NO_ONE
    assert client.get("/v1/models", auth=("anyone", ALICE)).status_code == NO_ONE
