"""What each route asks of its caller. A route that nobody thought of asks for the admin key."""

import re
from enum import Enum

from starlette.types import Scope


class Access(Enum):
    """`open` to all, for any `key` that the server knows, or for the `admin` key only."""

    OPEN = "open"
    KEY = "key"
    ADMIN = "admin"


HEALTH_ROUTES = frozenset({"/health", "/ping"})
METRICS_ROUTES = frozenset({"/metrics", "/metrics/"})
OPEN_ROUTES = HEALTH_ROUTES | METRICS_ROUTES  # no tenant's data
PAGE = "/kvgraft"
# read by browsers, which can show a key as a password only
PAGE_ROUTES = frozenset({PAGE, "/v1/kvgraft/status"})
KEY_ROUTES = PAGE_ROUTES | {
    "/detokenize",
    "/docs",
    "/docs/oauth2-redirect",
    "/generative_scoring",
    "/invocations",
    "/load",
    "/openapi.json",
    "/redoc",
    "/tokenize",
    "/tokenizer_info",
    "/v1/chat/completions",
    "/v1/chat/completions/batch",
    "/v1/completions",
    "/v1/messages",
    "/v1/messages/count_tokens",
    "/v1/models",
    "/v1/responses",
    "/version",
}
# `keys` refuses a store for several tenants
STORED_RESPONSE = re.compile(r"/v1/responses/resp_[^/]+(/cancel)?")


def access(path: str) -> Access:
    """What the route at `path`, without the root path of a proxy, asks for."""
    if path in OPEN_ROUTES:
        return Access.OPEN
    return Access.KEY if path in KEY_ROUTES or STORED_RESPONSE.fullmatch(path) else Access.ADMIN


def route_path(scope: Scope) -> str:
    """The path of the route, without the root path of a proxy."""
    path: str = scope["path"]
    root: str = scope.get("root_path", "").rstrip("/")
    return path[len(root) :] if root and path.startswith(f"{root}/") else path
