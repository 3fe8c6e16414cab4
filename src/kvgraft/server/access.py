"""Access level of each route. A route that is not listed here requires the admin key."""

import re
from enum import Enum

from starlette.types import Scope


class Access(Enum):
    """Access level: `open` to all, any known API `key`, or the `admin` key only."""

    OPEN = "open"
    KEY = "key"
    ADMIN = "admin"


HEALTH_ROUTES = frozenset({"/health", "/ping"})
METRICS_ROUTES = frozenset({"/metrics", "/metrics/"})
# they show no tenant's data
OPEN_ROUTES = HEALTH_ROUTES | METRICS_ROUTES
PAGE = "/kvgraft"
# a browser can send a key only as the password of basic authentication
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
# safe for any key: `keys.py` refuses vLLM's response store for several tenants
STORED_RESPONSE = re.compile(r"/v1/responses/resp_[^/]+(/cancel)?")


def access(path: str) -> Access:
    """Return the access level of a path, given without the root path of a proxy."""
    if path in OPEN_ROUTES:
        return Access.OPEN
    return Access.KEY if path in KEY_ROUTES or STORED_RESPONSE.fullmatch(path) else Access.ADMIN


def route_path(scope: Scope) -> str:
    """Return the path of a request without the root path of a proxy."""
    path: str = scope["path"]
    root: str = scope.get("root_path", "").rstrip("/")
    return path[len(root) :] if root and path.startswith(f"{root}/") else path
